//! Metadata as the fields of `config.json`.
//!
//! Every key below the architecture's prefix must be known here: one that is not may change the computation.

use super::{
    file::{GgufFile, Stored},
    metadata::{Metadata, Value},
    names::{Architecture, EMBEDDING, HEAD, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS},
    tokenizer,
    types::GgmlType,
};
use crate::{
    ConvertError,
    config::{Fields, MOST_LAYERS, Rope, WHOLE_NORMS},
};
use serde_json::{Map, Value as Json, json};
use std::sync::Arc;

/// Keys below the prefix that become a field as they are.
const COPIED: [(&str, &str); 14] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("context_length", "max_position_embeddings"),
    ("rope.freq_base", "rope_theta"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
];

/// Keys below the prefix that are read by name.
const READ: [&str; 13] = [
    "attention.key_length",
    "attention.value_length",
    "expert_feed_forward_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "vocab_size",
];

/// Keys below the prefix that change nothing: how the file was made.
const IGNORED: [&str; 1] = ["tensor_data_layout"];

/// A model's configuration.
#[derive(Debug)]
pub(super) struct Config {
    pub fields: Fields,
    pub head_dim: usize,
    /// Divisors of the rotary frequencies, one for each pair of channels.
    pub rope_factors: Option<Arc<[f32]>>,
}

struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'static str,
}

pub(super) fn read(file: &GgufFile, arch: &Architecture) -> Result<Config, ConvertError> {
    let keys = Keys { metadata: &file.metadata, prefix: arch.name };
    keys.check_known()?;
    let mut fields = Map::new();
    fields.insert("architectures".into(), json!([arch.checkpoint_name]));
    for (key, field) in COPIED {
        if let Some(v) = keys.number(key)? {
            fields.insert(field.into(), v);
        }
    }
    // Files of models without a window say that it has no positions. Not absent, which means what the family assumes.
    if fields.get("sliding_window") == Some(&json!(0)) {
        fields.insert("sliding_window".into(), Json::Null);
    }
    let (head_dim, rotated) = keys.head_dim(arch)?;
    fields.insert("head_dim".into(), head_dim.into());
    if rotated != head_dim {
        fields.insert("partial_rotary_factor".into(), Rope::share(rotated, head_dim).into());
    }
    fields.insert("vocab_size".into(), vocab(file)?.into());
    fields.insert("tie_word_embeddings".into(), (!file.tensors.contains_key(HEAD)).into());
    if let Some(scaling) = keys.rope_scaling(file, rotated / 2)? {
        fields.insert("rope_scaling".into(), scaling);
    }
    fields.extend(biases(file, arch));
    if arch.is_gemma() {
        fields.extend(keys.gemma(head_dim)?);
    }
    if arch.moe {
        let inner = keys.number("expert_feed_forward_length")?;
        let inner =
            inner.ok_or_else(|| keys.absent("expert_feed_forward_length", "the rows of an expert"))?;
        fields.insert("moe_intermediate_size".into(), inner.clone());
        fields.insert("norm_topk_prob".into(), true.into());
        let dense = |n: &String| n.strip_prefix("blk.")?.strip_suffix(".ffn_up.weight")?.parse::<u32>().ok();
        fields.insert("mlp_only_layers".into(), file.tensors.keys().filter_map(dense).collect());
        // Where all layers have experts the field only has to be there.
        fields.entry("intermediate_size").or_insert(inner);
    } else {
        // A count of 0 means a dense model.
        for field in ["num_experts", "num_experts_per_tok"] {
            if fields.get(field) == Some(&json!(0)) {
                fields.remove(field);
            }
        }
    }
    fields.extend(tokenizer::special_ids(&file.metadata)?);
    let rope_factors = rope_factors(file, ROPE_FACTORS, rotated / 2)?.map(Into::into);
    Ok(Config { fields: Fields::new(fields), head_dim, rope_factors })
}

/// Whether projections have biases: the file says so by having them.
fn biases(file: &GgufFile, arch: &Architecture) -> Vec<(String, Json)> {
    let has = |module: &str| file.tensors.contains_key(&format!("blk.0.{module}.bias"));
    let mut out = Vec::new();
    if !arch.biased && has("attn_q") {
        out.push(("attention_bias".to_owned(), true.into()));
    }
    if has("ffn_up") {
        out.push(("mlp_bias".to_owned(), true.into()));
    }
    out
}

/// Rows of the embedding. There is a key for it, which not every file has and which counts the tokenizer's tokens.
pub(super) fn vocab(file: &GgufFile) -> Result<usize, ConvertError> {
    let path = file.metadata.path();
    match file.tensors.get(EMBEDDING).map(|t| t.shape.as_slice()) {
        Some(&[rows, _]) => Ok(rows),
        Some(shape) => {
            Err(ConvertError::file(path, format!("tensor {EMBEDDING:?}: expected a matrix, found {shape:?}")))
        }
        None => {
            Err(ConvertError::file(path, format!("tensor {EMBEDDING:?}: expected, found no such tensor")))
        }
    }
}

/// Divisors in the tensor `name`, `expected` of them.
fn rope_factors(file: &GgufFile, name: &str, expected: usize) -> Result<Option<Vec<f32>>, ConvertError> {
    let Some(Stored { ty, shape, offset, bytes, data }) = file.tensors.get(name) else {
        return Ok(None);
    };
    let fail = |message: String| {
        let path = file.metadata.path();
        ConvertError::file(path, format!("tensor {name:?}: {message}"))
    };
    if *ty != GgmlType::F32 || shape[..] != [expected] {
        return Err(fail(format!("expected F32 [{expected}], found {ty} {shape:?}")));
    }
    let bytes = data.range(*offset, *bytes as usize)?;
    let factors: Vec<f32> = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    match factors.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
        None => Ok(Some(factors)),
        Some(f) => Err(fail(format!("expected factors above 0, found {f}"))),
    }
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn absent(&self, name: &str, expected: &str) -> ConvertError {
        self.metadata.absent(&self.key(name), expected)
    }

    fn wrong(&self, name: &str, found: impl std::fmt::Display, expected: &str) -> ConvertError {
        self.metadata.wrong(&self.key(name), found, expected)
    }

    fn check_known(&self) -> Result<(), ConvertError> {
        let dotted = self.key("");
        for key in self.metadata.keys() {
            let Some(name) = key.strip_prefix(&dotted) else { continue };
            let copied = COPIED.iter().any(|(k, _)| *k == name);
            if !copied && !READ.contains(&name) && !IGNORED.contains(&name) {
                let found = self.metadata.value(key).map(ToString::to_string).unwrap_or_default();
                return Err(self.wrong(name, found, "nothing: no recipe here implements it"));
            }
        }
        Ok(())
    }

    /// A number; one for each layer, if they are all the same.
    fn number(&self, name: &str) -> Result<Option<Json>, ConvertError> {
        let key = self.key(name);
        let scalar = match self.metadata.value(&key) {
            None => return Ok(None),
            Some(Value::Scalar(s)) => Some(*s),
            Some(Value::Numbers(n)) => {
                let first = n.iter().next();
                if !n.iter().all(|s| Some(s) == first) {
                    return Err(self.wrong(name, "a list of different numbers", "one number for all layers"));
                }
                first
            }
            Some(v) => return Err(self.wrong(name, v, "a number")),
        };
        let json = scalar.and_then(|s| s.unsigned().map(Json::from).or_else(|| s.float().map(Json::from)));
        json.map(Some).ok_or_else(|| self.wrong(name, "not a number", "a finite number of 0 or more"))
    }

    fn size(&self, name: &str) -> Result<Option<usize>, ConvertError> {
        match self.number(name)? {
            None => Ok(None),
            Some(v) => match v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0) {
                Some(n) => Ok(Some(n)),
                None => Err(self.wrong(name, v, "a positive integer")),
            },
        }
    }

    /// Channels of a head, of which values have as many, and those that are rotated.
    fn head_dim(&self, arch: &Architecture) -> Result<(usize, usize), ConvertError> {
        const ROTATED: &str = "rope.dimension_count";
        const OF_VALUES: &str = "attention.value_length";
        let head_dim = if let Some(n) = self.size("attention.key_length")? {
            n
        } else {
            let width = |name| self.size(name)?.ok_or_else(|| self.absent(name, "a positive integer"));
            let (hidden, heads) = (width("embedding_length")?, width("attention.head_count")?);
            if !hidden.is_multiple_of(heads) {
                let expected = format!("a divisor of embedding_length = {hidden}, or key_length given");
                return Err(self.wrong("attention.head_count", heads, &expected));
            }
            hidden / heads
        };
        let expected = format!("{head_dim}, the channels of a head");
        if let Some(n) = self.size(OF_VALUES)?.filter(|n| *n != head_dim) {
            return Err(self.wrong(OF_VALUES, n, &expected));
        }
        match self.size(ROTATED)? {
            Some(n) if n > head_dim || n < head_dim && !arch.partial => {
                Err(self.wrong(ROTATED, n, &expected))
            }
            rotated => Ok((head_dim, rotated.unwrap_or(head_dim))),
        }
    }

    /// What Gemma's files leave to their reader: norms hold `1 + w`, and scores are divided by the root of the head's
    /// channels, but for the largest models by that of the stream's channels for each head.
    fn gemma(&self, head_dim: usize) -> Result<Map<String, Json>, ConvertError> {
        const LARGEST: [(&str, u64); 2] = [("gemma2", 46), ("gemma3", 62)];
        let mut out = Map::new();
        out.insert(WHOLE_NORMS.into(), true.into());
        if self.prefix == "gemma" {
            return Ok(out);
        }
        let number =
            |name| Ok::<_, ConvertError>(self.number(name)?.and_then(|v| v.as_u64()).unwrap_or_default());
        let layers = number("block_count")?;
        if self.number("attention.sliding_window")? == Some(json!(0)) {
            // More layers than there may be are refused with the field that counts them.
            let types = vec!["full_attention"; MOST_LAYERS.min(layers as usize)];
            out.insert("layer_types".into(), types.into());
        }
        let largest = LARGEST.iter().any(|(name, n)| *name == self.prefix && *n == layers);
        let scalar = match number("attention.head_count")? {
            heads if largest && heads > 0 => number("embedding_length")? / heads,
            _ => head_dim as u64,
        };
        out.insert("query_pre_attn_scalar".into(), scalar.into());
        Ok(out)
    }

    /// LongRoPE, whose divisors are tensors and whose factor on cosine and sine is a key; `pairs` channels are rotated.
    fn long_rope(&self, file: &GgufFile, pairs: usize) -> Result<Option<Json>, ConvertError> {
        const ORIGINAL: &str = "rope.scaling.original_context_length";
        let sides = (rope_factors(file, SHORT_FACTORS, pairs)?, rope_factors(file, LONG_FACTORS, pairs)?);
        let (short, long) = match sides {
            (Some(short), Some(long)) => (short, long),
            (None, None) => return Ok(None),
            (found, _) => {
                let absent = if found.is_some() { LONG_FACTORS } else { SHORT_FACTORS };
                let message =
                    format!("tensor {absent:?}: expected beside its other side, found no such tensor");
                return Err(ConvertError::file(file.metadata.path(), message));
            }
        };
        let original =
            self.size(ORIGINAL)?.ok_or_else(|| self.absent(ORIGINAL, "the context of the short factors"))?;
        let factor = self.metadata.float(&self.key("rope.scaling.attn_factor"))?.unwrap_or(1.0);
        Ok(Some(json!({
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": original, "attention_factor": factor,
        })))
    }

    fn rope_scaling(&self, file: &GgufFile, pairs: usize) -> Result<Option<Json>, ConvertError> {
        let kind = self.metadata.string(&self.key("rope.scaling.type"))?;
        if let Some(long) = self.long_rope(file, pairs)? {
            return match kind {
                None | Some("longrope" | "none") => Ok(Some(long)),
                Some(other) => {
                    let expected = "\"longrope\", since the file has tensors of its factors";
                    Err(self.wrong("rope.scaling.type", format!("{other:?}"), expected))
                }
            };
        }
        let mut scaling = Map::new();
        let mut copy = |name: &str, field: &str| {
            let value = self.number(name)?;
            value.map(|v| scaling.insert(field.into(), v));
            Ok::<_, ConvertError>(())
        };
        match kind {
            None | Some("none") => return Ok(None),
            Some("linear") => copy("rope.scaling.factor", "factor")?,
            Some("yarn") => {
                copy("rope.scaling.factor", "factor")?;
                copy("rope.scaling.original_context_length", "original_max_position_embeddings")?;
                copy("rope.scaling.yarn_beta_fast", "beta_fast")?;
                copy("rope.scaling.yarn_beta_slow", "beta_slow")?;
            }
            Some(other) => {
                let expected = "\"none\", \"linear\", \"yarn\", or \"longrope\" with its tensors of factors";
                return Err(self.wrong("rope.scaling.type", format!("{other:?}"), expected));
            }
        }
        for name in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
            if let Some(x) = self.metadata.float(&self.key(name))?.filter(|x| *x != 1.0) {
                return Err(self.wrong(name, x, "1"));
            }
        }
        scaling.insert("rope_type".into(), kind.into());
        Ok(Some(scaling.into()))
    }
}

/// A refusal of a field as one of the key it came from.
pub(super) fn explain(error: ConvertError, metadata: &Metadata, arch: &Architecture) -> ConvertError {
    let ConvertError::Config { field, found, expected } = error else { return error };
    let (key, expected) = match COPIED.iter().find(|(_, f)| *f == field) {
        Some((key, _)) => (format!("{}.{key}", arch.name), expected),
        None => (field, expected),
    };
    metadata.wrong(&key, found, &expected)
}
