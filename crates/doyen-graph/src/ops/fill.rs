//! Operators whose output is larger than their inputs: Expand, Tile, Range, ConstantOfShape. The extents come from
//! data and are checked before anything is allocated.

use super::strided::{Offsets, broadcast_dims, cells, from_cells, strides, take};
use super::util::{
    MAX_ELEMENTS, at_most, buffer, check_rank, check_type, common_type, constant_ints, extent, fact,
    output_of, required,
};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Element, Shape, Tensor, bf16_from_f64, f16_from_f64};

/// Extents from an input, as far as they are known; `None` when not even their number is.
fn extents(name: &str, input: &Fact) -> Result<Option<Vec<Dim>>, OpError> {
    check_type(name, input, &[DType::I64])?;
    if input.rank() == Some(0) {
        return Err(OpError::input(name, "a list (rank 1)", "a scalar"));
    }
    match constant_ints(name, input)? {
        Some(list) => {
            check_rank(name, list.len())?;
            list.into_iter().map(|v| extent(name, v).map(Dim::Known)).collect::<Result<Vec<_>, _>>().map(Some)
        }
        None => match input.dim(0).known() {
            Some(rank) => {
                check_rank(name, rank)?;
                Ok(Some(vec![Dim::Unknown; rank]))
            }
            None => Ok(None),
        },
    }
}

/// The input broadcast with a shape (both ways).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expand;

impl OpDef for Expand {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let (x, target) = (required(inputs, 0, "input")?, required(inputs, 1, "shape")?);
        let shape = match (&x.shape, extents("shape", target)?) {
            (Some(s), Some(t)) => Some(broadcast_dims(&[s, &t]).ok_or_else(|| {
                let found = fact(None, Some(t)).shape_text();
                OpError::input(
                    "shape",
                    format!("a shape that broadcasts with input {}", x.shape_text()),
                    found,
                )
            })?),
            _ => None,
        };
        Ok(vec![fact(x.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        let walk = Offsets::broadcast(x.shape(), &shape);
        Ok(vec![take(x, shape, walk)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "shape")])?;
        let out = outputs.first().ok_or("it has no output")?;
        Ok(vec![token_axis::pointwise(&[inputs.first().copied().flatten()], out)?])
    }
}

/// The input repeated along each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile;

impl OpDef for Tile {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let (x, repeats) = (required(inputs, 0, "input")?, required(inputs, 1, "repeats")?);
        let (Some(s), Some(r)) = (&x.shape, extents("repeats", repeats)?) else {
            return Ok(vec![fact(x.dtype, None)]);
        };
        if s.len() != r.len() {
            return Err(OpError::input(
                "repeats",
                format!("{} values, one per axis of input", s.len()),
                r.len(),
            ));
        }
        let repeat = |(d, r): (&Dim, &Dim)| match (d, r) {
            (Dim::Known(d), Dim::Known(r)) => d.checked_mul(*r).map(Dim::Known),
            (d, Dim::Known(1)) => Some(d.clone()),
            _ => Some(Dim::Unknown),
        };
        let shape = s.iter().zip(&r).map(repeat).collect::<Option<Vec<_>>>();
        let overflow =
            || OpError::input("repeats", "extents that fit", fact(None, Some(r.clone())).shape_text());
        Ok(vec![fact(x.dtype, Some(shape.ok_or_else(overflow)?))])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let (x, repeats) = (required(inputs, 0, "input")?, required(inputs, 1, "repeats")?.to_i64()?);
        // Each axis is walked as [repeat, extent], the repeat with stride 0.
        let dims: Vec<usize> =
            repeats.iter().zip(x.shape().iter()).flat_map(|(&r, &d)| [r as usize, d]).collect();
        let steps = strides(x.shape()).into_iter().flat_map(|s| [0, s]).collect();
        Ok(vec![take(x, shape, Offsets::new(&dims, steps, 0))?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "repeats")])?;
        let Some(Some(Traced { trace: Trace::Tokens(a), shape, .. })) = inputs.first() else {
            return Ok(vec![Trace::Absent]);
        };
        if outputs.first().and_then(|o| o.get(a.axis)) != shape.get(a.axis) {
            return Err(format!("it repeats axis {}, which counts tokens", a.axis));
        }
        Ok(vec![Trace::Tokens(*a)])
    }
}

/// `start`, `start + delta`, ... up to `limit`, which is not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range;

const RANGE_TYPES: &[DType] =
    &[DType::F16, DType::BF16, DType::F32, DType::F64, DType::I16, DType::I32, DType::I64];

impl Range {
    fn operands<'a, T>(inputs: &[Option<&'a T>]) -> Result<[(&'static str, &'a T); 3], OpError> {
        let at = |i: usize, name: &'static str| required(inputs, i, name).map(|t| (name, t));
        Ok([at(0, "start")?, at(1, "limit")?, at(2, "delta")?])
    }

    /// The number of elements.
    fn count([start, limit, delta]: [&Tensor; 3]) -> Result<usize, OpError> {
        let n = if start.dtype().is_float() {
            let [s, l, d] = [one_float(start)?, one_float(limit)?, one_float(delta)?];
            if d == 0.0 {
                return Err(OpError::input("delta", "a step other than 0", d));
            }
            let n = ((l - s) / d).ceil();
            if !n.is_finite() {
                return Err(OpError::input("limit", "finite bounds and step", format!("{s} to {l} by {d}")));
            }
            n.max(0.0) as i128
        } else {
            let [s, l, d] = [one_int(start)?, one_int(limit)?, one_int(delta)?];
            if d == 0 {
                return Err(OpError::input("delta", "a step other than 0", d));
            }
            let span = if d > 0 { l - s } else { s - l };
            if span <= 0 { 0 } else { (span - 1) / d.abs() + 1 }
        };
        usize::try_from(n)
            .ok()
            .filter(|&n| n <= MAX_ELEMENTS)
            .ok_or_else(|| OpError::input("limit", format!("at most {MAX_ELEMENTS} elements"), n))
    }
}

fn one_float(t: &Tensor) -> Result<f64, OpError> {
    t.to_f64()?.first().copied().ok_or_else(|| OpError::other("a bound of Range is empty"))
}

fn one_int(t: &Tensor) -> Result<i128, OpError> {
    t.to_i64()?.first().copied().map(i128::from).ok_or_else(|| OpError::other("a bound of Range is empty"))
}

fn sequence<T: Element>(shape: Shape, at: impl Fn(usize) -> T) -> Result<Tensor, OpError> {
    let mut out = buffer(&shape, T::SIZE)?;
    (0..shape.iter().product()).for_each(|i| at(i).write(&mut out));
    Ok(Tensor::from_bytes(T::DTYPE, shape, out.into())?)
}

impl OpDef for Range {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        if opset >= 27 {
            match attrs.int("stash_type")? {
                None | Some(1) => {}
                Some(other) => return Err(OpError::attribute("stash_type", "1 (float32)", other)),
            }
        }
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let operands = Self::operands(inputs)?;
        for (name, f) in operands {
            check_type(name, f, RANGE_TYPES)?;
            let one = f.shape.as_ref().is_none_or(|s| s.iter().all(|d| d.compatible(&Dim::Known(1))));
            if !one {
                return Err(OpError::input(name, "a scalar", f.shape_text()));
            }
        }
        let dtype = common_type(operands)?;
        let known = operands.map(|(_, f)| f.constant.as_ref());
        let n = if let [Some(s), Some(l), Some(d)] = known {
            Dim::Known(Self::count([&s.to_tensor()?, &l.to_tensor()?, &d.to_tensor()?])?)
        } else {
            Dim::Unknown
        };
        Ok(vec![fact(dtype, Some(vec![n]))])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let [(_, start), _, (_, delta)] = Self::operands(inputs)?;
        Ok(vec![if dtype.is_float() {
            let (s, d) = (one_float(start)?, one_float(delta)?);
            let at = |i: usize| s + i as f64 * d;
            match dtype {
                DType::F64 => sequence(shape, at)?,
                DType::F32 => sequence(shape, |i| at(i) as f32)?,
                DType::F16 => sequence(shape, |i| f16_from_f64(at(i)))?,
                _ => sequence(shape, |i| bf16_from_f64(at(i)))?,
            }
        } else {
            let (s, d) = (one_int(start)?, one_int(delta)?);
            let at = |i: usize| s + i as i128 * d;
            match dtype {
                DType::I16 => sequence(shape, |i| at(i) as i16)?,
                DType::I32 => sequence(shape, |i| at(i) as i32)?,
                _ => sequence(shape, |i| at(i) as i64)?,
            }
        }])
    }
}

/// One value everywhere; the shape is an input.
#[derive(Debug, Clone, PartialEq)]
pub struct ConstantOfShape {
    /// The value, one element.
    pub value: Tensor,
}

impl OpDef for ConstantOfShape {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let value = attrs.tensor("value")?.unwrap_or_else(|| Tensor::scalar(0f32));
        if value.numel() != 1 {
            return Err(OpError::attribute("value", "a tensor of one element", value.shape()));
        }
        Ok(Self { value })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let shape = extents("input", required(inputs, 0, "input")?)?;
        Ok(vec![fact(Some(self.value.dtype()), shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let (cell, size) = cells(&self.value);
        let mut out = buffer(&shape, size)?;
        (0..shape.iter().product::<usize>()).for_each(|_| out.extend_from_slice(&cell));
        Ok(vec![from_cells(dtype, shape, out)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(v: &[i64]) -> Tensor {
        Tensor::from_slice([v.len()], v).unwrap()
    }

    #[test]
    fn expand_goes_both_ways() {
        let x = Tensor::from_slice([2, 1], &[1i32, 2]).unwrap();
        let run = |to: &[i64]| Expand.eval(&[Some(&x), Some(&list(to))], 1);
        assert_eq!(run(&[1, 1, 2]).unwrap()[0].shape().dims(), [1, 2, 2]);
        assert_eq!(run(&[2]).unwrap()[0].to_vec::<i32>().unwrap(), [1, 1, 2, 2]);
        assert!(run(&[3, 2]).unwrap_err().to_string().starts_with("input shape"));
        assert!(run(&[2, 1 << 40]).is_err());
        assert!(run(&[-1]).is_err());
        assert_eq!(run(&[2, 0]).unwrap()[0].numel(), 0);
    }

    #[test]
    fn tile_repeats() {
        let x = Tensor::from_slice([1, 2], &[1u8, 2]).unwrap();
        let run = |r: &[i64]| Tile.eval(&[Some(&x), Some(&list(r))], 1);
        assert_eq!(run(&[2, 2]).unwrap()[0].to_vec::<u8>().unwrap(), [1, 2, 1, 2, 1, 2, 1, 2]);
        assert_eq!(run(&[0, 2]).unwrap()[0].shape().dims(), [0, 4]);
        assert!(run(&[1]).is_err());
        assert!(run(&[1, i64::MAX]).is_err());
        assert!(run(&[i64::MAX, i64::MAX]).is_err());
    }

    #[test]
    fn ranges() {
        let ints = |s: i64, l: i64, d: i64| {
            let t = [s, l, d].map(Tensor::scalar);
            Range.eval(&[Some(&t[0]), Some(&t[1]), Some(&t[2])], 1).map(|y| y[0].to_vec::<i64>().unwrap())
        };
        assert_eq!(ints(3, 9, 3).unwrap(), [3, 6]);
        assert_eq!(ints(10, 4, -2).unwrap(), [10, 8, 6]);
        assert!(ints(1, 0, 1).unwrap().is_empty());
        assert!(ints(0, 1, 0).is_err());
        assert!(ints(i64::MIN, i64::MAX, 1).is_err());
        assert_eq!(ints(i64::MIN, i64::MAX, i64::MAX).unwrap(), [i64::MIN, -1, i64::MAX - 1]);
        let f = [1f32, 2.0, f32::NAN].map(Tensor::scalar);
        assert!(Range.eval(&[Some(&f[0]), Some(&f[1]), Some(&f[2])], 1).is_err());
    }

    #[test]
    fn constants_of_shape() {
        let op = ConstantOfShape::parse("ConstantOfShape", 9, &mut Attrs::default()).unwrap();
        assert_eq!(op.eval(&[Some(&list(&[]))], 1).unwrap()[0].to_f32().unwrap(), [0.0]);
        assert_eq!(op.eval(&[Some(&list(&[2, 0]))], 1).unwrap()[0].shape().dims(), [2, 0]);
        assert!(op.eval(&[Some(&list(&[1 << 20, 1 << 20]))], 1).is_err());
        assert!(op.eval(&[Some(&list(&[-1]))], 1).is_err());
        let two = Tensor::from_slice([2], &[1f32, 2.0]).unwrap();
        assert!(
            ConstantOfShape::parse("ConstantOfShape", 9, &mut Attrs::from([("value", two.into())])).is_err()
        );
    }
}
