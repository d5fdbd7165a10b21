//! Softmax, its logarithm, and the largest elements, along the last axis.
//!
//! Rows are independent of each other; the sum of a row has one order (16 interleaved partial sums, then pairwise).
//! Expert routing has rules of its own (`route`).

use super::{math::exp, multiversion::multiversion, rows::for_rows};
use crate::{
    detect::Isa,
    pool::{Pool, UnsafeSlice},
};
use std::cmp::Ordering;

const LANES: usize = 16;

/// Softmax of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Softmax {
    row: fn(&[f32], &mut [f32]),
}

impl Softmax {
    /// `e^(x - max) / sum`, or with `log` its logarithm.
    pub fn new(isa: Isa, log: bool) -> Self {
        Self { row: if log { log_softmax(isa) } else { softmax(isa) } }
    }

    /// The softmax of each row of `x [rows, width]`. A row of nothing but `-inf` gives NaN.
    ///
    /// # Panics
    /// When `x` is not whole rows, or `y` not as long.
    pub fn rows(&self, pool: &Pool, x: &[f32], width: usize, y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "lengths of input and output");
        if x.is_empty() {
            return;
        }
        assert!(x.len().is_multiple_of(width), "{} elements are not rows of {width}", x.len());
        let y = UnsafeSlice::new(y);
        for_rows(pool, x.len() / width, width, &|rows| {
            for r in rows {
                let span = r * width..(r + 1) * width;
                // SAFETY: rows are disjoint, and each belongs to one worker.
                (self.row)(&x[span.clone()], unsafe { y.range(span) });
            }
        });
    }
}

multiversion! {
    fn softmax(x: &[f32], y: &mut [f32]) = softmax_body;
}
multiversion! {
    fn log_softmax(x: &[f32], y: &mut [f32]) = log_softmax_body;
}

#[inline(always)]
fn max_of(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in x.chunks(LANES) {
        for (m, &v) in lanes.iter_mut().zip(chunk) {
            *m = if v > *m { v } else { *m };
        }
    }
    lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// Writes `e^(x - max)` and returns the sum.
#[inline(always)]
fn exp_sum<const FMA: bool>(x: &[f32], max: f32, y: &mut [f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        for ((s, &x), y) in sums.iter_mut().zip(x).zip(y) {
            *y = exp::<FMA>(x - max);
            *s += *y;
        }
    }
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            sums[i] += sums[i + n];
        }
        n /= 2;
    }
    sums[0]
}

#[inline(always)]
fn softmax_body<const FMA: bool>(x: &[f32], y: &mut [f32]) {
    let sum = exp_sum::<FMA>(x, max_of(x), y);
    for y in y {
        *y /= sum;
    }
}

#[inline(always)]
fn log_softmax_body<const FMA: bool>(x: &[f32], y: &mut [f32]) {
    let max = max_of(x);
    let log = exp_sum::<FMA>(x, max, y).ln();
    for (y, &x) in y.iter_mut().zip(x) {
        *y = x - max - log;
    }
}

/// The first `values.len()` elements of `x` in descending order (ascending, unless `largest`) with their indices. Ties
/// go to the lower index; NaN counts as larger than every number, as the TopK operator has it.
///
/// For few elements out of many: the cost is their product at worst, and no memory is taken.
///
/// # Panics
/// When more are asked for than there are, or the outputs differ in length.
pub fn top_k(x: &[f32], largest: bool, values: &mut [f32], indices: &mut [i64]) {
    let k = values.len();
    assert!(k <= x.len(), "{k} of {} elements", x.len());
    assert_eq!(indices.len(), k, "lengths of values and indices");
    let order = |a: f32, b: f32| a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
    let first = if largest { Ordering::Greater } else { Ordering::Less };
    let mut found = 0;
    for (i, &v) in x.iter().enumerate() {
        if found == k && (k == 0 || order(v, values[k - 1]) != first) {
            continue;
        }
        let at = values[..found].partition_point(|&w| order(v, w) != first);
        found = (found + 1).min(k);
        values.copy_within(at..found - 1, at + 1);
        indices.copy_within(at..found - 1, at + 1);
        (values[at], indices[at]) = (v, i as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::noise;
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    proptest! {
        #[test]
        fn rows_agree_with_f64(rows in 0usize..4, width in 1usize..100, seed: u64, spread in 0.1f32..60.0, log: bool) {
            let x: Vec<f32> = noise(seed, rows * width).iter().map(|v| v * spread).collect();
            let pool = Pool::new(NonZeroUsize::MIN, false).unwrap();
            for isa in Isa::all() {
                let mut y = vec![9.0; x.len()];
                Softmax::new(isa, log).rows(&pool, &x, width, &mut y);
                for (x, y) in x.chunks(width).zip(y.chunks(width)) {
                    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let sum: f64 = x.iter().map(|&v| (f64::from(v) - f64::from(max)).exp()).sum();
                    for (&x, &y) in x.iter().zip(y) {
                        let e = f64::from(x) - f64::from(max) - sum.ln();
                        let e = if log { e } else { e.exp() };
                        prop_assert!((f64::from(y) - e).abs() < 2e-6 * (1.0 + e.abs()), "{y} {e}");
                    }
                }
            }
        }

        #[test]
        fn top_k_is_a_stable_sort(x in prop::collection::vec(-5i32..5, 0..40), k in 0usize..40, largest: bool, nan: bool) {
            let mut x: Vec<f32> = x.iter().map(|&v| v as f32).collect();
            if nan {
                x.iter_mut().step_by(7).for_each(|v| *v = f32::NAN);
            }
            let k = k.min(x.len());
            let key = |v: f32| if v.is_nan() { 1e9 } else { v };
            let mut expected: Vec<usize> = (0..x.len()).collect();
            expected.sort_by(|&a, &b| {
                let o = key(x[a]).total_cmp(&key(x[b]));
                if largest { o.reverse() } else { o }
            });
            let (mut values, mut indices) = (vec![0.0; k], vec![-1; k]);
            top_k(&x, largest, &mut values, &mut indices);
            for (i, &e) in expected[..k].iter().enumerate() {
                prop_assert_eq!(indices[i], e as i64);
                prop_assert_eq!(values[i].to_bits(), x[e].to_bits());
            }
        }
    }

    #[test]
    fn rows_on_several_threads_are_the_same() {
        let x = noise(5, 64 * 1001);
        for isa in Isa::all() {
            let run = |threads: usize| {
                let pool = Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap();
                let mut y = vec![0.0; x.len()];
                Softmax::new(isa, false).rows(&pool, &x, 1001, &mut y);
                y
            };
            assert_eq!(run(1), run(3));
        }
    }
}
