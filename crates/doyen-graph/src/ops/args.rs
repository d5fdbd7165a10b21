//! Shape checks of operators with many named inputs: extents that may be unknown at load, compared one by one.
//!
//! The same functions run at load on declared facts and, through `util::outputs_of`, at run on the tensors given.
//! Types and arity are checked with `util`; nothing here knows an operator.

use super::OpError;
use super::util::{FLOATS, check_type};
use crate::ir::{Dim, Fact};
use doyen_tensor::{DType, Tensor};

/// An extent an input must have; `None` where nothing is known yet.
pub(super) type Want = Option<usize>;

/// float32, float16, bfloat16: the activation types of the contrib operators.
pub(super) const ACTIVATIONS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// `[4,?,16]`, for messages.
pub(super) fn want_text(want: &[Want]) -> String {
    let dims: Vec<String> = want.iter().map(|w| w.map_or_else(|| "?".into(), |n| n.to_string())).collect();
    format!("[{}]", dims.join(","))
}

/// Whether the known part of a shape has this rank and these extents.
pub(super) fn fits(fact: &Fact, want: &[Want]) -> bool {
    let Some(shape) = &fact.shape else { return true };
    shape.len() == want.len()
        && shape.iter().zip(want).all(|(d, w)| match (d, w) {
            (Dim::Known(d), Some(w)) => d == w,
            _ => true,
        })
}

/// Refuses an input whose known shape is not `want`; `why` says where the numbers come from.
pub(super) fn expect(name: &str, fact: &Fact, want: &[Want], why: &str) -> Result<(), OpError> {
    if fits(fact, want) {
        return Ok(());
    }
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    Err(OpError::input(name, format!("shape {}{why}", want_text(want)), fact.shape_text()))
}

/// [`expect`] for an input that may be absent.
pub(super) fn expect_if(name: &str, fact: Option<&Fact>, want: &[Want], why: &str) -> Result<(), OpError> {
    fact.map_or(Ok(()), |f| expect(name, f, want, why))
}

/// Refuses an input whose known rank is not one of `ranks`.
pub(super) fn expect_rank(name: &str, fact: &Fact, ranks: &[usize]) -> Result<(), OpError> {
    match fact.rank() {
        Some(r) if !ranks.contains(&r) => {
            let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            Err(OpError::input(name, format!("rank {}", list.join(" or ")), fact.shape_text()))
        }
        _ => Ok(()),
    }
}

/// The type of an activation input, and that another input has the same.
pub(super) fn same_type(
    name: &str,
    fact: Option<&Fact>,
    dtype: Option<DType>,
    of: &str,
) -> Result<(), OpError> {
    match (fact.and_then(|f| f.dtype), dtype) {
        (Some(found), Some(want)) if found != want => {
            Err(OpError::input(name, format!("{want} as input {of}"), found))
        }
        _ => Ok(()),
    }
}

/// The product of known extents, `None` when one is unknown.
///
/// # Errors
/// When the product overflows.
pub(super) fn product(name: &str, factors: &[Want]) -> Result<Want, OpError> {
    let Some(known) = factors.iter().copied().collect::<Option<Vec<usize>>>() else { return Ok(None) };
    known
        .iter()
        .try_fold(1usize, |n, &f| n.checked_mul(f))
        .map(Some)
        .ok_or_else(|| OpError::input(name, "extents that fit the address space", want_text(factors)))
}

/// Extent `axis` from the back (0 is the last), if the shape is known.
pub(super) fn back(fact: &Fact, axis: usize) -> Want {
    let shape = fact.shape.as_ref()?;
    shape.len().checked_sub(axis + 1).and_then(|i| shape[i].known())
}

/// `back` of an input that may be absent.
pub(super) fn dim_of(fact: Option<&Fact>, axis: usize) -> Want {
    fact.and_then(|f| f.dim(axis).known())
}

/// The symbolic extent for a shape rule.
pub(super) fn dim(want: Want) -> Dim {
    want.map_or(Dim::Unknown, Dim::Known)
}

/// A float input's elements as f64.
pub(super) fn floats(name: &str, t: &Tensor) -> Result<Vec<f64>, OpError> {
    check_type(name, &Fact::of_type(Some(t.dtype())), FLOATS)?;
    Ok(t.to_f64()?)
}

/// `n` zeros, or an error where the machine cannot hold them: sizes here may come from the values of inputs.
pub(super) fn zeros(n: usize) -> Result<Vec<f64>, OpError> {
    let mut v = Vec::new();
    v.try_reserve_exact(n).map_err(|_| OpError::other(format!("no memory for {n} intermediate values")))?;
    v.resize(n, 0.0);
    Ok(v)
}
