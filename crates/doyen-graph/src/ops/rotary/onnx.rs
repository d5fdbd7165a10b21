//! `ai.onnx::RotaryEmbedding` (23).

use super::super::args::{expect, floats};
use super::super::util::{at_most, check_type, fact_of, optional, outputs_of, required};
use super::super::{OpDef, OpError, Trace, Traced};
use super::{HeadAttrs, apply, cache_row, check_caches, trace};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Inputs: `X [B,S,N*D]` or `[B,N,S,D]`, `cos_cache` and `sin_cache`, `position_ids [B,S]` (optional). The caches are
/// `[positions, rotary/2]` with ids and `[B,S,rotary/2]` without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxRotary {
    /// Even and odd channels are pairs, instead of halves.
    pub interleaved: bool,
    /// Heads; required for rank 3.
    pub num_heads: Option<usize>,
    /// Rotated channels of a head, when the attribute says so; otherwise all.
    pub rotary_dim: Option<usize>,
}

impl OnnxRotary {
    fn layout(&self, x: &Fact) -> Result<super::Layout, OpError> {
        if x.rank() == Some(3) && self.num_heads.is_none() {
            return Err(OpError::attribute(
                "num_heads",
                "a number of heads for an input of rank 3",
                "nothing",
            ));
        }
        HeadAttrs { heads: self.num_heads, rotary_dim: self.rotary_dim }.layout("X", x, None)
    }
}

impl OpDef for OnnxRotary {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let heads = HeadAttrs::parse(attrs)?;
        let interleaved = attrs.flag("interleaved", false)?;
        Ok(Self { interleaved, num_heads: heads.heads, rotary_dim: heads.rotary_dim })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 4)?;
        let x = required(inputs, 0, "X")?;
        let layout = self.layout(x)?;
        let (cos, sin) = (required(inputs, 1, "cos_cache")?, required(inputs, 2, "sin_cache")?);
        if let Some(ids) = optional(inputs, 3) {
            check_type("position_ids", ids, &[DType::I64])?;
            expect("position_ids", ids, &[layout.batch, layout.seq], "batch, sequence")?;
            check_caches(cos, sin, &[None], self.rotary_dim, &layout, x)?;
        } else {
            check_caches(cos, sin, &[layout.batch, layout.seq], self.rotary_dim, &layout, x)?;
        }
        Ok(vec![Fact { constant: None, ..x.clone() }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        outputs_of(self, inputs)?;
        let x = required(inputs, 0, "X")?;
        let layout = self.layout(&fact_of(x))?;
        let (cos_t, sin_t) = (required(inputs, 1, "cos_cache")?, required(inputs, 2, "sin_cache")?);
        let (cos, sin) = (floats("cos_cache", cos_t)?, floats("sin_cache", sin_t)?);
        let half = cos_t.shape().last().copied().unwrap_or(0);
        let ids = optional(inputs, 3).map(Tensor::to_i64).transpose()?;
        let seq = layout.seq.unwrap_or(0);
        let y = apply(x, layout, self.interleaved, |b, s| {
            let at = match &ids {
                Some(ids) => cache_row(ids[b * seq + s], cos_t.shape()[0])?,
                None => b * seq + s,
            } * half;
            Ok((&cos[at..at + half], &sin[at..at + half]))
        })?;
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        if inputs.get(3).copied().flatten().is_some() {
            trace(inputs, &[(3, 1)], &[1, 2])
        } else {
            trace(inputs, &[(1, 1), (2, 1)], &[])
        }
    }
}
