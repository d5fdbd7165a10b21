//! The scalar reference, in f64 from the inputs to the one rounding at the end.

use super::super::OpError;
use super::super::args::{floats, zeros};
use super::super::experts::dot;
use super::super::util::{fact_of, optional, outputs_of, required};
use super::{Attention, QkOutput, Sizes};
use crate::ir::Fact;
use doyen_tensor::{DType, Tensor};

/// `[B,heads,rows,size]`, whatever the layout of the input.
struct Heads {
    count: usize,
    rows: usize,
    size: usize,
    values: Vec<f64>,
}

impl Heads {
    fn row(&self, b: usize, h: usize, r: usize) -> &[f64] {
        let at = ((b * self.count + h) * self.rows + r) * self.size;
        &self.values[at..at + self.size]
    }
}

/// Reads `Q`, `K` or `V` into head-major order.
fn heads(name: &str, t: &Tensor, count: usize, rows: usize, size: usize) -> Result<Heads, OpError> {
    let values = floats(name, t)?;
    if t.shape().len() == 4 {
        return Ok(Heads { count, rows, size, values });
    }
    let mut out = Vec::with_capacity(values.len());
    for b in 0..t.shape()[0] {
        for h in 0..count {
            for r in 0..rows {
                let at = ((b * rows + r) * count + h) * size;
                out.extend_from_slice(&values[at..at + size]);
            }
        }
    }
    Ok(Heads { count, rows, size, values: out })
}

/// The past rows, then the new ones, of every head.
fn concat(name: &str, past: Option<&Tensor>, new: Heads, batch: usize) -> Result<Heads, OpError> {
    let Some(past) = past else { return Ok(new) };
    let rows = past.shape()[2];
    let (old, mut values) = (floats(name, past)?, Vec::new());
    for bh in 0..batch * new.count {
        values.extend_from_slice(&old[bh * rows * new.size..(bh + 1) * rows * new.size]);
        values.extend_from_slice(&new.values[bh * new.rows * new.size..(bh + 1) * new.rows * new.size]);
    }
    Ok(Heads { rows: rows + new.rows, values, ..new })
}

/// What hides keys from queries.
struct Visibility<'a> {
    op: &'a Attention,
    total: usize,
    past: usize,
    queries: usize,
    mask: Option<(&'a Tensor, Vec<f64>)>,
    nonpad: Option<Vec<usize>>,
}

impl Visibility<'_> {
    /// What is added to the score of query `i` and key `j`: minus infinity hides the key.
    fn bias(&self, b: usize, h: usize, i: usize, j: usize) -> f64 {
        let at = match &self.nonpad {
            Some(n) => n[b] as i64 - self.queries as i64,
            None => self.past as i64,
        } + i as i64;
        let (j_at, op) = (j as i64, self.op);
        let padded = self.nonpad.as_ref().is_some_and(|n| j >= n[b]);
        let future = op.is_causal && j_at > at;
        let left = op.left_window.is_some_and(|w| at - j_at > w as i64);
        let right = op.right_window.is_some_and(|w| j_at - at > w as i64);
        if padded || future || left || right { f64::NEG_INFINITY } else { self.mask(b, h, i, j) }
    }

    fn mask(&self, b: usize, h: usize, i: usize, j: usize) -> f64 {
        let Some((t, values)) = &self.mask else { return 0.0 };
        let dims = t.shape();
        let full = [b, h, i, j];
        let lead = full.len() - dims.len();
        let mut at = 0;
        for (axis, &d) in dims.iter().enumerate() {
            let last = axis + 1 == dims.len();
            let index =
                if d == 1 && !(last && self.op.short_mask && self.total > 1) { 0 } else { full[lead + axis] };
            if index >= d {
                return f64::NEG_INFINITY;
            }
            at = at * d + index;
        }
        values[at]
    }
}

pub(super) fn run(
    op: &Attention,
    inputs: &[Option<&Tensor>],
    outputs: usize,
) -> Result<Vec<Tensor>, OpError> {
    let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(fact_of)).collect();
    let out = outputs_of(op, inputs)?;
    let sizes = op.sizes(&facts.iter().map(Option::as_ref).collect::<Vec<_>>())?;
    let known = |w: Option<usize>| w.ok_or_else(|| OpError::other("a size does not follow from the inputs"));
    let (batch, queries, keys, past) =
        (known(sizes.batch)?, known(sizes.queries)?, known(sizes.keys)?, known(sizes.past)?);
    let (q_heads, kv_heads, size, v_size) =
        (known(sizes.q_heads)?, known(sizes.kv_heads)?, known(sizes.size)?, known(sizes.v_size)?);
    let q = heads("Q", required(inputs, 0, "Q")?, q_heads, queries, size)?;
    let k = heads("K", required(inputs, 1, "K")?, kv_heads, keys, size)?;
    let v = heads("V", required(inputs, 2, "V")?, kv_heads, keys, v_size)?;
    let k = concat("past_key", optional(inputs, 4), k, batch)?;
    let v = concat("past_value", optional(inputs, 5), v, batch)?;
    let visibility = Visibility {
        op,
        total: past + keys,
        past,
        queries,
        mask: optional(inputs, 3).map(|t| Ok::<_, OpError>((t, additive(t)?))).transpose()?,
        nonpad: optional(inputs, 6).map(|t| lengths(t, keys)).transpose()?,
    };
    let (y, qk) = attend(&visibility, sizes, &q, &k, &v, outputs > 3)?;
    let y = if required(inputs, 0, "Q")?.shape().len() == 3 { sequence_major(&y, batch) } else { y.values };
    let mut results = vec![Tensor::from_f64(out[0].0, out[0].1.clone(), &y)?];
    for (values, (dtype, shape)) in [k.values, v.values].iter().zip(&out[1..3]) {
        results.push(Tensor::from_f64(*dtype, shape.clone(), values)?);
    }
    if let Some(qk) = qk {
        results.push(Tensor::from_f64(out[3].0, out[3].1.clone(), &qk)?);
    }
    Ok(results)
}

/// A mask as numbers to add.
fn additive(t: &Tensor) -> Result<Vec<f64>, OpError> {
    if t.dtype() != DType::Bool {
        return floats("attn_mask", t);
    }
    Ok(t.bytes().iter().map(|&keep| if keep == 0 { f64::NEG_INFINITY } else { 0.0 }).collect())
}

fn lengths(t: &Tensor, keys: usize) -> Result<Vec<usize>, OpError> {
    t.to_i64()?
        .into_iter()
        .map(|n| {
            usize::try_from(n)
                .ok()
                .filter(|&n| n <= keys)
                .ok_or_else(|| OpError::input("nonpad_kv_seqlen", format!("lengths from 0 to {keys}"), n))
        })
        .collect()
}

/// `[B,heads,rows,size]` as `[B,rows,heads*size]`.
fn sequence_major(y: &Heads, batch: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(y.values.len());
    for b in 0..batch {
        for r in 0..y.rows {
            for h in 0..y.count {
                out.extend_from_slice(y.row(b, h, r));
            }
        }
    }
    out
}

/// The output, head-major, and the scores that are wanted.
fn attend(
    visibility: &Visibility<'_>,
    sizes: Sizes,
    q: &Heads,
    k: &Heads,
    v: &Heads,
    want_qk: bool,
) -> Result<(Heads, Option<Vec<f64>>), OpError> {
    let op = visibility.op;
    let (batch, total) = (sizes.batch.unwrap_or(0), k.rows);
    let rows = batch * q.count * q.rows;
    let scale = op.scale.map_or_else(|| 1.0 / (q.size as f64).sqrt(), f64::from);
    let cap = f64::from(op.softcap);
    let mut y = Heads { count: q.count, rows: q.rows, size: v.size, values: zeros(rows * v.size)? };
    let mut qk = if want_qk { Some(zeros(rows * total)?) } else { None };
    for row in 0..rows {
        let (bh, i) = (row / q.rows, row % q.rows);
        let (b, h) = (bh / q.count, bh % q.count);
        let kv = h / (q.count / k.count);
        let raw: Vec<f64> = (0..total).map(|j| scale * dot(q.row(b, h, i), k.row(b, kv, j))).collect();
        let capped: Vec<f64> =
            raw.iter().map(|&s| if cap > 0.0 { cap * (s / cap).tanh() } else { s }).collect();
        let bias: Vec<f64> = (0..total).map(|j| visibility.bias(b, h, i, j)).collect();
        let masked: Vec<f64> =
            capped.iter().zip(&bias).map(|(s, m)| if *m == f64::NEG_INFINITY { *m } else { s + m }).collect();
        let p = softmax(&masked);
        for (j, &p) in p.iter().enumerate().filter(|(_, p)| **p != 0.0) {
            for (o, v) in y.values[row * v.size..(row + 1) * v.size].iter_mut().zip(v.row(b, kv, j)) {
                *o += p * v;
            }
        }
        if let Some(qk) = &mut qk {
            let source = match op.qk_output {
                QkOutput::Raw => &raw,
                QkOutput::Capped => &capped,
                QkOutput::Masked => &masked,
                QkOutput::Probabilities => &p,
            };
            qk[row * total..(row + 1) * total].copy_from_slice(source);
        }
    }
    Ok((y, qk))
}

/// Probabilities; all zero where nothing is visible.
pub(in super::super) fn softmax(s: &[f64]) -> Vec<f64> {
    let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY && !s.iter().any(|v| v.is_nan()) {
        return vec![0.0; s.len()];
    }
    let e: Vec<f64> = s.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|v| v / sum).collect()
}
