//! The small gated operators of hybrid models (operator contract, section 3.6), a row at a time.

use super::{
    math::{exp, fma, sigmoid},
    multiversion::multiversion,
    rows::for_rows,
};
use crate::{
    detect::Isa,
    pool::{Pool, UnsafeSlice},
};

/// Partial sums of a reduction.
const LANES: usize = 32;

/// Of x, the gate, the weight and epsilon, into a row.
type GatedNorm = fn(&[f32], &[f32], &[f32], f32, &mut [f32]);
/// Of three rows, into a row.
type OfThree = fn(&[f32], &[f32], &[f32], &mut [f32]);

/// The kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Gated {
    norm_silu: GatedNorm,
    norm_sigmoid: GatedNorm,
    add: fn(&[f32], &[f32], f32, &mut [f32]),
    decay: OfThree,
    beta: fn(&[f32], &mut [f32]),
}

impl Gated {
    /// The kernels for `isa`.
    pub fn new(isa: Isa) -> Self {
        Self {
            norm_silu: norm_silu(isa),
            norm_sigmoid: norm_sigmoid(isa),
            add: add(isa),
            decay: decay(isa),
            beta: beta(isa),
        }
    }

    /// `rms(x) * scale * activation(gate)` over each group of `scale.len()` values; the activation is `g * sigmoid(g)` with
    /// `silu`, else the sigmoid.
    ///
    /// # Panics
    /// When lengths do not agree.
    pub fn norm(&self, pool: &Pool, [x, gate, scale]: [&[f32]; 3], (eps, silu): (f32, bool), y: &mut [f32]) {
        let width = scale.len();
        assert!(width > 0 && x.len().is_multiple_of(width), "{} values in groups of {width}", x.len());
        assert!(gate.len() == x.len() && y.len() == x.len(), "lengths of values, gate and output");
        let row = if silu { self.norm_silu } else { self.norm_sigmoid };
        let y = UnsafeSlice::new(y);
        for_rows(pool, x.len() / width, width, &|rows| {
            for r in rows {
                let span = r * width..(r + 1) * width;
                // SAFETY: rows are disjoint, and each belongs to one worker.
                let y = unsafe { y.range(span.clone()) };
                row(&x[span.clone()], &gate[span], scale, eps, y);
            }
        });
    }

    /// `x + y * gate`, the gate one value a row of `x` and `y`.
    ///
    /// # Panics
    /// When lengths do not agree.
    pub fn add(&self, pool: &Pool, [x, y, gate]: [&[f32]; 3], out: &mut [f32]) {
        assert!(x.len() == y.len() && x.len() == out.len(), "lengths of values and output");
        if x.is_empty() {
            return;
        }
        assert!(!gate.is_empty() && x.len().is_multiple_of(gate.len()), "a gate for every row");
        let width = x.len() / gate.len();
        let out = UnsafeSlice::new(out);
        for_rows(pool, gate.len(), width, &|rows| {
            for r in rows {
                let span = r * width..(r + 1) * width;
                // SAFETY: rows are disjoint, and each belongs to one worker.
                let out = unsafe { out.range(span.clone()) };
                (self.add)(&x[span.clone()], &y[span], gate[r], out);
            }
        });
    }

    /// `decay = scale * softplus(a + bias)` over rows of `bias.len()` heads.
    ///
    /// # Panics
    /// When lengths do not agree.
    pub fn decay(&self, a: &[f32], (bias, scale): (&[f32], &[f32]), out: &mut [f32]) {
        assert!(bias.len() == scale.len() && !bias.is_empty(), "lengths of bias and scale");
        assert!(a.len() == out.len() && a.len().is_multiple_of(bias.len()), "rows of heads");
        for (a, out) in a.chunks_exact(bias.len()).zip(out.chunks_exact_mut(bias.len())) {
            (self.decay)(a, bias, scale, out);
        }
    }

    /// `beta = sigmoid(b)`.
    pub fn beta(&self, b: &[f32], out: &mut [f32]) {
        (self.beta)(b, out);
    }
}

multiversion! {
    fn norm_silu(x: &[f32], gate: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) = norm_silu_body;
}
multiversion! {
    fn norm_sigmoid(x: &[f32], gate: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) = norm_sigmoid_body;
}
multiversion! {
    fn add(x: &[f32], y: &[f32], gate: f32, out: &mut [f32]) = add_body;
}
multiversion! {
    fn decay(a: &[f32], bias: &[f32], scale: &[f32], out: &mut [f32]) = decay_body;
}
multiversion! {
    fn beta(b: &[f32], out: &mut [f32]) = beta_body;
}

#[inline(always)]
fn norm_silu_body<const FMA: bool>(x: &[f32], gate: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) {
    norm::<FMA>(x, gate, scale, eps, y, |g| g * sigmoid::<FMA>(g));
}

#[inline(always)]
fn norm_sigmoid_body<const FMA: bool>(x: &[f32], gate: &[f32], scale: &[f32], eps: f32, y: &mut [f32]) {
    norm::<FMA>(x, gate, scale, eps, y, sigmoid::<FMA>);
}

#[inline(always)]
fn norm<const FMA: bool>(
    x: &[f32],
    gate: &[f32],
    scale: &[f32],
    eps: f32,
    y: &mut [f32],
    activation: impl Fn(f32) -> f32,
) {
    let mut sums = [0.0; LANES];
    for chunk in x.chunks(LANES) {
        for (s, &v) in sums.iter_mut().zip(chunk) {
            *s = fma::<FMA>(v, v, *s);
        }
    }
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            sums[i] += sums[i + n];
        }
        n /= 2;
    }
    let inv = 1.0 / (sums[0] / x.len() as f32 + eps).sqrt();
    for (((y, &x), &g), &s) in y.iter_mut().zip(x).zip(gate).zip(scale) {
        *y = x * inv * s * activation(g);
    }
}

#[inline(always)]
fn add_body<const FMA: bool>(x: &[f32], y: &[f32], gate: f32, out: &mut [f32]) {
    for ((o, &x), &y) in out.iter_mut().zip(x).zip(y) {
        // Rounded before the sum, as the contract has it.
        let product = y * gate;
        *o = x + product;
    }
}

/// `max(v, 0) + ln(1 + e^-|v|)`: the logarithm by the standard library, once a head and token.
#[inline(always)]
fn decay_body<const FMA: bool>(a: &[f32], bias: &[f32], scale: &[f32], out: &mut [f32]) {
    for (((o, &a), &b), &s) in out.iter_mut().zip(a).zip(bias).zip(scale) {
        let v = a + b;
        *o = s * (v.max(0.0) + exp::<FMA>(-v.abs()).ln_1p());
    }
}

#[inline(always)]
fn beta_body<const FMA: bool>(b: &[f32], out: &mut [f32]) {
    for (o, &b) in out.iter_mut().zip(b) {
        *o = sigmoid::<FMA>(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::noise;
    use doyen_graph::ops::{
        OpDef,
        gated::{GateActivation, GatedAdd, GatedRmsNorm, LinearAttentionGate},
    };
    use doyen_tensor::Tensor;
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    fn tensor(dims: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(dims.to_vec(), values).unwrap()
    }

    fn close(got: &[f32], want: &Tensor) -> Result<(), TestCaseError> {
        let want = want.to_f32().unwrap();
        prop_assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(&want) {
            prop_assert!((g - w).abs() <= 4e-6 * (1.0 + w.abs()), "{} {}", g, w);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn gated_operators_agree_with_the_reference(
            rows in 1usize..5, groups in 1usize..4, width in 1usize..80, silu: bool, spread in 0.1f32..30.0, seed: u64,
        ) {
            let pool = Pool::new(NonZeroUsize::MIN, false).unwrap();
            let n = rows * groups * width;
            let draw = |i: u64, n: usize| noise(seed ^ (i << 40), n).iter().map(|v| v * spread).collect::<Vec<_>>();
            let (x, gate, scale) = (draw(0, n), draw(1, n), noise(seed ^ 7, width));
            let dims = [rows, groups * width];
            let (tx, tg, ts) = (tensor(&dims, &x), tensor(&dims, &gate), tensor(&[width], &scale));
            let activation = if silu { GateActivation::Silu } else { GateActivation::Sigmoid };
            let norm = GatedRmsNorm { epsilon: 1e-3, activation };
            let want = norm.eval(&[Some(&tx), Some(&ts), Some(&tg)], 1).unwrap();
            let heads = draw(2, groups * width);
            let th = tensor(&[groups * width], &heads);
            let ta = tensor(&[1, rows, groups * width], &x);
            let gates = LinearAttentionGate.eval(&[Some(&ta), Some(&th), Some(&th), Some(&ta)], 2).unwrap();
            let own = draw(3, rows);
            let sum = GatedAdd.eval(&[Some(&tx), Some(&tg), Some(&tensor(&[rows, 1], &own))], 1).unwrap();
            for isa in Isa::all() {
                let (k, mut y) = (Gated::new(isa), vec![9.0; n]);
                k.norm(&pool, [&x, &gate, &scale], (1e-3, silu), &mut y);
                close(&y, &want[0])?;
                k.decay(&x, (&heads, &heads), &mut y);
                close(&y, &gates[0])?;
                k.beta(&x, &mut y);
                close(&y, &gates[1])?;
                k.add(&pool, [&x, &gate, &own], &mut y);
                close(&y, &sum[0])?;
            }
        }
    }
}
