//! Real checkpoints, converted without quantization and run by the reference interpreter, against recorded outputs.

use doyen_convert::{
    Options, Silent, Target, convert,
    options::{Mxfp4, Setting},
};
use doyen_graph::{
    interp::Interpreter,
    package::{DirSource, Package},
};
use doyen_tensor::{FloatType, Tensor};
use safetensors::SafeTensors;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

fn shared() -> PathBuf {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared");
    let path = PathBuf::from(std::env::var_os("DOYEN_SHARED").unwrap_or_else(|| default.into()));
    assert!(path.is_dir(), "{} is missing; set DOYEN_SHARED to the shared test data", path.display());
    path
}

fn package(checkpoint: &Path, options: &Options) -> (tempfile::TempDir, Package) {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("package");
    convert(checkpoint, &Target::new(&target), options, &mut Silent).unwrap();
    let package = Package::open(Arc::new(DirSource::open(&target).unwrap())).unwrap();
    (dir, package)
}

/// One step: new tokens after a cache; logits `[n, vocab]` flat, and the cache after them.
fn step(package: &Package, ids: &[i64], cache: &[(String, Tensor)]) -> (Vec<f32>, Vec<(String, Tensor)>) {
    let past =
        cache.iter().find(|(n, _)| n.rsplit('.').next() == Some("key")).map_or(0, |(_, t)| t.shape()[2]);
    let mut inputs = vec![
        ("input_ids", Tensor::from_slice([1, ids.len()], ids).unwrap()),
        ("attention_mask", Tensor::from_slice([1, past + ids.len()], &vec![1i64; past + ids.len()]).unwrap()),
    ];
    inputs.extend(cache.iter().map(|(n, t)| (n.as_str(), t.clone())));
    let mut out = Interpreter::new(&package.graph).run(&inputs).unwrap().into_iter();
    let logits = out.next().unwrap().to_f32().unwrap();
    (logits, cache.iter().map(|(n, _)| n.clone()).zip(out).collect())
}

fn empty_cache(package: &Package) -> Vec<(String, Tensor)> {
    let values = package.graph.inputs.iter().map(|&i| package.graph.value(i));
    values
        .filter(|v| v.name.starts_with("past"))
        .map(|v| {
            // Batch 1 and no past; states of fixed size are zeros.
            let extent = |axis| if axis == 0 { 1 } else { v.fact.dim(axis).known().unwrap_or(0) };
            let dims: Vec<usize> = (0..v.fact.rank().unwrap()).map(extent).collect();
            let zeros = vec![0.0; dims.iter().product()];
            (v.name.clone(), Tensor::from_f32(v.fact.dtype.unwrap(), dims, &zeros).unwrap())
        })
        .collect()
}

fn argmax(row: &[f32]) -> i64 {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap() as i64
}

/// Logits of whole prompts within 1e-4, and greedy tokens with the cache fed back.
fn check(name: &str, checkpoint: &Path, prompts: usize, greedy: usize) {
    let recorded = shared().join("goldens").join(name).join("golden.safetensors");
    check_recorded(name, (checkpoint, &Options::float(FloatType::F32)), &recorded, prompts, greedy);
}

pub fn check_recorded(
    name: &str,
    (checkpoint, options): (&Path, &Options),
    recorded: &Path,
    prompts: usize,
    greedy: usize,
) {
    let (_dir, package) = package(checkpoint, options);
    let file = std::fs::read(recorded).unwrap();
    let golden = SafeTensors::deserialize(&file).unwrap();
    let ints = |key: &str| -> Vec<i64> {
        golden.tensor(key).unwrap().data().as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect()
    };
    for k in 0..prompts {
        let logits = golden.tensor(&format!("logits_{k}")).unwrap();
        let vocab = logits.shape()[1];
        let expected = logits.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b));
        let (found, mut cache) = step(&package, &ints(&format!("prompt_{k}")), &empty_cache(&package));
        let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst <= 1e-4, "{name}, prompt {k}: {worst}");
        let mut token = argmax(&found[found.len() - vocab..]);
        for (i, &expected) in ints(&format!("greedy_{k}")).iter().take(greedy).enumerate() {
            assert_eq!(token, expected, "{name}, prompt {k}, token {i}");
            let (row, next) = step(&package, &[token], &cache);
            (token, cache) = (argmax(&row), next);
        }
    }
}

fn golden(name: &str) {
    check(name, &shared().join("goldens").join(name).join("checkpoint"), 3, 24);
}

#[test]
fn llama() {
    golden("llama");
}

#[test]
fn qwen3_moe() {
    golden("qwen3_moe");
}

#[test]
fn qwen3_moe_tied() {
    golden("qwen3_moe_tied");
}

#[test]
fn gpt_oss() {
    golden("gpt_oss");
}

/// Experts of 4-bit floats that nobody asked to be anything else keep their values, as floats and as 8-bit codes.
#[test]
fn gpt_oss_with_its_codes() {
    let kept = |s: &Setting| !matches!(s, Setting::Experts(_));
    let float = Options::float(FloatType::F32);
    let settings: Vec<Setting> = float.settings.iter().copied().filter(kept).collect();
    for (mxfp4, kind) in [(Mxfp4::Kept, "fp4"), (Mxfp4::Codes8, "int")] {
        let options = Options { settings: settings.clone(), mxfp4, ..float.clone() };
        let folder = shared().join("goldens/gpt_oss");
        let (_dir, package) = package(&folder.join("checkpoint"), &options);
        let mut banks = package.graph.nodes.iter().filter(|n| n.op_type == "QMoE").peekable();
        assert!(banks.peek().is_some());
        assert!(banks.all(|n| n.attrs.clone().string("quant_type").unwrap().as_deref() == Some(kind)));
        let recorded = folder.join("golden.safetensors");
        check_recorded("gpt_oss", (&folder.join("checkpoint"), &options), &recorded, 3, 4);
    }
}

#[test]
fn glm4() {
    golden("glm4");
}

#[test]
fn glm4_moe() {
    golden("glm4_moe");
}

#[test]
fn gemma3() {
    golden("gemma3");
}

#[test]
fn qwen3_next() {
    golden("qwen3_next");
}

/// One prompt and a few tokens: the interpreter is slow on purpose.
#[test]
fn docmoe() {
    check("docmoe", &shared().join("models/docmoe-hf"), 1, 4);
}
