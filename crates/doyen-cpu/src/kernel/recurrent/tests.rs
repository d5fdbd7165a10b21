//! Recurrent kernels against the operators' scalar references: drawn sizes, sequences in any company and any chunks.

use super::*;
use crate::{detect::Isa, kernel::test_data::noise, pool::Pool};
use doyen_graph::{
    device::StateSlot,
    ops::{
        OpDef,
        causal_conv::CausalConv as ConvOp,
        linear_attention::{LinearAttention as LinearOp, UpdateRule},
    },
};
use doyen_tensor::Tensor;
use proptest::prelude::*;
use std::num::NonZeroUsize;

fn tensor(dims: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(dims.to_vec(), values).unwrap()
}

/// Runs `step` for two sequences in chunks; the tokens of each in order, and its last state.
///
/// A step is given the spans and slots, the rows of the tokens it takes (of both sequences laid end to end), the memory of
/// the states, and the output.
fn chunked(
    lens: [usize; 2],
    chunks: &[[usize; 2]],
    (state, width): (usize, usize),
    mut step: impl FnMut(&[SeqSpan], &[StateSlots], &[usize], &mut [f32], &mut [f32]),
) -> [(Vec<f32>, Vec<f32>); 2] {
    let mut memory = vec![f32::NAN; 4 * state];
    let mut slots = [0u32, 2].map(|s| [StateSlot(s), StateSlot(s + 1)]);
    let mut done = [0usize; 2];
    let mut out = [Vec::new(), Vec::new()];
    let rest = [[usize::MAX; 2]];
    for want in chunks.iter().chain(&rest) {
        let (mut spans, mut own, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for s in 0..2 {
            let len = want[s].min(lens[s] - done[s]);
            spans.push(SeqSpan { first: rows.len(), len, past: done[s] });
            let first = s * lens[0] + done[s];
            rows.extend(first..first + len);
            own.push(StateSlots { read: (done[s] > 0).then_some(slots[s][0]), write: slots[s][1] });
        }
        let mut y = vec![f32::NAN; rows.len() * width];
        step(&spans, &own, &rows, &mut memory, &mut y);
        for s in 0..2 {
            out[s].extend_from_slice(&y[spans[s].first * width..(spans[s].first + spans[s].len) * width]);
            done[s] += spans[s].len;
            slots[s].reverse();
        }
    }
    let mut out = out.into_iter();
    [0, 1].map(|s| {
        let at = slots[s][0].index() * state;
        (out.next().unwrap_or_default(), memory[at..at + state].to_vec())
    })
}

/// The given rows of `x`, `width` each.
fn rows_of(x: &[f32], width: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|&r| x[r * width..(r + 1) * width].iter().copied()).collect()
}

fn close(got: &[f32], want: &[f32], what: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1f32, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        prop_assert!((g - w).abs() <= 2e-5 * scale, "{} {}: {} {}", what, i, g, w);
    }
    Ok(())
}

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

/// A convolution over two sequences, in chunks.
fn convolve(
    isa: Isa,
    pool: &Pool,
    p: &ConvParams<'_>,
    (lens, x): ([usize; 2], &[f32]),
    chunks: &[[usize; 2]],
) -> [(Vec<f32>, Vec<f32>); 2] {
    let size = p.held() * p.channels;
    chunked(lens, chunks, (size, p.channels), |spans, slots, rows, memory, y| {
        let states = States::new(memory, size, spans, slots).unwrap();
        CausalConv::new(isa).run(pool, p, &states, &rows_of(x, p.channels, rows), y);
    })
}

/// Linear attention of drawn sizes.
#[derive(Debug, Clone)]
struct Linear {
    op: LinearOp,
    p: LinearParams,
    per_key: bool,
    shared_beta: bool,
    values: [Vec<f32>; 5],
}

impl Linear {
    fn new(
        (q_heads, kv_heads, shared_keys): (usize, usize, bool),
        (key_size, value_size): (usize, usize),
        (rule, per_key, shared_beta): (UpdateRule, bool, bool),
        (tokens, seed): (usize, u64),
    ) -> Self {
        let key_heads = if shared_keys { q_heads.min(kv_heads) } else { kv_heads };
        let p = LinearParams { q_heads, key_heads, kv_heads, key_size, value_size, scale: 0.7 };
        let draw = |i: u64, width: usize| noise(seed ^ (i << 32), tokens * width);
        let mut key = draw(1, key_heads * key_size);
        for k in key.chunks_mut(key_size) {
            let norm = k.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-3);
            for v in k.iter_mut() {
                *v /= norm;
            }
        }
        let decay = draw(3, kv_heads * if per_key { key_size } else { 1 });
        let beta = draw(4, if shared_beta { 1 } else { kv_heads });
        let values = [
            draw(0, q_heads * key_size),
            key,
            draw(2, kv_heads * value_size),
            decay.into_iter().map(|v| v - 1.0).collect(),
            beta.into_iter().map(|v| 0.5 + v / 2.0).collect(),
        ];
        let op = LinearOp { q_heads, kv_heads, rule, scale: Some(0.7) };
        Self { op, p, per_key, shared_beta, values }
    }

    fn widths(&self) -> [usize; 5] {
        let p = &self.p;
        [
            p.q_heads * p.key_size,
            p.key_heads * p.key_size,
            p.kv_heads * p.value_size,
            p.kv_heads * if self.per_key { p.key_size } else { 1 },
            if self.shared_beta { 1 } else { p.kv_heads },
        ]
    }

    fn run(
        &self,
        isa: Isa,
        pool: &Pool,
        lens: [usize; 2],
        chunks: &[[usize; 2]],
    ) -> [(Vec<f32>, Vec<f32>); 2] {
        let (p, widths) = (&self.p, self.widths());
        let mut scratch = vec![f32::NAN; pool.threads() * p.scratch()];
        chunked(lens, chunks, (p.state(), p.heads() * p.value_size), |spans, slots, rows, memory, y| {
            let [q, k, v, decay, beta] = [0, 1, 2, 3, 4].map(|i| rows_of(&self.values[i], widths[i], rows));
            let operands = Operands {
                query: &q,
                key: &k,
                value: &v,
                decay: self.op.rule.decays().then_some(&decay),
                beta: self.op.rule.corrects().then_some(&beta),
            };
            let states = States::new(memory, p.state(), spans, slots).unwrap();
            LinearAttention::new(isa).run(pool, p, &states, &operands, (&mut scratch, y));
        })
    }

    /// Output and state of the rows of one sequence by the reference.
    fn reference(&self, rows: Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let (rows, widths) = (rows.collect::<Vec<_>>(), self.widths());
        let of = |i: usize| tensor(&[1, rows.len(), widths[i]], &rows_of(&self.values[i], widths[i], &rows));
        let [q, k, v, decay, beta] = [0, 1, 2, 3, 4].map(of);
        let decay = self.op.rule.decays().then_some(&decay);
        let beta = self.op.rule.corrects().then_some(&beta);
        let out = self.op.eval(&[Some(&q), Some(&k), Some(&v), None, decay, beta], 2).unwrap();
        (out[0].to_f32().unwrap(), out[1].to_f32().unwrap())
    }
}

const RULES: [UpdateRule; 4] =
    [UpdateRule::Linear, UpdateRule::Gated, UpdateRule::Delta, UpdateRule::GatedDelta];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn convolutions_agree_with_the_reference(
        channels in 1usize..150, taps in 1usize..6, dilation in 1usize..4, lens in [0usize..9, 0usize..9],
        chunks in prop::collection::vec([0usize..4, 0usize..4], 0..4), silu: bool, biased: bool, seed: u64,
    ) {
        let (w, b) = (noise(seed, taps * channels), noise(seed ^ 1, channels));
        let x = noise(seed ^ 2, (lens[0] + lens[1]) * channels);
        let bias = biased.then_some(&b[..]);
        let p = ConvParams { weight: &w, bias, channels, taps, dilation, silu };
        let stored: Vec<f32> = (0..taps * channels).map(|i| w[i % taps * channels + i / taps]).collect();
        let op = ConvOp { silu, dilation, channels_last: true };
        for isa in Isa::all() {
            let got = convolve(isa, &pool(1), &p, (lens, &x), &chunks);
            let whole = convolve(isa, &pool(3), &p, (lens, &x), &[]);
            for s in 0..2 {
                prop_assert_eq!(&got[s], &whole[s], "chunks change the result");
                let rows = s * lens[0]..s * lens[0] + lens[s];
                let own = tensor(&[1, lens[s], channels], &x[rows.start * channels..rows.end * channels]);
                let (w, b) = (tensor(&[channels, 1, taps], &stored), tensor(&[channels], &b));
                let want = op.eval(&[Some(&own), Some(&w), biased.then_some(&b)], 2).unwrap();
                close(&got[s].0, &want[0].to_f32().unwrap(), "output")?;
                close(&got[s].1, &want[1].to_f32().unwrap(), "state")?;
            }
        }
    }

    #[test]
    fn linear_attention_agrees_with_the_reference(
        base in 1usize..4, times in 1usize..3, inverse: bool, shared_keys: bool, key_size in 1usize..40,
        value_size in 1usize..70, rule in 0usize..4, per_key: bool, shared_beta: bool,
        lens in [0usize..7, 0usize..7], chunks in prop::collection::vec([0usize..4, 0usize..4], 0..4), seed: u64,
    ) {
        let (q, kv) = if inverse { (base, base * times) } else { (base * times, base) };
        let gates = (RULES[rule], per_key, shared_beta);
        let l = Linear::new(
            (q, kv, shared_keys && inverse), (key_size, value_size), gates, (lens[0] + lens[1], seed),
        );
        for isa in Isa::all() {
            let got = l.run(isa, &pool(1), lens, &chunks);
            let whole = l.run(isa, &pool(1), lens, &[]);
            for s in 0..2 {
                prop_assert_eq!(&got[s], &whole[s], "chunks change the result");
                let want = l.reference(s * lens[0]..s * lens[0] + lens[s]);
                close(&got[s].0, &want.0, "output")?;
                close(&got[s].1, &want.1, "state")?;
            }
        }
    }
}

/// Enough work to be spread over threads.
#[test]
fn threads_do_not_change_linear_attention() {
    let gates = (UpdateRule::GatedDelta, false, false);
    let l = Linear::new((2, 4, true), (128, 128), gates, (9, 3));
    for isa in Isa::all() {
        assert_eq!(l.run(isa, &pool(1), [5, 4], &[]), l.run(isa, &pool(3), [5, 4], &[[2, 1]]));
    }
}

#[test]
fn slots_belong_to_one_sequence() {
    let mut memory = vec![0.0; 8];
    let spans = [SeqSpan { first: 0, len: 1, past: 1 }, SeqSpan { first: 1, len: 1, past: 0 }];
    let slots =
        |read: Option<u32>, write: u32| StateSlots { read: read.map(StateSlot), write: StateSlot(write) };
    let mut refused = |a, b| States::new(&mut memory, 2, &spans, &[a, b]).err();
    assert_eq!(refused(slots(Some(0), 1), slots(None, 2)), None);
    assert_eq!(refused(slots(Some(0), 1), slots(Some(0), 2)), None, "a fork reads what its origin reads");
    assert_eq!(refused(slots(Some(0), 1), slots(None, 1)), Some(StateError::Shared { sequence: 0 }));
    assert_eq!(refused(slots(Some(0), 0), slots(None, 1)), Some(StateError::Shared { sequence: 0 }));
    assert_eq!(refused(slots(Some(2), 1), slots(None, 2)), Some(StateError::Shared { sequence: 1 }));
    assert_eq!(refused(slots(None, 1), slots(None, 4)), Some(StateError::Slots { sequence: 1, slots: 4 }));
}
