//! Operators that keep the elements and their order: Reshape, Flatten, Squeeze, Unsqueeze.

use super::axes::{Axes, AxesSource};
use super::util::{at_most, check_rank, check_type, constant_ints, fact, output_of, required, wrap_axis};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// The shape comes from an input: 0 copies the input's extent (unless `allow_zero`), one -1 is inferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reshape {
    /// A 0 in the shape is an extent of zero.
    pub allow_zero: bool,
}

/// The product of extents: a number, one name, or unknown.
fn product(dims: &[Dim]) -> Dim {
    let mut known = Some(1usize);
    let mut rest = dims.iter().filter(|d| match d.known() {
        Some(n) => {
            known = known.and_then(|k| k.checked_mul(n));
            false
        }
        None => true,
    });
    let (first, more) = (rest.next(), rest.next().is_some());
    match (known, first, more) {
        (Some(n), None, _) => Dim::Known(n),
        (Some(1), Some(d), false) => d.clone(),
        _ => Dim::Unknown,
    }
}

/// `of / by`, after cancelling equal names; an error when numbers do not divide.
fn quotient(of: &[Dim], by: &[Dim]) -> Result<Dim, ()> {
    let mut left = of.to_vec();
    let mut divisor = Vec::new();
    for d in by {
        match left.iter().position(|l| matches!(l, Dim::Named(_)) && l == d) {
            Some(i) => {
                left.remove(i);
            }
            None => divisor.push(d.clone()),
        }
    }
    let Dim::Known(n) = product(&divisor) else { return Ok(Dim::Unknown) };
    let (numbers, mut names): (Vec<Dim>, Vec<Dim>) = left.into_iter().partition(|d| d.known().is_some());
    match product(&numbers) {
        Dim::Known(m) if n > 0 && m.is_multiple_of(n) => {
            names.push(Dim::Known(m / n));
            Ok(product(&names))
        }
        Dim::Known(_) if names.is_empty() => Err(()),
        _ => Ok(Dim::Unknown),
    }
}

impl Reshape {
    fn target(self, data: &Fact, target: &[i64]) -> Result<Vec<Dim>, OpError> {
        let refuse = |expected: &str| OpError::input("shape", expected, format!("{target:?}"));
        let mut out = Vec::with_capacity(target.len());
        for (i, &t) in target.iter().enumerate() {
            out.push(match t {
                -1 => Dim::Unknown,
                0 if !self.allow_zero => match &data.shape {
                    Some(s) if i >= s.len() => {
                        return Err(refuse(&format!("no 0 past the {} axes of data", s.len())));
                    }
                    _ => data.dim(i),
                },
                t => Dim::Known(usize::try_from(t).map_err(|_| refuse("extents of -1 or more"))?),
            });
        }
        let mut inferred = target.iter().enumerate().filter(|(_, t)| **t == -1).map(|(i, _)| i);
        let (at, more) = (inferred.next(), inferred.next().is_some());
        if more {
            return Err(refuse("at most one -1"));
        }
        let Some(shape) = &data.shape else { return Ok(out) };
        let mismatch = || {
            OpError::input(
                "shape",
                format!("as many elements as data of shape {} has", data.shape_text()),
                format!("{target:?}"),
            )
        };
        match at {
            Some(at) => {
                if self.allow_zero && target.contains(&0) {
                    return Err(refuse("no -1 beside a 0 when allowzero is 1"));
                }
                let others: Vec<Dim> =
                    out.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, d)| d.clone()).collect();
                out[at] = quotient(shape, &others).map_err(|()| mismatch())?;
            }
            None => {
                if !product(shape).compatible(&product(&out)) {
                    return Err(mismatch());
                }
            }
        }
        Ok(out)
    }
}

impl OpDef for Reshape {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { allow_zero: opset >= 14 && attrs.flag("allowzero", false)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let (data, target) = (required(inputs, 0, "data")?, required(inputs, 1, "shape")?);
        check_type("shape", target, &[DType::I64])?;
        if target.rank() == Some(0) {
            return Err(OpError::input("shape", "a list (rank 1)", "a scalar"));
        }
        let shape = match constant_ints("shape", target)? {
            Some(list) => {
                check_rank("shape", list.len())?;
                Some(self.target(data, &list)?)
            }
            None => match target.dim(0).known() {
                Some(rank) => {
                    check_rank("shape", rank)?;
                    Some(vec![Dim::Unknown; rank])
                }
                None => None,
            },
        };
        Ok(vec![fact(data.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "shape")])?;
        same_elements(inputs, outputs)
    }
}

/// The first input under the output's shape.
fn reshaped<O: OpDef>(op: &O, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
    let (_, shape) = output_of(op, inputs)?;
    Ok(vec![required(inputs, 0, "data")?.reshaped(shape)?])
}

fn same_elements(inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
    let data = inputs.first().copied().flatten().ok_or("it has no input")?;
    Ok(vec![token_axis::reshape(data, outputs.first().ok_or("it has no output")?)?])
}

/// To a matrix: the axes before `axis` are the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flatten {
    /// As written; may be the rank.
    pub axis: i64,
}

impl OpDef for Flatten {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { axis: attrs.int("axis")?.unwrap_or(1) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let x = required(inputs, 0, "input")?;
        let dims = match &x.shape {
            None => vec![Dim::Unknown; 2],
            Some(s) => {
                let at =
                    if self.axis == s.len() as i64 { Some(s.len()) } else { wrap_axis(self.axis, s.len()) };
                let at =
                    at.ok_or_else(|| OpError::attribute("axis", format!("-{0} to {0}", s.len()), self.axis))?;
                vec![product(&s[..at]), product(&s[at..])]
            }
        };
        Ok(vec![fact(x.dtype, Some(dims))])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        same_elements(inputs, outputs)
    }
}

/// Removes axes of extent 1: the given ones, or all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Squeeze {
    /// The axes.
    pub axes: AxesSource,
}

impl OpDef for Squeeze {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { axes: AxesSource::parse(opset, 13, attrs)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, self.axes.inputs())?;
        let x = required(inputs, 0, "data")?;
        let axes = self.axes.resolve(inputs, x.rank())?;
        let shape = match (&x.shape, axes) {
            (None, _) => None,
            (Some(s), Axes::Default) => {
                let all_known = s.iter().all(|d| d.known().is_some());
                all_known.then(|| s.iter().filter(|d| **d != Dim::Known(1)).cloned().collect())
            }
            (Some(s), Axes::Unknown(n)) => {
                n.and_then(|n| s.len().checked_sub(n)).map(|rank| vec![Dim::Unknown; rank])
            }
            (Some(s), Axes::Given(axes)) => {
                if let Some(a) = axes.iter().find(|&&a| !s[a].compatible(&Dim::Known(1))) {
                    return Err(OpError::input("data", format!("extent 1 on axis {a}"), x.shape_text()));
                }
                let kept = s.iter().enumerate().filter(|(i, _)| !axes.contains(i));
                Some(kept.map(|(_, d)| d.clone()).collect())
            }
        };
        Ok(vec![fact(x.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "axes")])?;
        same_elements(inputs, outputs)
    }
}

/// Inserts axes of extent 1; the axes are counted in the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsqueeze {
    /// The axes.
    pub axes: AxesSource,
}

impl OpDef for Unsqueeze {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let axes = AxesSource::parse(opset, 13, attrs)?;
        if axes == AxesSource::Attribute(None) {
            return Err(OpError::attribute("axes", "a list of ints (required)", "nothing"));
        }
        Ok(Self { axes })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, self.axes.inputs())?;
        let x = required(inputs, 0, "data")?;
        if self.axes == AxesSource::Input {
            required(inputs, 1, "axes")?;
        }
        // The number of axes gives the rank of the output, in which they are then counted.
        let count = match self.axes.resolve(inputs, None)? {
            Axes::Unknown(n) => n,
            Axes::Default | Axes::Given(_) => None,
        };
        let (Some(s), Some(count)) = (&x.shape, count) else { return Ok(vec![fact(x.dtype, None)]) };
        check_rank("axes", s.len().saturating_add(count))?;
        let rank = s.len() + count;
        let shape = match self.axes.resolve(inputs, Some(rank))? {
            Axes::Given(axes) => {
                let mut rest = s.iter();
                let dim = |i| if axes.contains(&i) { None } else { rest.next() };
                (0..rank).map(dim).map(|d| d.cloned().unwrap_or(Dim::Known(1))).collect()
            }
            Axes::Default | Axes::Unknown(_) => vec![Dim::Unknown; rank],
        };
        Ok(vec![fact(x.dtype, Some(shape))])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        reshaped(self, inputs)
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "axes")])?;
        same_elements(inputs, outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::util::fact_of;

    fn list(v: &[i64]) -> Tensor {
        Tensor::from_slice([v.len()], v).unwrap()
    }
    fn zeros(shape: &[usize]) -> Tensor {
        Tensor::from_slice(shape, &vec![0f32; shape.iter().product()]).unwrap()
    }
    fn reshape(x: &[usize], to: &[i64], allow_zero: bool) -> Result<Vec<usize>, String> {
        let op = Reshape { allow_zero };
        let y = op.eval(&[Some(&zeros(x)), Some(&list(to))], 1).map_err(|e| e.to_string())?;
        Ok(y[0].shape().to_vec())
    }

    #[test]
    fn reshape_rules() {
        assert_eq!(reshape(&[2, 3, 4], &[0, -1], false).unwrap(), [2, 12]);
        assert_eq!(reshape(&[1], &[], false).unwrap(), [0usize; 0]);
        assert_eq!(reshape(&[0, 3], &[3, 0], true).unwrap(), [3, 0]);
        assert!(reshape(&[0, 3], &[0, -1], false).unwrap_err().contains("as many elements"));
        assert!(reshape(&[2, 3], &[-1, -1], false).unwrap_err().contains("at most one -1"));
        assert!(reshape(&[2, 3], &[4], false).is_err());
        assert!(reshape(&[2, 3], &[4, -1], false).is_err());
        assert!(reshape(&[2, 3], &[-2, 3], false).is_err());
        assert!(reshape(&[6], &[6, 0], false).is_err());
        assert!(reshape(&[6], &[i64::MAX, i64::MAX], false).is_err());
        assert!(reshape(&[0], &[0, -1], true).is_err());
    }

    #[test]
    fn names_pass_through_reshape() {
        let x = Fact::new(DType::F32, ["batch".into(), "seq".into(), Dim::Known(64)]);
        let infer = |to: &[i64]| {
            let out = Reshape { allow_zero: false }.infer(&[Some(&x), Some(&fact_of(&list(to)))]).unwrap();
            out[0].shape_text()
        };
        assert_eq!(infer(&[0, 0, 4, -1]), "[batch,seq,4,16]");
        assert_eq!(infer(&[0, -1, 4, 16]), "[batch,seq,4,16]");
        assert_eq!(infer(&[-1, 64]), "[?,64]");
        assert_eq!(infer(&[0, -1]), "[batch,?]");
    }

    #[test]
    fn squeeze_and_unsqueeze() {
        let run = |x: &[usize], axes: &[i64], squeeze: bool| {
            let (x, a) = (zeros(x), list(axes));
            let y = if squeeze {
                Squeeze { axes: AxesSource::Input }.eval(&[Some(&x), Some(&a)], 1)
            } else {
                Unsqueeze { axes: AxesSource::Input }.eval(&[Some(&x), Some(&a)], 1)
            };
            y.map(|y| y[0].shape().to_vec()).map_err(|e| e.to_string())
        };
        assert_eq!(run(&[1, 3, 1], &[-1], true).unwrap(), [1, 3]);
        assert_eq!(
            run(&[1, 3, 1], &[1], true).unwrap_err(),
            "input data: expected extent 1 on axis 1, found [1,3,1]"
        );
        assert_eq!(run(&[3, 4], &[3, 0], false).unwrap(), [1, 3, 4, 1]);
        assert_eq!(
            run(&[3], &[-1, 2], false).unwrap_err(),
            "input axes: expected each axis once, found axis 2 twice"
        );
        let all = Squeeze { axes: AxesSource::Attribute(None) }.eval(&[Some(&zeros(&[1, 2, 1]))], 1).unwrap();
        assert_eq!(all[0].shape().dims(), [2]);
        assert!(Unsqueeze::parse("Unsqueeze", 11, &mut Attrs::default()).is_err());
    }

    #[test]
    fn flatten_takes_the_rank_as_axis() {
        let y = |axis| Flatten { axis }.eval(&[Some(&zeros(&[2, 3, 4]))], 1).unwrap()[0].shape().to_vec();
        assert_eq!(y(3), [24, 1]);
        assert_eq!(y(0), [1, 24]);
        assert_eq!(y(-1), [6, 4]);
        assert!(Flatten { axis: 4 }.eval(&[Some(&zeros(&[2, 3, 4]))], 1).is_err());
    }
}
