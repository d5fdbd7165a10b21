//! Tensors under the names of a Hugging Face checkpoint, which recipes ask for, and what their writers changed undone.
//!
//! Writers of GGUF files reorder the rows of Llama's query and key projections (pairs of the rotation lie beside each
//! other) and put all experts of a projection in one tensor. Both are undone by where rows are read from.

use super::{
    file::{GgufFile, Stored},
    metadata::Metadata,
    types::GgmlType,
};
use crate::{
    ConvertError,
    source::{Checkpoint, Entry, Naming, RowOrder, SourceType},
};
use std::collections::BTreeMap;

/// An architecture of the GGUF registry that a recipe exists for.
#[derive(Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "they are independent facts")]
pub(super) struct Architecture {
    /// Its name in GGUF files, which its metadata keys start with.
    pub name: &'static str,
    /// Its name in config.json.
    pub checkpoint_name: &'static str,
    /// Whether query and key rows are stored with rotated pairs beside each other.
    pairs_rows: bool,
    /// Whether query, key and value always have biases.
    pub biased: bool,
    /// Whether layers have experts.
    pub moe: bool,
    /// Whether a part of each head may be left without rotation.
    pub partial: bool,
    /// Norms of a layer: name here, name in a checkpoint.
    norms: Renamed,
    /// Other modules of a layer, likewise.
    inside: Renamed,
}

/// Name in a GGUF file, name in a checkpoint.
type Renamed = &'static [(&'static str, &'static str)];

const PRE: Renamed = &[("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")];
const SANDWICH: Renamed = &[
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const PLAIN: Architecture = Architecture {
    name: "llama",
    checkpoint_name: "LlamaForCausalLM",
    pairs_rows: true,
    biased: false,
    moe: false,
    partial: false,
    norms: PRE,
    inside: INSIDE,
};
const PAIRS_APART: Architecture = Architecture { pairs_rows: false, ..PLAIN };

static KNOWN: [Architecture; 8] = [
    PLAIN,
    Architecture { name: "qwen2", checkpoint_name: "Qwen2ForCausalLM", biased: true, ..PAIRS_APART },
    Architecture { name: "qwen3", checkpoint_name: "Qwen3ForCausalLM", ..PAIRS_APART },
    Architecture { name: "qwen3moe", checkpoint_name: "Qwen3MoeForCausalLM", moe: true, ..PAIRS_APART },
    Architecture {
        name: "phi3",
        checkpoint_name: "Phi3ForCausalLM",
        partial: true,
        inside: FUSED,
        ..PAIRS_APART
    },
    Architecture { name: "gemma", checkpoint_name: "GemmaForCausalLM", ..PAIRS_APART },
    Architecture { name: "gemma2", checkpoint_name: "Gemma2ForCausalLM", norms: SANDWICH, ..PAIRS_APART },
    Architecture { name: "gemma3", checkpoint_name: "Gemma3ForCausalLM", norms: SANDWICH, ..PAIRS_APART },
];

const KEY: &str = "general.architecture";

impl Architecture {
    pub(super) fn of(metadata: &Metadata) -> Result<&'static Self, ConvertError> {
        let known = || {
            let names: Vec<_> = KNOWN.iter().map(|a| a.name).collect();
            format!("an architecture with a recipe: {}", names.join(", "))
        };
        let name = metadata.string(KEY)?.ok_or_else(|| metadata.absent(KEY, &known()))?;
        KNOWN
            .iter()
            .find(|a| a.name == name)
            .ok_or_else(|| metadata.wrong(KEY, format!("{name:?}"), &known()))
    }

    /// Whether it is a Gemma: norms are stored whole, embeddings are scaled.
    pub(super) fn is_gemma(&self) -> bool {
        self.name.starts_with("gemma")
    }

    /// The name in a checkpoint of a module inside of layers.
    fn inside(&self, module: &str) -> Option<&'static str> {
        renamed(self.norms, module).or_else(|| renamed(self.inside, module))
    }
}

impl Naming for Architecture {
    fn stored_name(&self, asked: &str) -> Option<String> {
        let (rest, kind) = asked.rsplit_once('.')?;
        let back = |table: &[(&'static str, &str)], module: &str| {
            table.iter().find(|(_, n)| *n == module).map(|(n, _)| *n)
        };
        let Some((layer, module)) = rest.strip_prefix("model.layers.").and_then(|r| r.split_once('.')) else {
            return back(&OUTSIDE, rest).map(|m| format!("{m}.{kind}"));
        };
        let module = match module.strip_prefix("mlp.experts.").and_then(|m| m.split_once('.')) {
            Some((_, projection)) => back(&EXPERTS, projection)?,
            None => back(self.norms, module).or_else(|| back(self.inside, module))?,
        };
        Some(format!("blk.{layer}.{module}.{kind}"))
    }
}

pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const HEAD: &str = "output.weight";
/// Divisors of the rotary frequencies; those of LongRoPE for short and for long sequences.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
pub(super) const SHORT_FACTORS: &str = "rope_factors_short.weight";
pub(super) const LONG_FACTORS: &str = "rope_factors_long.weight";

/// Modules outside of layers: name here, name in a checkpoint.
const OUTSIDE: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Modules of a layer.
const INSIDE: Renamed = &[
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];

/// Modules of a layer with projections of one input in one matrix.
const FUSED: Renamed = &[
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_up", "mlp.gate_up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Experts of a layer, all in one tensor.
const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

/// A stored name's parts: `blk.3.attn_q.weight` is layer 3, `attn_q`, `weight`.
struct Name<'a> {
    layer: Option<usize>,
    module: &'a str,
    kind: &'a str,
}

impl<'a> Name<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (rest, kind) = name.rsplit_once('.').filter(|(_, k)| matches!(*k, "weight" | "bias"))?;
        match rest.strip_prefix("blk.").and_then(|r| r.split_once('.')) {
            Some((layer, module)) => Some(Self { layer: Some(layer.parse().ok()?), module, kind }),
            None => Some(Self { layer: None, module: rest, kind }),
        }
    }
}

fn renamed(table: &[(&str, &'static str)], module: &str) -> Option<&'static str> {
    table.iter().find(|(n, _)| *n == module).map(|(_, n)| *n)
}

/// The tensors of a file as those of a checkpoint folder. `heads` are query and key heads.
pub(super) fn checkpoint(
    file: GgufFile,
    arch: &'static Architecture,
    head_dim: usize,
) -> Result<Checkpoint, ConvertError> {
    let mut out = BTreeMap::new();
    for (name, stored) in file.tensors {
        if [ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS].contains(&name.as_str()) {
            continue;
        }
        let parsed = Name::parse(&name);
        if let Some(Name { layer: Some(layer), module, kind: "weight" }) = parsed
            && let Some(projection) = renamed(&EXPERTS, module)
        {
            for (e, entry) in experts(&name, stored)?.enumerate() {
                let asked = format!("model.layers.{layer}.mlp.experts.{e}.{projection}.weight");
                out.insert(asked, entry);
            }
            continue;
        }
        let asked = parsed.and_then(|n| {
            Some(match n.layer {
                None => format!("{}.{}", renamed(&OUTSIDE, n.module)?, n.kind),
                Some(layer) => format!("model.layers.{layer}.{}.{}", arch.inside(n.module)?, n.kind),
            })
        });
        let rotated = name.starts_with("blk.") && (name.contains(".attn_q.") || name.contains(".attn_k."));
        let order = if rotated && arch.pairs_rows {
            RowOrder::RotaryPairs(check_heads(&name, &stored, head_dim)?)
        } else {
            RowOrder::Stored
        };
        // Tensors that no recipe knows keep their name, below the model's own, so that they are not overlooked.
        let asked = asked.unwrap_or_else(|| match name.strip_prefix("blk.") {
            Some(rest) => format!("model.layers.{rest}"),
            None => format!("model.{name}"),
        });
        out.insert(asked, entry(name, stored, order));
    }
    Ok(Checkpoint::of(out, Some(arch)))
}

fn entry(name: String, stored: Stored, order: RowOrder) -> Entry {
    let Stored { ty, shape, offset, data, .. } = stored;
    Entry { dtype: source_type(ty), shape, data, offset, stored_name: Some(name), order, parts: Vec::new() }
}

const fn source_type(ty: GgmlType) -> SourceType {
    match ty {
        GgmlType::F32 => SourceType::F32,
        GgmlType::F16 => SourceType::F16,
        GgmlType::BF16 => SourceType::BF16,
        GgmlType::F64 => SourceType::F64,
        other => SourceType::Blocks(other),
    }
}

/// Rows whose heads are taken apart must be whole heads; vectors besides must have elements to take apart.
fn check_heads(name: &str, stored: &Stored, head_dim: usize) -> Result<usize, ConvertError> {
    let rows = match stored.shape[..] {
        [n] if stored.ty.block().0 == 1 => n,
        [rows, _] => rows,
        _ => {
            let (ty, shape) = (stored.ty, &stored.shape);
            return Err(refusal(name, stored, &format!("expected a matrix, found {ty} {shape:?}")));
        }
    };
    if head_dim < 2 || !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim) {
        let expected = format!("expected rows of whole heads of {head_dim}, found {rows} rows");
        return Err(refusal(name, stored, &expected));
    }
    Ok(head_dim)
}

fn refusal(name: &str, stored: &Stored, message: &str) -> ConvertError {
    ConvertError::file(stored.data.path(), format!("tensor {name:?}: {message}"))
}

/// The matrices of a tensor `[experts, rows, cols]`.
fn experts(name: &str, stored: Stored) -> Result<impl Iterator<Item = Entry>, ConvertError> {
    let [count, rows, cols] = stored.shape[..] else {
        let message = format!("expected extents [experts, rows, columns], found {:?}", stored.shape);
        return Err(refusal(name, &stored, &message));
    };
    let bytes = stored.bytes / count as u64;
    let name = name.to_owned();
    Ok((0..count as u64).map(move |e| {
        let one =
            Stored { shape: vec![rows, cols], offset: stored.offset + e * bytes, bytes, ..stored.clone() };
        entry(name.clone(), one, RowOrder::Stored)
    }))
}
