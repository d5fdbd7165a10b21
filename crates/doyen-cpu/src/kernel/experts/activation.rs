//! Activation functions of experts (operator contract, 1.7), with and without a gate.

use crate::{
    detect::Isa,
    kernel::{
        math::{fma, sigmoid},
        multiversion::multiversion,
    },
};

/// The function between FC1 and FC2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x`.
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    Gelu,
    /// `x sigmoid(x)`.
    Silu,
    /// `G sigmoid(alpha G) (L + beta)` with `G = min(g, limit)` and `L` = `l` clamped to `-limit..limit`.
    SwiGlu {
        /// Factor of the gate inside the sigmoid.
        alpha: f32,
        /// Added to the linear part.
        beta: f32,
        /// Clamp; infinite when there is none.
        limit: f32,
    },
}

/// Where gate rows `g` and linear rows `l` are. With a gate, an activation other than SwiGLU gives `act(g) * l`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gate {
    /// There is no gate: `act(h)`.
    None,
    /// FC1 row `2 i` is gate `i`, row `2 i + 1` linear `i`.
    Interleaved,
    /// FC1 row `i` is gate `i`, row `inter + i` linear `i`.
    Concatenated,
    /// FC1 row `i` is gate `i`, FC3 row `i` linear `i`.
    Separate,
}

/// The operand of an activation for outputs `0 .. out.len()`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operand<'a> {
    /// `h`.
    Plain(&'a [f32]),
    /// `g` and `l`.
    Gated(&'a [f32], &'a [f32]),
    /// `g`, `l`, `g`, `l`, ...
    Pairs(&'a [f32]),
}

impl Activation {
    /// Writes `act` of the operand; each element depends on its own inputs only, bit for bit.
    pub(super) fn apply(self, isa: Isa, operand: Operand<'_>, out: &mut [f32]) {
        apply(isa)(self, operand, out);
    }
}

multiversion! {
    fn apply(act: Activation, operand: Operand<'_>, out: &mut [f32]) = apply_body;
}

#[inline(always)]
fn apply_body<const FMA: bool>(act: Activation, operand: Operand<'_>, out: &mut [f32]) {
    // Written so that NaN passes, which min and max would swallow.
    match act {
        Activation::Identity => plain(operand, out, |x| x),
        Activation::Relu => plain(operand, out, |x| if x < 0.0 { 0.0 } else { x }),
        Activation::Gelu => plain(operand, out, |x| {
            // 0.5 (1 + tanh(u)) = sigmoid(2 u).
            let inner = fma::<FMA>(0.044_715 * x * x, x, x);
            x * sigmoid::<FMA>(1.595_769 * inner)
        }),
        Activation::Silu => plain(operand, out, |x| x * sigmoid::<FMA>(x)),
        Activation::SwiGlu { alpha, beta, limit } => gated(operand, out, |g, l| {
            let g = if g > limit { limit } else { g };
            let l = if l > limit { limit } else { l };
            let l = if l < -limit { -limit } else { l };
            g * sigmoid::<FMA>(alpha * g) * (l + beta)
        }),
    }
}

/// `act(h)`, or `act(g) * l` where there is a gate.
#[inline(always)]
fn plain(operand: Operand<'_>, out: &mut [f32], act: impl Fn(f32) -> f32) {
    match operand {
        Operand::Plain(h) => out.iter_mut().zip(h).for_each(|(o, &h)| *o = act(h)),
        _ => gated(operand, out, |g, l| act(g) * l),
    }
}

/// `act(g, l)`; without a gate `l` is 0.
#[inline(always)]
fn gated(operand: Operand<'_>, out: &mut [f32], act: impl Fn(f32, f32) -> f32) {
    match operand {
        Operand::Plain(h) => out.iter_mut().zip(h).for_each(|(o, &h)| *o = act(h, 0.0)),
        Operand::Gated(g, l) => {
            for ((o, &g), &l) in out.iter_mut().zip(g).zip(l) {
                *o = act(g, l);
            }
        }
        Operand::Pairs(h) => {
            for (o, &[g, l]) in out.iter_mut().zip(h.as_chunks::<2>().0) {
                *o = act(g, l);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Contract 1.7: alpha 1.702, beta 1, limit 7; in all three placements.
    #[test]
    fn worked_example() {
        let act = Activation::SwiGlu { alpha: 1.702, beta: 1.0, limit: 7.0 };
        let h = [10.0, 10.0, -10.0, -10.0, 2.0, -10.0, 2.0, 0.5];
        let (g, l) = ([10.0, -10.0, 2.0, 2.0], [10.0, -10.0, -10.0, 0.5]);
        for isa in Isa::all() {
            for operand in [Operand::Pairs(&h), Operand::Gated(&g, &l)] {
                let mut a = [0.0; 4];
                act.apply(isa, operand, &mut a);
                for (found, expected) in a.iter().zip([55.99963, 2.434776e-06, -11.61395, 2.903488f32]) {
                    assert!(
                        (found - expected).abs() <= 2e-6 * expected.abs(),
                        "{isa}: {found} for {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn plain_functions_match_f64() {
        let x: Vec<f32> = (-400..401).map(|i| i as f32 / 10.0).collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gelu = |x: f64| {
            0.5 * x * (1.0 + (f64::sqrt(2.0 / std::f64::consts::PI) * (x + 0.044715 * x * x * x)).tanh())
        };
        for isa in Isa::all() {
            for act in [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu] {
                let mut y = vec![0.0; x.len()];
                act.apply(isa, Operand::Plain(&x), &mut y);
                for (&x, &y) in x.iter().zip(&y) {
                    let (v, y) = (f64::from(x), f64::from(y));
                    let expected = match act {
                        Activation::Identity => v,
                        Activation::Relu => v.max(0.0),
                        Activation::Gelu => gelu(v),
                        _ => v * sigmoid(v),
                    };
                    let bound = 4e-7 * v.abs().max(1e-3);
                    assert!((y - expected).abs() <= bound, "{isa} {act:?}({x}): {y} for {expected}");
                }
            }
        }
    }

    #[test]
    fn nan_passes_and_places_do_not_matter() {
        let all = [
            Activation::Identity,
            Activation::Relu,
            Activation::Gelu,
            Activation::Silu,
            Activation::SwiGlu { alpha: 1.0, beta: 0.0, limit: 3.0 },
            Activation::SwiGlu { alpha: 1.0, beta: 0.0, limit: f32::INFINITY },
        ];
        let (g, l): (Vec<f32>, Vec<f32>) = (0..21).map(|i| (i as f32 - 10.3, 4.0 - i as f32 * 0.4)).unzip();
        for isa in Isa::all() {
            for act in all {
                let mut y = [0.0; 2];
                act.apply(isa, Operand::Gated(&[f32::NAN, 1.0], &[1.0, f32::NAN]), &mut y);
                assert!(y.iter().all(|v| v.is_nan()), "{isa} {act:?}: {y:?}");
                let mut whole = vec![0.0; g.len()];
                act.apply(isa, Operand::Gated(&g, &l), &mut whole);
                for start in 0..g.len() {
                    let mut part = vec![0.0; g.len() - start];
                    act.apply(isa, Operand::Gated(&g[start..], &l[start..]), &mut part);
                    assert_eq!(part, whole[start..]);
                    let pairs: Vec<f32> =
                        g[start..].iter().zip(&l[start..]).flat_map(|(&g, &l)| [g, l]).collect();
                    act.apply(isa, Operand::Pairs(&pairs), &mut part);
                    assert_eq!(part, whole[start..]);
                }
            }
        }
    }
}
