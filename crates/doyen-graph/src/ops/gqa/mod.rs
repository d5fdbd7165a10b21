//! `com.microsoft::GroupQueryAttention` (operator contract, section 3.1).
//!
//! * this file: attributes
//! * `check`: the load-time checks of every input
//! * `plan`: what the lengths of a run mean: past, new and kept rows of every sequence
//! * `cache`: key and value caches in their stored form, float or quantized, whole or window-sized
//! * `eval`: the scalar reference

mod cache;
mod check;
mod eval;
mod plan;
#[cfg(test)]
mod tests;

pub use plan::window_rows;

use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor};

/// Indices of the operator's inputs.
#[allow(missing_docs)]
pub mod input {
    pub const QUERY: usize = 0;
    pub const KEY: usize = 1;
    pub const VALUE: usize = 2;
    pub const PAST_KEY: usize = 3;
    pub const PAST_VALUE: usize = 4;
    pub const SEQLENS_K: usize = 5;
    pub const TOTAL_SEQUENCE_LENGTH: usize = 6;
    pub const COS_CACHE: usize = 7;
    pub const SIN_CACHE: usize = 8;
    pub const POSITION_IDS: usize = 9;
    pub const ATTENTION_BIAS: usize = 10;
    pub const HEAD_SINK: usize = 11;
    pub const K_SCALE: usize = 12;
    pub const V_SCALE: usize = 13;
    pub const Q_NORM_WEIGHT: usize = 14;
    pub const K_NORM_WEIGHT: usize = 15;
}

/// Attention in which groups of query heads share a key and value head, with its own cache.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupQueryAttention {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub kv_num_heads: usize,
    /// Factor on q.k; `1/sqrt(head size)` when absent.
    pub scale: Option<f32>,
    /// `softcap * tanh(s / softcap)` before bias and mask, when positive.
    pub softcap: f32,
    /// Rotary embedding of queries and keys.
    pub rotary: Option<RotaryAttrs>,
    /// Visible keys including the query's own, when limited. Only with `causal`.
    pub window: Option<usize>,
    /// The caches hold about a window instead of everything: the operator evicts.
    pub window_cache: bool,
    /// Whether a query sees only keys at or before its position.
    pub causal: bool,
    /// Whether a zero joins the softmax's denominator when there is no `head_sink`.
    pub smooth_softmax: bool,
    /// How the caches store rows.
    pub kv: KvCache,
    /// What the fourth output holds.
    pub qk_output: QkOutput,
    /// Epsilon of the RMS norm of query and key heads, where their weights are given.
    pub qk_norm_epsilon: f32,
}

/// Rotary embedding inside the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotaryAttrs {
    /// Even and odd channels are pairs, instead of halves.
    pub interleaved: bool,
    /// Rotated channels as one producer repeats them; must be twice the cache's columns.
    pub dim: Option<usize>,
}

/// How the caches store rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvCache {
    /// In the type of the activations.
    Float,
    /// int8 codes.
    Int8(KvScales),
    /// int4 codes as `code + 8`, two a byte, even channel in the low nibble.
    Int4(KvScales),
}

/// Granularity of the scales of both caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvScales {
    /// Of the keys.
    pub key: Granularity,
    /// Of the values.
    pub value: Granularity,
}

/// How many scales a cache has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// One: `[1]`.
    Tensor,
    /// One a head and channel: `[1,Nkv,1,D]`.
    Channel,
}

/// What the fourth output holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QkOutput {
    /// It does not exist.
    None,
    /// Scores after softcap and bias; zero where a key is not visible, as ONNX Runtime writes it.
    BeforeSoftmax,
    /// Probabilities.
    AfterSoftmax,
}

impl KvCache {
    fn parse(attrs: &mut Attrs) -> Result<Self, OpError> {
        let mut granularity = |name: &'static str| match attrs.string(name)?.as_deref().unwrap_or("NONE") {
            "NONE" => Ok(None),
            "PER_TENSOR" => Ok(Some(Granularity::Tensor)),
            "PER_CHANNEL" => Ok(Some(Granularity::Channel)),
            other => Err(OpError::attribute(name, "NONE, PER_TENSOR or PER_CHANNEL", format!("{other:?}"))),
        };
        let (key, value) = (granularity("k_quant_type")?, granularity("v_quant_type")?);
        let width = attrs.int("kv_cache_bit_width")?.unwrap_or(0);
        match (key, value) {
            (None, None) if width == 0 => Ok(Self::Float),
            (None, None) => {
                Err(OpError::attribute("kv_cache_bit_width", "nothing with k_quant_type NONE", width))
            }
            (Some(key), Some(value)) => match width {
                8 => Ok(Self::Int8(KvScales { key, value })),
                4 => Ok(Self::Int4(KvScales { key, value })),
                v => Err(OpError::attribute("kv_cache_bit_width", "8 or 4", v)),
            },
            (Some(_), None) => {
                Err(OpError::attribute("v_quant_type", "PER_TENSOR or PER_CHANNEL as k_quant_type", "NONE"))
            }
            (None, Some(_)) => {
                Err(OpError::attribute("k_quant_type", "PER_TENSOR or PER_CHANNEL as v_quant_type", "NONE"))
            }
        }
    }

    /// Granularity of the scales of the keys and of the values, if there are scales.
    pub const fn scales(self) -> Option<KvScales> {
        match self {
            Self::Float => None,
            Self::Int8(s) | Self::Int4(s) => Some(s),
        }
    }
}

impl OpDef for GroupQueryAttention {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let num_heads = attrs.required_count("num_heads", "heads")?;
        let kv_num_heads = attrs.required_count("kv_num_heads", "heads")?;
        if !num_heads.is_multiple_of(kv_num_heads) {
            let expected = format!("a multiple of kv_num_heads ({kv_num_heads})");
            return Err(OpError::attribute("num_heads", expected, num_heads));
        }
        let causal = attrs.flag("causal", true)?;
        let window = match attrs.int("local_window_size")?.unwrap_or(-1) {
            -1 | 0 => None,
            w if w > 0 && causal => usize::try_from(w).ok(),
            w if w > 0 => return Err(OpError::attribute("local_window_size", "-1 with causal 0", w)),
            w => return Err(OpError::attribute("local_window_size", "-1 (none) or 1 or more keys", w)),
        };
        let window_cache = attrs.flag("sliding_window_cache", false)?;
        if window_cache && window.is_none() {
            return Err(OpError::attribute("sliding_window_cache", "0 without local_window_size", 1));
        }
        let smooth_softmax = match attrs.int("smooth_softmax")?.unwrap_or(-1) {
            -1 | 0 => false,
            1 => true,
            v => return Err(OpError::attribute("smooth_softmax", "-1, 0 or 1", v)),
        };
        let qk_output = match attrs.int("qk_output")?.unwrap_or(0) {
            0 => QkOutput::None,
            1 => QkOutput::BeforeSoftmax,
            2 => QkOutput::AfterSoftmax,
            v => return Err(OpError::attribute("qk_output", "0, 1 or 2", v)),
        };
        // Its extent would be a length that no input backs.
        if window_cache && qk_output != QkOutput::None {
            let found = attrs.int("qk_output")?.unwrap_or(0);
            return Err(OpError::attribute("qk_output", "0 with sliding_window_cache", found));
        }
        let interleaved = attrs.flag("rotary_interleaved", false)?;
        let dim = match attrs.int("rotary_embedding_dim")?.unwrap_or(0) {
            0 => None,
            v => Some(usize::try_from(v).map_err(|_| {
                OpError::attribute("rotary_embedding_dim", "twice the columns of cos_cache", v)
            })?),
        };
        let rotary = attrs.flag("do_rotary", false)?.then_some(RotaryAttrs { interleaved, dim });
        let scale = attrs.finite("scale")?.filter(|&s| s != 0.0);
        let softcap = attrs.not_negative("softcap")?.unwrap_or(0.0);
        let qk_norm_epsilon = attrs.not_negative("qk_norm_epsilon")?.unwrap_or(1e-6);
        let kv = KvCache::parse(attrs)?;
        Ok(Self {
            num_heads,
            kv_num_heads,
            scale,
            softcap,
            rotary,
            window,
            window_cache,
            causal,
            smooth_softmax,
            kv,
            qk_output,
            qk_norm_epsilon,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        check::inputs(self, inputs)
    }

    fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError> {
        eval::run(self, inputs, outputs)
    }

    fn trace(&self, _: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        Err("it owns state: attention with a cache".into())
    }
}
