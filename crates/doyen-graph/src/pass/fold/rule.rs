//! Which operators on constants are movements of elements, and how.

use super::view;
use crate::{
    ir::{Constant, Fact, Node},
    ops::{Op, OpError},
};
use doyen_tensor::Shape;
use std::{ops::Range, sync::Arc};

/// The node's results as views of its first inputs, or `None` when it must be evaluated. `declared` is what shape
/// inference says of the outputs.
pub(super) fn as_views(
    node: &Node,
    inputs: &[Option<&Fact>],
    declared: &[Fact],
) -> Result<Option<Vec<Constant>>, OpError> {
    let constants: Vec<Option<&Arc<Constant>>> =
        inputs.iter().map(|f| f.and_then(|f| f.constant.as_ref())).collect();
    let Some(Some(x)) = constants.first() else { return Ok(None) };
    let shapes = declared.iter().map(Fact::concrete_shape).collect::<Option<Vec<Shape>>>();
    let rank = x.shape().len();
    let views = match (&node.op, shapes.as_deref()) {
        (Op::Identity(_), _) => Some(vec![Constant::clone(x)]),
        (Op::Reshape(_) | Op::Squeeze(_) | Op::Unsqueeze(_) | Op::Flatten(_), Some([shape])) => {
            view::reshape(x, shape).map(|v| vec![v])
        }
        (Op::Transpose(op), _) => view::transpose(x, &op.permutation(rank)?).map(|v| vec![v]),
        (Op::Slice(_), _) => sliced(x, &constants)?.map(|v| vec![v]),
        (Op::Split(op), Some(shapes)) => split(x, axis(op.axis, rank)?, shapes),
        (Op::Concat(op), _) => {
            let all: Vec<&Constant> = constants.iter().flatten().map(|c| &***c).collect();
            view::concat(&all, axis(op.axis, rank)?).map(|v| vec![v])
        }
        _ => None,
    };
    // Elements below a byte can be read through a view only where they still lie in one run.
    Ok(views.filter(|v| v.iter().all(|c| c.dtype().bits() >= 8 || c.as_tensor().is_some())))
}

fn axis(value: i64, rank: usize) -> Result<usize, OpError> {
    let wrapped = if value < 0 { value + rank as i64 } else { value };
    usize::try_from(wrapped)
        .ok()
        .filter(|&a| a < rank)
        .ok_or_else(|| OpError::attribute("axis", format!("an axis of {rank}"), value))
}

fn ints(constants: &[Option<&Arc<Constant>>], index: usize) -> Result<Option<Vec<i64>>, OpError> {
    match constants.get(index) {
        Some(Some(c)) => Ok(Some(c.to_tensor()?.to_i64()?)),
        _ => Ok(None),
    }
}

fn sliced(x: &Constant, constants: &[Option<&Arc<Constant>>]) -> Result<Option<Constant>, OpError> {
    let (Some(starts), Some(ends)) = (ints(constants, 1)?, ints(constants, 2)?) else { return Ok(None) };
    let axes = ints(constants, 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = ints(constants, 4)?.unwrap_or_else(|| vec![1; starts.len()]);
    if steps.iter().any(|&s| s != 1) || ends.len() != starts.len() || axes.len() != starts.len() {
        return Ok(None);
    }
    let mut out = x.clone();
    for ((&start, &end), &a) in starts.iter().zip(&ends).zip(&axes) {
        let a = axis(a, x.shape().len())?;
        let Some(v) = view::slice(&out, a, clamped(start, end, out.shape()[a])) else { return Ok(None) };
        out = v;
    }
    Ok(Some(out))
}

/// ONNX's reading of a start and an end: negative counts from the end, both are clamped to the extent.
fn clamped(start: i64, end: i64, extent: usize) -> Range<usize> {
    let n = extent as i64;
    let at = |v: i64| if v < 0 { v.saturating_add(n) } else { v }.clamp(0, n) as usize;
    let (start, end) = (at(start), at(end));
    start..end.max(start)
}

fn split(x: &Constant, axis: usize, shapes: &[Shape]) -> Option<Vec<Constant>> {
    let mut start = 0;
    let mut out = Vec::with_capacity(shapes.len());
    for shape in shapes {
        let end = start + shape.get(axis)?;
        out.push(view::slice(x, axis, start..end)?);
        start = end;
    }
    Some(out)
}
