//! Cast and CastLike.
//!
//! Between integers the upper bits are dropped; floats are rounded once to nearest even and overflow to infinity;
//! anything but zero becomes true. A float outside an integer's range, which ONNX leaves undefined, goes to the
//! nearest end of the range, and NaN to 0; ONNX's tests want the bits above four dropped, however.

use super::minifloat::{Rounding, decode, encode};
use super::strided::{cells, from_cells};
use super::util::{CASTABLE, at_most, check_type, fact, output_of, required, type_list};
use super::value::{from_floats, from_ints, int_range, ints, to_odd_f64};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// To another element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    /// The type; `None` for that of the second input (CastLike).
    pub to: Option<DType>,
    /// Floats of 8 bits: overflow gives the largest value instead of infinity or NaN.
    pub saturate: bool,
    /// How float8e8m0 rounds.
    pub rounding: Rounding,
}

/// Elements on the way from one type to another.
enum Wide {
    Floats(Vec<f64>),
    Ints(Vec<i128>),
}

fn widen(x: &Tensor) -> Result<Wide, OpError> {
    Ok(match x.dtype() {
        t if t.is_float() => Wide::Floats(x.to_f64()?),
        DType::U4 => Wide::Ints(cells(x).0.iter().map(|&c| i128::from(c)).collect()),
        DType::I4 => Wide::Ints(cells(x).0.iter().map(|&c| i128::from((c as i8) << 4 >> 4)).collect()),
        t if t.is_int() || t == DType::Bool => Wide::Ints(ints(x)?),
        t => {
            let value = |&c: &u8| decode(t, c).ok_or_else(|| OpError::input("input", type_list(CASTABLE), t));
            Wide::Floats(cells(x).0.iter().map(value).collect::<Result<_, _>>()?)
        }
    })
}

impl Cast {
    fn narrow(self, to: DType, shape: Shape, values: Wide) -> Result<Tensor, OpError> {
        let values = match (values, to) {
            (Wide::Floats(v), DType::Bool) => {
                Wide::Ints(v.into_iter().map(|v| i128::from(v != 0.0)).collect())
            }
            (Wide::Floats(v), DType::I4 | DType::U4) => {
                Wide::Ints(v.into_iter().map(|v| v as i128).collect())
            }
            (Wide::Floats(v), t) if t.is_int() => {
                let (low, high) = int_range(t);
                Wide::Ints(v.into_iter().map(|v| (v as i128).clamp(low, high)).collect())
            }
            (Wide::Ints(v), DType::F64) => Wide::Floats(v.into_iter().map(|v| v as f64).collect()),
            (Wide::Ints(v), t) if !t.is_int() && !matches!(t, DType::Bool | DType::I4 | DType::U4) => {
                Wide::Floats(v.into_iter().map(to_odd_f64).collect())
            }
            (same, _) => same,
        };
        match (values, to) {
            (Wide::Ints(v), DType::I4 | DType::U4) => {
                from_cells(to, shape, v.into_iter().map(|v| v as u8 & 15).collect())
            }
            (Wide::Ints(v), _) => from_ints(to, shape, &v),
            (Wide::Floats(v), t) if t.is_float() => from_floats(to, shape, &v),
            (Wide::Floats(v), _) => {
                let code = |v: f64| encode(to, v, self.saturate, self.rounding);
                from_cells(to, shape, v.into_iter().map(code).collect::<Result<_, _>>()?)
            }
        }
    }
}

impl OpDef for Cast {
    fn parse(op_type: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let saturate = opset < 19 || attrs.flag("saturate", true)?;
        let rounding = if opset < 24 { None } else { attrs.string("round_mode")? };
        let rounding = match rounding.as_deref() {
            None | Some("up") => Rounding::Up,
            Some("down") => Rounding::Down,
            Some("nearest") => Rounding::Nearest,
            Some(other) => return Err(OpError::attribute("round_mode", "up, down or nearest", other)),
        };
        if op_type == "CastLike" {
            return Ok(Self { to: None, saturate, rounding });
        }
        let number = attrs.required_int("to")?;
        let to = i32::try_from(number).ok().and_then(DType::from_onnx);
        let Some(to) = to.filter(|t| CASTABLE.contains(t)) else {
            return Err(OpError::attribute("to", type_list(CASTABLE), format!("type number {number}")));
        };
        Ok(Self { to: Some(to), saturate, rounding })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if self.to.is_some() { 1 } else { 2 })?;
        let x = required(inputs, 0, "input")?;
        check_type("input", x, CASTABLE)?;
        let to = match self.to {
            Some(to) => Some(to),
            None => check_type("target_type", required(inputs, 1, "target_type")?, CASTABLE)?,
        };
        Ok(vec![fact(to, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (to, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        if x.dtype() == to {
            return Ok(vec![x.clone()]);
        }
        Ok(vec![self.narrow(to, shape, widen(x)?)?])
    }

    /// Of the second input only the type counts.
    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(vec![inputs.first().copied().flatten().map_or(Trace::Absent, |t| t.trace)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(x: &Tensor, to: DType) -> Tensor {
        let op = Cast { to: Some(to), saturate: true, rounding: Rounding::Up };
        op.eval(&[Some(x)], 1).unwrap().remove(0)
    }

    #[test]
    fn floats_to_integers() {
        let x = Tensor::from_slice([5], &[-1.9f32, 2.9, 1e30, f32::NEG_INFINITY, f32::NAN]).unwrap();
        assert_eq!(cast(&x, DType::I32).to_vec::<i32>().unwrap(), [-1, 2, i32::MAX, i32::MIN, 0]);
        assert_eq!(cast(&x, DType::U64).to_vec::<u64>().unwrap(), [0, 2, u64::MAX, 0, 0]);
        assert_eq!(cast(&x, DType::Bool).to_vec::<bool>().unwrap(), [true; 5]);
    }

    #[test]
    fn integers_drop_bits_and_round_once() {
        let x = Tensor::from_slice([2], &[200i16, -1]).unwrap();
        assert_eq!(cast(&x, DType::I8).to_vec::<i8>().unwrap(), [-56, -1]);
        assert_eq!(cast(&x, DType::U64).to_vec::<u64>().unwrap(), [200, u64::MAX]);
        let big = Tensor::scalar((1i64 << 62) + (1 << 54) + 1);
        let want = (1i64 << 62) as f32 + (1i64 << 55) as f32;
        assert_eq!(cast(&big, DType::BF16).to_f32().unwrap(), [want]);
        let f = Tensor::scalar((1i64 << 24) + 1);
        assert_eq!(cast(&f, DType::F32).to_f32().unwrap(), [16_777_216.0]);
        assert!(cast(&Tensor::scalar(70000i32), DType::F16).to_f32().unwrap()[0].is_infinite());
        assert_eq!(cast(&Tensor::scalar(true), DType::F16).to_f32().unwrap(), [1.0]);
    }

    #[test]
    fn four_bits_and_eight() {
        let x = Tensor::from_slice([3], &[-3i32, 7, 18]).unwrap();
        let packed = cast(&x, DType::I4);
        assert_eq!(packed.bytes(), [0x7d, 0x02]);
        assert_eq!(cast(&packed, DType::I32).to_vec::<i32>().unwrap(), [-3, 7, 2]);
        assert_eq!(cast(&cast(&x, DType::U4), DType::F32).to_f32().unwrap(), [13.0, 7.0, 2.0]);
        let y = Tensor::from_slice([3], &[0.3f32, -500.0, f32::NAN]).unwrap();
        let back = cast(&cast(&y, DType::F8E4M3FN), DType::F32).to_f32().unwrap();
        assert_eq!(back[..2], [0.3125, -448.0]);
        assert!(back[2].is_nan());
        let scale = Tensor::from_bytes(DType::F8E8M0, [2], vec![127, 130].into()).unwrap();
        assert_eq!(cast(&scale, DType::F16).to_f32().unwrap(), [1.0, 8.0]);
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
