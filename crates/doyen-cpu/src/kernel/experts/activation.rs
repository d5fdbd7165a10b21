//! Activation functions of experts (operator contract, 1.7), with and without a gate.

use crate::detect::Isa;

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
        match isa {
            // SAFETY: the variant holds the proof that AVX2, FMA and F16C are there.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => unsafe { avx2::apply(self, operand, out) },
            Isa::Scalar => self.apply_scalar(operand, out),
        }
    }

    fn apply_scalar(self, operand: Operand<'_>, out: &mut [f32]) {
        for (i, o) in out.iter_mut().enumerate() {
            *o = match operand {
                Operand::Plain(h) => self.plain(h[i]),
                Operand::Gated(g, l) => self.gated(g[i], l[i]),
                Operand::Pairs(h) => self.gated(h[2 * i], h[2 * i + 1]),
            };
        }
    }

    fn plain(self, x: f32) -> f32 {
        match self {
            Self::Identity => x,
            Self::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Self::Gelu => x * sigmoid(gelu_inner(x)),
            Self::Silu => x * sigmoid(x),
            Self::SwiGlu { .. } => self.gated(x, 0.0),
        }
    }

    fn gated(self, g: f32, l: f32) -> f32 {
        let Self::SwiGlu { alpha, beta, limit } = self else {
            return self.plain(g) * l;
        };
        // Written so that NaN passes, which min and max would swallow.
        let g = if g > limit { limit } else { g };
        let l = if l > limit { limit } else { l };
        let l = if l < -limit { -limit } else { l };
        g * sigmoid(alpha * g) * (l + beta)
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `2 sqrt(2 / pi) (x + 0.044715 x^3)`: `0.5 (1 + tanh(u)) = sigmoid(2 u)`.
fn gelu_inner(x: f32) -> f32 {
    GELU_SLOPE * (x + GELU_CUBE * x * x * x)
}

const GELU_SLOPE: f32 = 1.595_769;
const GELU_CUBE: f32 = 0.044_715;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    //! The same on eight lanes; a last partial vector is padded, so an element's place does not matter.

    #![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

    use super::{Activation, GELU_CUBE, GELU_SLOPE, Operand};
    use crate::kernel::exp::sigmoid;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn apply(act: Activation, operand: Operand<'_>, out: &mut [f32]) {
        for (i, o) in out.chunks_mut(8).enumerate() {
            let y = match operand {
                Operand::Plain(h) => plain(act, load(&h[8 * i..])),
                Operand::Gated(g, l) => gated(act, load(&g[8 * i..]), load(&l[8 * i..])),
                Operand::Pairs(h) => {
                    let h = &h[16 * i..];
                    let (g, l) = split(load(h), load(h.get(8..).unwrap_or_default()));
                    gated(act, g, l)
                }
            };
            let mut lanes = [0f32; 8];
            // SAFETY: eight numbers.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), y) };
            o.copy_from_slice(&lanes[..o.len()]);
        }
    }

    /// Up to eight numbers, and zeros.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn load(x: &[f32]) -> __m256 {
        if let Some(eight) = x.first_chunk::<8>() {
            // SAFETY: eight numbers.
            return unsafe { _mm256_loadu_ps(eight.as_ptr()) };
        }
        let mut lanes = [0f32; 8];
        lanes[..x.len()].copy_from_slice(x);
        // SAFETY: eight numbers.
        unsafe { _mm256_loadu_ps(lanes.as_ptr()) }
    }

    /// Even and odd elements of sixteen.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn split(a: __m256, b: __m256) -> (__m256, __m256) {
        let order = |v: __m256| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)));
        (order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)), order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)))
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn plain(act: Activation, x: __m256) -> __m256 {
        match act {
            Activation::Identity => x,
            // max returns its second operand when one is NaN.
            Activation::Relu => _mm256_max_ps(_mm256_setzero_ps(), x),
            Activation::Gelu => {
                let cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
                let inner = _mm256_fmadd_ps(_mm256_set1_ps(GELU_CUBE), cube, x);
                _mm256_mul_ps(x, sigmoid(_mm256_mul_ps(_mm256_set1_ps(GELU_SLOPE), inner)))
            }
            Activation::Silu => _mm256_mul_ps(x, sigmoid(x)),
            Activation::SwiGlu { .. } => gated(act, x, _mm256_setzero_ps()),
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn gated(act: Activation, g: __m256, l: __m256) -> __m256 {
        let Activation::SwiGlu { alpha, beta, limit } = act else {
            return _mm256_mul_ps(plain(act, g), l);
        };
        let limit = _mm256_set1_ps(limit);
        let g = _mm256_min_ps(limit, g);
        let l = _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), limit), _mm256_min_ps(limit, l));
        let gate = _mm256_mul_ps(g, sigmoid(_mm256_mul_ps(_mm256_set1_ps(alpha), g)));
        _mm256_mul_ps(gate, _mm256_add_ps(l, _mm256_set1_ps(beta)))
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
