//! Gather, GatherElements, GatherND.

use super::strided::{Offsets, strides, take};
use super::util::{INDICES, at_most, check_type, fact, normalize_axis, output_of, required};
use super::{OpDef, OpError, TokenAxis, Trace, Traced};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// `value` as an index into `extent` elements; negative ones count from the end.
pub(super) fn index(name: &str, value: i64, extent: usize) -> Result<usize, OpError> {
    super::util::wrap_axis(value, extent)
        .ok_or_else(|| OpError::input(name, format!("an index of an axis of {extent} elements"), value))
}

fn indices_of(inputs: &[Option<&Fact>]) -> Result<(), OpError> {
    check_type("indices", required(inputs, 1, "indices")?, INDICES).map(|_| ())
}

fn traced<'a>(inputs: &[Option<Traced<'a>>]) -> Result<[Traced<'a>; 2], String> {
    let at = |i: usize| inputs.get(i).copied().flatten().ok_or("an input is missing");
    Ok([at(0)?, at(1)?])
}

const SELECTS: &str = "it selects among the tokens";

/// Slices of `data` along `axis` at `indices`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gather {
    /// As written.
    pub axis: i64,
}

impl OpDef for Gather {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { axis: attrs.int("axis")?.unwrap_or(0) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let data = required(inputs, 0, "data")?;
        indices_of(inputs)?;
        let indices = required(inputs, 1, "indices")?;
        let axis = match data.rank() {
            None => None,
            Some(rank) => Some(normalize_axis("axis", self.axis, rank)?),
        };
        let shape = match (&data.shape, axis, &indices.shape) {
            (Some(d), Some(axis), Some(i)) => Some([&d[..axis], i.as_slice(), &d[axis + 1..]].concat()),
            _ => None,
        };
        if let (Some(c), Some(Dim::Known(n))) = (&indices.constant, axis.map(|a| data.dim(a))) {
            for v in c.to_tensor()?.to_i64()? {
                index("indices", v, n)?;
            }
        }
        Ok(vec![fact(data.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let (data, indices) = (required(inputs, 0, "data")?, required(inputs, 1, "indices")?);
        let axis = normalize_axis("axis", self.axis, data.shape().len())?;
        let extent = data.shape()[axis];
        let outer: usize = data.shape()[..axis].iter().product();
        let inner: usize = data.shape()[axis + 1..].iter().product();
        let rows = (indices.to_i64()?.into_iter())
            .map(|v| index("indices", v, extent))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = &rows;
        let walk = (0..outer).flat_map(|o| {
            rows.iter().flat_map(move |&r| (0..inner).map(move |j| (o * extent + r) * inner + j))
        });
        Ok(vec![take(data, shape, walk)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let [data, indices] = traced(inputs)?;
        let axis = normalize_axis("axis", self.axis, data.shape.len()).map_err(|e| e.to_string())?;
        Ok(vec![match (data.trace, indices.trace) {
            (Trace::Absent, Trace::Absent) => Trace::Absent,
            (Trace::Absent, Trace::Tokens(i)) => {
                Trace::Tokens(TokenAxis { axis: axis + i.axis, inner: i.inner })
            }
            (Trace::Tokens(d), Trace::Absent) if d.axis != axis => {
                let at = if d.axis < axis { d.axis } else { d.axis + indices.shape.len() - 1 };
                Trace::Tokens(TokenAxis { axis: at, inner: d.inner })
            }
            _ => return Err(SELECTS.into()),
        }])
    }
}

/// One element of `data` per element of `indices`, which replaces the coordinate on `axis`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherElements {
    /// As written.
    pub axis: i64,
}

/// Checks that `other` fits into `data` on every axis but `axis` (GatherElements, ScatterElements).
pub(super) fn check_fits(name: &str, data: &Fact, other: &Fact, axis: i64) -> Result<(), OpError> {
    let (Some(d), Some(o)) = (&data.shape, &other.shape) else { return Ok(()) };
    let axis = normalize_axis("axis", axis, d.len())?;
    let fits = o.len() == d.len()
        && d.iter().zip(o).enumerate().all(|(i, (d, o))| match (d.known(), o.known()) {
            (Some(d), Some(o)) => i == axis || o <= d,
            _ => true,
        });
    if fits {
        return Ok(());
    }
    let expected = format!("at most the extents of data {} off axis {axis}", data.shape_text());
    Err(OpError::input(name, expected, other.shape_text()))
}

impl OpDef for GatherElements {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { axis: attrs.int("axis")?.unwrap_or(0) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let data = required(inputs, 0, "data")?;
        indices_of(inputs)?;
        let indices = required(inputs, 1, "indices")?;
        check_fits("indices", data, indices, self.axis)?;
        Ok(vec![fact(data.dtype, indices.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let (data, indices) = (required(inputs, 0, "data")?, required(inputs, 1, "indices")?);
        let walk = element_offsets(data.shape(), indices, self.axis)?;
        Ok(vec![take(data, shape, walk)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let [data, indices] = traced(inputs)?;
        let axis = normalize_axis("axis", self.axis, data.shape.len()).map_err(|e| e.to_string())?;
        Ok(vec![match (data.trace, indices.trace) {
            (Trace::Absent, Trace::Absent) => Trace::Absent,
            (Trace::Tokens(d), Trace::Tokens(i))
                if d == i && d.axis != axis && data.shape[d.axis] == indices.shape[d.axis] =>
            {
                Trace::Tokens(d)
            }
            (Trace::Absent, Trace::Tokens(i)) if i.axis == axis => Trace::Tokens(i),
            _ => return Err(SELECTS.into()),
        }])
    }
}

/// Offset in a tensor of shape `data` of every element that `indices` names, in order of `indices`.
pub(super) fn element_offsets(data: &Shape, indices: &Tensor, axis: i64) -> Result<Vec<usize>, OpError> {
    let axis = normalize_axis("axis", axis, data.len())?;
    let own = strides(data);
    let mut elsewhere = own.clone();
    elsewhere[axis] = 0;
    Offsets::new(indices.shape(), elsewhere, 0)
        .zip(indices.to_i64()?)
        .map(|(base, v)| Ok(base + index("indices", v, data[axis])? * own[axis] as usize))
        .collect()
}

/// Slices of `data` at coordinates: the last axis of `indices` holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherNd {
    /// Leading axes that `data` and `indices` share.
    pub batch_dims: usize,
}

/// The coordinates' number, checked, where both shapes are known enough.
pub(super) fn coordinates(data: &Fact, indices: &Fact, batch_dims: usize) -> Result<Option<usize>, OpError> {
    let (Some(d), Some(i)) = (&data.shape, &indices.shape) else { return Ok(None) };
    if i.len() <= batch_dims || d.len() <= batch_dims {
        let expected = format!("more than the {batch_dims} axes of batch_dims in data and indices");
        return Err(OpError::input("indices", expected, indices.shape_text()));
    }
    let Some(n) = i.last().and_then(Dim::known) else { return Ok(None) };
    if n > d.len() - batch_dims {
        let expected = format!("at most {} coordinates in the last axis", d.len() - batch_dims);
        return Err(OpError::input("indices", expected, n));
    }
    if let Some(b) = (0..batch_dims).find(|&b| !d[b].compatible(&i[b])) {
        return Err(OpError::input("indices", format!("extent {} on axis {b}, as data", d[b]), &i[b]));
    }
    Ok(Some(n))
}

/// Offset of the first element of every slice that `indices` names, and the elements of a slice.
pub(super) fn slice_offsets(
    data: &Shape,
    indices: &Tensor,
    batch_dims: usize,
) -> Result<(Vec<usize>, usize), OpError> {
    let n = indices.shape().last().copied().unwrap_or(0);
    let own = data.strides();
    let slice: usize = data[batch_dims + n..].iter().product();
    let lead = &indices.shape()[..indices.shape().len() - 1];
    let per_batch: usize = lead[batch_dims..].iter().product();
    let batch: usize = data[batch_dims..].iter().product();
    let values = indices.to_i64()?;
    let offset = |i: usize| {
        let base = i / per_batch.max(1) * batch;
        values[i * n..(i + 1) * n].iter().enumerate().try_fold(base, |o, (j, &v)| {
            Ok(o + index("indices", v, data[batch_dims + j])? * own[batch_dims + j])
        })
    };
    let count: usize = lead.iter().product();
    Ok(((0..count).map(offset).collect::<Result<_, OpError>>()?, slice))
}

impl OpDef for GatherNd {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let raw = attrs.int("batch_dims")?.unwrap_or(0);
        let batch_dims =
            usize::try_from(raw).map_err(|_| OpError::attribute("batch_dims", "0 or more", raw))?;
        Ok(Self { batch_dims })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let (data, indices) = (required(inputs, 0, "data")?, required(inputs, 1, "indices")?);
        check_type("indices", indices, &[DType::I64])?;
        let shape = match (coordinates(data, indices, self.batch_dims)?, &data.shape, &indices.shape) {
            (Some(n), Some(d), Some(i)) => Some([&i[..i.len() - 1], &d[self.batch_dims + n..]].concat()),
            _ => None,
        };
        Ok(vec![fact(data.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let (data, indices) = (required(inputs, 0, "data")?, required(inputs, 1, "indices")?);
        let (starts, len) = slice_offsets(data.shape(), indices, self.batch_dims)?;
        let walk = starts.into_iter().flat_map(|s| s..s + len);
        Ok(vec![take(data, shape, walk)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let [data, indices] = traced(inputs)?;
        let last = indices.shape.len().saturating_sub(1);
        let named = self.batch_dims + indices.shape.last().copied().unwrap_or(0);
        Ok(vec![match (data.trace, indices.trace) {
            (Trace::Absent, Trace::Absent) => Trace::Absent,
            (Trace::Absent, Trace::Tokens(i)) if (self.batch_dims..last).contains(&i.axis) => {
                Trace::Tokens(i)
            }
            (Trace::Tokens(d), Trace::Absent) if d.axis >= named => {
                Trace::Tokens(TokenAxis { axis: last + d.axis - named, inner: d.inner })
            }
            (Trace::Tokens(d), Trace::Tokens(i)) if d == i && d.axis < self.batch_dims => Trace::Tokens(d),
            _ => return Err(SELECTS.into()),
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_data::iota;

    fn idx(shape: &[usize], v: &[i64]) -> Tensor {
        Tensor::from_slice(shape, v).unwrap()
    }

    #[test]
    fn gather_replaces_the_axis() {
        let run = |axis, i: &Tensor| Gather { axis }.eval(&[Some(&iota(&[2, 3])), Some(i)], 1);
        let y = run(1, &idx(&[2, 1], &[2, -3])).unwrap().remove(0);
        assert_eq!(y.shape().dims(), [2, 2, 1]);
        assert_eq!(y.to_vec::<i32>().unwrap(), [2, 0, 5, 3]);
        let y = run(0, &Tensor::scalar(1i64)).unwrap().remove(0);
        assert_eq!(y.shape().dims(), [3]);
        assert_eq!(
            run(0, &idx(&[1], &[2])).unwrap_err().to_string(),
            "input indices: expected an index of an axis of 2 elements, found 2"
        );
        assert!(run(0, &idx(&[1], &[i64::MIN])).is_err());
        assert_eq!(run(0, &idx(&[0], &[])).unwrap()[0].shape().dims(), [0, 3]);
    }

    #[test]
    fn gather_elements_keeps_the_other_coordinates() {
        let run = |axis, i: &Tensor| GatherElements { axis }.eval(&[Some(&iota(&[2, 3])), Some(i)], 1);
        assert_eq!(run(1, &idx(&[2, 1], &[2, -3])).unwrap()[0].to_vec::<i32>().unwrap(), [2, 3]);
        assert_eq!(run(0, &idx(&[1, 2], &[1, 0])).unwrap()[0].to_vec::<i32>().unwrap(), [3, 1]);
        assert!(run(1, &idx(&[3, 1], &[0, 0, 0])).is_err());
        assert!(run(1, &idx(&[3], &[0, 0, 0])).is_err());
    }

    #[test]
    fn gather_nd_takes_slices() {
        let run =
            |batch_dims, i: &Tensor| GatherNd { batch_dims }.eval(&[Some(&iota(&[2, 2, 2])), Some(i)], 1);
        assert_eq!(run(0, &idx(&[2, 2], &[0, 1, 1, 0])).unwrap()[0].to_vec::<i32>().unwrap(), [2, 3, 4, 5]);
        assert_eq!(run(1, &idx(&[2, 1], &[1, 0])).unwrap()[0].to_vec::<i32>().unwrap(), [2, 3, 4, 5]);
        assert!(run(0, &idx(&[1, 4], &[0, 0, 0, 0])).is_err());
        assert!(run(2, &idx(&[2, 1], &[0, 0])).is_err());
        assert!(run(0, &idx(&[1, 1], &[7])).is_err());
    }

    #[test]
    fn token_axes() {
        let (table, ids, out) = (Shape::from([100, 16]), Shape::from([1, 5]), Shape::from([1, 5, 16]));
        let tokens = |shape, axis| {
            Some(Traced { trace: Trace::Tokens(TokenAxis { axis, inner: 1 }), shape, constant: None })
        };
        let plain = |shape| Some(Traced { trace: Trace::Absent, shape, constant: None });
        let at = |axis| vec![Trace::Tokens(TokenAxis { axis, inner: 1 })];
        let g = |axis, d, i| Gather { axis }.trace(&[d, i], std::slice::from_ref(&out));
        assert_eq!(g(0, plain(&table), tokens(&ids, 1)).unwrap(), at(1));
        assert_eq!(g(1, plain(&table), tokens(&ids, 1)).unwrap(), at(2));
        assert_eq!(g(2, tokens(&out, 1), plain(&ids)).unwrap(), at(1));
        assert_eq!(g(0, tokens(&out, 1), plain(&ids)).unwrap(), at(2));
        assert!(g(1, tokens(&out, 1), plain(&ids)).is_err());
    }
}
