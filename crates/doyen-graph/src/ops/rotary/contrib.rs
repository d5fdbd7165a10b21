//! `com.microsoft::RotaryEmbedding` (v1).

use super::super::args::{expect, floats};
use super::super::util::{at_most, check_type, fact_of, outputs_of, required};
use super::super::{OpDef, OpError, Trace, Traced};
use super::{HeadAttrs, apply, cache_row, check_caches, trace};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Inputs: `input [B,S,N*D]` or `[B,N,S,D]`, `position_ids`, `cos_cache` and `sin_cache [positions, rotary/2]`.
///
/// Positions are `[B,S]`, one first position `[1]` that counts up, or `[3,B,S]` streams that agree (what one producer
/// exports for text). The `scale` attribute has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContribRotary {
    /// Even and odd channels are pairs, instead of halves.
    pub interleaved: bool,
    /// Heads, when the attribute says so; otherwise a head of rank 3 is as wide as the cache rotates.
    pub num_heads: Option<usize>,
    /// Rotated channels of a head, when the attribute says so; otherwise all.
    pub rotary_dim: Option<usize>,
}

impl ContribRotary {
    const fn heads(&self) -> HeadAttrs {
        HeadAttrs { heads: self.num_heads, rotary_dim: self.rotary_dim }
    }

    fn layout(&self, inputs: &[Option<&Fact>]) -> Result<super::Layout, OpError> {
        let x = required(inputs, 0, "input")?;
        let cos = required(inputs, 2, "cos_cache")?;
        let width = super::back(cos, 0).and_then(|h| h.checked_mul(2));
        if x.rank() == Some(3) && self.rotary_dim.is_some() && self.num_heads.is_none() {
            return Err(OpError::attribute("num_heads", "a number of heads with rotary_embedding_dim", 0));
        }
        self.heads().layout("input", x, width)
    }
}

impl OpDef for ContribRotary {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let heads = HeadAttrs::parse(attrs)?;
        attrs.float("scale")?;
        attrs.flag("is_packed_batching", false)?;
        let interleaved = attrs.flag("interleaved", false)?;
        Ok(Self { interleaved, num_heads: heads.heads, rotary_dim: heads.rotary_dim })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 4)?;
        let x = required(inputs, 0, "input")?;
        let ids = required(inputs, 1, "position_ids")?;
        let layout = self.layout(inputs)?;
        check_type("position_ids", ids, &[DType::I64])?;
        match ids.rank() {
            None => {}
            Some(1) => expect("position_ids", ids, &[Some(1)], "one first position")?,
            Some(2) => expect("position_ids", ids, &[layout.batch, layout.seq], "batch, sequence")?,
            Some(3) => {
                expect(
                    "position_ids",
                    ids,
                    &[Some(3), layout.batch, layout.seq],
                    "streams, batch, sequence",
                )?;
            }
            Some(_) => {
                return Err(OpError::input("position_ids", "[1], [B,S] or [3,B,S]", ids.shape_text()));
            }
        }
        let cos = required(inputs, 2, "cos_cache")?;
        let sin = required(inputs, 3, "sin_cache")?;
        check_caches(cos, sin, &[None], self.rotary_dim, &layout, x)?;
        Ok(vec![Fact { constant: None, ..x.clone() }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        outputs_of(self, inputs)?;
        let facts: Vec<Fact> = inputs.iter().flatten().map(|t| fact_of(t)).collect();
        let layout = self.layout(&facts.iter().map(Some).collect::<Vec<_>>())?;
        let x = required(inputs, 0, "input")?;
        let ids = required(inputs, 1, "position_ids")?;
        let position = positions(ids)?;
        let (cos_t, sin_t) = (required(inputs, 2, "cos_cache")?, required(inputs, 3, "sin_cache")?);
        let (cos, sin) = (floats("cos_cache", cos_t)?, floats("sin_cache", sin_t)?);
        let (rows, half) = (cos_t.shape()[0], cos_t.shape()[1]);
        let seq = layout.seq.unwrap_or(0);
        let y = apply(x, layout, self.interleaved, |b, s| {
            let p = match &position {
                Positions::From(first) => first.saturating_add(s as i64),
                Positions::Each(ids) => ids[b * seq + s],
            };
            let at = cache_row(p, rows)? * half;
            Ok((&cos[at..at + half], &sin[at..at + half]))
        })?;
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let rank = inputs.get(1).copied().flatten().map_or(0, |t| t.shape.len());
        if rank < 2 {
            return Err("its positions count up from one first position".into());
        }
        trace(inputs, &[(1, rank - 1)], &[2, 3])
    }
}

enum Positions {
    /// The first position of every sequence.
    From(i64),
    /// One a token.
    Each(Vec<i64>),
}

fn positions(ids: &Tensor) -> Result<Positions, OpError> {
    let values = ids.to_i64()?;
    match ids.shape().len() {
        1 => Ok(Positions::From(values[0])),
        3 => {
            let n = values.len() / 3;
            if values[..n] != values[n..2 * n] || values[..n] != values[2 * n..] {
                let expected = "three equal streams (different ones need MRotaryEmbedding)";
                return Err(OpError::input("position_ids", expected, "different ones"));
            }
            Ok(Positions::Each(values[..n].to_vec()))
        }
        _ => Ok(Positions::Each(values)),
    }
}
