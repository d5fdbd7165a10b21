//! The scalar reference, in f64 from the inputs to the one rounding at the end.

use super::super::OpError;
use super::super::args::{floats, zeros};
use super::super::attention::softmax;
use super::super::experts::dot;
use super::super::util::{fact_of, optional, outputs_of, required};
use super::check::{Form, Sizes};
use super::{MultiHeadAttention, input as at};
use crate::ir::Fact;
use doyen_tensor::Tensor;

/// All sizes known.
#[derive(Debug, Clone, Copy)]
struct Known {
    form: Form,
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    past: usize,
    size: usize,
    v_size: usize,
}

impl Known {
    fn new(op: &MultiHeadAttention, s: Sizes) -> Result<Self, OpError> {
        let known =
            |w: Option<usize>| w.ok_or_else(|| OpError::other("a size does not follow from the inputs"));
        Ok(Self {
            form: s.form,
            batch: known(s.batch)?,
            heads: op.num_heads,
            queries: known(s.queries)?,
            keys: known(s.keys)?,
            past: known(s.past)?,
            size: known(s.size)?,
            v_size: known(s.v_size)?,
        })
    }

    const fn total(&self) -> usize {
        self.past + self.keys
    }
}

/// `[B,N,rows,size]` of a part of an input: element `(b, h, r, c)` lies at `at(b, h, r) + c`. `bias` is added by head
/// and channel.
fn head_major(
    values: &[f64],
    (batch, heads, rows, size): (usize, usize, usize, usize),
    bias: Option<&[f64]>,
    at: impl Fn(usize, usize, usize) -> usize,
) -> Result<Vec<f64>, OpError> {
    let mut out = zeros(batch * heads * rows * size)?;
    for (i, row) in out.chunks_exact_mut(size).enumerate() {
        let (bh, r) = (i / rows, i % rows);
        let (b, h) = (bh / heads, bh % heads);
        row.copy_from_slice(&values[at(b, h, r)..][..size]);
        if let Some(bias) = bias {
            row.iter_mut().zip(&bias[h * size..]).for_each(|(v, b)| *v += b);
        }
    }
    Ok(out)
}

/// Queries, new keys and new values, head-major.
fn arriving(k: Known, inputs: &[Option<&Tensor>]) -> Result<[Vec<f64>; 3], OpError> {
    let bias = optional(inputs, at::BIAS).map(|t| floats("bias", t)).transpose()?;
    let part = |start: usize, len: usize| bias.as_ref().map(|b| &b[start..start + len]);
    let hidden = k.heads * k.size;
    let biases = [part(0, hidden), part(hidden, hidden), part(2 * hidden, k.heads * k.v_size)];
    let query = floats("query", required(inputs, at::QUERY, "query")?)?;
    let input = |i: usize, name: &str| floats(name, required(inputs, i, name)?);
    let (q_dims, k_dims) = ((k.batch, k.heads, k.queries, k.size), (k.batch, k.heads, k.keys, k.size));
    let v_dims = (k.batch, k.heads, k.keys, k.v_size);
    // `[B,rows,N,parts,size]`: part `p` of a head.
    let packed = |rows: usize, parts: usize, p: usize| {
        move |b: usize, h: usize, r: usize| (((b * rows + r) * k.heads + h) * parts + p) * k.size
    };
    let plain =
        |rows: usize, size: usize| move |b: usize, h: usize, r: usize| ((b * rows + r) * k.heads + h) * size;
    if k.form == Form::PackedQkv {
        let of = |p: usize| head_major(&query, q_dims, biases[p], packed(k.queries, 3, p));
        return Ok([of(0)?, of(1)?, of(2)?]);
    }
    let q = head_major(&query, q_dims, biases[0], plain(k.queries, k.size))?;
    let key = input(at::KEY, "key")?;
    if k.form == Form::PackedKv {
        let of = |p: usize| head_major(&key, k_dims, biases[1 + p], packed(k.keys, 2, p));
        return Ok([q, of(0)?, of(1)?]);
    }
    let value = input(at::VALUE, "value")?;
    if k.form == Form::HeadMajor {
        return Ok([q, key, value]);
    }
    let keys = head_major(&key, k_dims, biases[1], plain(k.keys, k.size))?;
    Ok([q, keys, head_major(&value, v_dims, biases[2], plain(k.keys, k.v_size))?])
}

/// The past rows of every head, then its new ones.
fn concat(
    name: &str,
    past: Option<&Tensor>,
    new: Vec<f64>,
    (rows, keys, size): (usize, usize, usize),
) -> Result<Vec<f64>, OpError> {
    let Some(past) = past else { return Ok(new) };
    let old = floats(name, past)?;
    let mut out = Vec::with_capacity(old.len() + new.len());
    let heads = (old.len() / (rows * size).max(1)).max(new.len() / (keys * size).max(1));
    for head in 0..heads {
        out.extend_from_slice(&old[head * rows * size..(head + 1) * rows * size]);
        out.extend_from_slice(&new[head * keys * size..(head + 1) * keys * size]);
    }
    Ok(out)
}

/// What is added to scores.
struct Additions<'a> {
    op: &'a MultiHeadAttention,
    k: Known,
    mask: Option<(usize, Vec<i64>)>,
    bias: Option<(&'a Tensor, Vec<f64>)>,
}

impl Additions<'_> {
    fn of(&self, [b, h, i, j]: [usize; 4]) -> f64 {
        let (k, total) = (self.k, self.k.total());
        if self.op.unidirectional && j > k.past + i {
            return f64::NEG_INFINITY;
        }
        let hidden = self.mask.as_ref().is_some_and(|(rank, m)| match rank {
            1 => j as i64 >= m[b],
            2 => m[b * total + j] == 0,
            _ => m[(b * k.queries + i) * total + j] == 0,
        });
        let bias = self.bias.as_ref().map_or(0.0, |(t, values)| {
            let dims = t.shape();
            let row = |axis: usize, at: usize| if dims[axis] == 1 { 0 } else { at };
            values[((row(0, b) * dims[1] + row(1, h)) * k.queries + i) * total + j]
        });
        bias + if hidden { f64::from(self.op.mask_filter_value) } else { 0.0 }
    }
}

pub(super) fn run(
    op: &MultiHeadAttention,
    inputs: &[Option<&Tensor>],
    outputs: usize,
) -> Result<Vec<Tensor>, OpError> {
    let out = outputs_of(op, inputs)?;
    let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(fact_of)).collect();
    let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
    let k = Known::new(op, op.sizes(&facts)?)?;
    let [q, keys, values] = arriving(k, inputs)?;
    let keys = concat("past_key", optional(inputs, at::PAST_KEY), keys, (k.past, k.keys, k.size))?;
    let values = concat("past_value", optional(inputs, at::PAST_VALUE), values, (k.past, k.keys, k.v_size))?;
    let mask = optional(inputs, at::KEY_PADDING_MASK)
        .map(|t| Ok::<_, OpError>((t.shape().len(), t.to_i64()?)))
        .transpose()?;
    let bias = optional(inputs, at::ATTENTION_BIAS)
        .map(|t| Ok::<_, OpError>((t, floats("attention_bias", t)?)))
        .transpose()?;
    let additions = Additions { op, k, mask, bias };
    let scale = op.scale.map_or_else(|| 1.0 / (k.size as f64).sqrt(), f64::from);
    let total = k.total();
    let mut y = zeros(k.batch * k.queries * k.heads * k.v_size)?;
    let mut qk = zeros(if outputs > 3 { k.batch * k.heads * k.queries * total } else { 0 })?;
    for row in 0..k.batch * k.heads * k.queries {
        let (bh, i) = (row / k.queries, row % k.queries);
        let (b, h) = (bh / k.heads, bh % k.heads);
        let q = &q[row * k.size..][..k.size];
        let products: Vec<f64> =
            (0..total).map(|j| scale * dot(q, &keys[(bh * total + j) * k.size..][..k.size])).collect();
        if outputs > 3 {
            qk[row * total..][..total].copy_from_slice(&products);
        }
        let scores: Vec<f64> =
            products.iter().enumerate().map(|(j, s)| s + additions.of([b, h, i, j])).collect();
        let y = &mut y[((b * k.queries + i) * k.heads + h) * k.v_size..][..k.v_size];
        for (j, &p) in softmax(&scores).iter().enumerate().filter(|(_, p)| **p != 0.0) {
            for (o, v) in y.iter_mut().zip(&values[(bh * total + j) * k.v_size..]) {
                *o += p * v;
            }
        }
    }
    let all = [y, keys, values, qk];
    all.iter()
        .zip(&out)
        .take(if outputs > 3 { 4 } else { 3 })
        .map(|(values, (dtype, shape))| Ok(Tensor::from_f64(*dtype, shape.clone(), values)?))
        .collect()
}
