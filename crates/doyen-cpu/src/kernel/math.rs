//! Elementary functions in f32, written so that loops over them vectorise.
//!
//! The standard library's versions are calls, one number at a time. These are branch-free, and what softmax,
//! activations and attention share, so that they agree on what `exp` is (routing, a few numbers a token, calls the
//! standard library's). `FMA` says whether the instruction set
//! fuses multiplication and addition; both variants meet the stated errors, which the tests measure against f64.

/// `a * b + c`, fused where that is one instruction.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 9 significant bits, so that its product with an exponent is exact.
const LN2_HI: f32 = 355.0 / 512.0;
const LN2_LO: f32 = -2.121_944_4e-4;

/// `e^x`: at most 2 ulp off where the result is normal, 0 below -104, infinity above 88.73, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; the series of `e^r` up to `r^7/7!` is 5e-9 off there. The power of two is
/// applied in two halves, since 2^128 and 2^-127 are no normal numbers.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -LN2_LO, fma::<FMA>(n, -LN2_HI, x));
    let mut p = 1.0 / 5040.0;
    p = fma::<FMA>(p, r, 1.0 / 720.0);
    p = fma::<FMA>(p, r, 1.0 / 120.0);
    p = fma::<FMA>(p, r, 1.0 / 24.0);
    p = fma::<FMA>(p, r, 1.0 / 6.0);
    p = fma::<FMA>(p, r, 0.5);
    p = fma::<FMA>(p, r, 1.0);
    p = fma::<FMA>(p, r, 1.0);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2^n` for `-126 <= n <= 127`; any bits otherwise.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `tanh x`, at most 3 ulp off.
///
/// Near zero by the continued fraction x/(1 + x^2/(3 + x^2/(5 + ...))) up to the 9, which is 1e-9 off at 0.7;
/// elsewhere `(1 - e) / (1 + e)` with `e = exp(-2 |x|)`.
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let s = x * x;
    let above = fma::<FMA>(s, s + 105.0, 945.0);
    let below = fma::<FMA>(s, fma::<FMA>(s, 15.0, 420.0), 945.0);
    let near = x * above / below;
    let e = exp::<FMA>(-2.0 * a);
    let far = ((1.0 - e) / (1.0 + e)).copysign(x);
    if a < 0.7 { near } else { far }
}

/// `1 / (1 + e^-x)`, at most 4 ulp off where the result is normal.
#[inline(always)]
pub(super) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// Coefficients of `erfc(x) e^(x^2) / t` in `t = 1 / (1 + 0.4 x)`, highest power first: a Chebyshev fit of our own over
/// `0 <= x <= 11`.
const ERFC: [f32; 10] = [
    -0.031_940_49,
    0.210_029_26,
    -0.525_205_8,
    0.579_936_7,
    -0.308_973,
    0.283_878_6,
    0.126_107_26,
    0.215_570_33,
    0.224_887_72,
    0.225_709_5,
];

/// `erfc x` with a relative error of at most `4e-7 (1 + x^2)`.
#[inline(always)]
pub(super) fn erfc<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let t = 1.0 / (1.0 + 0.4 * a);
    let mut p = ERFC[0];
    for &c in &ERFC[1..] {
        p = fma::<FMA>(p, t, c);
    }
    let tail = p * t * exp::<FMA>(-a * a);
    if x < 0.0 { 2.0 - tail } else { tail }
}

/// `erf x` with an absolute error of at most 3e-7, and a relative one of 1e-6 near zero.
#[inline(always)]
pub(super) fn erf<const FMA: bool>(x: f32) -> f32 {
    let s = x * x;
    // 2/sqrt(pi) times the series 1 - s/3 + s^2/10 - s^3/42 + s^4/216 - s^5/1320.
    let mut p = -1.0 / 1320.0;
    p = fma::<FMA>(p, s, 1.0 / 216.0);
    p = fma::<FMA>(p, s, -1.0 / 42.0);
    p = fma::<FMA>(p, s, 1.0 / 10.0);
    p = fma::<FMA>(p, s, -1.0 / 3.0);
    p = fma::<FMA>(p, s, 1.0);
    let near = std::f32::consts::FRAC_2_SQRT_PI * p * x;
    let far = 1.0 - erfc::<FMA>(x);
    if x.abs() < 0.5 { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        detect::Isa,
        kernel::{multiversion::multiversion, test_data::erfc64},
    };

    macro_rules! loops {
        ($($name:ident, $body:ident, $f:ident;)*) => {$(
            #[inline(always)]
            fn $body<const FMA: bool>(x: &[f32], y: &mut [f32]) {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = $f::<FMA>(x);
                }
            }
            multiversion! { fn $name(x: &[f32], y: &mut [f32]) = $body; }
        )*};
    }
    loops! {
        exps, exps_body, exp;
        tanhs, tanhs_body, tanh;
        sigmoids, sigmoids_body, sigmoid;
        erfs, erfs_body, erf;
        erfcs, erfcs_body, erfc;
    }

    type Loop = fn(&[f32], &mut [f32]);

    /// The largest value of `error(x, got)` over a fine grid.
    fn worst(f: fn(Isa) -> Loop, lo: f32, hi: f32, error: impl Fn(f64, f64) -> f64) -> f64 {
        let n = 200_001;
        let x: Vec<f32> = (0..n).map(|i| lo + (hi - lo) * i as f32 / (n - 1) as f32).collect();
        let mut worst = 0.0f64;
        for isa in Isa::all() {
            let mut y = vec![0.0; n];
            f(isa)(&x, &mut y);
            for (&x, &y) in x.iter().zip(&y) {
                worst = worst.max(error(f64::from(x), f64::from(y)));
            }
        }
        worst
    }

    /// Distance in units of the last place of the f32 nearest to `expected`.
    fn ulps(got: f64, expected: f64) -> f64 {
        let near = (expected as f32).abs();
        let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
        (got - expected).abs() / ulp
    }

    #[test]
    fn exp_error() {
        assert!(worst(exps, -87.3, 88.7, |x, y| ulps(y, x.exp())) <= 2.0);
        assert!(worst(exps, -1.0, 1.0, |x, y| ulps(y, x.exp())) <= 2.0);
        let special = [f32::NEG_INFINITY, -105.0, -1e30, 88.8, f32::INFINITY, 0.0, -0.0, f32::NAN, -95.0];
        for isa in Isa::all() {
            let mut y = [0.0; 9];
            exps(isa)(&special, &mut y);
            assert_eq!(y[..7], [0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY, 1.0, 1.0]);
            assert!(y[7].is_nan());
            assert!((f64::from(y[8]) / (-95f64).exp() - 1.0).abs() < 1e-3, "subnormal {}", y[8]);
        }
    }

    #[test]
    fn tanh_error() {
        for (lo, hi) in [(-1.0, 1.0), (-20.0, 20.0), (-1e-3, 1e-3)] {
            assert!(worst(tanhs, lo, hi, |x, y| ulps(y, x.tanh())) <= 3.0);
        }
        for isa in Isa::all() {
            let mut y = [0.0; 4];
            tanhs(isa)(&[f32::INFINITY, f32::NEG_INFINITY, 1e30, f32::NAN], &mut y);
            assert_eq!(y[..3], [1.0, -1.0, 1.0]);
            assert!(y[3].is_nan());
        }
    }

    #[test]
    fn sigmoid_error() {
        assert!(worst(sigmoids, -85.0, 90.0, |x, y| ulps(y, 1.0 / (1.0 + (-x).exp()))) <= 4.0);
    }

    #[test]
    fn erf_errors() {
        let relative = |x: f64, y: f64| (y / erfc64(x) - 1.0).abs() / (1.0 + x * x);
        let w = worst(erfcs, -5.0, 9.0, relative);
        assert!(w <= 4e-7, "{w}");
        let w = worst(erfs, -6.0, 6.0, |x, y| (y - (1.0 - erfc64(x))).abs());
        assert!(w <= 3e-7, "{w}");
        let series = |x: f64| std::f64::consts::FRAC_2_SQRT_PI * (x - x.powi(3) / 3.0);
        assert!(worst(erfs, 1e-3, 1e-2, |x, y| (y / series(x) - 1.0).abs()) <= 1e-6);
    }
}
