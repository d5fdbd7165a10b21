//! Clip: limits to an interval.

use super::util::{NUMBERS, at_most, check_type, common_type, fact, optional, output_of, required};
use super::value::{from_floats, from_ints, ints};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{Shape, Tensor};

/// `min(max(x, low), high)`: the upper bound wins where the bounds cross, NaN stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Clip {
    /// Bounds as attributes (before opset 11).
    Attributes {
        /// Lower bound.
        min: f32,
        /// Upper bound.
        max: f32,
    },
    /// Bounds as the optional inputs `min` and `max`.
    Inputs,
}

fn clip<T: PartialOrd + Copy>(x: T, low: Option<T>, high: Option<T>) -> T {
    let x = low.filter(|l| x < *l).unwrap_or(x);
    high.filter(|h| x > *h).unwrap_or(x)
}

impl Clip {
    fn bounds<T: Copy>(
        inputs: &[Option<&Tensor>],
        read: impl Fn(&Tensor) -> Result<Vec<T>, OpError>,
    ) -> Result<[Option<T>; 2], OpError> {
        let at = |i: usize| optional(inputs, i).map(&read).transpose().map(|v| v?.first().copied());
        Ok([at(1)?, at(2)?])
    }
}

impl OpDef for Clip {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        if opset >= 11 {
            return Ok(Self::Inputs);
        }
        Ok(Self::Attributes {
            min: attrs.float("min")?.unwrap_or(f32::MIN),
            max: attrs.float("max")?.unwrap_or(f32::MAX),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if *self == Self::Inputs { 3 } else { 1 })?;
        let x = required(inputs, 0, "input")?;
        check_type("input", x, NUMBERS)?;
        let bounds = [("min", optional(inputs, 1)), ("max", optional(inputs, 2))];
        let given = bounds.into_iter().filter_map(|(name, f)| Some((name, f?)));
        for (name, f) in given.clone() {
            let one = f.shape.as_ref().is_none_or(|s| s.iter().all(|d| d.compatible(&Dim::Known(1))));
            if !one {
                return Err(OpError::input(name, "a scalar", f.shape_text()));
            }
        }
        let dtype = common_type(std::iter::once(("input", x)).chain(given))?;
        Ok(vec![fact(dtype, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        let y = if dtype.is_float() {
            let [low, high] = match *self {
                Self::Attributes { min, max } => [Some(f64::from(min)), Some(f64::from(max))],
                Self::Inputs => Self::bounds(inputs, |t| Ok(t.to_f64()?))?,
            };
            let v: Vec<f64> = x.to_f64()?.into_iter().map(|x| clip(x, low, high)).collect();
            from_floats(dtype, shape, &v)?
        } else {
            let [low, high] = match *self {
                Self::Attributes { min, max } => [Some(min.ceil() as i128), Some(max.floor() as i128)],
                Self::Inputs => Self::bounds(inputs, ints)?,
            };
            let v: Vec<i128> = ints(x)?.into_iter().map(|x| clip(x, low, high)).collect();
            from_ints(dtype, shape, &v)?
        };
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "min"), (2, "max")])?;
        let out = outputs.first().ok_or("it has no output")?;
        Ok(vec![token_axis::pointwise(&[inputs.first().copied().flatten()], out)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_cross_and_nan_stays() {
        let x = Tensor::from_slice([3], &[1f32, 5.0, f32::NAN]).unwrap();
        let (low, high) = (Tensor::scalar(4f32), Tensor::scalar(2f32));
        let y = Clip::Inputs.eval(&[Some(&x), Some(&low), Some(&high)], 1).unwrap()[0].to_f32().unwrap();
        assert_eq!(y[..2], [2.0, 2.0]);
        assert!(y[2].is_nan());
        let y = Clip::Inputs.eval(&[Some(&x), None, Some(&high)], 1).unwrap()[0].to_f32().unwrap();
        assert_eq!(y[..2], [1.0, 2.0]);
        let e = Clip::Inputs.eval(&[Some(&x), Some(&Tensor::scalar(1i32))], 1).unwrap_err().to_string();
        assert_eq!(e, "input min: expected float32, the type of input, found int32");
        assert!(Clip::Inputs.eval(&[Some(&x), Some(&x)], 1).is_err());
    }

    #[test]
    fn attributes_before_opset_11() {
        let mut attrs = Attrs::from([("max", 2f32.into())]);
        let op = Clip::parse("Clip", 6, &mut attrs).unwrap();
        let x = Tensor::from_slice([2], &[-3f32, 5.0]).unwrap();
        assert_eq!(op.eval(&[Some(&x)], 1).unwrap()[0].to_f32().unwrap(), [-3.0, 2.0]);
    }
}
