//! Packages that are broken in one place: refused with what is wrong and where, before anything is printed.

use super::common::{Place, Run, doyen, replace, replace_text};
use std::fs;

fn run(place: &Place) -> Run {
    doyen(["run", place.arg(), "-p", "x", "-n", "2", "--temperature", "0"])
}

/// The fault is found by every verb that uses the package; `show` has no business with the tokenizer.
#[track_caller]
fn refused(place: &Place, words: &[&str]) {
    run(place).refused(words);
    doyen(["chat", place.arg()]).refused(words);
}

#[test]
fn missing_files() {
    doyen(["run", "/nowhere/package", "-p", "x"]).refused(&["/nowhere/package", "No such file"]);
    doyen(["show", "/nowhere/package"]).refused(&["/nowhere/package", "No such file"]);
    let place = Place::package();
    doyen(["run", place.path.join("model.onnx").to_str().unwrap(), "-p", "x"]).refused(&["directory"]);

    fs::remove_file(place.path.join("model.onnx.data")).unwrap();
    refused(
        &place,
        &["model.onnx", "\"model.onnx.data\" is missing", "model.embed_tokens.weight", place.arg()],
    );
    doyen(["show", place.arg()]).refused(&["\"model.onnx.data\" is missing"]);
    fs::remove_file(place.path.join("model.onnx")).unwrap();
    refused(&place, &["\"model.onnx\" is missing", place.arg()]);
    fs::remove_file(place.path.join("genai_config.json")).unwrap();
    refused(&place, &["there is no .onnx file"]);

    let place = Place::package();
    fs::remove_file(place.path.join("tokenizer.json")).unwrap();
    refused(&place, &["has no tokenizer.json", "copy"]);
    doyen(["show", place.arg()]).ok();
}

#[test]
fn truncated_files() {
    let place = Place::package();
    place.edit("model.onnx.data", |mut b| {
        b.truncate(500_000);
        b
    });
    refused(&place, &["model.onnx.data", "bytes", "500000", "truncated"]);
    place.edit("model.onnx.data", |_| Vec::new());
    refused(&place, &["the file has 0", "truncated"]);
    place.edit("model.onnx", |mut b| {
        b.truncate(20_000);
        b
    });
    refused(&place, &["model.onnx", "not a readable ONNX protobuf"]);
    place.edit("model.onnx", |_| Vec::new());
    refused(&place, &["model.onnx", "empty"]);
}

#[test]
fn corrupt_protobuf() {
    let place = Place::package();
    let original = fs::read(place.path.join("model.onnx")).unwrap();
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    for round in 0..24 {
        let mut bytes = original.clone();
        for _ in 0..=round % 4 {
            let at = random(bytes.len());
            bytes[at] = random(256) as u8;
        }
        if round % 3 == 0 {
            let (a, b) = (random(bytes.len()), random(bytes.len()));
            bytes.drain(a.min(b)..a.max(b));
        }
        fs::write(place.path.join("model.onnx"), bytes).unwrap();
        let shown = doyen(["show", place.arg()]);
        match shown.code {
            Some(0) => _ = shown.ok(),
            _ => shown.refused(&["model.onnx"]),
        }
        let ran = run(&place);
        match ran.code {
            Some(0) => _ = ran.ok(),
            _ => ran.refused(&[]),
        }
    }
    fs::write(place.path.join("model.onnx"), vec![0xff; 10_000]).unwrap();
    refused(&place, &["model.onnx", "protobuf"]);
}

#[test]
fn external_data_that_leaves_the_package() {
    for (to, why) in [("../../.secret.d", "goes up with .."), ("/etc/hosts/abcd", "an absolute path")] {
        let place = Place::package();
        place.edit("model.onnx", |b| replace(b, "model.onnx.data", to));
        refused(&place, &["model.onnx", to, why, "model.embed_tokens.weight"]);
        doyen(["show", place.arg()]).refused(&[to, why]);
    }
}

#[test]
fn ranges_that_overflow_or_end_beyond_the_file() {
    // The entry {key: "offset", value: "393600"} of one tensor, as protobuf fields 1 and 2.
    for to in ["999999", "-99999", "39x600", "1e9999"] {
        let place = Place::package();
        place
            .edit("model.onnx", |b| replace(b, "offset\u{12}\u{6}393600", &format!("offset\u{12}\u{6}{to}")));
        refused(&place, &["model.onnx", "cos_cache"]);
    }
    let place = Place::package();
    place.edit("model.onnx", |b| replace(b, "length\u{12}\u{6}131072", "length\u{12}\u{6}131071"));
    refused(&place, &["model.onnx", "131072", "131071"]);
}

#[cfg(unix)]
#[test]
fn links_and_special_files() {
    use std::os::unix::fs::symlink;
    for file in ["model.onnx.data", "model.onnx", "tokenizer.json", "genai_config.json"] {
        let place = Place::package();
        fs::rename(place.path.join(file), place.beside("secret")).unwrap();
        symlink("../secret", place.path.join(file)).unwrap();
        refused(&place, &[file, "symbolic link that leaves the package", "copy"]);
    }
    let place = Place::package();
    symlink("loop", place.beside("loop")).unwrap();
    doyen(["run", place.beside("loop").to_str().unwrap(), "-p", "x"]).refused(&["loop"]);
    symlink("package", place.beside("link")).unwrap();
    doyen(["run", place.beside("link").to_str().unwrap(), "-p", "x", "-n", "1"]).ok();
    fs::remove_file(place.path.join("model.onnx.data")).unwrap();
    fs::create_dir(place.path.join("model.onnx.data")).unwrap();
    refused(&place, &["model.onnx.data", "regular file"]);
}

#[test]
fn all_unknown_operators_are_listed() {
    let place = Place::package();
    place.edit("model.onnx", |b| {
        let b = replace(b, "SkipSimplifiedLayerNormalization", "SkipSimplifiedLayerNormalizatioX");
        replace(b, "GroupQueryAttention", "GroupQueryAttentioX")
    });
    let words = [
        "com.microsoft::GroupQueryAttentioX",
        "\"/model/layers.0/attn/GroupQueryAttentioX\"",
        "\"/model/layers.2/attn/GroupQueryAttentioX\"",
        "com.microsoft::SkipSimplifiedLayerNormalizatioX",
        "\"/model/layers.3/final_norm_layernorm/SkipLayerNorm\"",
    ];
    refused(&place, &words);
    doyen(["verify", place.arg()]).refused(&words);

    // What is in it can be seen all the same, and why it does not run.
    let shown = doyen(["show", place.arg()]);
    let text = shown.ok();
    assert!(text.contains("cannot run: ") && text.contains("all constants"), "{text}");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
    let shown = doyen(["show", place.arg(), "--json"]);
    let json: serde_json::Value = serde_json::from_str(shown.ok()).unwrap();
    assert_eq!(json["cpu"]["runs"], false);
    assert!(json["cpu"]["why"].as_str().unwrap().contains(words[0]), "{json}");
}

#[test]
fn manifests_that_lie() {
    for (from, to, words) in [
        ("\"context_length\": 2048", "\"context_length\": -1", &["model.context_length", "-1"][..]),
        ("\"context_length\": 2048", "\"context_length\": \"long\"", &["model.context_length", "long"]),
        ("\"eos_token_id\": 2", "\"eos_token_id\": [2, \"x\"]", &["eos_token_id"]),
        ("\"filename\": \"model.onnx\"", "\"filename\": \"../package/model.onnx\"", &["goes up with .."]),
        ("\"filename\": \"model.onnx\"", "\"filename\": \"other.onnx\"", &["\"other.onnx\" is missing"]),
        ("\"repetition_penalty\": 1.0", "\"repetition_penalty\": 0", &["repetition penalty", "0"]),
        (
            "\"logits\": \"logits\"",
            "\"logits\": \"lowits\"",
            &["model.decoder.outputs.logits", "lowits", "present.2.value"],
        ),
        ("\"eos_token_id\": 2", "\"eos_token_id\": 1024", &["end token 1024", "vocabulary of 1024"]),
    ] {
        let place = Place::package();
        place.edit("genai_config.json", |b| replace_text(b, from, to));
        run(&place).refused(words);
    }
    let place = Place::package();
    place.edit("genai_config.json", |_| b"[[[".to_vec());
    refused(&place, &["genai_config.json", place.arg()]);
    place.edit("genai_config.json", |_| "[".repeat(100_000).into_bytes());
    refused(&place, &["genai_config.json"]);
}

#[test]
fn huge_claims_take_no_memory() {
    let place = Place::package();
    place.edit("genai_config.json", |b| {
        replace_text(b, "\"context_length\": 2048", "\"context_length\": 1000000000000000")
    });
    let shown = doyen(["show", place.arg()]);
    assert!(shown.ok().contains("context length  1000000000000000"), "{}", shown.stdout);
    // What is planned is what the rotary caches reach.
    assert!(shown.ok().contains("1 x 2048 positions"), "{}", shown.stdout);
    run(&place).ok();
    doyen(["run", place.arg(), "-p", "x", "--context", "1000000000000000"]).refused(&["--context"]);
    doyen(["run", place.arg(), "-p", "x", "--context", "50000000000"]).refused(&["--context"]);
}

#[test]
fn unreadable_tokenizers() {
    for (text, words) in [
        ("", &["tokenizer.json", "empty"][..]),
        ("{", &["tokenizer.json", "JSON"]),
        ("[]", &["tokenizer.json"]),
        ("{\"model\": {\"type\": \"Nope\"}}", &["tokenizer.json"]),
        ("\u{0}\u{1}\u{2}", &["tokenizer.json"]),
    ] {
        let place = Place::package();
        place.edit("tokenizer.json", |_| text.as_bytes().to_vec());
        refused(&place, words);
    }
    let place = Place::package();
    place.edit("tokenizer.json", |_| vec![0xff, 0xfe, 0x00]);
    refused(&place, &["tokenizer.json"]);
}

#[test]
fn chat_templates_that_fail() {
    let chat = |place: &Place| doyen(["run", place.arg(), "--chat", "-p", "x", "-n", "1"]);
    let place = Place::package();
    place.edit("chat_template.jinja", |_| b"{{ raise_exception('roles must alternate') }}".to_vec());
    chat(&place).refused(&["chat template", "roles must alternate"]);
    place.edit("chat_template.jinja", |_| b"\n{% for %}".to_vec());
    chat(&place).refused(&["chat_template.jinja, line 2", "--raw"]);
    place.edit("chat_template.jinja", |_| b"{% for i in range(1000000000) %}{{ i }}{% endfor %}".to_vec());
    chat(&place).refused(&["chat template"]);
    place.edit("chat_template.jinja", |_| b"{{ messages[0].nope.deeper }}".to_vec());
    chat(&place).refused(&["chat template"]);
    // A template matters to those who chat only.
    place.edit("chat_template.jinja", |_| b"{% for %}".to_vec());
    run(&place).ok();
    fs::remove_file(place.path.join("chat_template.jinja")).unwrap();
    chat(&place).refused(&["no chat template", "--raw"]);
    run(&place).ok();
}

#[test]
fn weights_that_are_not_numbers() {
    let place = Place::package();
    // Codes cannot be NaN; the embedding and every scale can.
    place.edit("model.onnx.data", |b| vec![0xff; b.len()]);
    run(&place).refused(&["NaN", "verify"]);
    let text = place.beside("text");
    fs::write(&text, "some words of a text").unwrap();
    doyen(["eval", place.arg(), "--text", text.to_str().unwrap()]).refused(&["NaN", "verify"]);
    // The reference computes the same NaN, which is no agreement.
    assert_ne!(doyen(["verify", place.arg(), "--tokens", "2"]).code, Some(0));
}

/// The data file of a package that is being talked to loses its second half.
#[cfg(unix)]
#[test]
fn a_package_truncated_while_it_runs_ends_with_a_reason() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;
    let place = Place::package();
    let mut chat = super::common::command(["chat", place.arg(), "-n", "4", "--temperature", "0"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = chat.stdin.take().unwrap();
    let mut stdout = BufReader::new(chat.stdout.take().unwrap());
    stdin.write_all(b"hello\n").unwrap();
    assert!(stdout.read_line(&mut String::new()).unwrap() > 0, "an answer");
    let data = fs::OpenOptions::new().write(true).open(place.path.join("model.onnx.data")).unwrap();
    data.set_len(4096).unwrap();
    stdin.write_all(b"hello again\n").unwrap();
    drop(stdin);
    let run: Run = chat.wait_with_output().unwrap().into();
    assert_eq!(run.code, Some(2), "{run:?}");
    run.says(&["error: a file became shorter while it was in use", "rename"]);
}
