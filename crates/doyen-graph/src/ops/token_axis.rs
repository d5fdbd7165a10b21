//! Token-axis rules that several operators share; the vocabulary is in `trace`.

use super::{TokenAxis, Trace, Traced};
use doyen_tensor::Shape;

/// The token axis of every input that is there.
fn tokens<'a>(inputs: &'a [Option<Traced<'a>>]) -> impl Iterator<Item = (TokenAxis, &'a Shape)> + 'a {
    inputs.iter().flatten().filter_map(|t| match t.trace {
        Trace::Tokens(axis) => Some((axis, t.shape)),
        Trace::Absent => None,
    })
}

/// Element-wise under numpy broadcasting: all token axes must meet in one axis of the output, and inputs without
/// tokens must not vary along it.
///
/// # Errors
/// Says how the operands would mix tokens.
pub(super) fn pointwise(inputs: &[Option<Traced<'_>>], out: &Shape) -> Result<Trace, String> {
    let place = |a: TokenAxis, shape: &Shape| {
        let axis = (a.axis + out.len()).checked_sub(shape.len())?;
        Some(TokenAxis { axis, inner: a.inner })
    };
    let mut found: Option<TokenAxis> = None;
    for (a, shape) in tokens(inputs) {
        let here = place(a, shape).ok_or("an operand has more axes than the output")?;
        match found {
            None => found = Some(here),
            Some(f) if f == here => {}
            Some(f) => {
                return Err(format!(
                    "its operands carry tokens differently: axis {} ({} per token) and axis {} ({} per token)",
                    f.axis, f.inner, here.axis, here.inner
                ));
            }
        }
    }
    let Some(found) = found else { return Ok(Trace::Absent) };
    for t in inputs.iter().flatten() {
        let own = (found.axis + t.shape.len()).checked_sub(out.len());
        let extent = own.and_then(|i| t.shape.get(i)).copied().unwrap_or(1);
        let wanted = out.get(found.axis).copied().unwrap_or(1);
        if t.trace == Trace::Absent && extent != 1 {
            return Err(format!("an operand without tokens has {extent} elements along the token axis"));
        }
        if t.trace != Trace::Absent && extent != wanted {
            return Err("the token axis is broadcast".into());
        }
    }
    Ok(Trace::Tokens(found))
}

/// The same elements in the same order under another shape: finds the axis whose extent counts the same tokens.
///
/// # Errors
/// When tokens would be split over several axes or interleaved with another axis.
pub(super) fn reshape(input: Traced<'_>, out: &Shape) -> Result<Trace, String> {
    let Trace::Tokens(a) = input.trace else { return Ok(Trace::Absent) };
    let shape = input.shape;
    let tokens = shape[a.axis] / a.inner.max(1);
    let outer: usize = shape[..a.axis].iter().product();
    let per_token = a.inner * shape[a.axis + 1..].iter().product::<usize>();
    let mut before = 1usize;
    for (axis, &d) in out.iter().enumerate() {
        let whole = tokens > 0 && d > 0 && d.is_multiple_of(tokens);
        if before == outer && whole {
            let inner = d / tokens;
            if inner * out[axis + 1..].iter().product::<usize>() == per_token {
                return Ok(Trace::Tokens(TokenAxis { axis, inner }));
            }
        }
        before *= d;
    }
    Err(format!("reshaping {shape} to {out} splits or reorders the tokens of axis {}", a.axis))
}

/// An operator on one input that works along `axes` (front-counted) only, and either keeps or removes them.
///
/// # Errors
/// When the tokens lie along one of the axes.
pub(super) fn off_axes(
    input: Option<&Option<Traced<'_>>>,
    axes: &[usize],
    removed: bool,
) -> Result<Trace, String> {
    let Some(Some(Traced { trace: Trace::Tokens(a), .. })) = input else { return Ok(Trace::Absent) };
    if axes.contains(&a.axis) {
        return Err(format!("it works along axis {}, which counts tokens", a.axis));
    }
    let before = if removed { axes.iter().filter(|&&x| x < a.axis).count() } else { 0 };
    Ok(Trace::Tokens(TokenAxis { axis: a.axis - before, inner: a.inner }))
}

/// Whether an input is absent or carries no tokens.
pub(super) fn is_absent(input: Option<&Option<Traced<'_>>>) -> bool {
    input.and_then(Option::as_ref).is_none_or(|t| t.trace == Trace::Absent)
}

/// Refuses tokens in any of these inputs (shapes, axes, indices of positions).
///
/// # Errors
/// Names the first input that carries tokens.
pub(super) fn none_of(inputs: &[Option<Traced<'_>>], names: &[(usize, &str)]) -> Result<(), String> {
    match names.iter().find(|(i, _)| !is_absent(inputs.get(*i))) {
        None => Ok(()),
        Some((_, name)) => Err(format!("its input {name} depends on the tokens")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traced(shape: &Shape, axis: usize, inner: usize) -> Traced<'_> {
        Traced { trace: Trace::Tokens(TokenAxis { axis, inner }), shape, constant: None }
    }
    fn plain(shape: &Shape) -> Traced<'_> {
        Traced { trace: Trace::Absent, shape, constant: None }
    }
    fn at(axis: usize, inner: usize) -> Trace {
        Trace::Tokens(TokenAxis { axis, inner })
    }

    #[test]
    fn broadcasting_keeps_the_axis() {
        let (x, w, out) = (Shape::from([1, 5, 8]), Shape::from([8]), Shape::from([1, 5, 8]));
        assert_eq!(pointwise(&[Some(traced(&x, 1, 1)), Some(plain(&w))], &out).unwrap(), at(1, 1));
        let (m, out) = (Shape::from([5, 1]), Shape::from([1, 5, 8]));
        assert_eq!(pointwise(&[Some(traced(&m, 0, 1)), Some(traced(&x, 1, 1))], &out).unwrap(), at(1, 1));
        let row = Shape::from([5, 8]);
        assert!(pointwise(&[Some(traced(&x, 1, 1)), Some(plain(&row))], &out).is_err());
        let (q, k, s) = (Shape::from([5, 1]), Shape::from([1, 5]), Shape::from([5, 5]));
        assert!(pointwise(&[Some(traced(&q, 0, 1)), Some(traced(&k, 1, 1))], &s).is_err());
    }

    #[test]
    fn reshapes_follow_the_tokens() {
        let follow = |from: &[usize], axis, inner, to: &[usize]| {
            let shape = Shape::from(from);
            reshape(traced(&shape, axis, inner), &Shape::from(to))
        };
        assert_eq!(follow(&[1, 5, 64], 1, 1, &[5, 64]).unwrap(), at(0, 1));
        assert_eq!(follow(&[1, 5, 64], 1, 1, &[1, 5, 4, 16]).unwrap(), at(1, 1));
        assert_eq!(follow(&[1, 5, 4, 16], 1, 1, &[5, 64]).unwrap(), at(0, 1));
        assert_eq!(follow(&[1, 5, 8, 32], 1, 1, &[1, 40, 32]).unwrap(), at(1, 8));
        assert_eq!(follow(&[1, 40, 32], 1, 8, &[5, 256]).unwrap(), at(0, 1));
        assert_eq!(follow(&[1, 40, 32], 1, 8, &[1, 10, 128]).unwrap(), at(1, 2));
        assert_eq!(follow(&[1, 4, 5, 16], 2, 1, &[4, 5, 16]).unwrap(), at(1, 1));
        assert!(follow(&[1, 4, 5, 16], 2, 1, &[20, 16]).is_err());
        assert!(follow(&[5, 64], 0, 1, &[64, 5]).is_err());
        assert!(follow(&[6, 2], 0, 1, &[2, 3, 2]).is_err());
    }

    #[test]
    fn reductions_shift_the_axis() {
        let s = Shape::from([2, 3, 5, 4]);
        let x = Some(traced(&s, 2, 1));
        assert_eq!(off_axes(Some(&x), &[0, 3], true).unwrap(), at(1, 1));
        assert_eq!(off_axes(Some(&x), &[0, 3], false).unwrap(), at(2, 1));
        assert!(off_axes(Some(&x), &[2], false).is_err());
    }
}
