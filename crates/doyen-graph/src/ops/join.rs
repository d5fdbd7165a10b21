//! Concat and Split.

use super::strided::{Offsets, cells, from_cells, strides, take};
use super::util::{
    at_most, buffer, check_type, common_type, constant_ints, extent, fact, normalize_axis, optional,
    output_of, outputs_by, required,
};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Inputs laid one after the other along `axis`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Concat {
    /// As written.
    pub axis: i64,
}

/// Most inputs of Concat and outputs of Split; far beyond what any exporter writes.
const MAX_PARTS: usize = 1 << 16;

fn parts<'a, T>(inputs: &[Option<&'a T>]) -> Result<Vec<&'a T>, OpError> {
    (0..inputs.len().max(1)).map(|i| required(inputs, i, &format!("inputs[{i}]"))).collect()
}

/// One extent from several along the axis.
fn sum(dims: &[&Dim]) -> Option<Dim> {
    let known: Vec<usize> = dims.iter().filter_map(|d| d.known()).collect();
    let total = known.iter().try_fold(0usize, |n, &d| n.checked_add(d))?;
    let mut others = dims.iter().filter(|d| d.known().is_none());
    Some(match (others.next(), others.next()) {
        (None, _) => Dim::Known(total),
        (Some(d), None) if total == 0 => (*d).clone(),
        _ => Dim::Unknown,
    })
}

impl OpDef for Concat {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { axis: attrs.required_int("axis")? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, MAX_PARTS)?;
        let facts = parts(inputs)?;
        let names: Vec<String> = (0..facts.len()).map(|i| format!("inputs[{i}]")).collect();
        let dtype = common_type(names.iter().map(String::as_str).zip(facts.iter().copied()))?;
        let Some(first) = facts.iter().find_map(|f| f.shape.clone()) else {
            return Ok(vec![fact(dtype, None)]);
        };
        let axis = normalize_axis("axis", self.axis, first.len())?;
        let mut out = first;
        for (name, f) in names.iter().zip(&facts) {
            let Some(s) = &f.shape else {
                continue;
            };
            let agrees = s.len() == out.len()
                && s.iter().zip(&out).enumerate().all(|(i, (a, b))| i == axis || a.compatible(b));
            if !agrees {
                let so_far: Vec<String> = (out.iter().enumerate())
                    .map(|(i, d)| if i == axis { "*".into() } else { d.to_string() })
                    .collect();
                return Err(OpError::input(name, format!("shape [{}]", so_far.join(",")), f.shape_text()));
            }
            for (o, d) in out.iter_mut().zip(s) {
                if o.known().is_none() && (d.known().is_some() || *o == Dim::Unknown) {
                    *o = d.clone();
                }
            }
        }
        out[axis] = if facts.iter().all(|f| f.shape.is_some()) {
            let dims: Vec<Dim> = facts.iter().map(|f| f.dim(axis)).collect();
            sum(&dims.iter().collect::<Vec<_>>())
                .ok_or_else(|| OpError::other("the extent along the axis overflows"))?
        } else {
            Dim::Unknown
        };
        Ok(vec![fact(dtype, Some(out))])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let axis = normalize_axis("axis", self.axis, shape.len())?;
        let outer: usize = shape[..axis].iter().product();
        let parts: Vec<_> = parts(inputs)?.into_iter().map(cells).collect();
        let size = parts.first().map_or(1, |p| p.1);
        let mut out = buffer(&shape, size)?;
        for o in 0..outer {
            for (bytes, _) in &parts {
                let run = bytes.len() / outer;
                out.extend_from_slice(&bytes[o * run..(o + 1) * run]);
            }
        }
        Ok(vec![from_cells(dtype, shape, out)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        let out = outputs.first().ok_or("it has no output")?;
        let axis = normalize_axis("axis", self.axis, out.len()).map_err(|e| e.to_string())?;
        let mut found = Trace::Absent;
        for t in inputs.iter().flatten().filter(|t| t.trace != Trace::Absent) {
            if found != Trace::Absent && found != t.trace {
                return Err("its inputs carry tokens on different axes".into());
            }
            found = t.trace;
        }
        let Trace::Tokens(a) = found else { return Ok(vec![Trace::Absent]) };
        if a.axis == axis {
            return Err(format!("it concatenates along axis {axis}, which counts tokens"));
        }
        if inputs.iter().flatten().any(|t| t.trace == Trace::Absent && t.shape.iter().all(|&d| d > 0)) {
            return Err("it joins values with and without tokens".into());
        }
        Ok(vec![found])
    }
}

/// How Split cuts its axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sizes {
    /// The second input; without it, into as many equal parts as the node has outputs (opset 13 to 17).
    Input,
    /// These extents (before opset 13).
    Attribute(Vec<usize>),
    /// Into as many equal parts as the node has outputs.
    Equal,
    /// So many parts of `ceil(extent / parts)`, the last one smaller (from opset 18).
    Parts(usize),
}

/// Cuts its input along `axis`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// As written.
    pub axis: i64,
    /// The parts.
    pub sizes: Sizes,
}

impl Split {
    /// The extents along the axis, `None` while they cannot be known. `outputs` is the node's number of outputs where
    /// that is known.
    fn plan(
        &self,
        split: Option<&Fact>,
        along: &Dim,
        outputs: Option<usize>,
    ) -> Result<Option<Vec<Dim>>, OpError> {
        let given = match (&self.sizes, split) {
            (Sizes::Parts(_), Some(_)) => {
                return Err(OpError::input("split", "nothing beside the attribute num_outputs", "a value"));
            }
            (Sizes::Input, Some(split)) => {
                check_type("split", split, &[DType::I64])?;
                match constant_ints("split", split)? {
                    Some(list) => {
                        Some(list.into_iter().map(|v| extent("split", v)).collect::<Result<Vec<_>, _>>()?)
                    }
                    None => match split.dim(0).known() {
                        Some(n) if n <= MAX_PARTS => return Ok(Some(vec![Dim::Unknown; n])),
                        Some(n) => {
                            return Err(OpError::input("split", format!("at most {MAX_PARTS} parts"), n));
                        }
                        None => return Ok(None),
                    },
                }
            }
            (Sizes::Attribute(list), _) => Some(list.clone()),
            _ => None,
        };
        if let Some(list) = given {
            let total = list.iter().try_fold(0usize, |n, &d| n.checked_add(d));
            if along.known().is_some_and(|n| total != Some(n)) || total.is_none() {
                return Err(OpError::input(
                    "split",
                    format!("sizes that sum to {along}"),
                    format!("{list:?}"),
                ));
            }
            return Ok(Some(list.into_iter().map(Dim::Known).collect()));
        }
        let (parts, even) = match self.sizes {
            Sizes::Parts(n) => (n, false),
            _ => match outputs {
                Some(n) => (n.max(1), true),
                None => return Ok(None),
            },
        };
        let Dim::Known(n) = *along else { return Ok(Some(vec![Dim::Unknown; parts])) };
        let chunk = n.div_ceil(parts);
        let last = chunk.checked_mul(parts - 1).and_then(|before| n.checked_sub(before));
        match last {
            Some(last) if !even || last == chunk => {
                let mut sizes = vec![Dim::Known(chunk); parts - 1];
                sizes.push(Dim::Known(last));
                Ok(Some(sizes))
            }
            _ => Err(OpError::input("input", format!("an axis that splits into {parts} parts"), n)),
        }
    }

    fn facts(&self, inputs: &[Option<&Fact>], outputs: Option<usize>) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if matches!(self.sizes, Sizes::Attribute(_) | Sizes::Equal) { 1 } else { 2 })?;
        let x = required(inputs, 0, "input")?;
        let split = optional(inputs, 1);
        let axis = match x.rank() {
            Some(rank) => Some(normalize_axis("axis", self.axis, rank)?),
            None => None,
        };
        let along = axis.map_or(Dim::Unknown, |a| x.dim(a));
        let sizes = match self.plan(split, &along, outputs)? {
            Some(sizes) => sizes,
            None => vec![Dim::Unknown; outputs.unwrap_or(0)],
        };
        let part = |size| {
            let shape = x.shape.clone().zip(axis).map(|(mut s, a)| {
                s[a] = size;
                s
            });
            fact(x.dtype, shape)
        };
        Ok(sizes.into_iter().map(part).collect())
    }
}

impl OpDef for Split {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let axis = attrs.int("axis")?.unwrap_or(0);
        let sizes = if opset < 13 {
            match attrs.ints("split")? {
                None => Sizes::Equal,
                Some(list) => Sizes::Attribute(
                    list.iter().map(|&v| usize::try_from(v)).collect::<Result<_, _>>().map_err(|_| {
                        OpError::attribute("split", "sizes of 0 or more", format!("{list:?}"))
                    })?,
                ),
            }
        } else if opset < 18 {
            Sizes::Input
        } else {
            match attrs.int("num_outputs")? {
                None => Sizes::Input,
                Some(n) => match usize::try_from(n) {
                    Ok(n) if (1..=MAX_PARTS).contains(&n) => Sizes::Parts(n),
                    _ => return Err(OpError::attribute("num_outputs", format!("1 to {MAX_PARTS}"), n)),
                },
            }
        };
        Ok(Self { axis, sizes })
    }

    /// Empty while the number of parts is not known: equal parts by the node's number of outputs, or sizes from an
    /// input of unknown length.
    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        self.facts(inputs, None)
    }

    fn infer_outputs(&self, inputs: &[Option<&Fact>], outputs: usize) -> Result<Vec<Fact>, OpError> {
        self.facts(inputs, Some(outputs))
    }

    fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError> {
        let shapes = outputs_by(inputs, |facts| self.facts(facts, Some(outputs)))?;
        if shapes.len() < outputs {
            let found = format!("{} sizes for {outputs} outputs", shapes.len());
            return Err(OpError::input("split", "a size for each output", found));
        }
        let x = required(inputs, 0, "input")?;
        let axis = normalize_axis("axis", self.axis, x.shape().len())?;
        let own = strides(x.shape());
        let mut start = 0;
        let cut = |(_, shape): (DType, Shape)| {
            let walk = Offsets::new(&shape, own.clone(), start * own[axis] as usize);
            start += shape[axis];
            take(x, shape, walk)
        };
        shapes.into_iter().map(cut).collect()
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "split")])?;
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        let axis = normalize_axis("axis", self.axis, rank).map_err(|e| e.to_string())?;
        let kept = token_axis::off_axes(inputs.first(), &[axis], false)?;
        Ok(vec![kept; outputs.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_data::iota;

    #[test]
    fn concat_inside_and_outside() {
        let (a, b) = (iota(&[2, 1, 2]), iota(&[2, 2, 2]));
        let y = Concat { axis: -2 }.eval(&[Some(&a), Some(&b)], 1).unwrap().remove(0);
        assert_eq!(y.shape().dims(), [2, 3, 2]);
        assert_eq!(y.to_vec::<i32>().unwrap(), [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 6, 7]);
        let e = Concat { axis: 0 }.eval(&[Some(&a), Some(&b)], 1).unwrap_err().to_string();
        assert_eq!(e, "input inputs[1]: expected shape [*,1,2], found [2,2,2]");
        let empty = Concat { axis: 1 }.eval(&[Some(&iota(&[0, 2])), Some(&iota(&[0, 3]))], 1).unwrap();
        assert_eq!(empty[0].shape().dims(), [0, 5]);
        assert!(Concat { axis: 0 }.eval(&[Some(&Tensor::scalar(1i32))], 1).is_err());
        assert!(Concat { axis: 0 }.eval(&[], 1).is_err());
    }

    #[test]
    fn concat_keeps_names() {
        let fact = |d: Dim| Fact::new(DType::F32, [d, "heads".into()]);
        let (past, none, two) = (fact("past".into()), fact(0.into()), fact(2.into()));
        let infer =
            |a: &Fact, b: &Fact| Concat { axis: 0 }.infer(&[Some(a), Some(b)]).unwrap()[0].shape_text();
        assert_eq!(infer(&past, &none), "[past,heads]");
        assert_eq!(infer(&past, &two), "[?,heads]");
    }

    fn split(attrs: &mut Attrs, opset: i64, n: usize, outputs: usize) -> Result<Vec<Vec<i32>>, String> {
        let op = Split::parse("Split", opset, attrs).map_err(|e| e.to_string())?;
        let parts = op.eval(&[Some(&iota(&[n]))], outputs).map_err(|e| e.to_string())?;
        Ok(parts.iter().map(|t| t.to_vec().unwrap()).collect())
    }

    #[test]
    fn splits_by_version() {
        let old = Attrs::from([("split", vec![1, 2].into())]);
        assert_eq!(split(&mut old.clone(), 11, 3, 2).unwrap(), [vec![0], vec![1, 2]]);
        assert!(split(&mut old.clone(), 11, 4, 2).unwrap_err().contains("sum to 4"));
        assert_eq!(split(&mut Attrs::default(), 13, 4, 2).unwrap(), [vec![0, 1], vec![2, 3]]);
        assert!(split(&mut Attrs::default(), 13, 3, 2).is_err());
        let parts = Attrs::from([("num_outputs", 2.into())]);
        assert_eq!(split(&mut parts.clone(), 18, 3, 2).unwrap(), [vec![0, 1], vec![2]]);
        assert!(split(&mut parts.clone(), 18, 3, 3).is_err());
        assert!(split(&mut Attrs::from([("num_outputs", 4.into())]), 18, 5, 4).is_err());
        assert!(split(&mut Attrs::from([("num_outputs", i64::MAX.into())]), 18, 5, 4).is_err());
        assert!(split(&mut Attrs::from([("num_outputs", 0.into())]), 18, 5, 4).is_err());
    }

    #[test]
    fn splits_an_inner_axis_into_given_sizes() {
        let op = Split { axis: 1, sizes: Sizes::Input };
        let sizes = Tensor::from_slice([3], &[1i64, 0, 2]).unwrap();
        let y = op.eval(&[Some(&iota(&[2, 3])), Some(&sizes)], 3).unwrap();
        assert_eq!(y[0].to_vec::<i32>().unwrap(), [0, 3]);
        assert_eq!(y[1].shape().dims(), [2, 0]);
        assert_eq!(y[2].to_vec::<i32>().unwrap(), [1, 2, 4, 5]);
        let bad = Tensor::from_slice([2], &[4i64, -1]).unwrap();
        assert!(op.eval(&[Some(&iota(&[2, 3])), Some(&bad)], 2).is_err());
    }
}
