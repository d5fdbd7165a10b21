//! Rotary embeddings (operator contract, section 3.3): the rotation, the layouts of a tensor of heads, and the
//! three operators that apply it outside of attention.
//!
//! * `contrib`: `com.microsoft::RotaryEmbedding`
//! * `onnx`: `ai.onnx::RotaryEmbedding`
//! * `mrope`: `com.microsoft::MRotaryEmbedding`, three position streams

mod contrib;
mod mrope;
mod onnx;
#[cfg(test)]
mod tests;

pub use contrib::ContribRotary;
pub use mrope::{MRotary, MropeLayout};
pub use onnx::OnnxRotary;

use super::args::{ACTIVATIONS, Want, back, expect, same_type};
use super::util::check_type;
use super::{OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::Tensor;

/// Rotates the pairs of a head's rotary part: `(x1*cos - x2*sin, x1*sin + x2*cos)`. `cos` and `sin` have half as
/// many values as rotate; a pair is even and odd channels, or the same channel of both halves.
pub(super) fn rotate(head: &mut [f64], cos: &[f64], sin: &[f64], interleaved: bool) {
    let half = cos.len();
    for i in 0..half {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, half + i) };
        let (x1, x2) = (head[a], head[b]);
        head[a] = x1 * cos[i] - x2 * sin[i];
        head[b] = x1 * sin[i] + x2 * cos[i];
    }
}

/// A tensor of heads: `[B,S,N*D]`, or `[B,N,S,D]`.
#[derive(Debug, Clone, Copy)]
struct Layout {
    batch: Want,
    seq: Want,
    heads: Want,
    size: Want,
    bnsh: bool,
}

/// Head count and rotary size as attributes give them; `None` where they leave it to the shapes.
#[derive(Debug, Clone, Copy)]
struct HeadAttrs {
    heads: Option<usize>,
    rotary_dim: Option<usize>,
}

impl HeadAttrs {
    fn parse(attrs: &mut Attrs) -> Result<Self, OpError> {
        let mut size = |name: &'static str| match attrs.int(name)? {
            Some(0) => Ok(None),
            _ => attrs.count(name, "(or 0, to leave it to the shapes)"),
        };
        let this = Self { heads: size("num_heads")?, rotary_dim: size("rotary_embedding_dim")? };
        match this.rotary_dim {
            Some(d) if !d.is_multiple_of(2) => {
                Err(OpError::attribute("rotary_embedding_dim", "an even size", d))
            }
            _ => Ok(this),
        }
    }

    /// The layout of the input, given the head size to assume for rank 3 without a head count.
    fn layout(&self, name: &str, x: &Fact, default_size: Want) -> Result<Layout, OpError> {
        check_type(name, x, ACTIVATIONS)?;
        let dim = |i: usize| x.dim(i).known();
        match x.rank() {
            None => Ok(Layout { batch: None, seq: None, heads: None, size: None, bnsh: false }),
            Some(4) => {
                let heads = dim(1);
                if let (Some(want), Some(found)) = (self.heads, heads)
                    && want != found
                {
                    return Err(OpError::input(name, format!("{want} heads (num_heads)"), x.shape_text()));
                }
                Ok(Layout { batch: dim(0), seq: dim(2), heads, size: dim(3), bnsh: true })
            }
            Some(3) => {
                let parts = self.heads.or(default_size);
                let other = match (dim(2), parts) {
                    (Some(hidden), Some(p)) if p == 0 || !hidden.is_multiple_of(p) => {
                        let what =
                            if self.heads.is_some() { "num_heads" } else { "2 * columns of cos_cache" };
                        let expected = format!("a hidden size that is a multiple of {p} ({what})");
                        return Err(OpError::input(name, expected, x.shape_text()));
                    }
                    (Some(hidden), Some(p)) => Some(hidden / p),
                    _ => None,
                };
                let (heads, size) =
                    if self.heads.is_some() { (self.heads, other) } else { (other, default_size) };
                Ok(Layout { batch: dim(0), seq: dim(1), heads, size, bnsh: false })
            }
            Some(_) => Err(OpError::input(name, "rank 3 or 4", x.shape_text())),
        }
    }
}

/// Checks both caches: `lead` extents, then half the rotary size, which must fit the head.
fn check_caches(
    cos: &Fact,
    sin: &Fact,
    lead: &[Want],
    rotary_dim: Option<usize>,
    layout: &Layout,
    x: &Fact,
) -> Result<(), OpError> {
    let half = rotary_dim.map(|d| d / 2).or_else(|| layout.size.map(|d| d / 2));
    let why = "half the rotated channels of a head";
    let mut want: Vec<Want> = lead.to_vec();
    want.push(half);
    for (name, f) in [("cos_cache", cos), ("sin_cache", sin)] {
        check_type(name, f, ACTIVATIONS)?;
        same_type(name, Some(f), x.dtype, "the rotated one")?;
        expect(name, f, &want, why)?;
    }
    let lead: Vec<Want> = (0..lead.len()).map(|i| cos.dim(i).known()).collect();
    let want: Vec<Want> = lead.into_iter().chain([back(cos, 0)]).collect();
    expect("sin_cache", sin, &want, "as cos_cache")?;
    match (back(cos, 0), layout.size) {
        (Some(half), Some(size)) if half.checked_mul(2).is_none_or(|d| d > size) => {
            Err(OpError::input("cos_cache", format!("at most {} columns (head size {size})", size / 2), half))
        }
        _ => Ok(()),
    }
}

/// Rotates every head of `x`; `row` gives the cosines and sines of a token.
fn apply<'c>(
    x: &Tensor,
    layout: Layout,
    interleaved: bool,
    mut row: impl FnMut(usize, usize) -> Result<(&'c [f64], &'c [f64]), OpError>,
) -> Result<Tensor, OpError> {
    let known = |w: Want| w.ok_or_else(|| OpError::other("the shape of the heads does not follow"));
    let (batch, seq) = (known(layout.batch)?, known(layout.seq)?);
    let (heads, size) = (known(layout.heads)?, known(layout.size)?);
    let mut values = x.to_f64()?;
    if values.is_empty() {
        return Ok(x.clone());
    }
    for b in 0..batch {
        for s in 0..seq {
            let (cos, sin) = row(b, s)?;
            for h in 0..heads {
                let head = if layout.bnsh { (b * heads + h) * seq + s } else { (b * seq + s) * heads + h };
                rotate(&mut values[head * size..(head + 1) * size], cos, sin, interleaved);
            }
        }
    }
    Ok(Tensor::from_f64(x.dtype(), x.shape().clone(), &values)?)
}

/// A position as a row of a cache of `rows` rows.
fn cache_row(position: i64, rows: usize) -> Result<usize, OpError> {
    usize::try_from(position).ok().filter(|&p| p < rows).ok_or_else(|| {
        OpError::input("position_ids", format!("positions below {rows} (rows of cos_cache)"), position)
    })
}

/// The token-axis rule: the heads and their per-token inputs (`(index, axis of the sequence)`) carry the tokens along
/// the sequence axis; the caches do not carry them.
fn trace(
    inputs: &[Option<Traced<'_>>],
    per_token: &[(usize, usize)],
    caches: &[usize],
) -> Result<Vec<Trace>, String> {
    let get = |i: usize| inputs.get(i).copied().flatten();
    if caches.iter().filter_map(|&i| get(i)).any(|t| t.trace != Trace::Absent) {
        return Err("its caches depend on the tokens".into());
    }
    let Some(x) = get(0) else { return Err("it has no input".into()) };
    let Trace::Tokens(a) = x.trace else {
        let alone = per_token.iter().filter_map(|&(i, _)| get(i)).all(|t| t.trace == Trace::Absent);
        return if alone {
            Ok(vec![x.trace])
        } else {
            Err("its positions alone depend on the tokens".into())
        };
    };
    if a.axis + 2 != x.shape.len() || a.inner != 1 {
        return Err("its input does not carry the tokens along the sequence".into());
    }
    for &(i, axis) in per_token {
        let Some(t) = get(i) else { continue };
        match t.trace {
            Trace::Tokens(p) if p.axis == axis && p.inner == 1 => {}
            _ => return Err("its positions do not carry the tokens along the sequence".into()),
        }
    }
    Ok(vec![x.trace])
}
