//! Checks every operator needs: arity, element types, axes, output sizes, and the bridge that lets `eval` reuse
//! the checks of `infer`.
//!
//! No arithmetic and no element access here (`strided`, `value`), no token-axis rules (`trace`).

use super::strided::broadcast_dims;
use super::{OpDef, OpError};
use crate::ir::{Constant, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};
use std::sync::Arc;

/// The most elements an operator may produce. Sizes that come from data (Expand, Tile, Range, ConstantOfShape)
/// are checked against it before anything is allocated.
pub(super) const MAX_ELEMENTS: usize = 1 << 31;
/// The most axes a shape made from data may have.
const MAX_RANK: usize = 64;

/// Every type that numbers are cast between, in an order of which the lists below are beginnings.
pub(super) const CASTABLE: &[DType] = &[
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
    DType::I4,
    DType::U4,
    DType::F8E4M3FN,
    DType::F8E5M2,
    DType::F8E8M0,
    DType::F4E2M1,
];
/// float16, bfloat16, float32, float64.
pub(super) const FLOATS: &[DType] = CASTABLE.split_at(4).0;
/// Floats and signed integers.
pub(super) const SIGNED: &[DType] = CASTABLE.split_at(8).0;
/// Floats and all integers of whole bytes.
pub(super) const NUMBERS: &[DType] = CASTABLE.split_at(12).0;
/// [`NUMBERS`] and bool.
pub(super) const NUMBERS_AND_BOOL: &[DType] = CASTABLE.split_at(13).0;
/// What products and sums over an axis are defined for.
pub(super) const MATMUL_TYPES: &[DType] =
    &[DType::F16, DType::BF16, DType::F32, DType::F64, DType::I32, DType::I64, DType::U32, DType::U64];
/// Types of indices and axes.
pub(super) const INDICES: &[DType] = &[DType::I32, DType::I64];
/// bool alone.
pub(super) const BOOL: &[DType] = &[DType::Bool];

/// The input at `index`, which the schema demands.
pub(super) fn required<'a, T>(inputs: &[Option<&'a T>], index: usize, name: &str) -> Result<&'a T, OpError> {
    optional(inputs, index).ok_or_else(|| OpError::input(name, "a value (required)", "nothing"))
}

/// The input at `index`, if it is there.
pub(super) fn optional<'a, T>(inputs: &[Option<&'a T>], index: usize) -> Option<&'a T> {
    inputs.get(index).copied().flatten()
}

/// Refuses inputs past the schema's.
pub(super) fn at_most<T>(inputs: &[Option<&T>], max: usize) -> Result<(), OpError> {
    match inputs.iter().rposition(Option::is_some) {
        Some(last) if last >= max => {
            Err(OpError::other(format!("expected at most {max} inputs, found {}", last + 1)))
        }
        _ => Ok(()),
    }
}

/// `bfloat16, float32 or float64`, for messages.
pub(super) fn type_list(types: &[DType]) -> String {
    match types {
        [] => "nothing".into(),
        [one] => one.to_string(),
        [head @ .., last] => {
            format!("{} or {last}", head.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}

/// The element type of an input, which must be one of `allowed` if it is known.
pub(super) fn check_type(name: &str, fact: &Fact, allowed: &[DType]) -> Result<Option<DType>, OpError> {
    match fact.dtype {
        Some(t) if !allowed.contains(&t) => Err(OpError::input(name, type_list(allowed), t)),
        t => Ok(t),
    }
}

/// The common element type of several inputs, which must agree where they are known.
pub(super) fn common_type<'a>(
    inputs: impl IntoIterator<Item = (&'a str, &'a Fact)>,
) -> Result<Option<DType>, OpError> {
    let mut first: Option<(&str, DType)> = None;
    for (name, fact) in inputs {
        match (first, fact.dtype) {
            (Some((other, a)), Some(b)) if a != b => {
                return Err(OpError::input(name, format!("{a}, the type of {other}"), b));
            }
            (None, Some(t)) => first = Some((name, t)),
            _ => {}
        }
    }
    Ok(first.map(|(_, t)| t))
}

/// `axis` counted from the front; `None` when outside `-rank..rank`.
pub(super) fn wrap_axis(axis: i64, rank: usize) -> Option<usize> {
    let r = i64::try_from(rank).ok()?;
    if (-r..r).contains(&axis) { usize::try_from(if axis < 0 { axis + r } else { axis }).ok() } else { None }
}

fn axis_range(rank: usize) -> String {
    if rank == 0 {
        "no axis (the tensor is a scalar)".into()
    } else {
        format!("an axis from -{rank} to {} (rank {rank})", rank - 1)
    }
}

/// Attribute `name` as an axis of a tensor of this rank, counted from the front.
pub(super) fn normalize_axis(name: &str, axis: i64, rank: usize) -> Result<usize, OpError> {
    wrap_axis(axis, rank).ok_or_else(|| OpError::attribute(name, axis_range(rank), axis))
}

/// Input `name` as an axis of a tensor of this rank, counted from the front.
pub(super) fn normalize_input_axis(name: &str, axis: i64, rank: usize) -> Result<usize, OpError> {
    wrap_axis(axis, rank).ok_or_else(|| OpError::input(name, axis_range(rank), axis))
}

/// Number of elements of a shape, at most [`MAX_ELEMENTS`]; extents beside a 0 must keep to that as well, so that
/// partial products fit.
pub(super) fn checked_numel(shape: &[usize]) -> Result<usize, OpError> {
    let whole = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)).filter(|&n| n <= MAX_ELEMENTS));
    whole.map(|n| if shape.contains(&0) { 0 } else { n }).ok_or_else(|| {
        OpError::other(format!(
            "the output would have shape {}, more than {MAX_ELEMENTS} elements",
            Shape::from(shape)
        ))
    })
}

/// An empty buffer that can hold `shape` at `size` bytes per element.
pub(super) fn buffer(shape: &[usize], size: usize) -> Result<Vec<u8>, OpError> {
    let bytes = checked_numel(shape)?.saturating_mul(size);
    let mut out = Vec::new();
    out.try_reserve_exact(bytes)
        .map_err(|_| OpError::other(format!("{bytes} bytes for the output cannot be allocated")))?;
    Ok(out)
}

/// Refuses ranks no model has, before a list of extents is allocated.
pub(super) fn check_rank(name: &str, rank: usize) -> Result<(), OpError> {
    if rank > MAX_RANK {
        return Err(OpError::input(name, format!("at most {MAX_RANK} axes"), rank));
    }
    Ok(())
}

/// A non-negative extent from data.
pub(super) fn extent(name: &str, value: i64) -> Result<usize, OpError> {
    usize::try_from(value).map_err(|_| OpError::input(name, "extents of 0 or more", value))
}

/// The integers (int32 or int64) of a constant input, `None` when the input is not constant. Refuses more than one
/// axis.
pub(super) fn constant_ints(name: &str, fact: &Fact) -> Result<Option<Vec<i64>>, OpError> {
    check_type(name, fact, INDICES)?;
    if fact.rank().is_some_and(|r| r > 1) {
        return Err(OpError::input(name, "a list (rank 1)", fact.shape_text()));
    }
    match &fact.constant {
        None => Ok(None),
        Some(c) => Ok(Some(c.to_tensor()?.to_i64()?)),
    }
}

/// The one integer of a constant input (rank 0, or one element), `None` when the input is not constant.
pub(super) fn constant_int(name: &str, fact: &Fact) -> Result<Option<i64>, OpError> {
    if fact.dim(0).known().is_some_and(|n| n != 1) && fact.rank().is_some_and(|r| r > 0) {
        return Err(OpError::input(name, "one integer", fact.shape_text()));
    }
    match constant_ints(name, fact)? {
        None => Ok(None),
        Some(v) => match v.as_slice() {
            [one] => Ok(Some(*one)),
            _ => Err(OpError::input(name, "one integer", format!("{} of them", v.len()))),
        },
    }
}

/// The extents several inputs broadcast to, `None` when a rank is not known.
pub(super) fn broadcast_facts(inputs: &[(&str, &Fact)]) -> Result<Option<Vec<Dim>>, OpError> {
    let mut out: Vec<Dim> = Vec::new();
    let mut known = true;
    for (name, fact) in inputs {
        let Some(shape) = &fact.shape else {
            known = false;
            continue;
        };
        out = broadcast_dims(&[&out, shape]).ok_or_else(|| {
            let so_far = out.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            OpError::input(name, format!("a shape that broadcasts with [{so_far}]"), fact.shape_text())
        })?;
    }
    Ok(known.then_some(out))
}

/// What is known of a value that has been computed.
pub(super) fn fact_of(t: &Tensor) -> Fact {
    Fact::from(Arc::new(Constant::from(t.clone())))
}

/// Type and shape of every output at these inputs, from `infer` with all inputs known: `eval` thereby makes exactly
/// the checks of `infer`, and the sizes are checked before anything is allocated.
pub(super) fn outputs_of<O: OpDef>(
    op: &O,
    inputs: &[Option<&Tensor>],
) -> Result<Vec<(DType, Shape)>, OpError> {
    outputs_by(inputs, |facts| op.infer(facts))
}

/// [`outputs_of`] for an operator that infers with more than its inputs.
pub(super) fn outputs_by(
    inputs: &[Option<&Tensor>],
    infer: impl FnOnce(&[Option<&Fact>]) -> Result<Vec<Fact>, OpError>,
) -> Result<Vec<(DType, Shape)>, OpError> {
    let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(fact_of)).collect();
    let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
    infer(&facts)?
        .iter()
        .map(|f| match (f.dtype, f.concrete_shape()) {
            (Some(dtype), Some(shape)) => {
                checked_numel(&shape)?;
                Ok((dtype, shape))
            }
            _ => Err(OpError::other("the output's type or shape does not follow from the inputs")),
        })
        .collect()
}

/// [`outputs_of`] for operators with one output.
pub(super) fn output_of<O: OpDef>(op: &O, inputs: &[Option<&Tensor>]) -> Result<(DType, Shape), OpError> {
    outputs_of(op, inputs)?.into_iter().next().ok_or_else(|| OpError::other("the operator has no output"))
}

/// A fact of a type that may be unknown and a shape that may be unknown.
pub(super) fn fact(dtype: Option<DType>, shape: Option<Vec<Dim>>) -> Fact {
    Fact { dtype, shape, constant: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_wrap_once() {
        assert_eq!(wrap_axis(-1, 3), Some(2));
        assert_eq!(wrap_axis(2, 3), Some(2));
        assert_eq!(wrap_axis(3, 3), None);
        assert_eq!(wrap_axis(-4, 3), None);
        assert_eq!(wrap_axis(i64::MIN, 3), None);
        assert_eq!(wrap_axis(0, 0), None);
        let e = normalize_axis("axis", 5, 2).unwrap_err().to_string();
        assert_eq!(e, "attribute axis: expected an axis from -2 to 1 (rank 2), found 5");
    }

    #[test]
    fn sizes_are_capped_without_overflow() {
        assert_eq!(checked_numel(&[]).unwrap(), 1);
        assert_eq!(checked_numel(&[7, 0, 5]).unwrap(), 0);
        assert!(checked_numel(&[usize::MAX, 0, usize::MAX]).is_err());
        assert_eq!(checked_numel(&[1 << 15, 1 << 16]).unwrap(), MAX_ELEMENTS);
        assert!(checked_numel(&[1 << 15, (1 << 16) + 1]).is_err());
        assert!(checked_numel(&[usize::MAX, usize::MAX]).is_err());
    }

    #[test]
    fn lists_of_types_read_well() {
        assert_eq!(type_list(INDICES), "int32 or int64");
        assert_eq!(type_list(BOOL), "bool");
        assert_eq!(type_list(FLOATS), "float16, bfloat16, float32 or float64");
    }
}
