//! Element types, as ONNX numbers them.

use half::{bf16, f16};
use std::fmt;

/// Element type of a tensor as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F64,
    F16,
    BF16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
    /// Signed 4-bit, two per byte, low nibble first.
    I4,
    /// Unsigned 4-bit, two per byte, low nibble first.
    U4,
    F8E4M3FN,
    F8E5M2,
    F8E8M0,
    /// 4-bit float, two per byte, low nibble first.
    F4E2M1,
}

impl DType {
    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 64,
            Self::F32 | Self::I32 | Self::U32 => 32,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 16,
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4M3FN | Self::F8E5M2 | Self::F8E8M0 => 8,
            Self::I4 | Self::U4 | Self::F4E2M1 => 4,
        }
    }

    /// Bytes of `n` elements (sub-byte types round up to a whole byte), or `None` on overflow.
    pub fn bytes_for(self, n: usize) -> Option<usize> {
        Some(n.checked_mul(self.bits())?.div_ceil(8))
    }

    /// Whether the type is a floating-point type wider than 8 bits.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }

    /// Whether the type is an integer type of whole bytes.
    pub const fn is_int(self) -> bool {
        matches!(
            self,
            Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::U8 | Self::U16 | Self::U32 | Self::U64
        )
    }

    /// The number ONNX gives the type in `TensorProto.DataType`.
    pub const fn onnx(self) -> i32 {
        match self {
            Self::F32 => 1,
            Self::U8 => 2,
            Self::I8 => 3,
            Self::U16 => 4,
            Self::I16 => 5,
            Self::I32 => 6,
            Self::I64 => 7,
            Self::Bool => 9,
            Self::F16 => 10,
            Self::F64 => 11,
            Self::U32 => 12,
            Self::U64 => 13,
            Self::BF16 => 16,
            Self::F8E4M3FN => 17,
            Self::F8E5M2 => 19,
            Self::U4 => 21,
            Self::I4 => 22,
            Self::F4E2M1 => 23,
            Self::F8E8M0 => 24,
        }
    }

    /// The inverse of [`DType::onnx`]; `None` for strings, complex numbers and types newer than these.
    pub const fn from_onnx(number: i32) -> Option<Self> {
        Some(match number {
            1 => Self::F32,
            2 => Self::U8,
            3 => Self::I8,
            4 => Self::U16,
            5 => Self::I16,
            6 => Self::I32,
            7 => Self::I64,
            9 => Self::Bool,
            10 => Self::F16,
            11 => Self::F64,
            12 => Self::U32,
            13 => Self::U64,
            16 => Self::BF16,
            17 => Self::F8E4M3FN,
            19 => Self::F8E5M2,
            21 => Self::U4,
            22 => Self::I4,
            23 => Self::F4E2M1,
            24 => Self::F8E8M0,
            _ => return None,
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::Bool => "bool",
            Self::I4 => "int4",
            Self::U4 => "uint4",
            Self::F8E4M3FN => "float8e4m3fn",
            Self::F8E5M2 => "float8e5m2",
            Self::F8E8M0 => "float8e8m0",
            Self::F4E2M1 => "float4e2m1",
        })
    }
}

/// `x` in f32 with an inexact result forced to an odd mantissa, so that a second rounding to fewer bits is
/// correct (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
fn to_odd_f32(x: f64) -> f32 {
    let near = x as f32;
    if near.is_nan() || f64::from(near) == x || near.to_bits() & 1 == 1 {
        return near;
    }
    // The even neighbour was chosen; the odd one lies on the other side of x.
    let bits = near.to_bits();
    f32::from_bits(if f64::from(near).abs() > x.abs() { bits - 1 } else { bits + 1 })
}

/// `x` rounded once to nearest even; `f16::from_f64` ignores the lower half of the mantissa or rounds twice.
pub fn f16_from_f64(x: f64) -> f16 {
    f16::from_f32(to_odd_f32(x))
}

/// `x` rounded once to nearest even; see [`f16_from_f64`].
pub fn bf16_from_f64(x: f64) -> bf16 {
    bf16::from_f32(to_odd_f32(x))
}

/// `x` rounded to the nearest float16 and back.
pub fn f16_round(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// `x` rounded to the nearest bfloat16 and back.
pub fn bf16_round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_rounded_once() {
        // Just above the middle of two neighbours: rounding through f32 first would land on the tie.
        let f = |x: f64| f16_from_f64(x).to_f32();
        let b = |x: f64| bf16_from_f64(x).to_f32();
        assert_eq!(f(1.0 + 2f64.powi(-11) + 2f64.powi(-40)), 1.0 + 2f32.powi(-10));
        assert_eq!(f(1.0 + 2f64.powi(-11)), 1.0);
        assert_eq!(f(-1.0 - 3.0 * 2f64.powi(-11) + 2f64.powi(-40)), -1.0 - 2f32.powi(-10));
        assert_eq!(b(1.0 + 2f64.powi(-8) + 2f64.powi(-40)), 1.0 + 2f32.powi(-7));
        assert_eq!((f(65519.999), f(-1e-300)), (65504.0, 0.0));
        assert!(f(65520.0).is_infinite() && f(f64::MAX).is_infinite() && f(f64::NAN).is_nan());
    }

    #[test]
    fn odd_rounding_stays_next_to_the_nearest() {
        let mut bits = 0x3ff1_2345_6789_abcdu64;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let x = f64::from_bits(bits);
            let (odd, near) = (to_odd_f32(x), x as f32);
            if x.is_nan() {
                assert!(odd.is_nan());
            } else {
                assert!(f64::from(odd) == x || odd.to_bits() & 1 == 1, "{x:e}");
                assert!(odd.to_bits().abs_diff(near.to_bits()) <= 1, "{x:e}");
            }
        }
    }
}
