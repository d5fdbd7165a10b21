//! Cast and CastLike.
//!
//! Between integers the upper bits are dropped; floats are rounded once to nearest even and overflow to infinity;
//! anything but zero becomes true. A float outside an integer's range, which ONNX leaves undefined, goes to the
//! nearest end of the range, and NaN to 0.

use super::util::{NUMBERS_AND_BOOL, at_most, check_type, fact, output_of, required, type_list};
use super::value::{from_floats, from_ints, int_range, ints, to_odd_f64};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// To another element type: the attribute's, or the second input's (CastLike).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    /// The type; `None` for that of the second input.
    pub to: Option<DType>,
}

/// `x` as `to`, by the rules of the module.
pub(super) fn cast(x: &Tensor, to: DType) -> Result<Tensor, OpError> {
    let shape = x.shape().clone();
    if x.dtype() == to {
        return Ok(x.clone());
    }
    match (x.dtype().is_float(), to.is_float()) {
        (true, true) => from_floats(to, shape, &x.to_f64()?),
        (true, false) if to == DType::Bool => {
            Ok(Tensor::from_slice(shape, &x.to_f64()?.iter().map(|&v| v != 0.0).collect::<Vec<_>>())?)
        }
        (true, false) => {
            let (low, high) = int_range(to);
            let whole = |v: f64| (v as i128).clamp(low, high);
            from_ints(to, shape, &x.to_f64()?.into_iter().map(whole).collect::<Vec<_>>())
        }
        (false, true) if to == DType::F64 => {
            from_floats(to, shape, &ints(x)?.into_iter().map(|v| v as f64).collect::<Vec<_>>())
        }
        (false, true) => from_floats(to, shape, &ints(x)?.into_iter().map(to_odd_f64).collect::<Vec<_>>()),
        (false, false) => from_ints(to, shape, &ints(x)?),
    }
}

impl OpDef for Cast {
    fn parse(op_type: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        // Both concern float8 targets alone.
        if opset >= 19 {
            attrs.flag("saturate", true)?;
        }
        if opset >= 24 {
            attrs.string("round_mode")?;
        }
        if op_type == "CastLike" {
            return Ok(Self { to: None });
        }
        let number = attrs.required_int("to")?;
        let to = i32::try_from(number).ok().and_then(DType::from_onnx);
        let Some(to) = to.filter(|t| NUMBERS_AND_BOOL.contains(t)) else {
            let found = to.map_or_else(|| format!("type number {number}"), |t| t.to_string());
            return Err(OpError::attribute("to", type_list(NUMBERS_AND_BOOL), found));
        };
        Ok(Self { to: Some(to) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if self.to.is_some() { 1 } else { 2 })?;
        let x = required(inputs, 0, "input")?;
        check_type("input", x, NUMBERS_AND_BOOL)?;
        let to = match self.to {
            Some(to) => Some(to),
            None => check_type("target_type", required(inputs, 1, "target_type")?, NUMBERS_AND_BOOL)?,
        };
        Ok(vec![fact(to, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (to, _) = output_of(self, inputs)?;
        Ok(vec![cast(required(inputs, 0, "input")?, to)?])
    }

    /// Of the second input only the type counts.
    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(vec![inputs.first().copied().flatten().map_or(Trace::Absent, |t| t.trace)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_to_integers() {
        let x = Tensor::from_slice([5], &[-1.9f32, 2.9, 1e30, f32::NEG_INFINITY, f32::NAN]).unwrap();
        assert_eq!(cast(&x, DType::I32).unwrap().to_vec::<i32>().unwrap(), [-1, 2, i32::MAX, i32::MIN, 0]);
        assert_eq!(cast(&x, DType::U64).unwrap().to_vec::<u64>().unwrap(), [0, 2, u64::MAX, 0, 0]);
        assert_eq!(cast(&x, DType::Bool).unwrap().to_vec::<bool>().unwrap(), [true; 5]);
    }

    #[test]
    fn integers_drop_bits_and_round_once() {
        let x = Tensor::from_slice([2], &[200i16, -1]).unwrap();
        assert_eq!(cast(&x, DType::I8).unwrap().to_vec::<i8>().unwrap(), [-56, -1]);
        assert_eq!(cast(&x, DType::U64).unwrap().to_vec::<u64>().unwrap(), [200, u64::MAX]);
        let big = Tensor::scalar((1i64 << 62) + (1 << 54) + 1);
        let want = (1i64 << 62) as f32 + (1i64 << 55) as f32;
        assert_eq!(cast(&big, DType::BF16).unwrap().to_f32().unwrap(), [want]);
        let f = Tensor::scalar((1i64 << 24) + 1);
        assert_eq!(cast(&f, DType::F32).unwrap().to_f32().unwrap(), [16_777_216.0]);
        assert!(cast(&Tensor::scalar(70000i32), DType::F16).unwrap().to_f32().unwrap()[0].is_infinite());
        assert_eq!(cast(&Tensor::scalar(true), DType::F16).unwrap().to_f32().unwrap(), [1.0]);
    }

    #[test]
    fn attributes_are_checked() {
        let parse = |n: i64| Cast::parse("Cast", 13, &mut Attrs::from([("to", n.into())]));
        assert_eq!(parse(16).unwrap().to, Some(DType::BF16));
        assert!(parse(8).unwrap_err().to_string().ends_with("found type number 8"));
        assert!(parse(i64::MAX).is_err());
        let e = Cast::parse("Cast", 13, &mut Attrs::default()).unwrap_err().to_string();
        assert!(e.starts_with("attribute to"), "{e}");
    }
}
