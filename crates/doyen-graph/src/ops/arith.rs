//! Element-wise arithmetic under broadcasting: Add, Sub, Mul, Div, Pow, Mod of two inputs; Max, Min, Sum, Mean of
//! any number.

use super::strided::Offsets;
use super::util::{
    FLOATS, NUMBERS, at_most, broadcast_facts, check_type, common_type, fact, output_of, required,
};
use super::value::{from_floats, from_ints, ints};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// `C = A op B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// Integers truncate; an integer division by zero is an error.
    Div,
    /// The result has the type of the base.
    Pow,
    /// The remainder takes the sign of the divisor (`fmod` = 0, as Python) or of the dividend (1, as C).
    Mod {
        fmod: bool,
    },
}

impl Binary {
    const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Pow => ["X", "Y"],
            _ => ["A", "B"],
        }
    }

    /// The function on floats.
    pub fn float(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a * b,
            Self::Div => a / b,
            Self::Pow => a.powf(b),
            Self::Mod { fmod: true } => a % b,
            Self::Mod { fmod: false } => {
                let r = a % b;
                if r == 0.0 {
                    0f64.copysign(b)
                } else if (r < 0.0) == (b < 0.0) {
                    r
                } else {
                    r + b
                }
            }
        }
    }

    fn int(self, a: i128, b: i128) -> Result<i128, OpError> {
        if b == 0 && matches!(self, Self::Div | Self::Mod { .. }) {
            return Err(OpError::input("B", "integer divisors other than 0", 0));
        }
        Ok(match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a.wrapping_mul(b),
            Self::Div => a / b,
            Self::Pow => int_pow(a, b)?,
            Self::Mod { fmod: true } => a % b,
            Self::Mod { fmod: false } => {
                let r = a % b;
                if r == 0 || (r < 0) == (b < 0) { r } else { r + b }
            }
        })
    }
}

/// `base ^ exponent`, wrapping. A negative exponent gives what truncating the true quotient gives.
fn int_pow(base: i128, exponent: i128) -> Result<i128, OpError> {
    if exponent < 0 {
        return match base {
            0 => Err(OpError::input("Y", "exponents of 0 or more where the base is 0", exponent)),
            1 => Ok(1),
            -1 => Ok(if exponent % 2 == 0 { 1 } else { -1 }),
            _ => Ok(0),
        };
    }
    let (mut result, mut square, mut left) = (1i128, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        left >>= 1;
    }
    Ok(result)
}

/// Folds `f` over operands broadcast to `out`, element by element.
fn fold<T: Copy>(
    operands: &[(&Shape, Vec<T>)],
    out: &Shape,
    f: impl Fn(T, T) -> Result<T, OpError>,
) -> Result<Vec<T>, OpError> {
    let Some(((shape, first), rest)) = operands.split_first() else { return Ok(Vec::new()) };
    let mut acc: Vec<T> = Offsets::broadcast(shape, out).map(|o| first[o]).collect();
    for (shape, values) in rest {
        for (a, o) in acc.iter_mut().zip(Offsets::broadcast(shape, out)) {
            *a = f(*a, values[o])?;
        }
    }
    Ok(acc)
}

fn floats_of<'a>(inputs: &[&'a Tensor]) -> Result<Vec<(&'a Shape, Vec<f64>)>, OpError> {
    inputs.iter().map(|t| Ok((t.shape(), t.to_f64()?))).collect()
}

fn ints_of<'a>(inputs: &[&'a Tensor]) -> Result<Vec<(&'a Shape, Vec<i128>)>, OpError> {
    inputs.iter().map(|t| Ok((t.shape(), ints(t)?))).collect()
}

/// A number of any type as f64.
fn as_floats(t: &Tensor) -> Result<Vec<f64>, OpError> {
    if t.dtype().is_float() { Ok(t.to_f64()?) } else { Ok(ints(t)?.into_iter().map(|v| v as f64).collect()) }
}

impl OpDef for Binary {
    fn parse(op_type: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(match op_type {
            "Add" => Self::Add,
            "Sub" => Self::Sub,
            "Mul" => Self::Mul,
            "Div" => Self::Div,
            "Pow" => Self::Pow,
            "Mod" => Self::Mod { fmod: attrs.flag("fmod", false)? },
            other => return Err(OpError::unknown_operator("", other)),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let [a, b] = self.names();
        let named = [(a, required(inputs, 0, a)?), (b, required(inputs, 1, b)?)];
        for (name, x) in named {
            check_type(name, x, NUMBERS)?;
        }
        let dtype = if *self == Self::Pow { named[0].1.dtype } else { common_type(named)? };
        Ok(vec![fact(dtype, broadcast_facts(&named)?)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let [a, b] = self.names();
        let operands = [required(inputs, 0, a)?, required(inputs, 1, b)?];
        let all_ints = operands.iter().all(|t| !t.dtype().is_float());
        let y = if all_ints {
            let v = fold(&ints_of(&operands)?, &shape, |a, b| self.int(a, b))?;
            from_ints(dtype, shape, &v)?
        } else {
            let wide = [
                (operands[0].shape(), as_floats(operands[0])?),
                (operands[1].shape(), as_floats(operands[1])?),
            ];
            let v = fold(&wide, &shape, |a, b| Ok(self.float(a, b)))?;
            if dtype.is_float() {
                from_floats(dtype, shape, &v)?
            } else {
                from_ints(dtype, shape, &v.into_iter().map(|x| x as i128).collect::<Vec<_>>())?
            }
        };
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(vec![token_axis::pointwise(inputs, outputs.first().ok_or("it has no output")?)?])
    }
}

/// A fold over one or more inputs. NaN wins in Max and Min, as in numpy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Variadic {
    Max,
    Min,
    Sum,
    Mean,
}

/// Most operands of a variadic operator; far beyond what any exporter writes.
const MAX_OPERANDS: usize = 1 << 16;

impl Variadic {
    const fn allowed(self) -> &'static [DType] {
        match self {
            Self::Max | Self::Min => NUMBERS,
            Self::Sum | Self::Mean => FLOATS,
        }
    }

    fn float(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Sum | Self::Mean => a + b,
            _ if a.is_nan() || b.is_nan() => f64::NAN,
            Self::Max => a.max(b),
            Self::Min => a.min(b),
        }
    }
}

fn present<'a, T>(inputs: &[Option<&'a T>]) -> Result<Vec<&'a T>, OpError> {
    (0..inputs.len().max(1)).map(|i| required(inputs, i, &format!("data_{i}"))).collect()
}

impl OpDef for Variadic {
    fn parse(op_type: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(match op_type {
            "Max" => Self::Max,
            "Min" => Self::Min,
            "Sum" => Self::Sum,
            "Mean" => Self::Mean,
            other => return Err(OpError::unknown_operator("", other)),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, MAX_OPERANDS)?;
        let facts = present(inputs)?;
        let names: Vec<String> = (0..facts.len()).map(|i| format!("data_{i}")).collect();
        let named: Vec<(&str, &Fact)> = names.iter().map(String::as_str).zip(facts).collect();
        for (name, x) in &named {
            check_type(name, x, self.allowed())?;
        }
        Ok(vec![fact(common_type(named.iter().copied())?, broadcast_facts(&named)?)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let operands = present(inputs)?;
        let y = if dtype.is_float() {
            let mut v = fold(&floats_of(&operands)?, &shape, |a, b| Ok(self.float(a, b)))?;
            if *self == Self::Mean {
                let n = operands.len() as f64;
                v = v.into_iter().map(|x| x / n).collect();
            }
            from_floats(dtype, shape, &v)?
        } else {
            let pick = if *self == Self::Max { i128::max } else { i128::min };
            from_ints(dtype, shape.clone(), &fold(&ints_of(&operands)?, &shape, |a, b| Ok(pick(a, b)))?)?
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

    fn run(op: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor, OpError> {
        op.eval(&[Some(a), Some(b)], 1).map(|mut v| v.remove(0))
    }
    fn i32s(v: &[i32]) -> Tensor {
        Tensor::from_slice([v.len()], v).unwrap()
    }

    #[test]
    fn signs_of_remainders() {
        let (a, b) = (i32s(&[-7, 7, -7, 7]), i32s(&[3, -3, -3, 3]));
        let m = |fmod| run(Binary::Mod { fmod }, &a, &b).unwrap().to_vec::<i32>().unwrap();
        assert_eq!(m(false), [2, -2, -1, 1]);
        assert_eq!(m(true), [-1, 1, -1, 1]);
        let f = Binary::Mod { fmod: false };
        assert_eq!(f.float(-1.0, f64::INFINITY), f64::INFINITY);
        assert_eq!(f.float(1.0, f64::INFINITY), 1.0);
        assert!(f.float(-0.0, 2.0).is_sign_positive() && f.float(0.0, -2.0).is_sign_negative());
        assert!(f.float(1.0, 0.0).is_nan());
    }

    #[test]
    fn integer_edges() {
        let min = Tensor::from_slice([1], &[i8::MIN]).unwrap();
        let minus = Tensor::from_slice([1], &[-1i8]).unwrap();
        assert_eq!(run(Binary::Div, &min, &minus).unwrap().to_vec::<i8>().unwrap(), [i8::MIN]);
        assert_eq!(run(Binary::Div, &i32s(&[-7]), &i32s(&[2])).unwrap().to_vec::<i32>().unwrap(), [-3]);
        let e = run(Binary::Div, &i32s(&[1]), &i32s(&[0])).unwrap_err().to_string();
        assert_eq!(e, "input B: expected integer divisors other than 0, found 0");
        let big = Tensor::scalar(u64::MAX);
        assert_eq!(run(Binary::Mul, &big, &big).unwrap().to_vec::<u64>().unwrap(), [1]);
        assert_eq!(
            run(Binary::Sub, &Tensor::scalar(0u8), &Tensor::scalar(1u8)).unwrap().to_vec::<u8>().unwrap(),
            [255]
        );
    }

    #[test]
    fn powers() {
        let p = |a: &Tensor, b: &Tensor| run(Binary::Pow, a, b).unwrap();
        assert_eq!(p(&i32s(&[3, -1, 2, 0]), &i32s(&[4, -3, -1, 0])).to_vec::<i32>().unwrap(), [81, -1, 0, 1]);
        assert_eq!(p(&i32s(&[2]), &Tensor::scalar(0.5f32)).to_vec::<i32>().unwrap(), [1]);
        let half = Tensor::from_f32(DType::F16, [1], &[3.0]).unwrap();
        assert_eq!(p(&half, &Tensor::scalar(2i64)).dtype(), DType::F16);
        assert!(run(Binary::Pow, &i32s(&[0]), &i32s(&[-1])).is_err());
        assert_eq!(p(&Tensor::scalar(3i64), &Tensor::scalar(i64::MAX)).numel(), 1);
    }

    #[test]
    fn errors_name_the_operand() {
        let e = run(Binary::Add, &i32s(&[1, 2]), &i32s(&[1, 2, 3])).unwrap_err().to_string();
        assert_eq!(e, "input B: expected a shape that broadcasts with [2], found [3]");
        let e = run(Binary::Add, &i32s(&[1]), &Tensor::scalar(1f32)).unwrap_err().to_string();
        assert_eq!(e, "input B: expected int32, the type of A, found float32");
    }

    #[test]
    fn folds_over_many() {
        let ts = [i32s(&[1, 5]), Tensor::scalar(3i32), i32s(&[2, 2])];
        let ins: Vec<_> = ts.iter().map(Some).collect();
        assert_eq!(Variadic::Max.eval(&ins, 1).unwrap()[0].to_vec::<i32>().unwrap(), [3, 5]);
        assert_eq!(Variadic::Min.eval(&ins, 1).unwrap()[0].to_vec::<i32>().unwrap(), [1, 2]);
        assert!(Variadic::Max.eval(&[], 1).is_err());
        let nan = Tensor::scalar(f32::NAN);
        let y = Variadic::Min.eval(&[Some(&nan), Some(&Tensor::scalar(1f32))], 1).unwrap();
        assert!(y[0].to_f32().unwrap()[0].is_nan());
    }
}
