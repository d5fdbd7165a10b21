//! Which operators on constants are movements of elements, and how.

use super::view;
use crate::{
    ir::{Constant, Fact, Node},
    ops::OpError,
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
    if !node.domain.is_empty() {
        return Ok(None);
    }
    let shapes = declared.iter().map(Fact::concrete_shape).collect::<Option<Vec<Shape>>>();
    let views = match (node.op_type.as_str(), shapes.as_deref()) {
        ("Identity", _) => Some(vec![Constant::clone(x)]),
        ("Reshape" | "Squeeze" | "Unsqueeze" | "Flatten", Some([shape])) => {
            view::reshape(x, shape).map(|v| vec![v])
        }
        ("Transpose", _) => view::transpose(x, &permutation(node, x.shape().len())?).map(|v| vec![v]),
        ("Slice", _) => sliced(x, &constants)?.map(|v| vec![v]),
        ("Split", Some(shapes)) => split(node, x, shapes)?,
        ("Concat", _) => concat(node, &constants)?.map(|v| vec![v]),
        _ => None,
    };
    // Elements below a byte can be read through a view only where they still lie in one run.
    Ok(views.filter(|v| v.iter().all(|c| c.dtype().bits() >= 8 || c.as_tensor().is_some())))
}

fn permutation(node: &Node, rank: usize) -> Result<Vec<usize>, OpError> {
    match node.attrs.clone().ints("perm")? {
        None => Ok((0..rank).rev().collect()),
        Some(perm) => perm
            .iter()
            .map(|&a| usize::try_from(a).map_err(|_| OpError::attribute("perm", "axes from 0", a)))
            .collect(),
    }
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

fn split(node: &Node, x: &Constant, shapes: &[Shape]) -> Result<Option<Vec<Constant>>, OpError> {
    let axis = axis(node.attrs.clone().int("axis")?.unwrap_or(0), x.shape().len())?;
    let mut start = 0;
    let mut out = Vec::with_capacity(shapes.len());
    for shape in shapes {
        let Some(&extent) = shape.get(axis) else { return Ok(None) };
        let Some(v) = view::slice(x, axis, start..start + extent) else { return Ok(None) };
        out.push(v);
        start += extent;
    }
    Ok(Some(out))
}

fn concat(node: &Node, constants: &[Option<&Arc<Constant>>]) -> Result<Option<Constant>, OpError> {
    let all: Vec<&Constant> = constants.iter().flatten().map(|c| &***c).collect();
    let Some(first) = all.first() else { return Ok(None) };
    let axis = axis(node.attrs.clone().required_int("axis")?, first.shape().len())?;
    Ok(view::concat(&all, axis))
}
