//! TopK, ArgMax, ArgMin: order along one axis. A NaN counts as larger than every number, as in numpy's sort.

use super::lines::Lines;
use super::strided::{cells, from_cells};
use super::util::{
    NUMBERS, at_most, buffer, check_type, constant_int, fact, normalize_axis, outputs_of, required,
};
use super::value::ints;
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};
use std::cmp::Ordering;

fn order_floats(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// For every line, what `pick` makes of the order of its elements, given by position.
fn per_line<R>(
    x: &Tensor,
    lines: Lines,
    pick: impl Fn(&dyn Fn(usize, usize) -> Ordering) -> R,
) -> Result<Vec<R>, OpError> {
    let each = |compare: &dyn Fn(usize, usize) -> Ordering| -> Vec<R> {
        let at = |start: usize, i: usize| start + i * lines.inner;
        lines.starts().map(|s| pick(&|i, j| compare(at(s, i), at(s, j)))).collect()
    };
    Ok(if x.dtype().is_float() {
        let v = x.to_f64()?;
        each(&|i, j| order_floats(v[i], v[j]))
    } else {
        let v = ints(x)?;
        each(&|i, j| v[i].cmp(&v[j]))
    })
}

/// The `k` largest or smallest elements along an axis, and where they are. Ties go to the lower index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    /// As written.
    pub axis: i64,
    /// The largest instead of the smallest.
    pub largest: bool,
    /// The attribute of opset 9 and before; an input afterwards. The result is always sorted.
    pub k: Option<i64>,
}

impl TopK {
    fn count(self, k: i64, along: &Dim) -> Result<usize, OpError> {
        let n = usize::try_from(k).ok().filter(|&k| along.known().is_none_or(|n| k <= n));
        n.ok_or_else(|| {
            let expected = format!("0 to {along}, the extent of the axis");
            match self.k {
                Some(_) => OpError::attribute("k", expected, k),
                None => OpError::input("K", expected, k),
            }
        })
    }
}

impl OpDef for TopK {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let axis = attrs.int("axis")?.unwrap_or(-1);
        let k = if opset < 10 { Some(attrs.required_int("k")?) } else { None };
        let mut largest = true;
        if opset >= 11 {
            largest = attrs.flag("largest", true)?;
            // Unsorted permits any order, the sorted one too.
            attrs.flag("sorted", true)?;
        }
        Ok(Self { axis, largest, k })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if self.k.is_some() { 1 } else { 2 })?;
        let x = required(inputs, 0, "X")?;
        let dtype = check_type("X", x, NUMBERS)?;
        let k = if self.k.is_some() {
            self.k
        } else {
            let k = required(inputs, 1, "K")?;
            check_type("K", k, &[DType::I64])?;
            constant_int("K", k)?
        };
        let shape = match &x.shape {
            None => None,
            Some(s) => {
                let axis = normalize_axis("axis", self.axis, s.len())?;
                let mut out = s.clone();
                out[axis] = match k {
                    Some(k) => Dim::Known(self.count(k, &s[axis])?),
                    None => Dim::Unknown,
                };
                Some(out)
            }
        };
        Ok(vec![fact(dtype, shape.clone()), fact(Some(DType::I64), shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let mut out = outputs_of(self, inputs)?.into_iter();
        let (dtype, shape) = out.next().ok_or_else(|| OpError::other("no output"))?;
        let x = required(inputs, 0, "X")?;
        let axis = normalize_axis("axis", self.axis, shape.len())?;
        let (lines, k) = (Lines::along(x.shape(), axis), shape[axis]);
        let order = per_line(x, lines, |compare| {
            let mut order: Vec<usize> = (0..lines.len).collect();
            order.sort_by(|&i, &j| if self.largest { compare(j, i) } else { compare(i, j) });
            order.truncate(k);
            order
        })?;
        let kept = Lines::along(&shape, axis);
        let (src, size) = cells(x);
        let mut values = buffer(&shape, size)?;
        values.resize(order.len() * k * size, 0);
        let mut indices = vec![0i64; order.len() * k];
        for ((line, from), to) in order.iter().zip(lines.starts()).zip(kept.starts()) {
            for (j, &i) in line.iter().enumerate() {
                let (from, to) = (from + i * lines.inner, to + j * kept.inner);
                values[to * size..(to + 1) * size].copy_from_slice(&src[from * size..(from + 1) * size]);
                indices[to] = i as i64;
            }
        }
        Ok(vec![from_cells(dtype, shape.clone(), values)?, Tensor::from_slice(shape, &indices)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "K")])?;
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        let axis = normalize_axis("axis", self.axis, rank).map_err(|e| e.to_string())?;
        let kept = token_axis::off_axes(inputs.first(), &[axis], false)?;
        Ok(vec![kept; outputs.len()])
    }
}

/// Where the largest or smallest element along an axis is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgReduce {
    /// ArgMax instead of ArgMin.
    pub largest: bool,
    /// As written.
    pub axis: i64,
    /// The axis stays, with extent 1.
    pub keep_dims: bool,
    /// The last of equals instead of the first.
    pub last: bool,
}

impl OpDef for ArgReduce {
    fn parse(op_type: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self {
            largest: op_type == "ArgMax",
            axis: attrs.int("axis")?.unwrap_or(0),
            keep_dims: attrs.flag("keepdims", true)?,
            last: opset >= 12 && attrs.flag("select_last_index", false)?,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let x = required(inputs, 0, "data")?;
        check_type("data", x, NUMBERS)?;
        let shape = match &x.shape {
            None => None,
            Some(s) => {
                let axis = normalize_axis("axis", self.axis, s.len())?;
                if s[axis] == Dim::Known(0) {
                    return Err(OpError::input(
                        "data",
                        format!("elements along axis {axis}"),
                        x.shape_text(),
                    ));
                }
                let mut out = s.clone();
                if self.keep_dims {
                    out[axis] = Dim::Known(1);
                } else {
                    out.remove(axis);
                }
                Some(out)
            }
        };
        Ok(vec![fact(Some(DType::I64), shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = super::util::output_of(self, inputs)?;
        let x = required(inputs, 0, "data")?;
        let lines = Lines::along(x.shape(), normalize_axis("axis", self.axis, x.shape().len())?);
        let found = per_line(x, lines, |compare| {
            (1..lines.len).fold(0, |best, i| {
                let order = if self.largest { compare(i, best) } else { compare(best, i) };
                if order == Ordering::Greater || self.last && order == Ordering::Equal { i } else { best }
            }) as i64
        })?;
        Ok(vec![Tensor::from_slice(shape, &found)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        let axis = normalize_axis("axis", self.axis, rank).map_err(|e| e.to_string())?;
        Ok(vec![token_axis::off_axes(inputs.first(), &[axis], !self.keep_dims)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topk(x: &Tensor, k: i64, axis: i64, largest: bool) -> Result<(Tensor, Vec<i64>), String> {
        let op = TopK { axis, largest, k: None };
        let mut y = op
            .eval(&[Some(x), Some(&Tensor::from_slice([1], &[k]).unwrap())], 2)
            .map_err(|e| e.to_string())?;
        let indices = y.remove(1).to_vec().unwrap();
        Ok((y.remove(0), indices))
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        let x = Tensor::from_slice([1, 5], &[2f32, 7.0, 7.0, 1.0, 1.0]).unwrap();
        assert_eq!(topk(&x, 3, 1, true).unwrap().1, [1, 2, 0]);
        assert_eq!(topk(&x, 3, 1, false).unwrap().1, [3, 4, 0]);
        let nan = Tensor::from_slice([3], &[1f32, f32::NAN, 2.0]).unwrap();
        assert_eq!(topk(&nan, 3, 0, true).unwrap().1, [1, 2, 0]);
        assert_eq!(topk(&nan, 3, 0, false).unwrap().1, [0, 2, 1]);
    }

    #[test]
    fn other_axes_and_bounds() {
        let x = Tensor::from_slice([3, 2], &[1u64, u64::MAX, 3, 4, 2, 0]).unwrap();
        let (v, i) = topk(&x, 2, 0, true).unwrap();
        assert_eq!(v.to_vec::<u64>().unwrap(), [3, u64::MAX, 2, 4]);
        assert_eq!(i, [1, 0, 2, 1]);
        assert_eq!(topk(&x, 0, 0, true).unwrap().0.shape().dims(), [0, 2]);
        assert_eq!(
            topk(&x, 4, 0, true).unwrap_err(),
            "input K: expected 0 to 3, the extent of the axis, found 4"
        );
        assert!(topk(&x, -1, 0, true).is_err());
    }

    #[test]
    fn first_and_last_of_equals() {
        let x = Tensor::from_slice([2, 3], &[1i32, 3, 3, 0, 0, 5]).unwrap();
        let run = |largest, last| {
            let op = ArgReduce { largest, axis: -1, keep_dims: false, last };
            op.eval(&[Some(&x)], 1).unwrap()[0].to_vec::<i64>().unwrap()
        };
        assert_eq!(run(true, false), [1, 2]);
        assert_eq!(run(true, true), [2, 2]);
        assert_eq!(run(false, false), [0, 0]);
        assert_eq!(run(false, true), [0, 1]);
        let empty = Tensor::from_slice([0], &[] as &[f32]).unwrap();
        assert!(
            ArgReduce { largest: true, axis: 0, keep_dims: true, last: false }
                .eval(&[Some(&empty)], 1)
                .is_err()
        );
    }
}
