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
    source::{Checkpoint, Entry, RowOrder, SourceType},
};
use std::collections::BTreeMap;

/// An architecture of the GGUF registry that a recipe exists for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

const KEY: &str = "general.architecture";

/// Name in GGUF files, name in config.json.
const KNOWN: [(&str, &str, Architecture); 4] = [
    ("llama", "LlamaForCausalLM", Architecture::Llama),
    ("qwen2", "Qwen2ForCausalLM", Architecture::Qwen2),
    ("qwen3", "Qwen3ForCausalLM", Architecture::Qwen3),
    ("qwen3moe", "Qwen3MoeForCausalLM", Architecture::Qwen3Moe),
];

impl Architecture {
    pub(super) fn of(metadata: &Metadata) -> Result<Self, ConvertError> {
        let known = || {
            let names: Vec<_> = KNOWN.iter().map(|(n, ..)| *n).collect();
            format!("an architecture with a recipe: {}", names.join(", "))
        };
        let name = metadata.string(KEY)?.ok_or_else(|| metadata.absent(KEY, &known()))?;
        let found = KNOWN.iter().find(|(n, ..)| *n == name);
        found.map(|(.., a)| *a).ok_or_else(|| metadata.wrong(KEY, format!("{name:?}"), &known()))
    }

    /// What its metadata keys start with.
    pub(super) fn prefix(self) -> &'static str {
        KNOWN.iter().find(|(.., a)| *a == self).map_or("", |(n, ..)| n)
    }

    /// Its name in config.json.
    pub(super) fn checkpoint_name(self) -> &'static str {
        KNOWN.iter().find(|(.., a)| *a == self).map_or("", |(_, n, _)| n)
    }

    /// Whether query and key rows are stored with rotated pairs beside each other.
    const fn pairs_rows(self) -> bool {
        matches!(self, Self::Llama)
    }
}

pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const HEAD: &str = "output.weight";
/// Divisors of the rotary frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Modules outside of layers: name here, name in a checkpoint.
const OUTSIDE: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Modules of a layer.
const INSIDE: [(&str, &str); 12] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
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

/// The stored name of a tensor that a recipe asks for; for messages.
fn stored_name(asked: &str) -> Option<String> {
    let (rest, kind) = asked.rsplit_once('.')?;
    let back = |table: &[(&'static str, &str)], module: &str| {
        table.iter().find(|(_, n)| *n == module).map(|(n, _)| *n)
    };
    let Some((layer, module)) = rest.strip_prefix("model.layers.").and_then(|r| r.split_once('.')) else {
        return back(&OUTSIDE, rest).map(|m| format!("{m}.{kind}"));
    };
    let module = match module.strip_prefix("mlp.experts.").and_then(|m| m.split_once('.')) {
        Some((_, projection)) => back(&EXPERTS, projection)?,
        None => back(&INSIDE, module)?,
    };
    Some(format!("blk.{layer}.{module}.{kind}"))
}

/// The tensors of a file as those of a checkpoint folder. `heads` are query and key heads.
pub(super) fn checkpoint(
    file: GgufFile,
    arch: Architecture,
    head_dim: usize,
) -> Result<Checkpoint, ConvertError> {
    let mut out = BTreeMap::new();
    for (name, stored) in file.tensors {
        if name == ROPE_FACTORS {
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
                Some(layer) => format!("model.layers.{layer}.{}.{}", renamed(&INSIDE, n.module)?, n.kind),
            })
        });
        let rotated = name.starts_with("blk.") && (name.contains(".attn_q.") || name.contains(".attn_k."));
        let order = if rotated && arch.pairs_rows() {
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
    Ok(Checkpoint::of(out, Some(stored_name)))
}

fn entry(name: String, stored: Stored, order: RowOrder) -> Entry {
    let Stored { ty, shape, offset, data, .. } = stored;
    Entry { dtype: source_type(ty), shape, data, offset, stored_name: Some(name), order }
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
