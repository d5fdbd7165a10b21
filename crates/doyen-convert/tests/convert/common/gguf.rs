//! GGUF files of the synthetic checkpoints, and whatever else a test wants to put in one.

use super::Checkpoint;
use std::{fs, path::Path};

/// A file before it is written: metadata and tensors in order.
#[derive(Debug, Clone, Default)]
pub struct Gguf {
    pub pairs: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
}

/// A metadata value.
#[derive(Debug, Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    /// Slowest first.
    pub shape: Vec<u64>,
    pub ty: u32,
    pub bytes: Vec<u8>,
}

pub const F32: u32 = 0;
const ALIGN: usize = 32;

fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

impl Meta {
    fn write(&self, out: &mut Vec<u8>) {
        let kind = |out: &mut Vec<u8>, n: u32| out.extend(n.to_le_bytes());
        let list = |out: &mut Vec<u8>, n: u32, len: usize| {
            kind(out, 9);
            kind(out, n);
            out.extend((len as u64).to_le_bytes());
        };
        match self {
            Self::U32(v) => {
                kind(out, 4);
                out.extend(v.to_le_bytes());
            }
            Self::F32(v) => {
                kind(out, 6);
                out.extend(v.to_le_bytes());
            }
            Self::Text(s) => {
                kind(out, 8);
                text(out, s);
            }
            Self::Texts(v) => {
                list(out, 8, v.len());
                for s in v {
                    text(out, s);
                }
            }
            Self::I32s(v) => {
                list(out, 5, v.len());
                for x in v {
                    out.extend(x.to_le_bytes());
                }
            }
        }
    }
}

impl Gguf {
    pub fn set(&mut self, key: &str, value: Meta) {
        self.pairs.retain(|(k, _)| k != key);
        self.pairs.push((key.into(), value));
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            text(&mut out, key);
            value.write(&mut out);
        }
        let mut offset = 0;
        for t in &self.tensors {
            text(&mut out, &t.name);
            out.extend((t.shape.len() as u32).to_le_bytes());
            t.shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.ty.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + t.bytes.len()).next_multiple_of(ALIGN);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGN), 0);
            out.extend(&t.bytes);
        }
        out
    }

    pub fn write(&self, path: &Path) {
        fs::write(path, self.bytes()).unwrap();
    }

    /// The model of a checkpoint, weights as they are. Keys and names follow `arch`.
    pub fn of(c: &Checkpoint, arch: &str) -> Self {
        let mut out = Self::default();
        out.set("general.architecture", Meta::Text(arch.into()));
        let size = |name: &str| c.config[name].as_u64().map(|n| n as u32);
        for (key, field) in [
            ("embedding_length", "hidden_size"),
            ("block_count", "num_hidden_layers"),
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("context_length", "max_position_embeddings"),
            ("expert_count", "num_experts"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
        ] {
            if let Some(n) = size(field) {
                out.set(&format!("{arch}.{key}"), Meta::U32(n));
            }
        }
        let eps = c.config["rms_norm_eps"].as_f64().unwrap() as f32;
        out.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), Meta::F32(eps));
        out.tokenizer(size("vocab_size").unwrap() as usize);
        out.add_tensors(c, arch);
        out
    }

    /// A byte-level vocabulary of `n` tokens: `<s>`, `</s>`, and numbers between brackets.
    fn tokenizer(&mut self, n: usize) {
        let token = |i: usize| match i {
            0 => "<s>".into(),
            1 => "</s>".into(),
            _ => char::from_u32(0x20 + i as u32).unwrap().to_string(),
        };
        self.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
        self.set("tokenizer.ggml.pre", Meta::Text("gpt-2".into()));
        self.set("tokenizer.ggml.tokens", Meta::Texts((0..n).map(token).collect()));
        self.set(
            "tokenizer.ggml.token_type",
            Meta::I32s((0..n).map(|i| if i < 2 { 3 } else { 1 }).collect()),
        );
        self.set("tokenizer.ggml.merges", Meta::Texts(Vec::new()));
        self.set("tokenizer.ggml.bos_token_id", Meta::U32(0));
        self.set("tokenizer.ggml.eos_token_id", Meta::U32(1));
    }

    fn add_tensors(&mut self, c: &Checkpoint, arch: &str) {
        let head = c.config["head_dim"].as_u64().unwrap_or(16) as usize;
        for (name, (shape, values)) in &c.tensors {
            if name.contains(".experts.") {
                continue;
            }
            let stored = stored_name(name);
            let rotated = arch == "llama" && (stored.contains("attn_q.") || stored.contains("attn_k."));
            let cols = if shape.len() == 1 { 1 } else { shape[1] };
            let values = if rotated { pairs(values, head, cols) } else { values.clone() };
            self.add_f32(&stored, shape, &values);
        }
        let Some(experts) = c.config["num_experts"].as_u64() else { return };
        for layer in 0..c.config["num_hidden_layers"].as_u64().unwrap() {
            for (projection, short) in [("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")] {
                let name = |e| format!("model.layers.{layer}.mlp.experts.{e}.{projection}.weight");
                let Some((shape, _)) = c.tensors.get(&name(0)) else { continue };
                let shape = [&[experts as usize], shape.as_slice()].concat();
                let values: Vec<f32> = (0..experts).flat_map(|e| c.tensors[&name(e)].1.clone()).collect();
                self.add_f32(&format!("blk.{layer}.ffn_{short}_exps.weight"), &shape, &values);
            }
        }
    }

    pub fn add_f32(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let shape = shape.iter().map(|&d| d as u64).collect();
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensors.push(Tensor { name: name.into(), shape, ty: F32, bytes });
    }
}

/// Rows as writers of Llama files store them: row `half * d / 2 + i` of a head becomes row `2 i + half`.
fn pairs(values: &[f32], head: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for (row, x) in values.chunks(cols).enumerate() {
        let (first, r) = (row / head * head, row % head);
        let to = first + 2 * (r % (head / 2)) + r / (head / 2);
        out[to * cols..(to + 1) * cols].copy_from_slice(x);
    }
    out
}

fn stored_name(name: &str) -> String {
    let mut out = name.replace("model.layers.", "blk.").replace("model.norm", "output_norm");
    for (from, to) in [
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.gate", "ffn_gate_inp"),
    ] {
        out = out.replace(from, to);
    }
    out
}
