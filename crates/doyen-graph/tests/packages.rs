//! Packages of other producers: they open, and the interpreter gives the logits their producer's runtime gave.

mod common;

use doyen_graph::{
    interp::Interpreter,
    package::{DirSource, Package, PackageError},
    pass::lower::StatePorts,
};
use doyen_tensor::{DType, Tensor};
use safetensors::SafeTensors;
use std::{collections::HashMap, path::Path, sync::Arc};

fn open(name: &str) -> Result<Package, PackageError> {
    Package::open(Arc::new(DirSource::open(common::shared("goldens").join(name))?))
}

fn i64s(bytes: &[u8]) -> Vec<i64> {
    bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// A sequence that is run on the interpreter step by step, its state fed back.
struct Sequence<'a> {
    package: &'a Package,
    interpreter: Interpreter<'a>,
    state: HashMap<String, Tensor>,
    len: usize,
}

impl<'a> Sequence<'a> {
    fn new(package: &'a Package) -> Self {
        let graph = &package.graph;
        let mut state = HashMap::new();
        let manifest = &package.manifest.decoder;
        let empty = |name: &str| {
            let fact = &graph.value(graph.find(name).unwrap()).fact;
            // Batch 1, no past, except for rolling caches, which start as a whole window; the last axis is named where
            // the producer does not write the head size out.
            let window = manifest.sliding_window.as_ref().and_then(|w| w.window_size);
            let extent = |axis: usize| match axis {
                0 => 1,
                2 if fact.dim(2).to_string() == "past_sliding_length" => window.unwrap(),
                2 => fact.dim(2).known().unwrap_or(0),
                _ => fact.dim(axis).known().or(manifest.head_size).unwrap(),
            };
            let shape: Vec<usize> = (0..fact.rank().unwrap()).map(extent).collect();
            let len = shape.iter().product();
            Tensor::from_f32(fact.dtype.unwrap(), shape, &vec![0.0; len]).unwrap()
        };
        for pair in &package.ports.states {
            match &pair.ports {
                StatePorts::KeyValue(p) => {
                    state.insert(p.past_key.clone(), empty(&p.past_key));
                    state.insert(p.past_value.clone(), empty(&p.past_value));
                }
                StatePorts::Fixed { past, .. } => {
                    state.insert(past.clone(), empty(past));
                }
            }
        }
        Self { package, interpreter: Interpreter::new(graph), state, len: 0 }
    }

    /// Runs new tokens; returns their logits, row by row.
    fn step(&mut self, tokens: &[i64]) -> Vec<f32> {
        let (graph, ports) = (&self.package.graph, &self.package.ports);
        let s = tokens.len();
        let total = self.len + s;
        let mut inputs: Vec<(&str, Tensor)> =
            self.state.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
        inputs.push((&ports.input_ids, Tensor::from_slice([1, s], tokens).unwrap()));
        if let Some(mask) = &ports.attention_mask {
            inputs.push((mask, Tensor::from_slice([1, total], &vec![1i64; total]).unwrap()));
        }
        if let Some(positions) = &ports.position_ids {
            let ids: Vec<i64> = (self.len as i64..total as i64).collect();
            inputs.push((positions, Tensor::from_slice([1, s], &ids).unwrap()));
        }
        let outputs = self.interpreter.run(&inputs).unwrap();
        let mut by_name: HashMap<&str, Tensor> =
            graph.outputs.iter().map(|&v| graph.value(v).name.as_str()).zip(outputs).collect();
        for pair in &ports.states {
            let mut feed = |past: &str, present: &str| {
                self.state.insert(past.to_owned(), by_name.remove(present).unwrap());
            };
            match &pair.ports {
                StatePorts::KeyValue(p) => {
                    feed(&p.past_key, &p.present_key);
                    feed(&p.past_value, &p.present_value);
                }
                StatePorts::Fixed { past, present } => feed(past, present),
            }
        }
        self.len = total;
        by_name[ports.logits.as_str()].to_f32().unwrap()
    }
}

fn argmax(row: &[f32]) -> i64 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as i64
}

/// How near logits must be to the other runtime's.
#[derive(Clone, Copy)]
enum Near {
    /// Largest difference.
    Max(f32),
    /// Norm of the difference over that of the logits, at the median position. Integer packages allow the other runtime
    /// int8 activations (accuracy level 4), which the reference does not have; where they tip a router to another
    /// expert, that position differs by more.
    Relative(f32),
}

fn median_relative(got: &[f32], want: &[f32], vocab: usize) -> f32 {
    let mut rows: Vec<f32> = got
        .chunks_exact(vocab)
        .zip(want.chunks_exact(vocab))
        .map(|(g, w)| {
            let difference: f32 = g.iter().zip(w).map(|(a, b)| (a - b).powi(2)).sum();
            (difference / w.iter().map(|b| b.powi(2)).sum::<f32>()).sqrt()
        })
        .collect();
    rows.sort_by(f32::total_cmp);
    rows[rows.len() / 2]
}

/// Prompts give the golden logits at every position; `greedy` tokens of each prompt follow one by one.
fn matches_golden(name: &str, near: Near, greedy: usize) {
    let package = open(name).unwrap();
    let folder = common::shared("goldens").join(name);
    let golden = std::fs::read(folder.join("golden-ort.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&golden).unwrap();
    let prompts =
        std::fs::read(folder.parent().map(Path::to_owned).unwrap().join("golden.safetensors")).unwrap();
    let prompts = SafeTensors::deserialize(&prompts).unwrap();
    for k in 0..3 {
        let prompt = i64s(prompts.tensor(&format!("prompt_{k}")).unwrap().data());
        let want = f32s(golden.tensor(&format!("ort_logits_{k}")).unwrap().data());
        let mut sequence = Sequence::new(&package);
        let got = sequence.step(&prompt);
        assert_eq!(got.len(), want.len());
        let vocab = got.len() / prompt.len();
        let (found, allowed) = match near {
            Near::Max(allowed) => {
                (got.iter().zip(&want).fold(0.0, |m, (a, b)| (a - b).abs().max(m)), allowed)
            }
            Near::Relative(allowed) => (median_relative(&got, &want, vocab), allowed),
        };
        assert!(found <= allowed, "{name}: prompt {k}: logits differ by {found}, allowed {allowed}");
        let tokens = i64s(golden.tensor(&format!("ort_greedy_{k}")).unwrap().data());
        let mut token = argmax(&got[got.len() - vocab..]);
        for (i, &w) in tokens.iter().take(greedy).enumerate() {
            assert_eq!(token, w, "{name}: prompt {k}: greedy token {i}");
            token = argmax(&sequence.step(&[token]));
        }
    }
}

#[test]
fn llama_of_mobius() {
    matches_golden("llama/package-mobius", Near::Max(5e-5), 24);
}

#[test]
fn qwen3_moe_of_mobius() {
    matches_golden("qwen3_moe/package-mobius", Near::Max(5e-5), 24);
}

#[test]
fn gpt_oss_of_genai() {
    matches_golden("gpt_oss/package-genai-fp32", Near::Max(5e-5), 24);
}

#[test]
fn gemma3_of_mobius() {
    matches_golden("gemma3/package-mobius", Near::Max(5e-5), 24);
}

#[test]
fn deepseek_v2_of_mobius() {
    matches_golden("deepseek_v2/package-mobius", Near::Max(5e-5), 24);
}

#[test]
fn qwen3_next_of_mobius() {
    matches_golden("qwen3_next/package-mobius", Near::Max(5e-5), 24);
}

#[test]
fn llama_of_genai_int4() {
    matches_golden("llama/package-genai-int4", Near::Relative(0.03), 0);
}

#[test]
fn gpt_oss_of_genai_int4() {
    matches_golden("gpt_oss/package-genai-int4", Near::Relative(0.03), 0);
}

#[test]
fn a_package_needs_its_data_file() {
    let dir = tempfile::tempdir().unwrap();
    let from = common::shared("goldens").join("llama/package-mobius");
    for name in ["model.onnx", "genai_config.json"] {
        std::fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    let open = || Package::open(Arc::new(DirSource::open(dir.path()).unwrap()));
    let message = open().unwrap_err().to_string();
    assert!(message.contains("model.onnx.data") && message.contains("missing"), "{message}");
    let data = std::fs::read(from.join("model.onnx.data")).unwrap();
    std::fs::write(dir.path().join("model.onnx.data"), &data[..data.len() / 2]).unwrap();
    let message = open().unwrap_err().to_string();
    assert!(message.contains("truncated") && message.contains(&(data.len() / 2).to_string()), "{message}");
}

/// Copies a package; the text of its manifest goes through `change`.
fn copy(name: &str, change: impl Fn(String) -> String) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = common::shared("goldens").join(name);
    for file in ["model.onnx", "model.onnx.data", "tokenizer.json"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let manifest = change(std::fs::read_to_string(from.join("genai_config.json")).unwrap());
    std::fs::write(dir.path().join("genai_config.json"), manifest).unwrap();
    dir
}

fn open_dir(dir: &tempfile::TempDir) -> Result<Package, PackageError> {
    Package::open(Arc::new(DirSource::open(dir.path())?))
}

#[test]
fn expert_weights_permuted_for_cuda_are_refused() {
    let cuda = |m: String| m.replace("\"provider_options\": []", "\"provider_options\": [{\"cuda\": {}}]");
    let message = open_dir(&copy("gpt_oss/package-genai-int4", cuda)).unwrap_err().to_string();
    assert!(message.contains("QMoE") && message.contains("weights_prepacked"), "{message}");
    // Without integer experts there is nothing to permute.
    open_dir(&copy("gpt_oss/package-genai-fp32", cuda)).unwrap();
}

#[test]
fn a_package_without_a_manifest_opens_by_its_ports() {
    let dir = copy("llama/package-genai-int4", |m| m);
    let with = open_dir(&dir).unwrap();
    std::fs::remove_file(dir.path().join("genai_config.json")).unwrap();
    let without = open_dir(&dir).unwrap();
    assert_eq!(with.ports, without.ports);
    assert!(without.text.tokenizer.is_some() && without.text.chat_template.is_none());
    std::fs::rename(dir.path().join("model.onnx"), dir.path().join("a.onnx")).unwrap();
    open_dir(&dir).unwrap();
    std::fs::copy(dir.path().join("a.onnx"), dir.path().join("b.onnx")).unwrap();
    let message = open_dir(&dir).unwrap_err().to_string();
    assert!(message.contains("a.onnx, b.onnx") && message.contains("model.decoder.filename"), "{message}");
}

/// The second flavour: no genai_config.json. Lists of ports, thin or missing, change nothing, since they are the graph's own.
#[test]
fn packages_described_for_onnx_genai() {
    for name in ["llama", "qwen3_moe", "gemma3", "qwen3_next", "deepseek_v2"] {
        let from = common::shared("goldens").join(format!("{name}/package-mobius"));
        let dir = copy(&format!("{name}/package-mobius"), |m| m);
        let with = open_dir(&dir).unwrap();
        std::fs::remove_file(dir.path().join("genai_config.json")).unwrap();
        let description = dir.path().join("inference_metadata.yaml");
        let whole = std::fs::read_to_string(from.join("inference_metadata.yaml")).unwrap();
        let (before, after) = (whole.find("  io:\n").unwrap(), whole.find("kv_cache:\n").unwrap());
        let io = |io: &str| format!("{}{io}{}", &whole[..before], &whole[after..]);
        let thin = "  io:\n    inputs:\n    - name: input_ids\n    token_input: input_ids\n    logits_output: logits\n";
        for text in [whole.clone(), io(thin), io("  io:\n    outputs:\n    - name: nothing\n"), io("")] {
            std::fs::write(&description, text).unwrap();
            let package = open_dir(&dir).unwrap();
            assert_eq!(package.ports, with.ports, "{name}");
            let m = &package.manifest;
            assert!(m.model_type.as_ref().is_some_and(|t| t.starts_with(name)), "{name}: {m:?}");
            assert!(m.context_length.is_some() && m.decoder.num_attention_heads.is_some(), "{m:?}");
            assert_eq!(m.decoder.num_key_value_heads, with.manifest.decoder.num_key_value_heads, "{name}");
            assert!(m.eos_tokens.is_empty());
        }
        for text in ["", "model: {}\n"] {
            std::fs::write(&description, text).unwrap();
            assert_eq!(open_dir(&dir).unwrap().ports, with.ports, "{name}: {text:?}");
        }
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [2, 7]}"#).unwrap();
        assert_eq!(open_dir(&dir).unwrap().manifest.eos_tokens.len(), 2);
    }
}

#[test]
fn descriptions_that_are_wrong_are_refused_by_file_and_place() {
    let dir = copy("llama/package-mobius", |m| m);
    std::fs::remove_file(dir.path().join("genai_config.json")).unwrap();
    let list = |i: usize| format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i - 1); 9].join(","));
    let bomb = (1..16).map(list).collect::<Vec<_>>().concat();
    for (text, word) in [
        ("model: [".into(), "line"),
        ("model: {max_sequence_length: -4}".into(), "model.max_sequence_length"),
        ("model: {io: {logits_output: nothing}}".into(), "\"nothing\""),
        ("pipeline: {models: {decoder: {filename: ../model.onnx}}}".into(), "not a file inside the package"),
        (format!("a0: &a0 [x, x]\n{bomb}"), "more than"),
    ] {
        std::fs::write(dir.path().join("inference_metadata.yaml"), &text).unwrap();
        let message = open_dir(&dir).unwrap_err().to_string();
        assert!(message.contains(word), "{text}: {message}");
    }
}

#[test]
fn a_manifest_may_not_point_outside() {
    for (from, to) in [
        ("\"filename\": \"model.onnx\"", "\"filename\": \"../model.onnx\""),
        ("\"vocab_size\": 1024", "\"vocab_size\": 1024, \"tokenizer_dir\": \"/etc\""),
    ] {
        let dir = copy("llama/package-genai-int4", |m| {
            assert!(m.contains(from));
            m.replace(from, to)
        });
        let message = open_dir(&dir).unwrap_err().to_string();
        assert!(message.contains("not a file inside the package"), "{message}");
    }
}

#[test]
fn ports_and_types_are_found() {
    let package = open("llama/package-mobius").unwrap();
    let logits = package.graph.find(&package.ports.logits).unwrap();
    assert_eq!(package.graph.value(logits).fact.dtype, Some(DType::F32));
    assert_eq!(package.ports.states.len(), 3);
}
