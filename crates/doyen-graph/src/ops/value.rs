//! Element values widened for arithmetic and rounded once on the way back.
//!
//! Floats are computed in f64: for float32 and narrower operands `+ - * /` and the square root rounded once from
//! f64 are bit for bit what the narrow type itself would give (53 >= 2 * 24 + 2 bits), and everything else is
//! better. Integers are computed in i128 and wrap on the way back, as ONNX and numpy wrap.

use super::OpError;
use doyen_tensor::{DType, Shape, Tensor};

/// Integer or boolean elements as i128.
pub(super) fn ints(t: &Tensor) -> Result<Vec<i128>, OpError> {
    Ok(match t.dtype() {
        DType::U64 => t.to_vec::<u64>()?.into_iter().map(i128::from).collect(),
        _ => t.to_i64()?.into_iter().map(i128::from).collect(),
    })
}

/// Integers stored as `dtype`, the bits above its width dropped.
pub(super) fn from_ints(dtype: DType, shape: impl Into<Shape>, values: &[i128]) -> Result<Tensor, OpError> {
    macro_rules! store {
        ($ty:ty) => {
            Tensor::from_slice(shape, &values.iter().map(|&v| v as $ty).collect::<Vec<$ty>>())
        };
    }
    Ok(match dtype {
        DType::I8 => store!(i8),
        DType::I16 => store!(i16),
        DType::I32 => store!(i32),
        DType::I64 => store!(i64),
        DType::U8 => store!(u8),
        DType::U16 => store!(u16),
        DType::U32 => store!(u32),
        DType::U64 => store!(u64),
        DType::Bool => Tensor::from_slice(shape, &values.iter().map(|&v| v != 0).collect::<Vec<bool>>()),
        other => return Err(OpError::other(format!("integers cannot be stored as {other}"))),
    }?)
}

/// Smallest and largest value of an integer type.
pub(super) fn int_range(dtype: DType) -> (i128, i128) {
    match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::Bool => (0, 1),
        _ => (i64::MIN.into(), i64::MAX.into()),
    }
}

/// Floats stored as `dtype`, each rounded once to nearest even.
pub(super) fn from_floats(dtype: DType, shape: impl Into<Shape>, values: &[f64]) -> Result<Tensor, OpError> {
    Ok(Tensor::from_f64(dtype, shape, values)?)
}

/// `v` in f64 with an inexact result forced to an odd mantissa, so that a second rounding to fewer
/// bits is correct (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
pub(super) fn to_odd_f64(v: i128) -> f64 {
    let near = v as f64;
    if near as i128 == v || near.to_bits() & 1 == 1 {
        return near;
    }
    let bits = near.to_bits();
    f64::from_bits(if (near as i128).unsigned_abs() > v.unsigned_abs() { bits - 1 } else { bits + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn integers_wrap() {
        let t = from_ints(DType::I8, [2], &[200, -129]).unwrap();
        assert_eq!(t.to_vec::<i8>().unwrap(), [-56, 127]);
        assert_eq!(ints(&Tensor::scalar(u64::MAX)).unwrap(), [i128::from(u64::MAX)]);
    }

    proptest! {
        /// Rounding to odd and then to fewer bits equals rounding at once (judged where f64 to f32 is the one step).
        #[test]
        fn odd_rounding_is_innocuous(v in any::<i64>()) {
            prop_assert_eq!(to_odd_f64(v.into()) as f32, v as f32);
        }
    }
}
