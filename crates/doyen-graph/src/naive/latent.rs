//! Latent attention by its definition: every cached row is expanded to the keys and values of all heads, in f64.

use super::{Cache, Span, text};
use crate::{lowered::LatentAttention, ops::Op};
use doyen_tensor::Tensor;
use std::ops::Range;

/// The operands as numbers.
pub(super) struct Operands {
    q: Vec<f32>,
    rows: Vec<f32>,
    shared: Vec<f32>,
    /// The up-projection `[rank, heads * (nope + v_head_size)]`.
    up: Vec<f32>,
}

impl Operands {
    pub(super) fn new(a: &LatentAttention, inputs: &[Option<Tensor>]) -> Result<Self, String> {
        let operand = |i: usize| inputs.get(i).and_then(Option::as_ref);
        let get = |i: usize| operand(i).ok_or("an operand is missing")?.to_f32().map_err(text);
        // The projection of the unit rows is its matrix, whatever its format.
        let unit: Vec<f32> =
            (0..a.rank * a.rank).map(|i| f32::from(u8::from(i % (a.rank + 1) == 0))).collect();
        let unit = Tensor::from_slice([a.rank, a.rank], &unit).map_err(text)?;
        let mut operands = vec![Some(&unit)];
        operands.extend((3..inputs.len()).map(operand));
        let up = match &a.up {
            Op::MatMul(_) | Op::MatMulNBits(_) => {
                a.up.eval(&operands, 1).map_err(text)?[0].to_f32().map_err(text)?
            }
            other => return Err(format!("{other:?} is no projection")),
        };
        if up.len() != a.rank * a.heads * (a.nope + a.v_head_size) {
            return Err(format!("the up-projection has {} weights", up.len()));
        }
        Ok(Self { q: get(0)?, rows: get(1)?, shared: get(2)?, up })
    }

    /// Channels `channels` of the projection of a latent row.
    fn expand(&self, row: &[f32], channels: Range<usize>) -> Vec<f64> {
        let width = self.up.len() / row.len();
        channels
            .map(|c| {
                row.iter().enumerate().map(|(r, &v)| f64::from(v) * f64::from(self.up[r * width + c])).sum()
            })
            .collect()
    }
}

/// Attention of the tokens of `span`: appends to the cache, returns `[tokens, heads * v_head_size]`.
pub(super) fn attend(a: &LatentAttention, cache: &mut Cache, o: &Operands, span: &Span) -> Vec<f32> {
    for t in span.first..span.first + span.len {
        let (row, shared) = (&o.rows[t * a.rank..(t + 1) * a.rank], &o.shared[t * a.rope..(t + 1) * a.rope]);
        cache.push_key(row.iter().chain(shared));
    }
    let width = a.rank + a.rope;
    let mut out = vec![0f32; span.len * a.heads * a.v_head_size];
    for h in 0..a.heads {
        let first = h * (a.nope + a.v_head_size);
        let (own, value) = (first..first + a.nope, first + a.nope..first + a.nope + a.v_head_size);
        let cached = || cache.keys().chunks(width);
        let keys: Vec<Vec<f64>> = cached()
            .map(|row| {
                let mut key = o.expand(&row[..a.rank], own.clone());
                key.extend(row[a.rank..].iter().map(|&v| f64::from(v)));
                key
            })
            .collect();
        let values: Vec<Vec<f64>> = cached().map(|row| o.expand(&row[..a.rank], value.clone())).collect();
        for i in 0..span.len {
            let q = &o.q[((span.first + i) * a.heads + h) * (a.nope + a.rope)..][..a.nope + a.rope];
            let seen = a.sight(span.past + i, keys.len());
            let scores: Vec<f64> = keys[seen.clone()]
                .iter()
                .map(|k| {
                    let s = q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum::<f64>() * f64::from(a.scale);
                    let cap = f64::from(a.softcap);
                    if cap > 0.0 { cap * (s / cap).tanh() } else { s }
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let y = &mut out[(i * a.heads + h) * a.v_head_size..][..a.v_head_size];
            for (c, y) in y.iter_mut().enumerate() {
                let sum: f64 =
                    scores.iter().zip(&values[seen.clone()]).map(|(s, v)| (s - max).exp() * v[c]).sum();
                *y = (sum / total) as f32;
            }
        }
    }
    out
}
