//! `y = f(x)` on f32.
//!
//! The functions of activations vectorise (`math`); those of position tables and the like, which run once per step
//! on few numbers, are the standard library's.

use crate::{
    detect::Isa,
    kernel::{
        math::{erf, erfc, exp, sigmoid, tanh},
        multiversion::multiversion,
        rows::for_rows,
    },
    pool::{Pool, UnsafeSlice},
};

/// Elements a worker takes at a time.
const BLOCK: usize = 1024;

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Unary {
    Abs,
    Ceil,
    Cos,
    Erf,
    Exp,
    Floor,
    /// `x/2 (1 + erf(x / sqrt 2))`.
    Gelu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    Log,
    Neg,
    Reciprocal,
    Relu,
    /// To nearest, ties to even.
    Round,
    Sigmoid,
    /// -1, 0 or 1; NaN for NaN.
    Sign,
    Sin,
    /// `ln(1 + e^x)`.
    Softplus,
    Sqrt,
    /// `x sigmoid(alpha x)`; SiLU with alpha 1.
    Swish {
        alpha: f32,
    },
    Tanh,
}

/// A function compiled for one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct UnaryKernel {
    f: fn(&[f32], f32, &mut [f32]),
    alpha: f32,
}

impl UnaryKernel {
    /// The kernel of `op` for `isa`.
    pub fn new(isa: Isa, op: Unary) -> Self {
        let alpha = if let Unary::Swish { alpha } = op { alpha } else { 1.0 };
        let pick = match op {
            Unary::Abs => abs_loop,
            Unary::Ceil => ceil_loop,
            Unary::Cos => cos_loop,
            Unary::Erf => erf_loop,
            Unary::Exp => exp_loop,
            Unary::Floor => floor_loop,
            Unary::Gelu => gelu_loop,
            Unary::GeluTanh => gelu_tanh_loop,
            Unary::Log => log_loop,
            Unary::Neg => neg_loop,
            Unary::Reciprocal => reciprocal_loop,
            Unary::Relu => relu_loop,
            Unary::Round => round_loop,
            Unary::Sigmoid => sigmoid_loop,
            Unary::Sign => sign_loop,
            Unary::Sin => sin_loop,
            Unary::Softplus => softplus_loop,
            Unary::Sqrt => sqrt_loop,
            Unary::Swish { .. } => swish_loop,
            Unary::Tanh => tanh_loop,
        };
        Self { f: pick(isa), alpha }
    }

    /// `y[i] = f(x[i])`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn run(&self, pool: &Pool, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "lengths of input and output");
        let y = UnsafeSlice::new(y);
        for_rows(pool, x.len().div_ceil(BLOCK), BLOCK, &|blocks| {
            let range = blocks.start * BLOCK..(blocks.end * BLOCK).min(x.len());
            // SAFETY: blocks are disjoint, and each belongs to one worker.
            (self.f)(&x[range.clone()], self.alpha, unsafe { y.range(range) });
        });
    }
}

macro_rules! loops {
    ($($name:ident, $body:ident: |$x:ident, $alpha:ident| $f:expr;)*) => {$(
        #[inline(always)]
        fn $body<const FMA: bool>(x: &[f32], $alpha: f32, y: &mut [f32]) {
            for (y, &$x) in y.iter_mut().zip(x) {
                *y = $f;
            }
        }
        multiversion! { fn $name(x: &[f32], alpha: f32, y: &mut [f32]) = $body; }
    )*};
}

loops! {
    abs_loop, abs_body: |x, _alpha| x.abs();
    ceil_loop, ceil_body: |x, _alpha| x.ceil();
    cos_loop, cos_body: |x, _alpha| x.cos();
    erf_loop, erf_body: |x, _alpha| erf::<FMA>(x);
    exp_loop, exp_body: |x, _alpha| exp::<FMA>(x);
    floor_loop, floor_body: |x, _alpha| x.floor();
    gelu_loop, gelu_body: |x, _alpha| gelu::<FMA>(x);
    gelu_tanh_loop, gelu_tanh_body: |x, _alpha| gelu_tanh::<FMA>(x);
    log_loop, log_body: |x, _alpha| x.ln();
    neg_loop, neg_body: |x, _alpha| -x;
    reciprocal_loop, reciprocal_body: |x, _alpha| 1.0 / x;
    relu_loop, relu_body: |x, _alpha| if x < 0.0 { 0.0 } else { x };
    round_loop, round_body: |x, _alpha| x.round_ties_even();
    sigmoid_loop, sigmoid_body: |x, _alpha| sigmoid::<FMA>(x);
    sign_loop, sign_body: |x, _alpha| if x == 0.0 { 0.0 } else { x.signum() };
    sin_loop, sin_body: |x, _alpha| x.sin();
    softplus_loop, softplus_body: |x, _alpha| if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() };
    sqrt_loop, sqrt_body: |x, _alpha| x.sqrt();
    swish_loop, swish_body: |x, alpha| x * sigmoid::<FMA>(alpha * x);
    tanh_loop, tanh_body: |x, _alpha| tanh::<FMA>(x);
}

/// By the complement, so that the far negative side keeps its relative accuracy.
#[inline(always)]
fn gelu<const FMA: bool>(x: f32) -> f32 {
    0.5 * x * erfc::<FMA>(-x * std::f32::consts::FRAC_1_SQRT_2)
}

#[inline(always)]
fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh::<FMA>(SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::{erfc64, noise};
    use std::num::NonZeroUsize;

    const ALL: [Unary; 20] = [
        Unary::Abs,
        Unary::Ceil,
        Unary::Cos,
        Unary::Erf,
        Unary::Exp,
        Unary::Floor,
        Unary::Gelu,
        Unary::GeluTanh,
        Unary::Log,
        Unary::Neg,
        Unary::Reciprocal,
        Unary::Relu,
        Unary::Round,
        Unary::Sigmoid,
        Unary::Sign,
        Unary::Sin,
        Unary::Softplus,
        Unary::Sqrt,
        Unary::Swish { alpha: 1.702 },
        Unary::Tanh,
    ];

    fn exact(op: Unary, x: f64) -> f64 {
        match op {
            Unary::Abs => x.abs(),
            Unary::Ceil => x.ceil(),
            Unary::Cos => x.cos(),
            Unary::Erf => 1.0 - erfc64(x),
            Unary::Exp => x.exp(),
            Unary::Floor => x.floor(),
            Unary::Gelu => 0.5 * x * erfc64(-x / 2f64.sqrt()),
            Unary::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            Unary::Log => x.ln(),
            Unary::Neg => -x,
            Unary::Reciprocal => 1.0 / x,
            Unary::Relu => x.max(0.0),
            Unary::Round => x.round_ties_even(),
            Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Unary::Sign => x.signum(),
            Unary::Sin => x.sin(),
            Unary::Softplus => x.exp().ln_1p(),
            Unary::Sqrt => x.sqrt(),
            Unary::Swish { alpha } => x / (1.0 + (-f64::from(alpha) * x).exp()),
            Unary::Tanh => x.tanh(),
        }
    }

    #[test]
    fn agree_with_f64() {
        let pool = Pool::new(NonZeroUsize::new(2).unwrap(), false).unwrap();
        for n in [0, 1, 7, 8, 9, 1023, 40_000] {
            let x: Vec<f32> = noise(n as u64, n + 1)[1..].iter().map(|v| v * 8.0).collect();
            for (op, isa) in ALL.into_iter().flat_map(|op| Isa::all().map(move |isa| (op, isa))) {
                let mut y = vec![9.0; n];
                UnaryKernel::new(isa, op).run(&pool, &x, &mut y);
                for (&x, &y) in x.iter().zip(&y) {
                    let e = exact(op, f64::from(x));
                    assert!(y.is_nan() == e.is_nan(), "{op:?} {x}: {y}, expected {e}");
                    assert!(
                        e.is_nan() || (f64::from(y) - e).abs() <= 1e-6 * (1.0 + e.abs()),
                        "{op:?} {x}: {y} {e}"
                    );
                }
            }
        }
    }

    #[test]
    fn special_values() {
        let pool = Pool::new(NonZeroUsize::MIN, false).unwrap();
        let run = |isa, op, x: f32| {
            let mut y = [0.0];
            UnaryKernel::new(isa, op).run(&pool, &[x], &mut y);
            y[0]
        };
        for isa in Isa::all() {
            for op in ALL {
                assert!(run(isa, op, f32::NAN).is_nan(), "{op:?}");
            }
            assert_eq!(run(isa, Unary::Sign, 0.0), 0.0);
            assert_eq!(run(isa, Unary::Softplus, 200.0), 200.0);
            assert_eq!(run(isa, Unary::Softplus, -200.0), 0.0);
            assert_eq!(run(isa, Unary::Sigmoid, f32::NEG_INFINITY), 0.0);
            assert_eq!(run(isa, Unary::Swish { alpha: 1.0 }, 100.0), 100.0);
            assert_eq!(run(isa, Unary::Gelu, -40.0), -0.0);
            assert_eq!(run(isa, Unary::Gelu, 40.0), 40.0);
            assert_eq!(run(isa, Unary::Erf, f32::INFINITY), 1.0);
        }
    }
}
