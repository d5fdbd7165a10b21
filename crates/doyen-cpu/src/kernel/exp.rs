//! The exponential function on eight lanes, for activations and anything else that needs many of them.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use std::arch::x86_64::*;

/// `e^x` within 2 units in the last place for `x` in -87.3..88; below it is about `e^-87.3`, above about `e^88`, NaN
/// stays NaN. Reduction to `x = n ln 2 + r` and the polynomial of the Cephes library.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn exp(x: __m256) -> __m256 {
    // With NaN, min and max return their second operand.
    let x = _mm256_max_ps(_mm256_set1_ps(-87.3), _mm256_min_ps(_mm256_set1_ps(88.0), x));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, the first with few enough bits that its multiples are exact.
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm256_set1_ps(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    let p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0)));
    let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
    _mm256_mul_ps(p, _mm256_castsi256_ps(power))
}

/// `1 / (1 + e^-x)`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sigmoid(x: __m256) -> __m256 {
    let one = _mm256_set1_ps(1.0);
    _mm256_div_ps(one, _mm256_add_ps(one, exp(_mm256_sub_ps(_mm256_setzero_ps(), x))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::Avx2;

    fn vector(x: f32) -> f32 {
        // SAFETY: the test asked for the token first.
        unsafe { lane(x) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn lane(x: f32) -> f32 {
        _mm256_cvtss_f32(exp(_mm256_set1_ps(x)))
    }

    #[test]
    fn matches_f64() {
        if Avx2::detect().is_none() {
            return;
        }
        for i in -870..880 {
            for j in 0..7 {
                let x = i as f32 / 10.0 + j as f32 * 0.0137;
                let (found, expected) = (f64::from(vector(x)), f64::from(x).exp());
                assert!(
                    (found / expected - 1.0).abs() < 2.0 * f64::from(f32::EPSILON),
                    "{x}: {found} {expected}"
                );
            }
        }
        assert!(vector(f32::NAN).is_nan());
        assert!(vector(f32::INFINITY) > 1e38 && vector(f32::NEG_INFINITY) < 2e-38);
        assert_eq!(vector(0.0), 1.0);
    }
}
