//! `y = f(a, b)` on f32 under broadcasting, and the fused products of gated feed-forwards.

use super::Broadcast;
use crate::{
    detect::Isa,
    kernel::{
        math::{fma, sigmoid},
        multiversion::multiversion,
        rows::for_rows,
    },
    pool::{Pool, UnsafeSlice},
};

/// Elements a worker takes at a time of a long run.
const BLOCK: usize = 1024;

/// A function of two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// The larger; NaN when one of them is.
    Max,
    /// The smaller; NaN when one of them is.
    Min,
    Pow,
}

/// A function compiled for one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct BinaryKernel {
    /// Operands as long as the result, or of one number.
    f: fn(&[f32], &[f32], &mut [f32]),
}

impl BinaryKernel {
    /// The kernel of `op` for `isa`.
    pub fn new(isa: Isa, op: Binary) -> Self {
        let pick = match op {
            Binary::Add => add,
            Binary::Sub => sub,
            Binary::Mul => mul,
            Binary::Div => div,
            Binary::Max => max,
            Binary::Min => min,
            Binary::Pow => pow,
        };
        Self { f: pick(isa) }
    }

    /// `y = f(a, b)`, paired as `shape` says.
    ///
    /// # Panics
    /// When the lengths are not those of `shape`.
    pub fn run(&self, pool: &Pool, shape: &Broadcast, a: &[f32], b: &[f32], y: &mut [f32]) {
        assert_eq!(shape.sizes(), [a.len(), b.len(), y.len()], "lengths of operands and result");
        if y.is_empty() {
            return;
        }
        let (run, [step_a, step_b]) = shape.run();
        let y = UnsafeSlice::new(y);
        // Elements start .. end of run i.
        let part = |i: usize, start: usize, end: usize| {
            let [at_a, at_b] = shape.offsets(i);
            let take = |at: usize, step: usize| if step == 0 { at..at + 1 } else { at + start..at + end };
            // SAFETY: runs, and blocks of a run, are disjoint, and each belongs to one worker.
            let y = unsafe { y.range(i * run + start..i * run + end) };
            (self.f)(&a[take(at_a, step_a)], &b[take(at_b, step_b)], y);
        };
        let runs = shape.runs();
        if runs == 1 {
            for_rows(pool, run.div_ceil(BLOCK), BLOCK, &|blocks| {
                part(0, blocks.start * BLOCK, (blocks.end * BLOCK).min(run));
            });
        } else {
            for_rows(pool, runs, run, &|range| range.for_each(|i| part(i, 0, run)));
        }
    }
}

macro_rules! loops {
    ($($name:ident, $body:ident: |$a:ident, $b:ident| $f:expr;)*) => {$(
        #[inline(always)]
        fn $body<const FMA: bool>(a: &[f32], b: &[f32], y: &mut [f32]) {
            match (a, b) {
                (&[$a], b) if b.len() == y.len() => {
                    for (y, &$b) in y.iter_mut().zip(b) {
                        *y = $f;
                    }
                }
                (a, &[$b]) if a.len() == y.len() => {
                    for (y, &$a) in y.iter_mut().zip(a) {
                        *y = $f;
                    }
                }
                (&[$a], &[$b]) => y.fill($f),
                _ => {
                    for ((y, &$a), &$b) in y.iter_mut().zip(a).zip(b) {
                        *y = $f;
                    }
                }
            }
        }
        multiversion! { fn $name(a: &[f32], b: &[f32], y: &mut [f32]) = $body; }
    )*};
}

loops! {
    add, add_body: |a, b| a + b;
    sub, sub_body: |a, b| a - b;
    mul, mul_body: |a, b| a * b;
    div, div_body: |a, b| a / b;
    max, max_body: |a, b| if a > b || a.is_nan() { a } else { b };
    min, min_body: |a, b| if a < b || a.is_nan() { a } else { b };
    pow, pow_body: |a, b| if b == 2.0 { a * a } else { a.powf(b) };
}

multiversion! {
    /// `y[i] = silu(gate[i]) * up[i]`, for equal lengths.
    pub fn silu_mul(gate: &[f32], up: &[f32], y: &mut [f32]) = silu_mul_body;
}
multiversion! {
    /// `y[i] += factor * x[i]`, for equal lengths.
    pub fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) = add_scaled_body;
}

#[inline(always)]
fn silu_mul_body<const FMA: bool>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
        *y = g * sigmoid::<FMA>(g) * u;
    }
}

#[inline(always)]
fn add_scaled_body<const FMA: bool>(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = fma::<FMA>(factor, x, *y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::noise;
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    const ALL: [Binary; 7] =
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Min, Binary::Pow];

    fn exact(op: Binary, a: f32, b: f32) -> f32 {
        match op {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Max => a.max(b),
            Binary::Min => a.min(b),
            Binary::Pow => a.powf(b),
        }
    }

    /// A shape and, for each operand, which of its axes are 1.
    fn shapes() -> impl Strategy<Value = (Vec<usize>, Vec<usize>, Vec<usize>)> {
        let extent = prop_oneof![1usize..5, Just(8), Just(33), Just(0)];
        prop::collection::vec((extent, any::<[bool; 2]>()), 0..5).prop_flat_map(|axes| {
            (Just(axes), 0usize..3).prop_map(|(axes, drop)| {
                let side =
                    |s: usize| axes.iter().map(|(e, one)| if one[s] { 1 } else { *e }).collect::<Vec<_>>();
                let (a, b) = (side(0), side(1));
                let out: Vec<usize> = a.iter().zip(&b).map(|(&a, &b)| if a == 1 { b } else { a }).collect();
                // Leading axes of extent 1 may be left out.
                let ones = b.iter().take_while(|&&e| e == 1).count().min(drop);
                (out, a, b[ones..].to_vec())
            })
        })
    }

    proptest! {
        #[test]
        fn agree_with_indexing((out, a_dims, b_dims) in shapes(), seed: u64, threads in 1usize..3) {
            let pool = Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap();
            let shape = Broadcast::new(&a_dims, &b_dims).unwrap();
            let [na, nb, n] = shape.sizes();
            let (a, b) = (noise(seed, na), noise(seed ^ 1, nb));
            let at = |dims: &[usize], mut i: usize| {
                let (mut offset, mut stride) = (0, 1);
                for (k, &e) in out.iter().rev().enumerate() {
                    let index = i % e;
                    i /= e;
                    if let Some(own) = dims.len().checked_sub(k + 1).map(|j| dims[j]) {
                        offset += if own == 1 { 0 } else { index * stride };
                        stride *= own;
                    }
                }
                offset
            };
            for (op, isa) in ALL.into_iter().flat_map(|op| Isa::all().map(move |isa| (op, isa))) {
                let mut y = vec![9.0; n];
                BinaryKernel::new(isa, op).run(&pool, &shape, &a, &b, &mut y);
                for (i, y) in y.iter().enumerate() {
                    let e = exact(op, a[at(&a_dims, i)], b[at(&b_dims, i)]);
                    prop_assert!(*y == e || (y.is_nan() && e.is_nan()), "{op:?} {y} {e}");
                }
            }
        }
    }

    #[test]
    fn long_runs_are_cut_into_blocks() {
        let pool = Pool::new(NonZeroUsize::new(3).unwrap(), false).unwrap();
        let a = noise(1, 50_001);
        for isa in Isa::all() {
            let mut y = vec![0.0; a.len()];
            let kernel = BinaryKernel::new(isa, Binary::Sub);
            kernel.run(&pool, &Broadcast::new(&[a.len()], &[1]).unwrap(), &a, &[0.5], &mut y);
            assert!(y.iter().zip(&a).all(|(y, a)| *y == a - 0.5));
            kernel.run(&pool, &Broadcast::new(&[1], &[a.len()]).unwrap(), &[0.5], &a, &mut y);
            assert!(y.iter().zip(&a).all(|(y, a)| *y == 0.5 - a));
        }
    }

    #[test]
    fn nan_wins_in_max_and_min() {
        let pool = Pool::new(NonZeroUsize::MIN, false).unwrap();
        let shape = Broadcast::new(&[2], &[2]).unwrap();
        for (op, isa) in
            [Binary::Max, Binary::Min].into_iter().flat_map(|op| Isa::all().map(move |i| (op, i)))
        {
            let mut y = [0.0; 2];
            BinaryKernel::new(isa, op).run(&pool, &shape, &[f32::NAN, 1.0], &[1.0, f32::NAN], &mut y);
            assert!(y[0].is_nan() && y[1].is_nan());
        }
    }

    #[test]
    fn fused() {
        let (g, u) = (noise(1, 77), noise(2, 77));
        for isa in Isa::all() {
            let mut y = vec![0.0; 77];
            silu_mul(isa)(&g, &u, &mut y);
            for ((y, g), u) in y.iter().zip(&g).zip(&u) {
                let (g, u) = (f64::from(*g), f64::from(*u));
                assert!((f64::from(*y) - g / (1.0 + (-g).exp()) * u).abs() < 1e-6);
            }
            let mut z = g.clone();
            add_scaled(isa)(&mut z, 0.5, &u);
            assert!(z.iter().zip(&g).zip(&u).all(|((z, g), u)| (z - (g + 0.5 * u)).abs() < 1e-6));
        }
    }
}
