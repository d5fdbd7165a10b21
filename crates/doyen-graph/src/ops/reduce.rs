//! Reductions over axes: ReduceMax, ReduceMean, ReduceMin, ReduceProd, ReduceSum, ReduceSumSquare, ReduceL1, ReduceL2.

use super::axes::{Axes, AxesSource};
use super::strided::Offsets;
use super::util::{MATMUL_TYPES, NUMBERS_AND_BOOL, at_most, check_type, fact, output_of, required};
use super::value::{from_floats, from_ints, int_range, ints};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// What is made of the elements that fall together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Reduction {
    /// Of nothing: the smallest value of the type.
    Max,
    /// Of nothing: NaN. Integers truncate.
    Mean,
    /// Of nothing: the largest value of the type.
    Min,
    Prod,
    Sum,
    SumSquare,
    L1,
    L2,
}

impl Reduction {
    fn start(self) -> f64 {
        match self {
            Self::Max => f64::NEG_INFINITY,
            Self::Min => f64::INFINITY,
            Self::Prod => 1.0,
            _ => 0.0,
        }
    }

    fn add(self, acc: f64, x: f64) -> f64 {
        match self {
            Self::Max | Self::Min if acc.is_nan() || x.is_nan() => f64::NAN,
            Self::Max => acc.max(x),
            Self::Min => acc.min(x),
            Self::Prod => acc * x,
            Self::Sum | Self::Mean => acc + x,
            Self::SumSquare | Self::L2 => acc + x * x,
            Self::L1 => acc + x.abs(),
        }
    }

    fn finish(self, acc: f64, count: usize) -> f64 {
        match self {
            Self::Mean => acc / count as f64,
            Self::L2 => acc.sqrt(),
            _ => acc,
        }
    }

    fn start_int(self, dtype: DType) -> i128 {
        match self {
            Self::Max => int_range(dtype).0,
            Self::Min => int_range(dtype).1,
            Self::Prod => 1,
            _ => 0,
        }
    }

    fn add_int(self, acc: i128, x: i128) -> i128 {
        match self {
            Self::Max => acc.max(x),
            Self::Min => acc.min(x),
            Self::Prod => acc.wrapping_mul(x),
            Self::Sum | Self::Mean => acc + x,
            Self::SumSquare | Self::L2 => acc.wrapping_add(x.wrapping_mul(x)),
            Self::L1 => acc + x.abs(),
        }
    }

    fn finish_int(self, acc: i128, count: usize) -> Result<i128, OpError> {
        match self {
            Self::Mean if count == 0 => Err(OpError::input("data", "something to average", "no elements")),
            Self::Mean => Ok(acc / count as i128),
            Self::L2 => Ok((acc as f64).sqrt() as i128),
            _ => Ok(acc),
        }
    }
}

/// A reduction over axes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduce {
    /// What is made of the elements that fall together.
    pub reduction: Reduction,
    /// The axes.
    pub axes: AxesSource,
    /// The axes stay, with extent 1.
    pub keep_dims: bool,
    /// Without axes nothing is reduced, instead of everything.
    pub noop: bool,
}

impl Reduce {
    const fn allowed(&self) -> &'static [DType] {
        match self.reduction {
            Reduction::Max | Reduction::Min => NUMBERS_AND_BOOL,
            _ => MATMUL_TYPES,
        }
    }

    /// The axes, or `None` while they are not known.
    fn resolved(&self, axes: Axes, rank: usize) -> Option<Vec<usize>> {
        match axes {
            Axes::Unknown(_) => None,
            Axes::Given(list) if !list.is_empty() => Some(list),
            _ => Some(if self.noop { Vec::new() } else { (0..rank).collect() }),
        }
    }

    fn shape(&self, inputs: &[Option<&Fact>], data: &[Dim]) -> Result<Option<Vec<Dim>>, OpError> {
        let axes = self.axes.resolve(inputs, Some(data.len()))?;
        let count = if let Axes::Unknown(n) = axes { n.filter(|&n| n > 0) } else { None };
        Ok(match self.resolved(axes, data.len()) {
            Some(axes) if self.keep_dims => {
                let dim = |(i, d): (usize, &Dim)| if axes.contains(&i) { Dim::Known(1) } else { d.clone() };
                Some(data.iter().enumerate().map(dim).collect())
            }
            Some(axes) => Some(
                data.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, d)| d.clone()).collect(),
            ),
            None if self.keep_dims => Some(vec![Dim::Unknown; data.len()]),
            None => count.and_then(|n| data.len().checked_sub(n)).map(|rank| vec![Dim::Unknown; rank]),
        })
    }
}

impl OpDef for Reduce {
    fn parse(op_type: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let reduction = match op_type {
            "ReduceMax" => Reduction::Max,
            "ReduceMean" => Reduction::Mean,
            "ReduceMin" => Reduction::Min,
            "ReduceProd" => Reduction::Prod,
            "ReduceSum" => Reduction::Sum,
            "ReduceSumSquare" => Reduction::SumSquare,
            "ReduceL1" => Reduction::L1,
            "ReduceL2" => Reduction::L2,
            other => return Err(OpError::unknown_operator("", other)),
        };
        // ReduceSum moved its axes to an input five versions before the others.
        let since = if reduction == Reduction::Sum { 13 } else { 18 };
        Ok(Self {
            reduction,
            axes: AxesSource::parse(opset, since, attrs)?,
            keep_dims: attrs.flag("keepdims", true)?,
            noop: opset >= since && attrs.flag("noop_with_empty_axes", false)?,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, self.axes.inputs())?;
        let x = required(inputs, 0, "data")?;
        let dtype = check_type("data", x, self.allowed())?;
        let shape = match &x.shape {
            Some(s) => self.shape(inputs, s)?,
            None => None,
        };
        Ok(vec![fact(dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "data")?;
        let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(super::util::fact_of)).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let rank = x.shape().len();
        let axes = self
            .resolved(self.axes.resolve(&facts, Some(rank))?, rank)
            .ok_or_else(|| OpError::input("axes", "known axes", "nothing"))?;
        // Where each element goes: the strides of the output with extent 1 on the reduced axes, 0 along them.
        let mut kept = x.shape().to_vec();
        for &a in &axes {
            kept[a] = 1;
        }
        let to: Vec<usize> = Offsets::broadcast(&kept, x.shape()).collect();
        let count: usize = axes.iter().map(|&a| x.shape()[a]).product();
        let size = kept.iter().product();
        let y = if dtype.is_float() {
            let mut acc = vec![self.reduction.start(); size];
            for (v, &o) in x.to_f64()?.into_iter().zip(&to) {
                acc[o] = self.reduction.add(acc[o], v);
            }
            for a in &mut acc {
                *a = self.reduction.finish(*a, count);
            }
            from_floats(dtype, shape, &acc)?
        } else {
            let mut acc = vec![self.reduction.start_int(dtype); size];
            for (v, &o) in ints(x)?.into_iter().zip(&to) {
                acc[o] = self.reduction.add_int(acc[o], v);
            }
            let done = acc.into_iter().map(|a| self.reduction.finish_int(a, count));
            from_ints(dtype, shape, &done.collect::<Result<Vec<_>, _>>()?)?
        };
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        if token_axis::is_absent(inputs.first()) {
            token_axis::none_of(inputs, &[(1, "axes")])?;
            return Ok(vec![Trace::Absent]);
        }
        let axes = self.axes.traced(inputs, rank)?;
        let axes = self.resolved(axes, rank).ok_or("its axes are not constant")?;
        Ok(vec![token_axis::off_axes(inputs.first(), &axes, !self.keep_dims)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(name: &str, opset: i64, attrs: &[(&str, i64)]) -> Reduce {
        let mut a = Attrs::default();
        for (k, v) in attrs {
            a.set(*k, *v);
        }
        Reduce::parse(name, opset, &mut a).unwrap()
    }
    fn axes(v: &[i64]) -> Tensor {
        Tensor::from_slice([v.len()], v).unwrap()
    }

    #[test]
    fn axes_and_keepdims() {
        let x = Tensor::from_slice([2, 3], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let run = |op: Reduce, a: Option<&Tensor>| {
            let y = op.eval(&[Some(&x), a], 1).unwrap().remove(0);
            (y.shape().to_vec(), y.to_f32().unwrap())
        };
        assert_eq!(run(op("ReduceSum", 13, &[]), Some(&axes(&[-1]))), (vec![2, 1], vec![6.0, 15.0]));
        assert_eq!(
            run(op("ReduceMean", 18, &[("keepdims", 0)]), Some(&axes(&[0]))),
            (vec![3], vec![2.5, 3.5, 4.5])
        );
        assert_eq!(run(op("ReduceMax", 18, &[("keepdims", 0)]), None), (vec![], vec![6.0]));
        let noop = op("ReduceSumSquare", 18, &[("noop_with_empty_axes", 1)]);
        assert_eq!(run(noop.clone(), Some(&axes(&[]))).1, [1.0, 4.0, 9.0, 16.0, 25.0, 36.0]);
        assert_eq!(run(noop, None).0, [2, 3]);
        let old = Reduce::parse("ReduceProd", 13, &mut Attrs::from([("axes", vec![0, 1].into())])).unwrap();
        assert_eq!(run(old, None), (vec![1, 1], vec![720.0]));
        assert!(op("ReduceSum", 13, &[]).eval(&[Some(&x), Some(&axes(&[0, -2]))], 1).is_err());
    }

    #[test]
    fn nothing_to_reduce() {
        let x = Tensor::from_slice([0, 2], &[] as &[f32]).unwrap();
        let run = |name| {
            op(name, 20, &[("keepdims", 0)]).eval(&[Some(&x), Some(&axes(&[0]))], 1).unwrap()[0]
                .to_f32()
                .unwrap()
        };
        assert_eq!(run("ReduceMax"), [f32::NEG_INFINITY; 2]);
        assert_eq!(run("ReduceMin"), [f32::INFINITY; 2]);
        assert_eq!(run("ReduceProd"), [1.0; 2]);
        assert!(run("ReduceMean").iter().all(|v| v.is_nan()));
        let b = Tensor::from_slice([0], &[] as &[bool]).unwrap();
        let max = op("ReduceMax", 20, &[("keepdims", 0)]).eval(&[Some(&b)], 1).unwrap();
        assert_eq!(max[0].to_vec::<bool>().unwrap(), [false]);
        let i = Tensor::from_slice([0], &[] as &[i32]).unwrap();
        assert!(op("ReduceMean", 18, &[]).eval(&[Some(&i)], 1).is_err());
    }

    #[test]
    fn norms_and_integers() {
        let x = Tensor::from_slice([2], &[3f32, -4.0]).unwrap();
        let run = |name| op(name, 18, &[("keepdims", 0)]).eval(&[Some(&x)], 1).unwrap()[0].to_f32().unwrap();
        assert_eq!((run("ReduceL1"), run("ReduceL2")), (vec![7.0], vec![5.0]));
        let x = Tensor::from_slice([2], &[-3i64, -4]).unwrap();
        let mean = op("ReduceMean", 18, &[("keepdims", 0)]).eval(&[Some(&x)], 1).unwrap();
        assert_eq!(mean[0].to_vec::<i64>().unwrap(), [-3]);
    }
}
