//! Models whose outputs others have computed: converted here and run on the CPU, or in packages of other producers.

use doyen::{
    model,
    verify::golden::{self, Outcome},
};
use doyen_graph::device::Numerics;
use doyen_runtime::{Engine, Plan, PlanOptions};
use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

fn shared(path: &str) -> PathBuf {
    let root = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = root.join(path);
    assert!(
        path.exists(),
        "{} is missing: set DOYEN_SHARED to the folder of shared test data",
        path.display()
    );
    path
}

fn doyen(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_doyen")).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Converts a checkpoint as it is, in float32.
fn plain(checkpoint: &Path, more: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let package = dir.path().join("package");
    let (from, to) = (checkpoint.to_str().unwrap(), package.to_str().unwrap());
    doyen(&[&["convert", from, "-o", to, "--float", "--dtype", "f32"], more].concat());
    (dir, package)
}

fn outcomes(package: &Path, recorded: &Path, numerics: Numerics) -> Vec<Outcome> {
    let package = model::open(Some(package)).unwrap();
    let graph = Arc::new(model::lowered(&package).unwrap());
    let device = model::cpu(None).unwrap();
    let goldens = golden::read(recorded).unwrap();
    let longest = |g: &golden::Golden| g.prompt.len() + g.greedy.as_ref().map_or(0, Vec::len) + 1;
    let context = goldens.iter().map(longest).max().unwrap();
    let plan =
        Plan::new(graph, &device, &PlanOptions { context, numerics, ..PlanOptions::default() }).unwrap();
    let mut engine = Engine::new(&plan, &device).unwrap();
    goldens.iter().map(|g| golden::compare(&mut engine, g).unwrap()).collect()
}

/// All logits within `tolerance`, all greedy tokens equal.
fn agrees(package: &Path, recorded: &Path, numerics: Numerics, tolerance: f64) {
    let outcomes = outcomes(package, recorded, numerics);
    assert!(outcomes.len() >= 3, "{} prompts", outcomes.len());
    for (k, o) in outcomes.iter().enumerate() {
        let logits = o.logits.expect("logits are recorded");
        assert!(logits.max_abs <= tolerance && logits.rows == o.prompt, "prompt {k}: {logits:?}");
        assert!(o.greedy_tokens >= 24 && o.greedy.is_none(), "prompt {k}: {:?}", o.greedy);
    }
}

/// As [`agrees`], for activations that both sides quantize to int8: a value next to a border between codes may get one code
/// here and its neighbour there, by the last bit of what comes before. That moves the logits of the tokens that see it by some parts in
/// a thousand, so most prompts have to agree to rounding, and the others to `flipped`.
fn agrees_but_for_flips(package: &Path, recorded: &Path, tolerance: f64, flipped: f64) {
    let outcomes = outcomes(package, recorded, Numerics::Int8);
    assert!(outcomes.len() >= 3, "{} prompts", outcomes.len());
    let differences: Vec<f64> = outcomes.iter().map(|o| o.logits.expect("recorded").max_abs).collect();
    let close = differences.iter().filter(|&&d| d <= tolerance).count();
    assert!(3 * close >= 2 * outcomes.len(), "{differences:?}");
    assert!(differences.iter().all(|&d| d <= flipped), "{differences:?}");
    assert!(outcomes.iter().all(|o| o.greedy_tokens >= 24 && o.greedy.is_none()));
}

/// A checkpoint converted in float32 gives the logits of the model it was made of.
fn converted(name: &str) {
    let (_dir, package) = plain(&shared(&format!("goldens/{name}/checkpoint")), &[]);
    agrees(&package, &shared(&format!("goldens/{name}/golden.safetensors")), Numerics::Exact, 2e-4);
}

#[test]
fn llama() {
    converted("llama");
}

#[test]
fn qwen3_moe() {
    converted("qwen3_moe");
}

#[test]
fn qwen3_moe_tied() {
    converted("qwen3_moe_tied");
}

#[test]
fn gpt_oss() {
    converted("gpt_oss");
}

#[test]
fn glm4() {
    converted("glm4");
}

#[test]
fn glm4_moe() {
    converted("glm4_moe");
}

#[test]
fn deepseek_v2() {
    converted("deepseek_v2");
}

#[test]
fn gemma3() {
    converted("gemma3");
}

#[test]
fn qwen3_next() {
    converted("qwen3_next");
}

/// Families without a golden in the shared folder: the converter's references, on the CPU's kernels.
#[test]
fn every_reference_of_the_converter() {
    let families = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../doyen-convert/tests/data/families"));
    let mut judged = 0;
    for family in std::fs::read_dir(families).unwrap().map(|e| e.unwrap().path()) {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(family.join(file), dir.path().join(file)).unwrap();
        }
        let tokenizer = r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
        let long = family.to_str().unwrap().ends_with("_long_context");
        let (_dir, package) = plain(dir.path(), if long { &["--long-context"] } else { &[] });
        agrees(&package, &family.join("golden.safetensors"), Numerics::Exact, 2e-4);
        judged += 1;
    }
    assert!(judged >= 20, "{judged} references");
}

#[test]
fn docmoe_and_its_held_out_loss() {
    let (_dir, package) = plain(&shared("models/docmoe-hf"), &[]);
    agrees(&package, &shared("goldens/docmoe/golden.safetensors"), Numerics::Exact, 2e-4);

    let expected: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shared("goldens/docmoe/heldout.json")).unwrap()).unwrap();
    let text = shared("models/docmoe-hf/heldout.txt");
    let args = ["--text", text.to_str().unwrap(), "--windows", "2", "--numerics", "exact", "--json"];
    let report = doyen(&[&["eval", package.to_str().unwrap()][..], &args].concat());
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let windows = report["window_nll"].as_array().unwrap();
    assert_eq!((windows.len(), &report["window"]), (2, &expected["window"]));
    for (got, want) in windows.iter().zip(expected["window_nll"].as_array().unwrap()) {
        let difference = (got.as_f64().unwrap() - want.as_f64().unwrap()).abs();
        assert!(difference <= 1e-4, "got {got}, expected {want}");
    }
}

#[test]
fn packages_of_other_producers() {
    for name in [
        "llama/package-mobius",
        "qwen3_moe/package-mobius",
        "gemma3/package-mobius",
        "gpt_oss/package-genai-fp32",
        "qwen3_next/package-mobius",
        "deepseek_v2/package-mobius",
    ] {
        let package = shared(&format!("goldens/{name}"));
        agrees(&package, &package.join("golden-ort.safetensors"), Numerics::Exact, 2e-4);
    }
    // Attention with sinks and masks, experts with limits, all in plain operators.
    let package = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt_oss-mobius"));
    agrees(package, &package.join("golden-ort.safetensors"), Numerics::Exact, 2e-4);
    // As recorded by a runtime that keeps activations of products with quantized weights in float: the package's own
    // recording is of int8 activations in those products but not in its experts, which no mode here does.
    let package = shared("goldens/gpt_oss/package-genai-int4");
    let recorded =
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt_oss-genai-int4-float.safetensors"));
    agrees(&package, recorded, Numerics::Exact, 2e-4);
    // Recorded by a runtime that quantizes activations in one term.
    let package = shared("goldens/llama/package-genai-int4");
    agrees_but_for_flips(&package, &package.join("golden-ort.safetensors"), 1e-3, 5e-2);
}

/// Described for onnx-genai alone, with and without a block of ports.
#[test]
fn packages_of_the_second_flavour() {
    for name in ["llama", "qwen3_next"] {
        let from = shared(&format!("goldens/{name}/package-mobius"));
        let dir = tempfile::tempdir().unwrap();
        for file in ["model.onnx", "model.onnx.data", "tokenizer.json"] {
            std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
        }
        let whole = std::fs::read_to_string(from.join("inference_metadata.yaml")).unwrap();
        let (without, _) = whole.split_once("  io:\n").unwrap();
        for text in [whole.as_str(), without] {
            std::fs::write(dir.path().join("inference_metadata.yaml"), text).unwrap();
            agrees(dir.path(), &from.join("golden-ort.safetensors"), Numerics::Exact, 2e-4);
        }
        let said = doyen(&["show", dir.path().to_str().unwrap()]);
        assert!(said.contains(name) && said.contains("context length  2048"), "{said}");
    }
}

#[test]
fn checkpoints_without_a_recipe_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(shared("goldens/llama/checkpoint/config.json")).unwrap();
    let checkpoint = dir.path().join("checkpoint");
    std::fs::create_dir(&checkpoint).unwrap();
    std::fs::write(
        checkpoint.join("config.json"),
        config.replace("LlamaForCausalLM", "UnheardOfForCausalLM"),
    )
    .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_doyen"))
        .args(["convert", checkpoint.to_str().unwrap(), "-o"])
        .arg(dir.path().join("out"))
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("UnheardOfForCausalLM") && stderr.contains("known are LlamaForCausalLM"),
        "{stderr}"
    );
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "the checkpoint alone");
}
