//! ScatterElements, ScatterND and TensorScatter: a copy of the data with some elements written.

use super::gather::{check_fits, coordinates, element_offsets, slice_offsets};
use super::strided::{cells, from_cells};
use super::util::{
    INDICES, NUMBERS_AND_BOOL, at_most, check_type, common_type, fact, normalize_axis, optional, output_of,
    required,
};
use super::value::{from_floats, from_ints, ints};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// What becomes of the element that an update meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Combine {
    /// The update replaces it; of several updates the last one counts.
    Replace,
    Add,
    Mul,
    Min,
    Max,
}

impl Combine {
    fn parse(opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        if opset < 16 {
            return Ok(Self::Replace);
        }
        Ok(match attrs.string("reduction")?.as_deref() {
            None | Some("none") => Self::Replace,
            Some("add") => Self::Add,
            Some("mul") => Self::Mul,
            Some("min") if opset >= 18 => Self::Min,
            Some("max") if opset >= 18 => Self::Max,
            Some(other) => {
                let allowed = if opset >= 18 { "none, add, mul, min or max" } else { "none, add or mul" };
                return Err(OpError::attribute("reduction", allowed, other));
            }
        })
    }

    fn float(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Replace => b,
            Self::Add => a + b,
            Self::Mul => a * b,
            Self::Min | Self::Max if a.is_nan() || b.is_nan() => f64::NAN,
            Self::Min => a.min(b),
            Self::Max => a.max(b),
        }
    }

    fn int(self, a: i128, b: i128) -> i128 {
        match self {
            Self::Replace => b,
            Self::Add => a.wrapping_add(b),
            Self::Mul => a.wrapping_mul(b),
            Self::Min => a.min(b),
            Self::Max => a.max(b),
        }
    }

    /// `data` with the elements of `updates` combined in at `offsets`, in order.
    fn apply(self, data: &Tensor, updates: &Tensor, offsets: &[usize]) -> Result<Tensor, OpError> {
        let (dtype, shape) = (data.dtype(), data.shape().clone());
        if self == Self::Replace {
            let ((out, size), (new, _)) = (cells(data), cells(updates));
            let mut out = out.to_vec();
            for (&o, cell) in offsets.iter().zip(new.chunks_exact(size)) {
                out[o * size..(o + 1) * size].copy_from_slice(cell);
            }
            return from_cells(dtype, shape, out);
        }
        if dtype.is_float() {
            let mut out = data.to_f64()?;
            offsets.iter().zip(updates.to_f64()?).for_each(|(&o, v)| out[o] = self.float(out[o], v));
            return from_floats(dtype, shape, &out);
        }
        let mut out = ints(data)?;
        offsets.iter().zip(ints(updates)?).for_each(|(&o, v)| out[o] = self.int(out[o], v));
        from_ints(dtype, shape, &out)
    }

    fn check(self, data: &Fact) -> Result<(), OpError> {
        if self != Self::Replace {
            check_type("data", data, NUMBERS_AND_BOOL)?;
        }
        Ok(())
    }
}

/// One update per element of `indices`, which replaces the coordinate on `axis`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScatterElements {
    /// As written.
    pub axis: i64,
    /// What becomes of the element that an update meets.
    pub combine: Combine,
}

impl OpDef for ScatterElements {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { axis: attrs.int("axis")?.unwrap_or(0), combine: Combine::parse(opset, attrs)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let data = required(inputs, 0, "data")?;
        let (indices, updates) = (required(inputs, 1, "indices")?, required(inputs, 2, "updates")?);
        check_type("indices", indices, INDICES)?;
        self.combine.check(data)?;
        let dtype = common_type([("data", data), ("updates", updates)])?;
        if let Some(rank) = data.rank() {
            normalize_axis("axis", self.axis, rank)?;
        }
        check_fits("indices", data, indices, self.axis)?;
        if let (Some(i), Some(u)) = (&indices.shape, &updates.shape)
            && (i.len() != u.len() || i.iter().zip(u).any(|(i, u)| !i.compatible(u)))
        {
            let expected = format!("shape {}, that of indices", indices.shape_text());
            return Err(OpError::input("updates", expected, updates.shape_text()));
        }
        Ok(vec![fact(dtype, data.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        output_of(self, inputs)?;
        let data = required(inputs, 0, "data")?;
        let offsets = element_offsets(data.shape(), required(inputs, 1, "indices")?, self.axis)?;
        Ok(vec![self.combine.apply(data, required(inputs, 2, "updates")?, &offsets)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        let found: Vec<Traced<'_>> = inputs.iter().copied().flatten().collect();
        if found.iter().all(|t| t.trace == Trace::Absent) {
            return Ok(vec![Trace::Absent]);
        }
        let rank = outputs.first().map_or(0, |s| s.len());
        let axis = normalize_axis("axis", self.axis, rank).map_err(|e| e.to_string())?;
        match found.first().map(|t| t.trace) {
            Some(Trace::Tokens(a))
                if a.axis != axis
                    && found.iter().all(|t| t.trace == Trace::Tokens(a))
                    && found.iter().all(|t| t.shape.get(a.axis) == found[0].shape.get(a.axis)) =>
            {
                Ok(vec![Trace::Tokens(a)])
            }
            _ => Err("it scatters over the tokens".into()),
        }
    }
}

/// Updates of whole slices at coordinates; the last axis of `indices` holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScatterNd {
    /// What becomes of the element that an update meets.
    pub combine: Combine,
}

impl OpDef for ScatterNd {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { combine: Combine::parse(opset, attrs)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let data = required(inputs, 0, "data")?;
        let (indices, updates) = (required(inputs, 1, "indices")?, required(inputs, 2, "updates")?);
        check_type("indices", indices, &[DType::I64])?;
        self.combine.check(data)?;
        let dtype = common_type([("data", data), ("updates", updates)])?;
        if let (Some(n), Some(d), Some(i), Some(u)) =
            (coordinates(data, indices, 0)?, &data.shape, &indices.shape, &updates.shape)
        {
            let expected = [&i[..i.len() - 1], &d[n..]].concat();
            if u.len() != expected.len() || u.iter().zip(&expected).any(|(u, e)| !u.compatible(e)) {
                let expected = format!("shape {}", fact(None, Some(expected)).shape_text());
                return Err(OpError::input("updates", expected, updates.shape_text()));
            }
        }
        Ok(vec![fact(dtype, data.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        output_of(self, inputs)?;
        let data = required(inputs, 0, "data")?;
        let (starts, len) = slice_offsets(data.shape(), required(inputs, 1, "indices")?, 0)?;
        let offsets: Vec<usize> = starts.into_iter().flat_map(|s| s..s + len).collect();
        Ok(vec![self.combine.apply(data, required(inputs, 2, "updates")?, &offsets)?])
    }
}

/// Writes new entries into a cache along its sequence axis, each sample at its own position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorScatter {
    /// The sequence axis, as written; not the batch axis 0.
    pub axis: i64,
    /// Positions wrap around at the end of the cache.
    pub circular: bool,
}

impl TensorScatter {
    fn sequence_axis(self, rank: usize) -> Result<usize, OpError> {
        match normalize_axis("axis", self.axis, rank)? {
            0 => Err(OpError::attribute("axis", "an axis other than 0, the batch axis", self.axis)),
            axis => Ok(axis),
        }
    }
}

impl OpDef for TensorScatter {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let circular = match attrs.string("mode")?.as_deref() {
            None | Some("linear") => false,
            Some("circular") => true,
            Some(other) => return Err(OpError::attribute("mode", "linear or circular", other)),
        };
        Ok(Self { axis: attrs.int("axis")?.unwrap_or(-2), circular })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let (past, update) = (required(inputs, 0, "past_cache")?, required(inputs, 1, "update")?);
        let dtype = common_type([("past_cache", past), ("update", update)])?;
        if let (Some(p), Some(u)) = (&past.shape, &update.shape) {
            let axis = self.sequence_axis(p.len())?;
            let fits = |(i, (p, u)): (usize, (&Dim, &Dim))| match (p.known(), u.known()) {
                (Some(p), Some(u)) => u == p || i == axis && u < p,
                _ => true,
            };
            if p.len() != u.len() || !p.iter().zip(u).enumerate().all(fits) {
                let expected = format!("shape {} with at most that extent on axis {axis}", past.shape_text());
                return Err(OpError::input("update", expected, update.shape_text()));
            }
        }
        if let Some(at) = optional(inputs, 2) {
            check_type("write_indices", at, &[DType::I64])?;
            let batch = past.dim(0);
            if at.rank().is_some_and(|r| r != 1) || !at.dim(0).compatible(&batch) {
                let expected = format!("shape [{batch}], one position per sample");
                return Err(OpError::input("write_indices", expected, at.shape_text()));
            }
        }
        Ok(vec![fact(dtype, past.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        output_of(self, inputs)?;
        let (past, update) = (required(inputs, 0, "past_cache")?, required(inputs, 1, "update")?);
        let axis = self.sequence_axis(past.shape().len())?;
        let (batch, capacity, new) = (past.shape()[0], past.shape()[axis], update.shape()[axis]);
        let starts = match optional(inputs, 2) {
            Some(t) => t.to_i64()?,
            None => vec![0; batch],
        };
        let inner: usize = past.shape()[axis + 1..].iter().product();
        let per_sample: usize = past.shape()[1..axis].iter().product();
        let mut offsets = Vec::with_capacity(update.numel());
        for (b, &start) in starts.iter().enumerate() {
            let start =
                usize::try_from(start).ok().filter(|s| self.circular || s.saturating_add(new) <= capacity);
            let start = start.ok_or_else(|| {
                let expected = format!("positions of 0 or more with {new} entries inside {capacity}");
                OpError::input("write_indices", expected, starts[b])
            })?;
            for row in b * per_sample..(b + 1) * per_sample {
                for s in 0..new {
                    let at = (start % capacity.max(1) + s) % capacity.max(1);
                    offsets.extend((0..inner).map(|j| (row * capacity + at) * inner + j));
                }
            }
        }
        Ok(vec![Combine::Replace.apply(past, update, &offsets)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(shape: &[usize], v: &[f32]) -> Tensor {
        Tensor::from_slice(shape, v).unwrap()
    }
    fn idx(shape: &[usize], v: &[i64]) -> Tensor {
        Tensor::from_slice(shape, v).unwrap()
    }

    #[test]
    fn updates_combine_in_order() {
        let (x, i, u) = (f32s(&[3], &[1.0, 2.0, 3.0]), idx(&[3], &[1, -2, 0]), f32s(&[3], &[5.0, 7.0, 0.5]));
        let run = |combine| {
            let y = ScatterElements { axis: 0, combine }.eval(&[Some(&x), Some(&i), Some(&u)], 1);
            y.unwrap()[0].to_f32().unwrap()
        };
        assert_eq!(run(Combine::Replace), [0.5, 7.0, 3.0]);
        assert_eq!(run(Combine::Add), [1.5, 14.0, 3.0]);
        assert_eq!(run(Combine::Mul), [0.5, 70.0, 3.0]);
        assert_eq!(run(Combine::Min), [0.5, 2.0, 3.0]);
        assert_eq!(run(Combine::Max), [1.0, 7.0, 3.0]);
    }

    #[test]
    fn errors_name_the_input() {
        let (x, u) = (f32s(&[3], &[1.0, 2.0, 3.0]), f32s(&[1], &[5.0]));
        let op = ScatterElements { axis: 0, combine: Combine::Replace };
        let e = op.eval(&[Some(&x), Some(&idx(&[1], &[3])), Some(&u)], 1).unwrap_err().to_string();
        assert_eq!(e, "input indices: expected an index of an axis of 3 elements, found 3");
        let e = op.eval(&[Some(&x), Some(&idx(&[2], &[0, 1])), Some(&u)], 1).unwrap_err().to_string();
        assert_eq!(e, "input updates: expected shape [2], that of indices, found [1]");
        let min = Attrs::from([("reduction", "min".into())]);
        assert!(ScatterElements::parse("ScatterElements", 16, &mut min.clone()).is_err());
        assert!(ScatterElements::parse("ScatterElements", 18, &mut min.clone()).is_ok());
    }

    #[test]
    fn whole_slices() {
        let x = f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let op = ScatterNd { combine: Combine::Add };
        let y =
            op.eval(&[Some(&x), Some(&idx(&[1, 1], &[1])), Some(&f32s(&[1, 2], &[10.0, 20.0]))], 1).unwrap();
        assert_eq!(y[0].to_f32().unwrap(), [1.0, 2.0, 13.0, 24.0]);
        assert!(op.eval(&[Some(&x), Some(&idx(&[1, 1], &[1])), Some(&f32s(&[2], &[1.0, 2.0]))], 1).is_err());
    }

    #[test]
    fn caches_linear_and_circular() {
        let past = f32s(&[2, 3, 1], &[0.0; 6]);
        let update = f32s(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
        let run = |circular, at: &[i64]| {
            let op = TensorScatter { axis: -2, circular };
            op.eval(&[Some(&past), Some(&update), Some(&idx(&[2], at))], 1).map(|y| y[0].to_f32().unwrap())
        };
        assert_eq!(run(false, &[0, 1]).unwrap(), [1.0, 2.0, 0.0, 0.0, 3.0, 4.0]);
        assert_eq!(run(true, &[2, 5]).unwrap(), [2.0, 0.0, 1.0, 4.0, 0.0, 3.0]);
        assert!(run(false, &[0, 2]).unwrap_err().to_string().starts_with("input write_indices"));
        assert!(run(true, &[0, -1]).is_err());
        assert!(run(false, &[0, i64::MAX]).is_err());
        let long = f32s(&[2, 4, 1], &[0.0; 8]);
        let op = TensorScatter { axis: 1, circular: true };
        assert!(op.eval(&[Some(&past), Some(&long)], 1).is_err());
        assert!(TensorScatter { axis: 0, circular: false }.eval(&[Some(&past), Some(&update)], 1).is_err());
    }
}
