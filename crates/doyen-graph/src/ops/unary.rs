//! Element-wise operators of one input: Abs, Ceil, Cos, Erf, Exp, Floor, Gelu, Log, Neg, Reciprocal, Relu, Round,
//! Sigmoid, Sign, Sin, Softplus, Sqrt, Swish, Tanh, and the predicates IsInf, IsNaN, Not.

use super::util::{BOOL, FLOATS, NUMBERS, SIGNED, at_most, check_type, fact, output_of, required};
use super::value::{from_floats, from_ints, ints};
use super::{OpDef, OpError, Trace, Traced, erf, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// `Y = f(X)` element by element.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Unary {
    Abs,
    Ceil,
    Cos,
    Erf,
    Exp,
    Floor,
    /// `x/2 (1 + erf(x / sqrt(2)))`.
    Gelu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// Infinite and of a sign that is looked for.
    IsInf {
        negative: bool,
        positive: bool,
    },
    IsNaN,
    Log,
    Neg,
    Not,
    Reciprocal,
    Relu,
    /// To nearest, ties to even.
    Round,
    Sigmoid,
    Sign,
    Sin,
    /// `ln(1 + e^x)`.
    Softplus,
    Sqrt,
    /// `x sigmoid(alpha x)`.
    Swish {
        alpha: f32,
    },
    Tanh,
}

impl Unary {
    const fn allowed(self) -> &'static [DType] {
        match self {
            Self::Abs | Self::Sign => NUMBERS,
            Self::Neg | Self::Relu => SIGNED,
            Self::Not => BOOL,
            _ => FLOATS,
        }
    }

    const fn is_predicate(self) -> bool {
        matches!(self, Self::IsInf { .. } | Self::IsNaN)
    }

    const fn input_name(self) -> &'static str {
        match self {
            Self::Exp | Self::Cos | Self::Sin | Self::Log | Self::Tanh | Self::Erf | Self::Sign => "input",
            _ => "X",
        }
    }

    /// The function on a float; predicates give 0 or 1.
    pub fn float(self, x: f64) -> f64 {
        match self {
            Self::Abs => x.abs(),
            Self::Ceil => x.ceil(),
            Self::Cos => x.cos(),
            Self::Erf => erf::erf(x),
            Self::Exp => x.exp(),
            Self::Floor => x.floor(),
            Self::Gelu => gelu(x),
            Self::GeluTanh => gelu_tanh(x),
            Self::IsInf { negative, positive } => {
                f64::from(x == f64::INFINITY && positive || x == f64::NEG_INFINITY && negative)
            }
            Self::IsNaN => f64::from(x.is_nan()),
            Self::Log => x.ln(),
            Self::Neg => -x,
            Self::Not => f64::from(x == 0.0),
            Self::Reciprocal => x.recip(),
            // A comparison keeps NaN; f64::max would drop it.
            Self::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Self::Round => x.round_ties_even(),
            Self::Sigmoid => sigmoid(x),
            Self::Sign => {
                if x == 0.0 || x.is_nan() {
                    x
                } else {
                    x.signum()
                }
            }
            Self::Sin => x.sin(),
            Self::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p() + if x.is_nan() { x } else { 0.0 },
            Self::Sqrt => x.sqrt(),
            Self::Swish { alpha } => x * sigmoid(f64::from(alpha) * x),
            Self::Tanh => x.tanh(),
        }
    }

    fn int(self, x: i128) -> i128 {
        match self {
            Self::Abs => x.abs(),
            Self::Neg => -x,
            Self::Relu => x.max(0),
            Self::Sign => x.signum(),
            Self::Not => i128::from(x == 0),
            _ => x,
        }
    }
}

/// `1 / (1 + e^-x)`.
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x/2 (1 + erf(x / sqrt(2)))`, written with the complement so that the negative tail keeps its digits.
pub(super) fn gelu(x: f64) -> f64 {
    0.5 * x * erf::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
pub(super) fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

impl OpDef for Unary {
    fn parse(op_type: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(match op_type {
            "Abs" => Self::Abs,
            "Ceil" => Self::Ceil,
            "Cos" => Self::Cos,
            "Erf" => Self::Erf,
            "Exp" => Self::Exp,
            "Floor" => Self::Floor,
            "Gelu" => match attrs.string("approximate")?.as_deref() {
                None | Some("none") => Self::Gelu,
                Some("tanh") => Self::GeluTanh,
                Some(other) => return Err(OpError::attribute("approximate", "none or tanh", other)),
            },
            "IsInf" => Self::IsInf {
                negative: attrs.flag("detect_negative", true)?,
                positive: attrs.flag("detect_positive", true)?,
            },
            "IsNaN" => Self::IsNaN,
            "Log" => Self::Log,
            "Neg" => Self::Neg,
            "Not" => Self::Not,
            "Reciprocal" => Self::Reciprocal,
            "Relu" => Self::Relu,
            "Round" => Self::Round,
            "Sigmoid" => Self::Sigmoid,
            "Sign" => Self::Sign,
            "Sin" => Self::Sin,
            "Softplus" => Self::Softplus,
            "Sqrt" => Self::Sqrt,
            "Swish" => Self::Swish { alpha: attrs.float("alpha")?.unwrap_or(1.0) },
            "Tanh" => Self::Tanh,
            other => return Err(OpError::unknown_operator("", other)),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let x = required(inputs, 0, self.input_name())?;
        let dtype = check_type(self.input_name(), x, self.allowed())?;
        let dtype = if self.is_predicate() { Some(DType::Bool) } else { dtype };
        Ok(vec![fact(dtype, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, self.input_name())?;
        let y = if !x.dtype().is_float() {
            from_ints(dtype, shape, &ints(x)?.into_iter().map(|v| self.int(v)).collect::<Vec<_>>())?
        } else if self.is_predicate() {
            let hits: Vec<bool> = x.to_f64()?.into_iter().map(|v| self.float(v) != 0.0).collect();
            Tensor::from_slice(shape, &hits)?
        } else {
            from_floats(dtype, shape, &x.to_f64()?.into_iter().map(|v| self.float(v)).collect::<Vec<_>>())?
        };
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(vec![token_axis::pointwise(inputs, outputs.first().ok_or("it has no output")?)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(op: Unary, x: &Tensor) -> Result<Tensor, OpError> {
        op.eval(&[Some(x)], 1).map(|mut v| v.remove(0))
    }

    #[test]
    fn floats_are_rounded_once_per_type() {
        let x = Tensor::from_f32(DType::BF16, [2], &[1.0, -3.0]).unwrap();
        let y = run(Unary::Exp, &x).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        assert_eq!(y.to_f32().unwrap(), [2.71875, doyen_tensor::bf16_round((-3f32).exp())]);
    }

    #[test]
    fn extremes() {
        assert_eq!(Unary::Softplus.float(1000.0), 1000.0);
        assert!(Unary::Softplus.float(f64::NAN).is_nan());
        assert!(Unary::Relu.float(f64::NAN).is_nan());
        assert_eq!(Unary::Sigmoid.float(-1000.0), 0.0);
        assert_eq!(Unary::Round.float(2.5), 2.0);
        assert_eq!(Unary::Round.float(-1.5), -2.0);
        assert!(Unary::Sqrt.float(-1.0).is_nan());
        assert!(Unary::Gelu.float(-10.0) < 0.0 && Unary::Gelu.float(-10.0) > -1e-21);
    }

    #[test]
    fn integers_wrap_and_types_are_checked() {
        let y = run(Unary::Abs, &Tensor::from_slice([2], &[i8::MIN, -3]).unwrap()).unwrap();
        assert_eq!(y.to_vec::<i8>().unwrap(), [i8::MIN, 3]);
        let e = run(Unary::Neg, &Tensor::from_slice([1], &[1u8]).unwrap()).unwrap_err().to_string();
        assert!(e.starts_with("input X: expected float16") && e.ends_with("found uint8"), "{e}");
        let y = run(Unary::Not, &Tensor::from_slice([0], &[] as &[bool]).unwrap()).unwrap();
        assert_eq!(y.numel(), 0);
    }

    #[test]
    fn infinities_by_sign() {
        let op = Unary::parse("IsInf", 20, &mut Attrs::from([("detect_negative", 0.into())])).unwrap();
        let x = Tensor::from_slice([3], &[f32::NEG_INFINITY, f32::INFINITY, f32::NAN]).unwrap();
        assert_eq!(run(op, &x).unwrap().to_vec::<bool>().unwrap(), [false, true, false]);
    }
}
