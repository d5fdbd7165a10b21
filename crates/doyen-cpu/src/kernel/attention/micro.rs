//! What happens to scores and states between the loops over keys and values: softmax weights, merging, the end.
//!
//! A query's state is a row of `v_head_size + 2` numbers: the weighted values, the maximum score, the sum of weights.
//! Used by `tile` and `schedule` only.

use super::{SPLIT, store::KvScales};
use crate::{
    detect::Isa,
    kernel::{
        math::{exp, fma, tanh},
        multiversion::multiversion,
    },
};

/// The loops over scores and states of one instruction set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Micro {
    pub(super) softcap: fn(&mut [f32], f32),
    pub(super) weights: fn(&mut [f32]) -> (f32, f32),
    pub(super) merge: fn(&mut [f32], &[f32]),
    pub(super) finish: fn(&[f32], Option<f32>, KvScales<'_>, &mut [f32]),
}

impl Micro {
    pub(super) fn new(isa: Isa) -> Self {
        Self { softcap: softcap(isa), weights: weights(isa), merge: merge(isa), finish: finish(isa) }
    }
}

/// Makes a state row that has seen no key.
pub(super) fn clear(state: &mut [f32]) {
    let (acc, tail) = split_state_mut(state);
    acc.fill(0.0);
    *tail = [f32::NEG_INFINITY, 0.0];
}

/// Values, and `[maximum, sum]`.
#[inline(always)]
pub(super) fn split_state_mut(state: &mut [f32]) -> (&mut [f32], &mut [f32; 2]) {
    state.split_last_chunk_mut().expect("a state row ends with maximum and sum")
}

#[inline(always)]
fn split_state(state: &[f32]) -> (&[f32], &[f32; 2]) {
    state.split_last_chunk().expect("a state row ends with maximum and sum")
}

multiversion! {
    fn softcap(scores: &mut [f32], cap: f32) = softcap_body;
}
multiversion! {
    /// Turns the scores of a split into weights `exp(s - max)`; returns the maximum and the sum of weights.
    fn weights(scores: &mut [f32]) -> (f32, f32) = weights_body;
}
multiversion! {
    /// Merges the state of the next split into a running state.
    fn merge(run: &mut [f32], part: &[f32]) = merge_body;
}
multiversion! {
    /// Writes the attention output of a state, its sink and the values' scales included. Zeros when no key was visible.
    fn finish(state: &[f32], sink: Option<f32>, scales: KvScales<'_>, out: &mut [f32]) = finish_body;
}

#[inline(always)]
fn softcap_body<const FMA: bool>(scores: &mut [f32], cap: f32) {
    for s in scores {
        *s = cap * tanh::<FMA>(*s / cap);
    }
}

#[inline(always)]
fn weights_body<const FMA: bool>(scores: &mut [f32]) -> (f32, f32) {
    debug_assert!(scores.len() <= SPLIT);
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    // Masked scores in the lanes that are left over.
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks.iter().chain([&last]) {
        for (m, &s) in lanes.iter_mut().zip(chunk) {
            *m = if s > *m { s } else { *m };
        }
    }
    let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    // All keys masked by a bias: no weight. A NaN among them stays one.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        exps::<FMA>(chunk, shift, &mut sums);
    }
    exps::<FMA>(&mut last, shift, &mut sums);
    rest.copy_from_slice(&last[..rest.len()]);
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            sums[i] += sums[i + n];
        }
        n /= 2;
    }
    (max, sums[0])
}

/// Scores of [`weights`] that are worked on together.
const LANES: usize = 16;

#[inline(always)]
fn exps<const FMA: bool>(scores: &mut [f32; LANES], shift: f32, sums: &mut [f32; LANES]) {
    for (s, sum) in scores.iter_mut().zip(sums) {
        *s = exp::<FMA>(*s - shift);
        *sum += *s;
    }
}

#[inline(always)]
fn merge_body<const FMA: bool>(run: &mut [f32], part: &[f32]) {
    let (part, &[part_max, part_sum]) = split_state(part);
    if part_sum == 0.0 {
        return;
    }
    let (run, [run_max, run_sum]) = split_state_mut(run);
    let max = if part_max > *run_max { part_max } else { *run_max };
    let (a, b) = (exp::<FMA>(*run_max - max), exp::<FMA>(part_max - max));
    *run_max = max;
    *run_sum = fma::<FMA>(*run_sum, a, part_sum * b);
    for (r, &p) in run.iter_mut().zip(part) {
        *r = fma::<FMA>(*r, a, p * b);
    }
}

#[inline(always)]
fn finish_body<const FMA: bool>(state: &[f32], sink: Option<f32>, scales: KvScales<'_>, out: &mut [f32]) {
    let (acc, &[max, sum]) = split_state(state);
    let factor = match sink {
        _ if sum == 0.0 => 0.0,
        None => 1.0 / sum,
        Some(sink) => {
            let top = if sink > max { sink } else { max };
            let weight = exp::<FMA>(max - top);
            weight / fma::<FMA>(sum, weight, exp::<FMA>(sink - top))
        }
    };
    match scales {
        KvScales::Tensor(scale) => {
            for (o, &a) in out.iter_mut().zip(acc) {
                *o = a * factor * scale;
            }
        }
        KvScales::Channel(scales) => {
            for ((o, &a), &scale) in out.iter_mut().zip(acc).zip(scales) {
                *o = a * factor * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::noise;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn weights_are_a_softmax(n in 1usize..=SPLIT, seed: u64, spread in 0.1f32..50.0) {
            let x: Vec<f32> = noise(seed, n).iter().map(|v| v * spread).collect();
            for isa in Isa::all() {
                let mut w = x.clone();
                let (max, sum) = (Micro::new(isa).weights)(&mut w);
                prop_assert_eq!(max, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                let mut total = 0.0;
                for (&w, &x) in w.iter().zip(&x) {
                    let e = (f64::from(x) - f64::from(max)).exp();
                    total += e;
                    prop_assert!((f64::from(w) - e).abs() < 3e-7);
                }
                prop_assert!((f64::from(sum) / total - 1.0).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn masked_keys_and_nan() {
        for isa in Isa::all() {
            let micro = Micro::new(isa);
            let mut s = [f32::NEG_INFINITY; 5];
            assert_eq!((micro.weights)(&mut s), (f32::NEG_INFINITY, 0.0));
            assert_eq!(s, [0.0; 5]);
            let mut s = [f32::NEG_INFINITY, f32::NAN];
            assert!((micro.weights)(&mut s).1.is_nan());
            let mut out = [9.0; 2];
            (micro.finish)(&[0.0, 0.0, f32::NEG_INFINITY, 0.0], None, KvScales::Tensor(1.0), &mut out);
            assert_eq!(out, [0.0; 2]);
            (micro.finish)(&[2.0, 4.0, 0.0, 2.0], Some(f32::NEG_INFINITY), KvScales::Tensor(1.0), &mut out);
            assert_eq!(out, [1.0, 2.0]);
            (micro.finish)(&[2.0, 4.0, 0.0, 2.0], None, KvScales::Channel(&[0.5, -3.0]), &mut out);
            assert_eq!(out, [0.5, -6.0]);
        }
    }
}
