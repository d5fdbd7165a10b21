//! Tiny synthetic checkpoints, whole or broken in one place.

pub mod gguf;

use doyen_convert::{ConvertError, Options, Report, Silent, Target, convert};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// A checkpoint before it is written. Weights are small, different from each other, and the same in every run.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub tokenizer: Option<String>,
}

fn weights(seed: usize, n: usize) -> Vec<f32> {
    let mut state = seed as u64 * 0x9E37_79B9 + 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 0.5
        })
        .collect()
}

impl Checkpoint {
    fn new(config: Value) -> Self {
        let tokenizer =
            Some(r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}"#.into());
        Self { config, tensors: BTreeMap::new(), tokenizer }
    }

    pub fn add(&mut self, name: &str, shape: &[usize]) {
        let values = weights(self.tensors.len(), shape.iter().product());
        self.tensors.insert(name.into(), (shape.to_vec(), values));
    }

    pub fn values(&mut self, name: &str) -> &mut Vec<f32> {
        &mut self.tensors.get_mut(name).unwrap().1
    }

    fn add_decoder(&mut self, layers: usize, qk_norm: bool, bias: bool) {
        let (h, q, kv, d) = (32, 32, 16, 16);
        self.add("model.embed_tokens.weight", &[64, h]);
        self.add("model.norm.weight", &[h]);
        for i in 0..layers {
            let p = format!("model.layers.{i}");
            self.add(&format!("{p}.input_layernorm.weight"), &[h]);
            self.add(&format!("{p}.post_attention_layernorm.weight"), &[h]);
            for (name, rows, cols) in [("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)] {
                self.add(&format!("{p}.self_attn.{name}_proj.weight"), &[rows, cols]);
                if bias && name != "o" {
                    self.add(&format!("{p}.self_attn.{name}_proj.bias"), &[rows]);
                }
            }
            if qk_norm {
                self.add(&format!("{p}.self_attn.q_norm.weight"), &[d]);
                self.add(&format!("{p}.self_attn.k_norm.weight"), &[d]);
            }
        }
    }

    fn add_swiglu(&mut self, module: &str, inner: usize) {
        self.add(&format!("{module}.gate_proj.weight"), &[inner, 32]);
        self.add(&format!("{module}.up_proj.weight"), &[inner, 32]);
        self.add(&format!("{module}.down_proj.weight"), &[32, inner]);
    }

    /// Two layers, the first dense, the second with four experts; tied.
    pub fn qwen3_moe() -> Self {
        let mut c = Self::new(json!({
            "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48,
            "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": false,
            "mlp_only_layers": [0], "vocab_size": 64, "max_position_embeddings": 64, "hidden_act": "silu",
            "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": [2, 3], "rms_norm_eps": 1e-6,
        }));
        c.add_decoder(2, true, false);
        c.add_swiglu("model.layers.0.mlp", 48);
        c.add("model.layers.1.mlp.gate.weight", &[4, 32]);
        for e in 0..4 {
            c.add_swiglu(&format!("model.layers.1.mlp.experts.{e}"), 32);
        }
        c
    }

    /// One dense layer with biases on query, key and value; untied; yarn.
    pub fn qwen2() -> Self {
        let mut c = Self::new(json!({
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 64,
            "max_position_embeddings": 64, "hidden_act": "silu", "eos_token_id": 2, "rms_norm_eps": 1e-6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        }));
        c.add_decoder(1, false, true);
        c.add_swiglu("model.layers.0.mlp", 48);
        c.add("lm_head.weight", &[64, 32]);
        c
    }

    /// [`Checkpoint::qwen2`] without scaled positions.
    pub fn qwen2_plain() -> Self {
        let mut c = Self::qwen2();
        c.config["rope_scaling"] = Value::Null;
        c.config["head_dim"] = 16.into();
        c
    }

    /// One dense layer; untied.
    pub fn llama() -> Self {
        let mut c = Self::new(json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48,
            "vocab_size": 64, "max_position_embeddings": 64, "hidden_act": "silu", "bos_token_id": 0,
            "eos_token_id": 1, "rms_norm_eps": 1e-6,
        }));
        c.add_decoder(1, false, false);
        c.add_swiglu("model.layers.0.mlp", 48);
        c.add("lm_head.weight", &[64, 32]);
        c
    }

    fn write_tensors(&self, path: &Path, keep: impl Fn(&str) -> bool) {
        let bytes: BTreeMap<&str, Vec<u8>> = self
            .tensors
            .iter()
            .filter(|(n, _)| keep(n))
            .map(|(n, (_, v))| (n.as_str(), v.iter().flat_map(|x| x.to_le_bytes()).collect()))
            .collect();
        let views = bytes
            .iter()
            .map(|(n, b)| (*n, TensorView::new(Dtype::F32, self.tensors[*n].0.clone(), b).unwrap()));
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn write_rest(&self, dir: &Path) {
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        if let Some(t) = &self.tokenizer {
            fs::write(dir.join("tokenizer.json"), t).unwrap();
        }
    }

    /// Writes one file of tensors.
    pub fn write(&self) -> Place {
        let place = Place::new();
        self.write_tensors(&place.checkpoint().join("model.safetensors"), |_| true);
        self.write_rest(&place.checkpoint());
        place
    }

    /// Writes two shards, layer 1 in the second, and an index.
    pub fn write_sharded(&self) -> Place {
        let place = Place::new();
        let second = |name: &str| name.starts_with("model.layers.1.");
        let shard = |name: &str| if second(name) { "b.safetensors" } else { "a.safetensors" };
        self.write_tensors(&place.checkpoint().join("a.safetensors"), |n| !second(n));
        self.write_tensors(&place.checkpoint().join("b.safetensors"), second);
        let map: BTreeMap<&str, &str> = self.tensors.keys().map(|n| (n.as_str(), shard(n))).collect();
        let index = json!({"metadata": {}, "weight_map": map});
        fs::write(place.checkpoint().join("model.safetensors.index.json"), index.to_string()).unwrap();
        self.write_rest(&place.checkpoint());
        place
    }
}

/// A folder with a checkpoint in it, and room for a package beside.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::create_dir(place.checkpoint()).unwrap();
        place
    }

    pub fn checkpoint(&self) -> PathBuf {
        self.0.path().join("checkpoint")
    }

    pub fn package(&self) -> PathBuf {
        self.0.path().join("package")
    }

    pub fn convert(&self, options: &Options) -> Result<Report, ConvertError> {
        convert(&self.checkpoint(), &Target::new(self.package()), options, &mut Silent)
    }

    /// The refusal of a conversion that must fail, and leave nothing beside the checkpoint.
    pub fn refusal(&self, options: &Options) -> String {
        let e = self.convert(options).expect_err("the conversion must fail").to_string();
        assert_eq!(self.entries(), ["checkpoint"], "{e}");
        e
    }

    /// Names beside the checkpoint, hidden ones included.
    pub fn entries(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.0.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}
