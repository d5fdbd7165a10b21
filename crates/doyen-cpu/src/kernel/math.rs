//! Elementary functions in f32, written so that loops over them vectorise.
//!
//! The standard library's versions are calls, one number at a time. These are branch-free, and used by every kernel,
//! so that a softmax, an activation and attention agree on what `exp` is. `FMA` says whether the instruction set
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{detect::Isa, kernel::multiversion::multiversion};

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
}
