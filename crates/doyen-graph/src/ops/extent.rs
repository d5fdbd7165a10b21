//! Shape and Size: extents as data.

use super::util::{at_most, fact, output_of, required};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Constant, Dim, Fact};
use doyen_tensor::{DType, Shape as Extents, Tensor};
use std::{ops::Range, sync::Arc};

/// The extents of the axes from `start` to `end`, which clamp and count from the end when negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// First axis.
    pub start: i64,
    /// One past the last axis; without it the rank.
    pub end: Option<i64>,
}

impl Shape {
    fn axes(self, rank: usize) -> Range<usize> {
        let r = rank as i64;
        let clamp = |v: i64| if v < 0 { v.saturating_add(r).max(0) } else { v.min(r) } as usize;
        let start = clamp(self.start);
        start..clamp(self.end.unwrap_or(r)).max(start)
    }
}

fn list(dims: &[usize]) -> Result<Tensor, OpError> {
    Ok(Tensor::from_slice([dims.len()], &dims.iter().map(|&d| d as i64).collect::<Vec<_>>())?)
}

impl OpDef for Shape {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        if opset < 15 {
            return Ok(Self { start: 0, end: None });
        }
        Ok(Self { start: attrs.int("start")?.unwrap_or(0), end: attrs.int("end")? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let Some(shape) = &required(inputs, 0, "data")?.shape else {
            return Ok(vec![fact(Some(DType::I64), Some(vec![Dim::Unknown]))]);
        };
        let taken = &shape[self.axes(shape.len())];
        match taken.iter().map(Dim::known).collect::<Option<Vec<_>>>() {
            Some(known) => Ok(vec![Fact::from(Arc::new(Constant::from(list(&known)?)))]),
            None => Ok(vec![fact(Some(DType::I64), Some(vec![Dim::Known(taken.len())]))]),
        }
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        output_of(self, inputs)?;
        let shape = required(inputs, 0, "data")?.shape();
        Ok(vec![list(&shape[self.axes(shape.len())])?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Extents]) -> Result<Vec<Trace>, String> {
        match inputs.first().copied().flatten() {
            Some(Traced { trace: Trace::Tokens(a), shape, .. })
                if self.axes(shape.len()).contains(&a.axis) =>
            {
                Err("its result depends on the number of tokens".into())
            }
            _ => Ok(vec![Trace::Absent]),
        }
    }
}

/// The number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size;

impl OpDef for Size {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        Ok(vec![match required(inputs, 0, "data")?.concrete_shape() {
            Some(s) => Fact::from(Arc::new(Constant::from(Tensor::scalar(s.numel()? as i64)))),
            None => fact(Some(DType::I64), Some(Vec::new())),
        }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        output_of(self, inputs)?;
        Ok(vec![Tensor::scalar(required(inputs, 0, "data")?.numel() as i64)])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Extents]) -> Result<Vec<Trace>, String> {
        match inputs.first().copied().flatten() {
            Some(Traced { trace: Trace::Tokens(_), .. }) => {
                Err("its result depends on the number of tokens".into())
            }
            _ => Ok(vec![Trace::Absent]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_clamp() {
        let x = Tensor::from_slice([2, 3, 4], &[0u8; 24]).unwrap();
        let run = |start, end| Shape { start, end }.eval(&[Some(&x)], 1).unwrap()[0].to_vec::<i64>().unwrap();
        assert_eq!(run(0, None), [2, 3, 4]);
        assert_eq!(run(-1, None), [4]);
        assert_eq!(run(1, Some(-1)), [3]);
        assert_eq!(run(2, Some(1)), [] as [i64; 0]);
        assert_eq!(run(i64::MIN, Some(i64::MAX)), [2, 3, 4]);
        assert_eq!(Size.eval(&[Some(&x)], 1).unwrap()[0].to_vec::<i64>().unwrap(), [24]);
    }

    #[test]
    fn known_extents_become_constants() {
        let x = Fact::new(DType::F32, ["batch".into(), Dim::Known(8)]);
        let tail = Shape { start: 1, end: None }.infer(&[Some(&x)]).unwrap().remove(0);
        assert_eq!(tail.constant.unwrap().to_tensor().unwrap().to_vec::<i64>().unwrap(), [8]);
        let all = Shape { start: 0, end: None }.infer(&[Some(&x)]).unwrap().remove(0);
        assert!(all.constant.is_none() && all.shape_text() == "[2]");
    }
}
