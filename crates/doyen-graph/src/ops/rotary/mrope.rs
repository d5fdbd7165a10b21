//! `com.microsoft::MRotaryEmbedding`: each frequency takes its position from one of three streams.

use super::super::args::{expect, floats};
use super::super::util::{at_most, check_type, fact_of, outputs_of, required};
use super::super::{OpDef, OpError, Trace, Traced};
use super::{HeadAttrs, apply, cache_row, check_caches, trace};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Inputs: `input [B,S,N*D]` or `[B,N,S,D]`, `position_ids [3,B,S]` (time, height, width), `cos_cache` and
/// `sin_cache [positions, rotary/2]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MRotary {
    /// Even and odd channels are pairs, instead of halves.
    pub interleaved: bool,
    /// Heads, when the attribute says so; otherwise a head of rank 3 is as wide as the cache rotates.
    pub num_heads: Option<usize>,
    /// Rotated channels of a head, when the attribute says so; otherwise all.
    pub rotary_dim: Option<usize>,
    /// Frequencies of each stream; they add up to half the rotated channels.
    pub section: [usize; 3],
    /// Which frequencies belong to which stream.
    pub layout: MropeLayout,
}

/// How the streams share the frequencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MropeLayout {
    /// The first `t` frequencies, then `h`, then `w`.
    Sectioned,
    /// Height at 1, 4, 7, … below `3h`, width at 2, 5, … below `3w`, time elsewhere.
    Interleaved,
}

impl MRotary {
    /// The stream (0 time, 1 height, 2 width) of frequency `i`.
    pub const fn stream(&self, i: usize) -> usize {
        let [t, h, w] = self.section;
        match self.layout {
            MropeLayout::Sectioned if i < t => 0,
            MropeLayout::Sectioned if i - t < h => 1,
            MropeLayout::Sectioned => 2,
            MropeLayout::Interleaved if i % 3 == 1 && i / 3 < h => 1,
            MropeLayout::Interleaved if i % 3 == 2 && i / 3 < w => 2,
            MropeLayout::Interleaved => 0,
        }
    }

    fn half(&self) -> usize {
        self.section.iter().sum()
    }

    fn layout(&self, x: &Fact) -> Result<super::Layout, OpError> {
        let heads = HeadAttrs { heads: self.num_heads, rotary_dim: self.rotary_dim };
        if x.rank() == Some(3) && self.rotary_dim.is_some() && self.num_heads.is_none() {
            return Err(OpError::attribute("num_heads", "a number of heads with rotary_embedding_dim", 0));
        }
        heads.layout("input", x, Some(2 * self.half()))
    }
}

impl OpDef for MRotary {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let heads = HeadAttrs::parse(attrs)?;
        attrs.float("scale")?;
        attrs.flag("is_packed_batching", false)?;
        let interleaved = attrs.flag("interleaved", false)?;
        let found = attrs.ints("mrope_section")?;
        let bad = || {
            let found = format!("{:?}", found.clone().unwrap_or_default());
            OpError::attribute("mrope_section", "three sizes of 0 or more", found)
        };
        let section: Vec<usize> = found
            .iter()
            .flatten()
            .map(|&v| usize::try_from(v).ok().filter(|&v| v <= 1 << 20))
            .collect::<Option<_>>()
            .ok_or_else(bad)?;
        let section: [usize; 3] = section.try_into().map_err(|_| bad())?;
        let layout = if attrs.flag("mrope_layout", false)? {
            MropeLayout::Interleaved
        } else {
            MropeLayout::Sectioned
        };
        let this =
            Self { interleaved, num_heads: heads.heads, rotary_dim: heads.rotary_dim, section, layout };
        match this.rotary_dim {
            Some(d) if d / 2 != this.half() => {
                let expected = format!("sizes that add up to {} (rotary_embedding_dim / 2)", d / 2);
                Err(OpError::attribute("mrope_section", expected, format!("{section:?}")))
            }
            _ => Ok(this),
        }
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 4)?;
        let x = required(inputs, 0, "input")?;
        let ids = required(inputs, 1, "position_ids")?;
        let layout = self.layout(x)?;
        check_type("position_ids", ids, &[DType::I64])?;
        expect("position_ids", ids, &[Some(3), layout.batch, layout.seq], "streams, batch, sequence")?;
        let (cos, sin) = (required(inputs, 2, "cos_cache")?, required(inputs, 3, "sin_cache")?);
        check_caches(cos, sin, &[None], Some(2 * self.half()), &layout, x)?;
        match (self.rotary_dim, layout.size) {
            (None, Some(size)) if size != 2 * self.half() => {
                let expected = format!("sizes that add up to {} (half a head)", size / 2);
                Err(OpError::attribute("mrope_section", expected, format!("{:?}", self.section)))
            }
            _ => Ok(vec![Fact { constant: None, ..x.clone() }]),
        }
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        outputs_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        let layout = self.layout(&fact_of(x))?;
        let ids = required(inputs, 1, "position_ids")?.to_i64()?;
        let (cos_t, sin_t) = (required(inputs, 2, "cos_cache")?, required(inputs, 3, "sin_cache")?);
        let (cos, sin) = (floats("cos_cache", cos_t)?, floats("sin_cache", sin_t)?);
        let (rows, half) = (cos_t.shape()[0], cos_t.shape()[1]);
        let tokens = ids.len() / 3;
        let mut table = (Vec::with_capacity(tokens * half), Vec::with_capacity(tokens * half));
        for t in 0..tokens {
            for i in 0..half {
                let at = cache_row(ids[self.stream(i) * tokens + t], rows)? * half + i;
                table.0.push(cos[at]);
                table.1.push(sin[at]);
            }
        }
        let seq = layout.seq.unwrap_or(0);
        let y = apply(x, layout, self.interleaved, |b, s| {
            let at = (b * seq + s) * half;
            Ok((&table.0[at..at + half], &table.1[at..at + half]))
        })?;
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        trace(inputs, &[(1, 2)], &[2, 3])
    }
}
