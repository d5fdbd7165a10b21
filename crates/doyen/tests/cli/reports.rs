//! The verbs that report: `eval`, `show`, `verify`, `conformance`, and `--help`.

use super::common::{Place, doyen, shared};
use serde_json::Value;
use std::fs;

fn json(args: &[&str]) -> Value {
    serde_json::from_str(doyen(args).ok()).unwrap()
}

#[test]
fn eval_scores_windows() {
    let place = Place::package();
    let text = place.beside("text");
    fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(8)).unwrap();
    let text = text.to_str().unwrap();
    let base = ["eval", place.arg(), "--text", text, "--window", "16"];
    let all = json(&[&base[..], &["--json"]].concat());
    let windows = all["windows"].as_u64().unwrap();
    assert!(windows > 2, "{all}");
    assert_eq!((&all["numerics"], &all["kv_dtype"]), (&"fast".into(), &"f16".into()));
    assert_eq!(all["tokens"], windows * 15, "the first token of a window is not scored");
    let two = json(&[&base[..], &["--json", "--windows", "2", "--threads", "1"]].concat());
    assert_eq!(two["window_nll"].as_array().unwrap()[..], all["window_nll"].as_array().unwrap()[..2]);
    let mean = two["window_nll"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).sum::<f64>() / 2.0;
    assert!((two["nll"].as_f64().unwrap() - mean).abs() < 1e-9);
    assert!((two["perplexity"].as_f64().unwrap() - mean.exp()).abs() < 1e-6 * mean.exp());
    let line = doyen([&base[..], &["--windows", "1"]].concat());
    assert_eq!(line.ok().lines().count(), 1);
    assert!(
        line.stdout.contains("nats/token, perplexity ") && line.stdout.contains("in 1 windows of 16"),
        "{line:?}"
    );
}

#[test]
fn eval_refuses_what_it_cannot_score() {
    let place = Place::package();
    let file = place.beside("text");
    let text = file.to_str().unwrap();
    let eval = |more: &[&str]| doyen(["eval", place.arg(), "--text", text].iter().chain(more));
    eval(&[]).refused(&[text, "No such file"]);
    fs::write(&file, "words and words").unwrap();
    eval(&["--window", "4096"]).refused(&["4096", "context length of 2048", "--window"]);
    eval(&["--window", "64", "--context", "32"]).refused(&["--window 64", "--context 32"]);
    eval(&["--window", "1"]).refused(&["--window", "at least 2"]);
    eval(&["--window", "0"]).refused(&["--window"]);
    eval(&["--windows", "0"]).refused(&["--windows"]);
    fs::write(&file, "").unwrap();
    eval(&[]).refused(&["the text has 0 tokens", "at least 2"]);
    fs::write(&file, [0xff, 0xfe]).unwrap();
    eval(&[]).refused(&[text, "UTF-8"]);
}

#[test]
fn show_accounts_for_every_byte() {
    for (package, data) in [
        (None, concat!(env!("CARGO_MANIFEST_DIR"), "/builtin/model.onnx.data").into()),
        (
            Some("goldens/llama/package-genai-int4"),
            shared("goldens/llama/package-genai-int4/model.onnx.data"),
        ),
        (
            Some("goldens/qwen3_moe/package-mobius"),
            shared("goldens/qwen3_moe/package-mobius/model.onnx.data"),
        ),
    ] {
        let path = package.map(|p| shared(p).to_str().unwrap().to_owned());
        let shown = json(&["show"].into_iter().chain(path.as_deref()).chain(["--json"]).collect::<Vec<_>>());
        let sum =
            |v: &Value| v.as_object().unwrap().values().map(|t| t["bytes"].as_u64().unwrap()).sum::<u64>();
        let (totals, bytes) = (sum(&shown["totals"]), shown["bytes"].as_u64().unwrap());
        let weights =
            shown["weights"].as_array().unwrap().iter().map(|w| w["bytes"].as_u64().unwrap()).sum::<u64>();
        let file = fs::metadata(&data).unwrap().len();
        assert_eq!(weights, totals, "{package:?}");
        // Constants inside model.onnx (shapes, axes) count as well; the file has gaps from aligning tensors.
        assert!(totals <= bytes && bytes - totals < 200_000, "{package:?}: totals {totals}, all {bytes}");
        let tensors = shown["weights"].as_array().unwrap().len() as u64;
        assert!(totals <= file + 200_000, "{package:?}: totals {totals}, file {file}");
        assert!(file <= bytes + 4 * 4096 * (tensors + 16), "{package:?}: file {file}, all {bytes}");
        assert_eq!(shown["cpu"]["runs"], true, "{package:?}");
        assert!(shown["cpu"]["kv_bytes_per_token"].as_u64().unwrap() > 0);
    }
}

#[test]
fn show_tells_the_experts_of_the_built_in_model_apart() {
    let shown = doyen(["show"]);
    let text = shown.ok();
    for part in
        ["experts fc1", "experts fc2", "context length  1024", "KV bytes per token", "layers          8"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let by_kind = json(&["show", "--json"]);
    for kind in ["experts fc1", "experts fc2"] {
        let formats = by_kind["totals"][kind]["formats"].as_array().unwrap();
        assert!(
            !formats.is_empty() && formats.iter().all(|f| f.as_str().unwrap().starts_with("int")),
            "{by_kind}"
        );
        let each = by_kind["weights"].as_array().unwrap().iter().filter(|w| w["kind"] == kind).count();
        assert_eq!(each, 8, "one of each layer");
    }
    assert!(by_kind.get("graph").is_none());
    assert!(json(&["show", "--json", "--graph"])["graph"].as_array().unwrap().len() > 50);
}

#[test]
fn verify_judges_by_the_tolerance() {
    let place = Place::package();
    let verify = |more: &[&str]| doyen(["verify", place.arg(), "--tokens", "3"].iter().chain(more));
    let good = verify(&[]);
    assert!(good.ok().contains("Exact mode") && good.stdout.contains("Fast mode"), "{good:?}");
    let bad = verify(&["--tolerance", "1e-9"]);
    assert_eq!(bad.code, Some(1), "{bad:?}");
    assert!(bad.stdout.contains("OUTSIDE the tolerance"), "{bad:?}");
    let bad = verify(&["--tolerance", "1e-9", "--json", "--numerics", "fast"]);
    assert_eq!(bad.code, Some(1));
    let report: Value = serde_json::from_str(&bad.stdout).unwrap();
    assert_eq!(
        (&report["checks"][0]["ok"], &report["checks"][0]["numerics"]),
        (&false.into(), &"fast".into())
    );
    for (value, words) in [("-1", "tolerance"), ("nan", "tolerance"), ("x", "tolerance")] {
        verify(&["--tolerance", value]).refused(&[words]);
    }
    verify(&["--golden", "/nowhere.safetensors"]).refused(&["/nowhere.safetensors"]);
    verify(&["--golden", place.path.join("genai_config.json").to_str().unwrap()])
        .refused(&["genai_config.json", "safetensors"]);
    let other = shared("goldens/docmoe/golden.safetensors");
    verify(&["--golden", other.to_str().unwrap()]).refused(&["vocabulary of 1024", "another model"]);
    verify(&["--prompt", ""]).refused(&["prompt", "empty"]);
}

#[test]
fn conformance_counts_and_fails() {
    let place = Place::package();
    let cases = place.beside("cases");
    fs::create_dir(&cases).unwrap();
    let run = |more: &[&str]| doyen(["conformance", cases.to_str().unwrap()].iter().chain(more));
    run(&[]).refused(&["cases", "no folder with a model.onnx"]);
    let copy = |name: &str, to: &str| {
        let from = shared("conformance/cases").join(name);
        super::common::copy_dir(&from, &cases.join(to));
        super::common::copy_dir(&from.join("test_data_set_0"), &cases.join(to).join("test_data_set_0"));
    };
    let names: Vec<String> = fs::read_dir(shared("conformance/cases"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with("plain-add-") || n == "plain-neg" || n.starts_with("err-add"))
        .collect();
    assert!(names.len() >= 2, "{names:?}");
    for name in &names {
        copy(name, name);
    }
    let good = run(&[]);
    let last = format!("{} passed, 0 failed, 0 skipped", names.len());
    assert_eq!(good.ok().lines().last(), Some(last.as_str()), "{good:?}");
    let last = format!("{} passed, 0 failed, 0 skipped", names.len());
    assert_eq!(run(&["--backend", "cpu"]).ok().lines().last(), Some(last.as_str()));

    // An expectation that is wrong, a model that is no model, and an exception with its reason.
    let wrong = names.iter().find(|n| !n.starts_with("err-")).unwrap();
    let output = cases.join(wrong).join("test_data_set_0/output_0.pb");
    let mut bytes = fs::read(&output).unwrap();
    let at = bytes.len() - 2;
    bytes[at] ^= 0x41;
    fs::write(&output, bytes).unwrap();
    copy(wrong, "broken");
    fs::write(cases.join("broken/model.onnx"), "no model").unwrap();
    let bad = run(&[]);
    assert_eq!(bad.code, Some(1), "{bad:?}");
    let last = format!("{} passed, 2 failed, 0 skipped", names.len() - 1);
    assert_eq!(bad.stdout.lines().last(), Some(last.as_str()), "{bad:?}");
    assert!(bad.stdout.contains(wrong) && bad.stdout.contains("broken"), "{bad:?}");
    let exceptions = place.beside("exceptions.json");
    let text = format!(
        r#"{{"exceptions": [{{"case": "{wrong}", "reason": "known"}}, {{"case": "bro*", "reason": "too"}}]}}"#
    );
    fs::write(&exceptions, text).unwrap();
    let skipped = run(&["--exceptions", exceptions.to_str().unwrap()]);
    assert!(skipped.ok().lines().last().unwrap().ends_with("0 failed, 2 skipped"), "{skipped:?}");
    let report: Value = serde_json::from_str(&run(&["--json"]).stdout).unwrap();
    assert!(report.is_object());
    fs::write(&exceptions, "{").unwrap();
    run(&["--exceptions", exceptions.to_str().unwrap()]).refused(&["exceptions.json"]);
    run(&["--exceptions", "/nowhere.json"]).refused(&["/nowhere.json"]);
    doyen(["conformance", "/nowhere"]).refused(&["/nowhere"]);
}

#[test]
fn help_has_examples_and_mistakes_have_suggestions() {
    for verb in ["run", "chat", "convert", "eval", "show", "verify", "conformance", "bench", "doctor"] {
        let help = doyen([verb, "--help"]);
        let text = help.ok();
        let examples =
            text.split("Examples:").nth(1).unwrap_or_else(|| panic!("{verb} has no examples: {text}"));
        assert!(
            examples.lines().filter(|l| l.contains(&format!("doyen {verb}"))).count() >= 2,
            "{verb}: {examples}"
        );
        let line = text.lines().next().unwrap();
        assert!(!line.ends_with('.') && line.len() > 10, "{verb}: {line}");
        doyen([verb, "--hepl"]).refused(&["--hepl", "--help"]);
    }
    assert!(doyen(["--help"]).ok().contains("Examples:"));
    assert!(doyen(["--version"]).ok().starts_with("doyen "));
    doyen(["conver"]).refused(&["conver", "'convert'"]);
    doyen(["run", "--max-new-token", "3"]).refused(&["--max-new-tokens"]);
    doyen(["convert", "x", "-o", "y", "--expert", "4"]).refused(&["--experts"]);
}
