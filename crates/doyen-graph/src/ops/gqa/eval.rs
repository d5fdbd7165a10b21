//! The scalar reference. Keys and values are read as the caches store them, new ones included, so that a prompt in
//! chunks gives what it gives at once.

use super::super::OpError;
use super::super::args::{floats, zeros};
use super::super::experts::dot;
use super::super::norm::{Statistics, normalize};
use super::super::rotary::rotate;
use super::super::util::{fact_of, optional, outputs_of, required};
use super::cache::{Cache, Codec, Extents};
use super::input::{
    ATTENTION_BIAS, COS_CACHE, HEAD_SINK, K_NORM_WEIGHT, K_SCALE, KEY, PAST_KEY, PAST_VALUE, POSITION_IDS,
    Q_NORM_WEIGHT, QUERY, SEQLENS_K, SIN_CACHE, TOTAL_SEQUENCE_LENGTH, V_SCALE, VALUE,
};
use super::plan::{Plan, Sequence};
use super::{GroupQueryAttention, QkOutput, check};
use crate::ir::Fact;
use doyen_tensor::Tensor;

/// `[B,S,heads*size]`.
struct Heads {
    seq: usize,
    count: usize,
    size: usize,
    values: Vec<f64>,
}

impl Heads {
    fn at(&self, b: usize, i: usize, h: usize) -> usize {
        ((b * self.seq + i) * self.count + h) * self.size
    }

    fn get(&self, b: usize, i: usize, h: usize) -> &[f64] {
        let at = self.at(b, i, h);
        &self.values[at..at + self.size]
    }

    fn get_mut(&mut self, b: usize, i: usize, h: usize) -> &mut [f64] {
        let at = self.at(b, i, h);
        &mut self.values[at..at + self.size]
    }
}

/// Everything but the caches.
struct Run<'a> {
    op: &'a GroupQueryAttention,
    plan: Plan,
    batch: usize,
    seq: usize,
    size: usize,
    bias: Option<(&'a Tensor, Vec<f64>)>,
    /// One a query head.
    sinks: Option<Vec<f64>>,
}

pub(super) fn run(
    op: &GroupQueryAttention,
    inputs: &[Option<&Tensor>],
    outputs: usize,
) -> Result<Vec<Tensor>, OpError> {
    if outputs > 3 && op.qk_output == QkOutput::None {
        return Err(OpError::attribute("qk_output", "1 or 2 where output_qk is wanted", 0));
    }
    let seqlens = required(inputs, SEQLENS_K, "seqlens_k")?;
    let total = required(inputs, TOTAL_SEQUENCE_LENGTH, "total_sequence_length")?;
    let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(fact_of)).collect();
    let sizes = check::sizes(op, &facts.iter().map(Option::as_ref).collect::<Vec<_>>())?;
    let known = |w: Option<usize>| w.ok_or_else(|| OpError::other("a size does not follow from the inputs"));
    let (batch, seq) = (known(sizes.batch)?, known(sizes.seq)?);
    let (size, capacity) = (known(sizes.head_size)?, known(sizes.capacity)?);
    let plan = match total.to_i64()?.as_slice() {
        [total] => Plan::new(op, &seqlens.to_i64()?, *total, seq, capacity)?,
        _ => return Err(OpError::input("total_sequence_length", "one number", total.shape())),
    };
    let facts = outputs_of(op, inputs)?;
    let query = required(inputs, QUERY, "query")?;
    let bias = optional(inputs, ATTENTION_BIAS).map(|t| Ok::<_, OpError>((t, floats("attention_bias", t)?)));
    let sinks = match optional(inputs, HEAD_SINK) {
        Some(t) => Some(floats("head_sink", t)?),
        None => op.smooth_softmax.then(|| vec![0.0; op.num_heads]),
    };
    let run = Run { op, plan, batch, seq, size, bias: bias.transpose()?, sinks };
    let [mut q, mut k, v] = run.split(query, optional(inputs, KEY), optional(inputs, VALUE))?;
    run.norm(&mut q, optional(inputs, Q_NORM_WEIGHT), "q_norm_weight")?;
    run.norm(&mut k, optional(inputs, K_NORM_WEIGHT), "k_norm_weight")?;
    run.rotate(inputs, &mut q, &mut k)?;

    let extents = Extents { batch, heads: op.kv_num_heads, rows: capacity, size };
    let caches = [(PAST_KEY, K_SCALE, k), (PAST_VALUE, V_SCALE, v)]
        .into_iter()
        .map(|(past, scale, new)| {
            let codec = Codec::new(op, query.dtype(), optional(inputs, scale))?;
            let new = Heads { values: codec.encode(&new.values)?, ..new };
            Ok((Cache::read(optional(inputs, past), extents, codec)?, new))
        })
        .collect::<Result<Vec<_>, OpError>>()?;
    let [keys, values] = [&caches[0], &caches[1]];

    let (out, qk) = run.attend(&q, keys, values, outputs > 3)?;
    let mut results = vec![Tensor::from_f64(facts[0].0, facts[0].1.clone(), &out)?];
    for (past, new) in [keys, values] {
        let rows = |b: usize, h: usize| (0..seq).map(|i| new.get(b, i, h)).collect();
        results.push(past.present(op, &run.plan, rows)?.into_tensor()?);
    }
    if let (Some(qk), Some((dtype, shape))) = (qk, facts.get(3)) {
        results.push(Tensor::from_f64(*dtype, shape.clone(), &qk)?);
    }
    Ok(results)
}

impl Run<'_> {
    /// Queries, keys and values, from three inputs or one packed.
    fn split(
        &self,
        query: &Tensor,
        key: Option<&Tensor>,
        value: Option<&Tensor>,
    ) -> Result<[Heads; 3], OpError> {
        let (nq, nkv) = (self.op.num_heads, self.op.kv_num_heads);
        let heads = |count: usize, values: Vec<f64>| Heads { seq: self.seq, count, size: self.size, values };
        let q = floats("query", query)?;
        if let (Some(k), Some(v)) = (key, value) {
            return Ok([heads(nq, q), heads(nkv, floats("key", k)?), heads(nkv, floats("value", v)?)]);
        }
        let width = (nq + 2 * nkv) * self.size;
        let part = |from: usize, n: usize| {
            let cut = |row: &[f64]| row[from * self.size..(from + n) * self.size].to_vec();
            heads(n, q.chunks(width).flat_map(cut).collect())
        };
        Ok([part(0, nq), part(nq, nkv), part(nq + nkv, nkv)])
    }

    fn norm(&self, x: &mut Heads, weight: Option<&Tensor>, name: &str) -> Result<(), OpError> {
        let Some(weight) = weight else { return Ok(()) };
        let weight = floats(name, weight)?;
        for head in x.values.chunks_mut(self.size) {
            let (_, _, n) = normalize(head, Statistics::Rms, f64::from(self.op.qk_norm_epsilon));
            for (o, (v, w)) in head.iter_mut().zip(n.iter().zip(&weight)) {
                *o = v * w;
            }
        }
        Ok(())
    }

    /// Rotates every token; padding may have a position beyond the caches and then stays as it is.
    fn rotate(&self, inputs: &[Option<&Tensor>], q: &mut Heads, k: &mut Heads) -> Result<(), OpError> {
        let Some(rotary) = self.op.rotary else { return Ok(()) };
        let cos_t = required(inputs, COS_CACHE, "cos_cache")?;
        let (cos, sin) =
            (floats("cos_cache", cos_t)?, floats("sin_cache", required(inputs, SIN_CACHE, "sin_cache")?)?);
        let (rows, half) = (cos_t.shape()[0], cos_t.shape()[1]);
        let ids = optional(inputs, POSITION_IDS).map(Tensor::to_i64).transpose()?;
        for (b, s) in self.plan.sequences.iter().enumerate() {
            for i in 0..self.seq {
                let (name, position) = self.position(ids.as_deref(), b, s, i);
                let Some(p) = usize::try_from(position).ok().filter(|&p| p < rows) else {
                    if i >= s.valid {
                        continue;
                    }
                    let expected = format!("positions below {rows} (rows of cos_cache)");
                    return Err(OpError::input(name, expected, format!("position {position}")));
                };
                let (c, s) = (&cos[p * half..(p + 1) * half], &sin[p * half..(p + 1) * half]);
                for x in [&mut *q, &mut *k] {
                    for h in 0..x.count {
                        rotate(x.get_mut(b, i, h), c, s, rotary.interleaved);
                    }
                }
            }
        }
        Ok(())
    }

    /// Position of new token `i`, and the input that says so. A first prompt counts up from its first id.
    fn position(&self, ids: Option<&[i64]>, b: usize, s: &Sequence, i: usize) -> (&'static str, i64) {
        match ids {
            None => ("seqlens_k", (s.past + i) as i64),
            Some(ids) if self.plan.first_prompt => {
                ("position_ids", ids[b * self.seq].saturating_add(i as i64))
            }
            Some(ids) => ("position_ids", ids[b * self.seq + i]),
        }
    }

    /// The output `[B,S,Nq*D]`, and the scores or probabilities `[B,Nq,S,total]` if they are wanted.
    fn attend(
        &self,
        q: &Heads,
        keys: &(Cache, Heads),
        values: &(Cache, Heads),
        want_qk: bool,
    ) -> Result<(Vec<f64>, Option<Vec<f64>>), OpError> {
        let (nq, nkv, total) = (self.op.num_heads, self.op.kv_num_heads, self.plan.total);
        let mut out = zeros(q.values.len())?;
        let mut qk = None;
        if want_qk {
            let n = [self.batch, nq, self.seq].iter().try_fold(total, |n, &d| n.checked_mul(d));
            qk = Some(zeros(n.ok_or_else(|| OpError::other("output_qk does not fit the address space"))?)?);
        }
        for (b, s) in self.plan.sequences.iter().enumerate() {
            for kv in 0..nkv {
                let pool = |(cache, new): &(Cache, Heads)| {
                    let new: Vec<&[f64]> = (0..self.seq).map(|i| new.get(b, i, kv)).collect();
                    cache.decode(kv, &cache.pool(b, kv, s, &new))
                };
                let (ks, vs) = (pool(keys), pool(values));
                for h in kv * (nq / nkv)..(kv + 1) * (nq / nkv) {
                    for i in 0..self.seq {
                        let seen = self.scores(b, h, i, s, q.get(b, i, h), &ks);
                        let weights = self.softmax(h, &seen);
                        let at = q.at(b, i, h);
                        for (&(j, score), w) in seen.iter().zip(&weights) {
                            for (o, v) in out[at..at + self.size].iter_mut().zip(&vs[j - s.first()]) {
                                *o += w * v;
                            }
                            if let Some(qk) = &mut qk {
                                qk[((b * nq + h) * self.seq + i) * total + j] =
                                    self.op.qk_output.of(score, *w);
                            }
                        }
                    }
                }
            }
        }
        Ok((out, qk))
    }

    /// Visible positions with their scores.
    fn scores(
        &self,
        b: usize,
        h: usize,
        i: usize,
        s: &Sequence,
        q: &[f64],
        keys: &[Vec<f64>],
    ) -> Vec<(usize, f64)> {
        let op = self.op;
        let scale = op.scale.map_or_else(|| 1.0 / (self.size as f64).sqrt(), f64::from);
        let cap = f64::from(op.softcap);
        let positions = keys.iter().enumerate().map(|(r, k)| (s.first() + r, k));
        positions
            .filter(|&(j, _)| s.sees(op, i, j))
            .map(|(j, k)| {
                let mut score = scale * dot(q, k);
                if cap > 0.0 {
                    score = cap * (score / cap).tanh();
                }
                (j, score + self.bias(b, h, i, j))
            })
            .collect()
    }

    fn bias(&self, b: usize, h: usize, i: usize, j: usize) -> f64 {
        let Some((t, values)) = &self.bias else { return 0.0 };
        let d = t.shape();
        let (b, h) = (if d[0] == 1 { 0 } else { b }, if d[1] == 1 { 0 } else { h });
        values[((b * d[1] + h) * d[2] + i) * d[3] + j]
    }

    /// Probabilities of the visible keys; a sink takes its share of the denominator.
    fn softmax(&self, h: usize, seen: &[(usize, f64)]) -> Vec<f64> {
        let sink = self.sinks.as_ref().map(|s| s[h]);
        let max = seen.iter().map(|&(_, s)| s).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return vec![0.0; seen.len()];
        }
        let e: Vec<f64> = seen.iter().map(|&(_, s)| (s - max).exp()).collect();
        let sum = e.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - max).exp());
        e.into_iter().map(|v| v / sum).collect()
    }
}
