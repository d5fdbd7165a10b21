//! `com.microsoft::MultiHeadAttention` (operator contract, section 3.2).
//!
//! * this file: attributes and what the inputs are
//! * `check`: the load-time checks
//! * `eval`: the scalar reference

mod check;
mod eval;
#[cfg(test)]
mod tests;

pub use check::Form;

use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor};

/// Indices of the operator's inputs.
#[allow(missing_docs)]
pub mod input {
    pub const QUERY: usize = 0;
    pub const KEY: usize = 1;
    pub const VALUE: usize = 2;
    pub const BIAS: usize = 3;
    pub const KEY_PADDING_MASK: usize = 4;
    pub const ATTENTION_BIAS: usize = 5;
    pub const PAST_KEY: usize = 6;
    pub const PAST_VALUE: usize = 7;
    pub const PAST_SEQUENCE_LENGTH: usize = 8;
    pub const CACHE_INDIRECTION: usize = 9;
}

/// Attention in which every query head has a key and value head of its own. Inputs: `query [B,S,N*D]`, `key [B,L,N*D]`,
/// `value [B,L,N*Dv]` (or the packed forms of [`Form`]), `bias [2*N*D + N*Dv]`, `key_padding_mask`, `attention_bias
/// [B or 1, N or 1, S, P+L]`, past caches `[B,N,P,D]` and `[B,N,P,Dv]`. Outputs: `[B,S,N*Dv]`, present key, present
/// value, and the scaled products `[B,N,S,P+L]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MultiHeadAttention {
    /// Heads N.
    pub num_heads: usize,
    /// Factor on q.k; `1/sqrt(D)` when absent.
    pub scale: Option<f32>,
    /// Query `i` sees keys up to `P + i`.
    pub unidirectional: bool,
    /// What a padding mask adds to the score of a key it hides.
    pub mask_filter_value: f32,
}

impl OpDef for MultiHeadAttention {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self {
            num_heads: attrs.required_count("num_heads", "heads")?,
            scale: attrs.finite("scale")?.filter(|&s| s != 0.0),
            unidirectional: attrs.flag("unidirectional", false)?,
            mask_filter_value: attrs.float("mask_filter_value")?.unwrap_or(-10000.0),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        check::inputs(self, inputs)
    }

    fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError> {
        eval::run(self, inputs, outputs)
    }

    fn trace(&self, _: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        Err("it owns state: attention over the sequence".into())
    }
}
