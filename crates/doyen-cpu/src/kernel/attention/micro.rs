//! The inner loops of attention, as a table per instruction set.
//!
//! A query's state is a row of `v_head_size + 2` numbers: the weighted values, the maximum score, the sum of weights.
//! Used by `tile` and `schedule` only.

use super::{
    SPLIT,
    store::{Dequantize, Quantize, dequantize, quantize},
};
use crate::{
    detect::Isa,
    kernel::{
        math::{exp, fma, tanh},
        multiversion::multiversion,
    },
};

/// `scores(q, k, scale, out)`: `out[j] = scale * (q . k[j])`, with `k [out.len(), q.len()]`. Every score is summed in
/// the same order, wherever it stands in `out`.
pub(super) type Scores = fn(&[f32], &[f32], f32, &mut [f32]);
/// `accumulate(p, v, acc)`: `acc += sum_j p[j] v[j]`, with `v [p.len(), acc.len()]`, keys in ascending order.
pub(super) type Accumulate = fn(&[f32], &[f32], &mut [f32]);

/// The inner loops of one instruction set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Micro {
    pub(super) scores: Scores,
    pub(super) accumulate: Accumulate,
    pub(super) softcap: fn(&mut [f32], f32),
    pub(super) weights: fn(&mut [f32]) -> (f32, f32),
    pub(super) merge: fn(&mut [f32], &[f32]),
    pub(super) finish: fn(&[f32], Option<f32>, &mut [f32]),
    pub(super) dequantize: Dequantize,
    pub(super) quantize: Quantize,
}

impl Micro {
    pub(super) fn new(isa: Isa) -> Self {
        let (scores, accumulate): (Scores, Accumulate) = match isa {
            Isa::Scalar => (scores_scalar, accumulate_scalar),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) | Isa::Avx512(_) => {
                isa.avx2().map_or((scores_scalar, accumulate_scalar), super::micro_avx2::loops)
            }
        };
        Self {
            scores,
            accumulate,
            softcap: softcap(isa),
            weights: weights(isa),
            merge: merge(isa),
            finish: finish(isa),
            dequantize: dequantize(isa),
            quantize: quantize(isa),
        }
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

fn scores_scalar(q: &[f32], k: &[f32], scale: f32, out: &mut [f32]) {
    for (j, o) in out.iter_mut().enumerate() {
        let key = &k[j * q.len()..(j + 1) * q.len()];
        *o = scale * q.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
    }
}

fn accumulate_scalar(p: &[f32], v: &[f32], acc: &mut [f32]) {
    for (j, &p) in p.iter().enumerate() {
        let value = &v[j * acc.len()..(j + 1) * acc.len()];
        for (a, &v) in acc.iter_mut().zip(value) {
            *a += p * v;
        }
    }
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
    /// Writes the attention output of a state, its sink included. Zeros when no key was visible.
    fn finish(state: &[f32], sink: Option<f32>, out: &mut [f32]) = finish_body;
}

#[inline(always)]
fn softcap_body<const FMA: bool>(scores: &mut [f32], cap: f32) {
    for s in scores {
        *s = cap * tanh::<FMA>(*s / cap);
    }
}

#[inline(always)]
fn weights_body<const FMA: bool>(scores: &mut [f32]) -> (f32, f32) {
    const LANES: usize = 16;
    debug_assert!(scores.len() <= SPLIT);
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in scores.chunks(LANES) {
        for (m, &s) in lanes.iter_mut().zip(chunk) {
            *m = if s > *m { s } else { *m };
        }
    }
    let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    // All keys masked by a bias: no weight. A NaN among them stays one.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut sums = [0.0; LANES];
    for chunk in scores.chunks_mut(LANES) {
        for (sum, s) in sums.iter_mut().zip(chunk) {
            *s = exp::<FMA>(*s - shift);
            *sum += *s;
        }
    }
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            sums[i] += sums[i + n];
        }
        n /= 2;
    }
    (max, sums[0])
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
fn finish_body<const FMA: bool>(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
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
    for (o, &a) in out.iter_mut().zip(acc) {
        *o = a * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::noise;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn scores_and_accumulate_agree_with_f64(d in 1usize..150, n in 0usize..40, skip in 0usize..3, seed: u64) {
            let (q, k) = (noise(seed, d + skip), noise(seed ^ 1, n * d + skip));
            let (q, k) = (&q[skip..], &k[skip..]);
            let p = noise(seed ^ 2, n);
            for isa in Isa::all() {
                let micro = Micro::new(isa);
                let mut s = vec![9.0; n];
                (micro.scores)(q, k, 0.25, &mut s);
                for (j, &s) in s.iter().enumerate() {
                    let e = k[j * d..][..d].iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
                    prop_assert!((f64::from(s) - 0.25 * e).abs() < 1e-5);
                    let mut alone = [0.0];
                    (micro.scores)(q, &k[j * d..][..d], 0.25, &mut alone);
                    prop_assert_eq!(alone[0], s);
                }
                let mut acc = noise(seed ^ 3, d + skip);
                let before = acc.clone();
                (micro.accumulate)(&p, k, &mut acc[skip..]);
                let mut stepwise = before.clone();
                for j in 0..n {
                    (micro.accumulate)(&p[j..=j], &k[j * d..][..d], &mut stepwise[skip..]);
                }
                prop_assert_eq!(&acc, &stepwise);
                for c in 0..d {
                    let e = (0..n).map(|j| f64::from(p[j]) * f64::from(k[j * d + c])).sum::<f64>();
                    prop_assert!((f64::from(acc[skip + c]) - f64::from(before[skip + c]) - e).abs() < 1e-5);
                }
            }
        }

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
            (micro.finish)(&[0.0, 0.0, f32::NEG_INFINITY, 0.0], None, &mut out);
            assert_eq!(out, [0.0; 2]);
            (micro.finish)(&[2.0, 4.0, 0.0, 2.0], Some(f32::NEG_INFINITY), &mut out);
            assert_eq!(out, [1.0, 2.0]);
        }
    }
}
