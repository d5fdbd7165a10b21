//! Softmax, LogSoftmax and CumSum: operators along one axis that keep the shape.

use super::lines::Lines;
use super::util::{
    FLOATS, INDICES, MATMUL_TYPES, at_most, check_type, constant_int, fact, normalize_axis,
    normalize_input_axis, output_of, required,
};
use super::value::{from_floats, from_ints, ints};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor};
use std::ops::Range;

/// `e^x / sum e^x` along an axis, or the logarithm of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax {
    /// As written.
    pub axis: i64,
    /// LogSoftmax.
    pub log: bool,
    /// Before opset 13: over all axes from `axis` on together.
    pub flattened: bool,
}

impl Softmax {
    fn axes(self, rank: usize) -> Result<Range<usize>, OpError> {
        let axis = normalize_axis("axis", self.axis, rank)?;
        Ok(axis..if self.flattened { rank } else { axis + 1 })
    }
}

/// The softmax of one line, from exponents relative to the maximum.
pub(super) fn softmax(line: &[f64]) -> Vec<f64> {
    let max = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = line.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.into_iter().map(|e| e / sum).collect()
}

fn log_softmax(line: &[f64]) -> Vec<f64> {
    let max = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = line.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    line.iter().map(|x| x - max - log_sum).collect()
}

impl OpDef for Softmax {
    fn parse(op_type: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let flattened = opset < 13;
        let axis = attrs.int("axis")?.unwrap_or(if flattened { 1 } else { -1 });
        Ok(Self { axis, log: op_type == "LogSoftmax", flattened })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let x = required(inputs, 0, "input")?;
        check_type("input", x, FLOATS)?;
        if let Some(rank) = x.rank() {
            self.axes(rank)?;
        }
        Ok(vec![fact(x.dtype, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let axes = self.axes(shape.len())?;
        let together = Shape::from([
            shape[..axes.start].iter().product(),
            shape[axes.clone()].iter().product(),
            shape[axes.end..].iter().product(),
        ]);
        let lines = Lines::along(&together, 1);
        let mut values = required(inputs, 0, "input")?.to_f64()?;
        for start in lines.starts() {
            let line = lines.gather(&values, start);
            let line = if self.log { log_softmax(&line) } else { softmax(&line) };
            lines.scatter(&mut values, start, &line);
        }
        Ok(vec![from_floats(dtype, shape, &values)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        let axes: Vec<usize> = self.axes(rank).map_err(|e| e.to_string())?.collect();
        Ok(vec![token_axis::off_axes(inputs.first(), &axes, false)?])
    }
}

/// Running sums along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CumSum {
    /// An element's own value is not in its sum.
    pub exclusive: bool,
    /// From the end.
    pub reverse: bool,
}

impl CumSum {
    fn run<T: Copy>(self, values: &mut [T], lines: Lines, zero: T, add: impl Fn(T, T) -> T) {
        for start in lines.starts() {
            let mut line = lines.gather(values, start);
            if self.reverse {
                line.reverse();
            }
            let mut sum = zero;
            for v in &mut line {
                let before = sum;
                sum = add(sum, *v);
                *v = if self.exclusive { before } else { sum };
            }
            if self.reverse {
                line.reverse();
            }
            lines.scatter(values, start, &line);
        }
    }
}

impl OpDef for CumSum {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { exclusive: attrs.flag("exclusive", false)?, reverse: attrs.flag("reverse", false)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let (x, axis) = (required(inputs, 0, "x")?, required(inputs, 1, "axis")?);
        check_type("x", x, MATMUL_TYPES)?;
        check_type("axis", axis, INDICES)?;
        if let (Some(axis), Some(rank)) = (constant_int("axis", axis)?, x.rank()) {
            normalize_input_axis("axis", axis, rank)?;
        }
        Ok(vec![fact(x.dtype, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let (x, axis) = (required(inputs, 0, "x")?, required(inputs, 1, "axis")?.to_i64()?);
        let axis = axis.first().ok_or_else(|| OpError::input("axis", "one integer", "none"))?;
        let lines = Lines::along(&shape, normalize_input_axis("axis", *axis, shape.len())?);
        let y = if dtype.is_float() {
            let mut v = x.to_f64()?;
            self.run(&mut v, lines, 0.0, |a, b| a + b);
            from_floats(dtype, shape, &v)?
        } else {
            let mut v = ints(x)?;
            self.run(&mut v, lines, 0, i128::wrapping_add);
            from_ints(dtype, shape, &v)?
        };
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "axis")])?;
        let Some(Some(x)) = inputs.first() else { return Ok(vec![Trace::Absent]) };
        if x.trace == Trace::Absent {
            return Ok(vec![Trace::Absent]);
        }
        let axis =
            inputs.get(1).copied().flatten().and_then(|t| t.constant).ok_or("its axis is not constant")?;
        let axis = axis.to_tensor().and_then(|t| t.to_i64()).map_err(|e| e.to_string())?;
        let axis = axis.first().ok_or("its axis is empty")?;
        let axis = normalize_input_axis("axis", *axis, x.shape.len()).map_err(|e| e.to_string())?;
        Ok(vec![token_axis::off_axes(inputs.first(), &[axis], false)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(shape: &[usize], v: &[f32]) -> Tensor {
        Tensor::from_slice(shape, v).unwrap()
    }

    #[test]
    fn softmax_by_version() {
        let x = floats(&[2, 1, 2], &[0.0, 0.0, 1.0, 1.0]);
        let run = |opset, axis: i64| {
            let op = Softmax::parse("Softmax", opset, &mut Attrs::from([("axis", axis.into())])).unwrap();
            op.eval(&[Some(&x)], 1).map(|y| y[0].to_f32().unwrap())
        };
        assert_eq!(run(13, -1).unwrap(), [0.5; 4]);
        assert_eq!(run(11, 1).unwrap(), [0.5; 4]);
        let all = run(11, 0).unwrap();
        assert!((all.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(run(13, 1).unwrap(), [1.0; 4]);
        assert!(run(13, 3).is_err());
    }

    #[test]
    fn softmax_of_extremes() {
        assert_eq!(softmax(&[f64::NEG_INFINITY, 1e308]), [0.0, 1.0]);
        assert!(softmax(&[f64::NEG_INFINITY; 2]).iter().all(|v| v.is_nan()));
        assert!(log_softmax(&[0.0, 1000.0])[0] == -1000.0);
    }

    #[test]
    fn running_sums() {
        let x = Tensor::from_slice([2, 3], &[1i32, 2, 3, 4, 5, 6]).unwrap();
        let run = |exclusive, reverse, axis: i64| {
            let y = CumSum { exclusive, reverse }.eval(&[Some(&x), Some(&Tensor::scalar(axis))], 1);
            y.map(|y| y[0].to_vec::<i32>().unwrap())
        };
        assert_eq!(run(false, false, 1).unwrap(), [1, 3, 6, 4, 9, 15]);
        assert_eq!(run(true, false, -1).unwrap(), [0, 1, 3, 0, 4, 9]);
        assert_eq!(run(false, true, 1).unwrap(), [6, 5, 3, 15, 11, 6]);
        assert_eq!(run(true, true, 0).unwrap(), [4, 5, 6, 0, 0, 0]);
        assert!(run(false, false, 2).is_err());
        let empty = floats(&[0, 3], &[]);
        let y =
            CumSum { exclusive: false, reverse: false }.eval(&[Some(&empty), Some(&Tensor::scalar(0i32))], 1);
        assert_eq!(y.unwrap()[0].shape().dims(), [0, 3]);
    }
}
