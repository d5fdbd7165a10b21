//! Element-wise operators of two inputs with a boolean result: Equal, Greater, GreaterOrEqual, Less, LessOrEqual,
//! And, Or, Xor.

use super::strided::Offsets;
use super::util::{
    BOOL, NUMBERS, NUMBERS_AND_BOOL, at_most, broadcast_facts, check_type, common_type, fact, output_of,
    required,
};
use super::value::ints;
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// `C = A op B`, boolean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Compare {
    Equal,
    Greater,
    GreaterOrEqual,
    Less,
    LessOrEqual,
    And,
    Or,
    Xor,
}

impl Compare {
    const fn allowed(self) -> &'static [DType] {
        match self {
            Self::And | Self::Or | Self::Xor => BOOL,
            Self::Equal => NUMBERS_AND_BOOL,
            _ => NUMBERS,
        }
    }

    /// The operator on two elements; booleans come as 0 and 1.
    fn holds<T: PartialOrd + From<bool>>(self, a: &T, b: &T) -> bool {
        let truth = |v: &T| *v != T::from(false);
        match self {
            Self::Equal => a == b,
            Self::Greater => a > b,
            Self::GreaterOrEqual => a >= b,
            Self::Less => a < b,
            Self::LessOrEqual => a <= b,
            Self::And => truth(a) && truth(b),
            Self::Or => truth(a) || truth(b),
            Self::Xor => truth(a) != truth(b),
        }
    }

    fn zip<T: PartialOrd + From<bool>>(
        self,
        (a, a_shape): (&[T], &Shape),
        (b, b_shape): (&[T], &Shape),
        out: &Shape,
    ) -> Vec<bool> {
        Offsets::broadcast(a_shape, out)
            .zip(Offsets::broadcast(b_shape, out))
            .map(|(i, j)| self.holds(&a[i], &b[j]))
            .collect()
    }
}

impl OpDef for Compare {
    fn parse(op_type: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(match op_type {
            "Equal" => Self::Equal,
            "Greater" => Self::Greater,
            "GreaterOrEqual" => Self::GreaterOrEqual,
            "Less" => Self::Less,
            "LessOrEqual" => Self::LessOrEqual,
            "And" => Self::And,
            "Or" => Self::Or,
            "Xor" => Self::Xor,
            other => return Err(OpError::unknown_operator("", other)),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let named = [("A", required(inputs, 0, "A")?), ("B", required(inputs, 1, "B")?)];
        for (name, x) in named {
            check_type(name, x, self.allowed())?;
        }
        common_type(named)?;
        Ok(vec![fact(Some(DType::Bool), broadcast_facts(&named)?)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let (a, b) = (required(inputs, 0, "A")?, required(inputs, 1, "B")?);
        let y = if a.dtype().is_float() {
            self.zip((&a.to_f64()?, a.shape()), (&b.to_f64()?, b.shape()), &shape)
        } else {
            self.zip((&ints(a)?, a.shape()), (&ints(b)?, b.shape()), &shape)
        };
        Ok(vec![Tensor::from_slice(shape, &y)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(vec![token_axis::pointwise(inputs, outputs.first().ok_or("it has no output")?)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(op: Compare, a: &Tensor, b: &Tensor) -> Vec<bool> {
        op.eval(&[Some(a), Some(b)], 1).unwrap()[0].to_vec().unwrap()
    }

    #[test]
    fn nan_is_equal_to_nothing() {
        let x = Tensor::from_slice([3], &[1f32, f32::NAN, -0.0]).unwrap();
        let y = Tensor::from_slice([3], &[1f32, f32::NAN, 0.0]).unwrap();
        assert_eq!(run(Compare::Equal, &x, &y), [true, false, true]);
        assert_eq!(run(Compare::LessOrEqual, &x, &y), [true, false, true]);
    }

    #[test]
    fn large_integers_are_exact() {
        let (a, b) = (Tensor::scalar(u64::MAX), Tensor::scalar(u64::MAX - 1));
        assert_eq!(run(Compare::Greater, &a, &b), [true]);
        assert_eq!(run(Compare::Equal, &a, &b), [false]);
    }

    #[test]
    fn logic_broadcasts() {
        let a = Tensor::from_slice([2, 1], &[true, false]).unwrap();
        let b = Tensor::from_slice([2], &[true, false]).unwrap();
        assert_eq!(run(Compare::And, &a, &b), [true, false, false, false]);
        assert_eq!(run(Compare::Or, &a, &b), [true, true, true, false]);
        assert_eq!(run(Compare::Xor, &a, &b), [false, true, true, false]);
        let e = Compare::And.eval(&[Some(&a), Some(&Tensor::scalar(1i32))], 1).unwrap_err();
        assert_eq!(e.to_string(), "input B: expected bool, found int32");
    }
}
