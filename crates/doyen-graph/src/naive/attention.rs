//! Attention over a cache by its definition (operator contract, section 3.1), one query at a time, in f64.

use super::{Span, stored, text};
use crate::lowered::{Attention, KvFormat};
use doyen_tensor::{Tensor, TensorError};
use std::ops::Range;

/// Rows of one layer of one sequence. Quantized caches hold codes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cache {
    /// Positions.
    pub rows: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    /// Appends a row of keys alone.
    pub(super) fn push_key<'v>(&mut self, row: impl Iterator<Item = &'v f32>) {
        self.keys.extend(row);
        self.rows += 1;
    }

    /// The rows of keys.
    pub(super) fn keys(&self) -> &[f32] {
        &self.keys
    }

    /// Rows from tensors `[kv_heads, rows, head_size]` of the stored type: keys, values.
    ///
    /// # Errors
    /// When a tensor is not of rank 3.
    pub fn from_tensors(format: KvFormat, keys: &Tensor, values: &Tensor) -> Result<Self, TensorError> {
        let rows = keys.shape().get(1).copied().unwrap_or(0);
        Ok(Self { rows, keys: by_row(format, keys)?, values: by_row(format, values)? })
    }

    /// The inverse of [`Cache::from_tensors`].
    ///
    /// # Errors
    /// When the rows are not of these heads.
    pub fn to_tensors(&self, format: KvFormat, kv_heads: usize) -> Result<(Tensor, Tensor), TensorError> {
        Ok((
            by_head(format, &self.keys, self.rows, kv_heads)?,
            by_head(format, &self.values, self.rows, kv_heads)?,
        ))
    }
}

/// `[heads, rows, size]` of the stored type as rows of numbers.
fn by_row(format: KvFormat, t: &Tensor) -> Result<Vec<f32>, TensorError> {
    let &[heads, rows, size] = t.shape().dims() else {
        return Err(TensorError::Format(format!("a cache of shape {}", t.shape())));
    };
    let (cells, size) = match format {
        KvFormat::Float => (t.to_f32()?, size),
        KvFormat::Int8 { .. } => (t.to_i64()?.into_iter().map(|v| v as f32).collect(), size),
        KvFormat::Int4 { .. } => {
            let nibbles = |b: &u8| [b & 15, b >> 4].map(|n| f32::from(n) - 8.0);
            (t.bytes().iter().flat_map(nibbles).collect(), 2 * size)
        }
    };
    let mut out = Vec::with_capacity(cells.len());
    for r in 0..rows {
        for h in 0..heads {
            out.extend_from_slice(&cells[(h * rows + r) * size..][..size]);
        }
    }
    Ok(out)
}

fn by_head(format: KvFormat, rows_of: &[f32], rows: usize, heads: usize) -> Result<Tensor, TensorError> {
    let size = rows_of.len() / (rows * heads).max(1);
    let mut cells = Vec::with_capacity(rows_of.len());
    for h in 0..heads {
        for r in 0..rows {
            cells.extend_from_slice(&rows_of[(r * heads + h) * size..][..size]);
        }
    }
    match format {
        KvFormat::Float => Tensor::from_f32(stored(format), [heads, rows, size], &cells),
        KvFormat::Int8 { .. } => {
            Tensor::from_slice([heads, rows, size], &cells.iter().map(|&v| v as i8).collect::<Vec<_>>())
        }
        KvFormat::Int4 { .. } => {
            let code = |v: f32| (v as i8 + 8) as u8;
            let packed: Vec<u8> = cells.chunks(2).map(|p| code(p[0]) | code(p[1]) << 4).collect();
            Tensor::from_slice([heads, rows, size / 2], &packed)
        }
    }
}

/// The operands as numbers.
pub(super) struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    sink: Vec<f32>,
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
    positions: Option<Vec<i64>>,
    /// With its strides.
    bias: Option<(Vec<f32>, [usize; 4])>,
}

impl Operands {
    /// The operands of a step over `spans`.
    ///
    /// # Errors
    /// When an operand is not of its type, or the bias does not cover the step.
    pub(super) fn new(a: &Attention, inputs: &[Option<Tensor>], spans: &[Span]) -> Result<Self, String> {
        let operand = |i: usize| inputs.get(i).and_then(Option::as_ref);
        let get = |i: usize| operand(i).map_or_else(|| Ok(Vec::new()), Tensor::to_f32).map_err(text);
        let longest = |of: fn(&Span) -> usize| spans.iter().map(of).max().unwrap_or(0);
        let reach = (longest(|s| s.len), longest(|s| s.past + s.len));
        let bias = operand(11).map(|t| {
            Ok::<_, String>((
                t.to_f32().map_err(text)?,
                a.bias_strides(t.shape().dims(), spans.len(), reach)?,
            ))
        });
        Ok(Self {
            q: get(0)?,
            k: get(1)?,
            v: get(2)?,
            cos: get(3)?,
            sin: get(4)?,
            q_norm: get(5)?,
            k_norm: get(6)?,
            sink: get(7)?,
            k_scale: get(8)?,
            v_scale: get(9)?,
            positions: operand(10).map(Tensor::to_i64).transpose().map_err(text)?,
            bias: bias.transpose()?,
        })
    }

    /// Rotary position of token `t`, which is at `running` in its sequence.
    fn position(&self, a: &Attention, t: usize, running: usize) -> Result<usize, String> {
        let Some(rotary) = a.rotary else { return Ok(running) };
        let (name, position) = match &self.positions {
            Some(p) => ("position_ids", p[t]),
            None => ("the sequence", running as i64),
        };
        let rows = self.cos.len() / (rotary.dim / 2).max(1);
        usize::try_from(position).ok().filter(|&p| p < rows).ok_or_else(|| {
            format!("{name}: expected positions below {rows} (rows of cos_cache), found {position}")
        })
    }

    /// Bias of new token `i` of the step's sequence `row`.
    fn bias(&self, [row, h, i, j]: [usize; 4]) -> f64 {
        self.bias.as_ref().map_or(0.0, |(b, s)| f64::from(b[row * s[0] + h * s[1] + i * s[2] + j * s[3]]))
    }
}

/// Attention of the tokens `span` of a step, which belong to its sequence `row`: appends to the cache, returns
/// `[tokens, heads * v_head_size]`.
///
/// # Errors
/// When a position is outside of the rotary caches.
pub(super) fn attend(
    a: &Attention,
    format: KvFormat,
    cache: &mut Cache,
    o: &Operands,
    (row, span): (usize, Range<usize>),
) -> Result<Vec<f32>, String> {
    let past = cache.rows;
    let mut queries = Vec::with_capacity(span.len());
    for (i, t) in span.enumerate() {
        let (q, k, v) = split(a, o, t);
        let position = o.position(a, t, past + i)?;
        let ready = |x: &[f32], gamma: &[f32]| -> Vec<f32> {
            x.chunks(a.head_size).flat_map(|h| rotated(a, o, &normed(a, h, gamma), position)).collect()
        };
        queries.push(ready(q, &o.q_norm));
        append(format, &mut cache.keys, &ready(k, &o.k_norm), &o.k_scale);
        append(format, &mut cache.values, v, &o.v_scale);
        cache.rows += 1;
    }
    let keys = read(format, &cache.keys, &o.k_scale, a.kv_heads * a.head_size);
    let values = read(format, &cache.values, &o.v_scale, a.kv_heads * a.v_head_size);
    let mut out = Vec::new();
    for (i, q) in queries.iter().enumerate() {
        for h in 0..a.heads {
            let visible = visible(a, past + i, cache.rows);
            let q = &q[h * a.head_size..(h + 1) * a.head_size];
            let bias = |j: usize| o.bias([row, h, i, j]);
            out.extend(head(a, q, h, (&keys, &values), visible, bias, o.sink.get(h).copied()));
        }
    }
    Ok(out)
}

fn split<'o>(a: &Attention, o: &'o Operands, t: usize) -> (&'o [f32], &'o [f32], &'o [f32]) {
    let (nq, nk, nv) = (a.heads * a.head_size, a.kv_heads * a.head_size, a.kv_heads * a.v_head_size);
    if a.packed_qkv {
        let row = &o.q[t * (nq + nk + nv)..(t + 1) * (nq + nk + nv)];
        return (&row[..nq], &row[nq..nq + nk], &row[nq + nk..]);
    }
    (&o.q[t * nq..(t + 1) * nq], &o.k[t * nk..(t + 1) * nk], &o.v[t * nv..(t + 1) * nv])
}

fn normed(a: &Attention, head: &[f32], gamma: &[f32]) -> Vec<f32> {
    let Some(epsilon) = a.qk_norm else { return head.to_vec() };
    let mean = head.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / head.len() as f64;
    let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
    head.iter().zip(gamma).map(|(&v, &g)| (f64::from(v) * scale * f64::from(g)) as f32).collect()
}

fn rotated(a: &Attention, o: &Operands, head: &[f32], position: usize) -> Vec<f32> {
    let Some(rotary) = a.rotary else { return head.to_vec() };
    let half = rotary.dim / 2;
    let mut out = head.to_vec();
    for i in 0..half {
        let (x, y) = if rotary.interleaved { (2 * i, 2 * i + 1) } else { (i, half + i) };
        let (cos, sin) = (o.cos[position * half + i], o.sin[position * half + i]);
        out[x] = head[x] * cos - head[y] * sin;
        out[y] = head[x] * sin + head[y] * cos;
    }
    out
}

/// Scale of channel `i` of a row: one for all, or one per channel, or none.
fn scale(scales: &[f32], i: usize) -> f32 {
    if scales.len() > 1 { scales[i % scales.len()] } else { scales.first().copied().unwrap_or(1.0) }
}

fn append(format: KvFormat, rows: &mut Vec<f32>, row: &[f32], scales: &[f32]) {
    let (low, high) = match format {
        KvFormat::Float => return rows.extend_from_slice(row),
        KvFormat::Int8 { .. } => (-128.0, 127.0),
        KvFormat::Int4 { .. } => (-8.0, 7.0),
    };
    rows.extend(
        row.iter().enumerate().map(|(i, v)| (v / scale(scales, i)).round_ties_even().clamp(low, high)),
    );
}

fn read(format: KvFormat, rows: &[f32], scales: &[f32], width: usize) -> Vec<f32> {
    if format == KvFormat::Float {
        return rows.to_vec();
    }
    rows.iter().enumerate().map(|(i, v)| v * scale(scales, i % width)).collect()
}

fn visible(a: &Attention, position: usize, rows: usize) -> Range<usize> {
    if !a.causal {
        return 0..rows;
    }
    (position + 1).saturating_sub(a.window.unwrap_or(usize::MAX))..position + 1
}

fn head(
    a: &Attention,
    q: &[f32],
    h: usize,
    (keys, values): (&[f32], &[f32]),
    visible: Range<usize>,
    bias: impl Fn(usize) -> f64,
    sink: Option<f32>,
) -> Vec<f32> {
    let kv = h / (a.heads / a.kv_heads);
    let row = |rows: &[f32], j: usize, size: usize| -> Vec<f32> {
        let start = (j * a.kv_heads + kv) * size;
        rows[start..start + size].to_vec()
    };
    let scores: Vec<f64> = visible
        .clone()
        .map(|j| {
            let k = row(keys, j, a.head_size);
            let dot: f64 = q.iter().zip(&k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            let s = dot * f64::from(a.scale);
            let cap = f64::from(a.softcap);
            bias(j) + if cap > 0.0 { cap * (s / cap).tanh() } else { s }
        })
        .collect();
    let sink = sink.or(a.smooth_softmax.then_some(0.0)).map(f64::from);
    let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return vec![0.0; a.v_head_size];
    }
    let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
    let mut out = vec![0f64; a.v_head_size];
    for (j, s) in visible.zip(&scores) {
        let p = (s - max).exp() / total;
        for (o, v) in out.iter_mut().zip(row(values, j, a.v_head_size)) {
            *o += p * f64::from(v);
        }
    }
    out.into_iter().map(|v| v as f32).collect()
}
