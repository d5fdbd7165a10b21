//! The floats of 8 and 4 bits: decoding, and encoding as Cast does (nearest even, with or without saturation).
//!
//! Formats: OCP 8-bit Floating Point (E4M3FN, E5M2) and OCP Microscaling Formats (E8M0, E2M1).

use super::OpError;
use doyen_tensor::DType;

/// How E8M0, which has powers of two only, rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Rounding {
    Up,
    Down,
    /// Ties go up.
    Nearest,
}

/// Sign, exponent and mantissa in the low bits of a byte.
#[derive(Debug, Clone, Copy)]
struct Layout {
    exponent: u32,
    mantissa: u32,
    bias: i32,
    max: f64,
    /// Codes (without sign) of infinity and NaN, where there are such.
    infinity: Option<u8>,
    nan: Option<u8>,
}

const E4M3FN: Layout =
    Layout { exponent: 4, mantissa: 3, bias: 7, max: 448.0, infinity: None, nan: Some(0x7f) };
const E5M2: Layout =
    Layout { exponent: 5, mantissa: 2, bias: 15, max: 57344.0, infinity: Some(0x7c), nan: Some(0x7e) };
const E2M1: Layout = Layout { exponent: 2, mantissa: 1, bias: 1, max: 6.0, infinity: None, nan: None };

impl Layout {
    const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F8E4M3FN => Some(E4M3FN),
            DType::F8E5M2 => Some(E5M2),
            DType::F4E2M1 => Some(E2M1),
            _ => None,
        }
    }

    fn decode(self, code: u8) -> f64 {
        let magnitude = code & ((1 << (self.exponent + self.mantissa)) - 1);
        let negative = code >> (self.exponent + self.mantissa) & 1 == 1;
        let (e, m) = (i32::from(magnitude >> self.mantissa), magnitude & ((1 << self.mantissa) - 1));
        let value = if self.infinity == Some(magnitude) {
            f64::INFINITY
        } else if self.nan == Some(magnitude) || self.infinity.is_some_and(|i| magnitude > i) {
            f64::NAN
        } else if e == 0 {
            f64::from(m) * 2f64.powi(1 - self.bias - self.mantissa as i32)
        } else {
            f64::from(m + (1 << self.mantissa)) * 2f64.powi(e - self.bias - self.mantissa as i32)
        };
        if negative { -value } else { value }
    }

    fn encode(self, x: f64, saturate: bool) -> u8 {
        let sign_bit = 1 << (self.exponent + self.mantissa);
        let sign = if x.is_sign_negative() { sign_bit } else { 0 };
        match self.nan {
            Some(nan) if x.is_nan() => sign | nan,
            // E2M1 has no NaN; ONNX's tests want the negative zero.
            None if x.is_nan() => sign_bit,
            _ => sign | self.magnitude(x.abs(), saturate),
        }
    }

    fn magnitude(self, x: f64, saturate: bool) -> u8 {
        let one = 1u32 << self.mantissa;
        let least = 1 - self.bias;
        // The binary exponent, from the bits; subnormal f64 are far below every format.
        let exponent = (((x.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(least);
        let rounded = (x * 2f64.powi(self.mantissa as i32 - exponent)).round_ties_even();
        if x.is_infinite() || rounded * 2f64.powi(exponent - self.mantissa as i32) > self.max {
            let highest = self.magnitude_of_max();
            return match (self.infinity, self.nan) {
                _ if saturate => highest,
                (Some(infinity), _) => infinity,
                (None, Some(nan)) => nan,
                (None, None) => highest,
            };
        }
        // A carry out of the mantissa runs into the exponent field by itself.
        let units = rounded as u32;
        if units < one { units as u8 } else { (((exponent - least) as u32) * one + units) as u8 }
    }

    fn magnitude_of_max(self) -> u8 {
        self.magnitude(self.max, true)
    }
}

/// The value of one code; `None` when the type is not one of these formats.
pub(super) fn decode(dtype: DType, code: u8) -> Option<f64> {
    match dtype {
        DType::F8E8M0 if code == 255 => Some(f64::NAN),
        DType::F8E8M0 => Some(2f64.powi(i32::from(code) - 127)),
        _ => Layout::of(dtype).map(|l| l.decode(code)),
    }
}

/// The code of a value.
///
/// # Errors
/// When the type is not one of these formats.
pub(super) fn encode(dtype: DType, x: f64, saturate: bool, rounding: Rounding) -> Result<u8, OpError> {
    match Layout::of(dtype) {
        Some(layout) => Ok(layout.encode(x, saturate)),
        None if dtype == DType::F8E8M0 => Ok(encode_scale(x, saturate, rounding)),
        None => Err(OpError::other(format!("{dtype} is not a float of 8 bits or fewer"))),
    }
}

/// E8M0. Negative numbers, which ONNX leaves unspecified, give NaN.
fn encode_scale(x: f64, saturate: bool, rounding: Rounding) -> u8 {
    const NAN: u8 = 255;
    const HIGHEST: i32 = 254;
    if x.is_nan() || x < 0.0 {
        return NAN;
    }
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let fraction = x / 2f64.powi(exponent) - 1.0;
    let up = match rounding {
        Rounding::Up => fraction > 0.0,
        Rounding::Down => false,
        Rounding::Nearest => fraction >= 0.5,
    };
    let code = exponent + i32::from(up) + 127;
    match code {
        _ if x.is_infinite() => {
            if saturate {
                HIGHEST as u8
            } else {
                NAN
            }
        }
        0..=HIGHEST => code as u8,
        _ if !saturate => NAN,
        _ => code.clamp(0, HIGHEST) as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code decodes to a value that encodes to the same code.
    #[test]
    fn codes_survive() {
        for dtype in [DType::F8E4M3FN, DType::F8E5M2, DType::F4E2M1, DType::F8E8M0] {
            for code in 0..=if dtype == DType::F4E2M1 { 15 } else { 255 } {
                let x = decode(dtype, code).unwrap();
                if !x.is_nan() {
                    assert_eq!(
                        encode(dtype, x, false, Rounding::Nearest).unwrap(),
                        code,
                        "{dtype} {code} {x}"
                    );
                }
            }
        }
    }

    /// The nearest representable value, found by looking at all of them.
    #[test]
    fn encodes_to_the_nearest() {
        for dtype in [DType::F8E4M3FN, DType::F8E5M2, DType::F4E2M1] {
            let last = if dtype == DType::F4E2M1 { 7 } else { 127 };
            let all: Vec<f64> =
                (0..=last).filter_map(|c| decode(dtype, c)).filter(|v| v.is_finite()).collect();
            for i in 0..4000 {
                let x = f64::from(i) * all[all.len() - 1] / 3999.0;
                let got = decode(dtype, encode(dtype, x, true, Rounding::Up).unwrap()).unwrap();
                let best = all.iter().map(|v| (v - x).abs()).fold(f64::INFINITY, f64::min);
                assert_eq!((got - x).abs(), best, "{dtype} {x} {got}");
            }
        }
    }

    #[test]
    fn specials() {
        let e = |dtype, x, saturate| encode(dtype, x, saturate, Rounding::Up).unwrap();
        assert_eq!(e(DType::F8E4M3FN, 464.0, true), 0x7e);
        assert_eq!(e(DType::F8E4M3FN, 464.1, false), 0x7f);
        assert_eq!(e(DType::F8E4M3FN, 464.0, false), 0x7e);
        assert_eq!(e(DType::F8E5M2, f64::INFINITY, true), 0x7b);
        assert_eq!(e(DType::F8E5M2, -1e9, false), 0xfc);
        assert_eq!(e(DType::F8E4M3FN, -0.0, true), 0x80);
        assert_eq!(e(DType::F4E2M1, 100.0, true), 7);
        assert_eq!(e(DType::F8E8M0, 1.1, true), 128);
        assert_eq!(encode(DType::F8E8M0, 1.5, true, Rounding::Nearest).unwrap(), 128);
        assert_eq!(encode(DType::F8E8M0, 1.9, true, Rounding::Down).unwrap(), 127);
        assert_eq!(e(DType::F8E8M0, 0.0, true), 0);
        assert_eq!(e(DType::F8E8M0, 0.0, false), 255);
        assert_eq!(e(DType::F8E8M0, 1e60, true), 254);
        assert!(encode(DType::F32, 1.0, true, Rounding::Up).is_err());
    }
}
