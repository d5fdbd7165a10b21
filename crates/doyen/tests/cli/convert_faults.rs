//! `doyen convert` on broken checkpoints and full disks: a clear error, and the target's folder as it was.

use super::common::{Place, Run, copy_dir, doyen, replace_text, shared};
use std::{fs, path::Path};

fn convert(place: &Place, more: &[&str]) -> Run {
    let out = place.beside("out");
    let args = ["convert", place.arg(), "-o", out.to_str().unwrap()];
    doyen(args.iter().chain(more))
}

/// The conversion is refused in these words, and nothing is left.
#[track_caller]
fn refused(place: &Place, words: &[&str]) {
    convert(place, &[]).refused(words);
    assert_eq!(place.listing(), ["checkpoint"]);
}

fn config(place: &Place, from: &str, to: &str) {
    place.edit("config.json", |b| replace_text(b, from, to));
}

#[test]
fn a_sound_checkpoint_converts() {
    let place = Place::checkpoint();
    let run = convert(&place, &["--json"]);
    let report: serde_json::Value = serde_json::from_str(run.ok()).unwrap();
    assert_eq!(report["architecture"], "LlamaForCausalLM");
    let data = fs::metadata(place.beside("out/model.onnx.data")).unwrap().len();
    assert_eq!(report["data_file_bytes"], data);
    assert_eq!(place.listing(), ["checkpoint", "out"]);
    doyen(["run", place.beside("out").to_str().unwrap(), "-p", "x", "-n", "2"]).ok();
}

#[test]
fn missing_files() {
    let nowhere = Path::new("/nowhere/checkpoint");
    let place = Place::checkpoint();
    let out = place.beside("out");
    doyen(["convert", nowhere.to_str().unwrap(), "-o", out.to_str().unwrap()])
        .refused(&["/nowhere/checkpoint", "no such folder"]);
    for (file, words) in [
        ("config.json", &["config.json"][..]),
        ("model.safetensors", &["model.safetensors", "model.safetensors.index.json"]),
        ("tokenizer.json", &["tokenizer.json"]),
    ] {
        let place = Place::checkpoint();
        fs::remove_file(place.path.join(file)).unwrap();
        refused(&place, words);
    }
}

#[test]
fn truncated_and_malformed_weights() {
    let place = Place::checkpoint();
    let whole = fs::read(place.path.join("model.safetensors")).unwrap();
    for len in [0, 4, 8, 100, 40_000, whole.len() - 1] {
        place.edit("model.safetensors", |_| whole[..len].to_vec());
        refused(&place, &["model.safetensors"]);
    }
    // A header that claims to be larger than memory.
    place.edit("model.safetensors", |_| [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat());
    refused(&place, &["model.safetensors", "header"]);
    place.edit("model.safetensors", |_| [&(1u64 << 40).to_le_bytes()[..], &whole[8..]].concat());
    refused(&place, &["model.safetensors", "header"]);
}

#[test]
fn overlapping_and_overflowing_ranges() {
    let place = Place::checkpoint();
    let whole = fs::read(place.path.join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&whole[8..8 + len]).unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut header = header.clone();
        change(&mut header);
        let text = header.to_string();
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &whole[8 + len..]].concat()
    };
    let norm = "model.norm.weight";
    let range = |h: &mut serde_json::Value, from: u64, to: u64| {
        h[norm]["data_offsets"] = serde_json::json!([from, to]);
    };
    let real = header[norm]["data_offsets"].clone();
    let (from, to) = (real[0].as_u64().unwrap(), real[1].as_u64().unwrap());
    for (start, end) in [(from + 2, to + 2), (from, u64::MAX), (u64::MAX - 1, u64::MAX), (to, from)] {
        place.edit("model.safetensors", |_| with(&|h| range(h, start, end)));
        refused(&place, &["model.safetensors", norm]);
    }
    place.edit("model.safetensors", |_| with(&|h| h[norm]["shape"] = serde_json::json!([1u64 << 63, 2])));
    refused(&place, &["model.safetensors", norm]);
}

#[test]
fn wrong_shapes_and_configurations() {
    let place = Place::checkpoint();
    config(&place, "\"hidden_size\": 96", "\"hidden_size\": 48");
    refused(&place, &["expected shape", "found"]);
    for (from, to, words) in [
        (
            "LlamaForCausalLM",
            "MysteryForCausalLM",
            &["MysteryForCausalLM", "known are", "Qwen3MoeForCausalLM"][..],
        ),
        ("\"silu\"", "\"relu7\"", &["hidden_act", "relu7", "silu"]),
        (
            "\"num_hidden_layers\": 3",
            "\"num_hidden_layers\": 4",
            &["model.layers.3", "not in the checkpoint"],
        ),
        ("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 900000000000", &["num_hidden_layers"]),
        ("\"num_attention_heads\": 6", "\"num_attention_heads\": 0", &["num_attention_heads", "0"]),
        ("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 5", &["num_key_value_heads", "5"]),
        ("\"vocab_size\": 1024", "\"vocab_size\": -5", &["vocab_size", "-5"]),
        ("\"hidden_size\": 96", "\"hidden_size\": \"wide\"", &["hidden_size", "wide"]),
        (
            "\"max_position_embeddings\": ",
            "\"max_position_embeddings\": 9000000000000000",
            &["max_position_embeddings"],
        ),
        ("\"rope_type\": \"llama3\"", "\"rope_type\": \"spiral\"", &["spiral"]),
    ] {
        let place = Place::checkpoint();
        config(&place, from, to);
        refused(&place, words);
    }
    // Layers beyond the last are not the model's (released checkpoints carry draft heads there); they are told of.
    let place = Place::checkpoint();
    config(&place, "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    let run = convert(&place, &[]);
    run.ok();
    run.says(&["note: ", "left out", "model.layers.2"]);
    let run = convert(&Place::checkpoint(), &["--experts", "4", "--layers", "0:shared-experts=2"]);
    run.ok();
    run.says(&[
        "note: the width of experts has no effect: the model has no experts",
        "of shared-experts has no effect",
    ]);
    for text in ["", "{", "[]", "null"] {
        let place = Place::checkpoint();
        place.edit("config.json", |_| text.as_bytes().to_vec());
        refused(&place, &["config.json"]);
    }
}

#[test]
fn values_that_are_not_numbers() {
    let place = Place::checkpoint();
    let whole = fs::read(place.path.join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&whole[8..8 + len]).unwrap();
    for name in ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"] {
        let at = 8 + len + header[name]["data_offsets"][1].as_u64().unwrap() as usize - 2;
        for bits in [0x7fc0u16, 0x7f80, 0xff80] {
            place.edit("model.safetensors", |_| {
                let mut b = whole.clone();
                b[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                b
            });
            refused(&place, &[name, if bits == 0x7fc0 { "NaN" } else { "inf" }]);
        }
    }
}

#[test]
fn unreadable_tokenizers() {
    for text in ["", "{", "[]", "{\"model\": 3}"] {
        let place = Place::checkpoint();
        place.edit("tokenizer.json", |_| text.as_bytes().to_vec());
        refused(&place, &["tokenizer.json"]);
    }
}

#[test]
fn options_that_make_no_sense() {
    let place = Place::checkpoint();
    for (args, words) in [
        (&["--experts", "5"][..], &["--experts", "5"][..]),
        (&["--experts", "fc1=2,fc9=4"], &["fc9"]),
        (&["--block", "33"], &["--block", "33"]),
        (&["--dtype", "f8"], &["--dtype", "f8"]),
        (&["--zero-points", "maybe"], &["maybe"]),
        (&["--layers", "7-9:mlp=8"], &["7"]),
        (&["--layers", "2-1:mlp=8"], &["2-1"]),
        (&["--layers", "0:color=8"], &["color"]),
        (&["--mlp", "-4"], &["-4"]),
    ] {
        convert(&place, args).refused(words);
        assert_eq!(place.listing(), ["checkpoint"]);
    }
    doyen(["convert", place.arg()]).refused(&["--output"]);
}

#[test]
fn targets_that_are_taken() {
    let place = Place::checkpoint();
    doyen(["convert", place.arg(), "-o", "/nowhere/deep/out"]).refused(&["/nowhere/deep"]);
    doyen(["convert", place.arg(), "-o", place.arg(), "--force"])
        .refused(&["holds", "not part of a package"]);
    fs::write(place.beside("out"), "mine").unwrap();
    convert(&place, &["--force"]).refused(&["not a folder"]);
    assert_eq!(fs::read_to_string(place.beside("out")).unwrap(), "mine");
    fs::remove_file(place.beside("out")).unwrap();

    convert(&place, &[]).ok();
    convert(&place, &[]).refused(&["already", "--force"]);
    convert(&place, &["--force", "--float"]).ok();
    fs::write(place.beside("out/thesis.txt"), "mine").unwrap();
    convert(&place, &["--force"]).refused(&["thesis.txt", "not part of a package"]);
    assert_eq!(place.listing(), ["checkpoint", "out"]);
}

/// Every file of a package, for comparing before and after.
#[cfg(unix)]
fn contents(dir: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|p| (p.clone(), fs::read(p).unwrap())).collect()
}

#[cfg(unix)]
#[test]
fn a_limit_on_file_sizes() {
    let place = Place::checkpoint();
    let out = place.beside("out");
    // In blocks of 1 KiB or 512 bytes, by shell: room for the small files only, or for the data but not the model.
    let limited = |blocks: &str, more: &str| -> Run {
        let script = format!(
            "ulimit -f {blocks}; exec {} convert {} -o {} {more}",
            env!("CARGO_BIN_EXE_doyen"),
            place.arg(),
            out.display()
        );
        std::process::Command::new("sh").args(["-c", &script]).output().unwrap().into()
    };
    for blocks in ["200", "20", "0"] {
        limited(blocks, "").refused(&["may not become that large", "bytes in all", "ulimit -f"]);
        assert_eq!(place.listing(), ["checkpoint"]);
    }
    convert(&place, &[]).ok();
    let before = contents(&out);
    limited("200", "--force --float --dtype f32").refused(&["may not become that large"]);
    assert_eq!(contents(&out), before, "a failed conversion leaves the package that was there");
    place.edit("tokenizer.json", |_| b"{".to_vec());
    convert(&place, &["--force"]).refused(&["tokenizer.json"]);
    assert_eq!(contents(&out), before);
    assert_eq!(place.listing(), ["checkpoint", "out"]);
}

#[cfg(unix)]
#[test]
fn a_folder_that_may_not_be_written() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::checkpoint();
    let locked = place.beside("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    // The superuser may write anywhere; then there is nothing to refuse.
    if fs::write(locked.join("probe"), "").is_err() {
        doyen(["convert", place.arg(), "-o", locked.join("out").to_str().unwrap()])
            .refused(&["locked", "denied"]);
    }
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn shards() {
    let place = Place::checkpoint();
    let shards = place.beside("shards");
    copy_dir(&shared("goldens/qwen3_moe/checkpoint"), &shards);
    let out = place.beside("out");
    let run = || doyen(["convert", shards.to_str().unwrap(), "-o", out.to_str().unwrap()]);
    let index = shards.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("model-00002-of-00002", "../checkpoint/model")).unwrap();
    run().refused(&["index.json", "../checkpoint/model", "file name beside the index"]);
    fs::write(&index, &text).unwrap();
    let second = shards.join("model-00002-of-00002.safetensors");
    let bytes = fs::read(&second).unwrap();
    fs::write(&second, &bytes[..bytes.len() / 2]).unwrap();
    run().refused(&["model-00002-of-00002.safetensors"]);
    fs::remove_file(&second).unwrap();
    run().refused(&["model-00002-of-00002.safetensors", "missing"]);
    assert_eq!(place.listing(), ["checkpoint", "shards"]);
}
