//! Movements of a constant's elements as views: new offsets, extents and strides over the same bytes.
//!
//! Every function returns `None` where no view exists (the caller then copies). All of them keep the meaning of
//! [`Constant`]: parts side by side along one axis.

use crate::ir::{Constant, Part};
use doyen_tensor::Shape;
use std::ops::Range;

/// The same elements in row-major order under other extents.
pub fn reshape(c: &Constant, shape: &Shape) -> Option<Constant> {
    if c.shape().numel().ok()? != shape.numel().ok()? {
        return None;
    }
    if let [part] = c.parts() {
        let strides = reshaped_strides(&part.shape, &part.strides, shape)?;
        let part = Part { bytes: part.bytes.clone(), offset: part.offset, shape: shape.clone(), strides };
        return Constant::from_parts(c.dtype(), 0, vec![part]).ok();
    }
    let outer: usize = c.shape()[..c.axis()].iter().product();
    (0..shape.len())
        .filter(|&axis| shape[..axis].iter().product::<usize>() == outer)
        .find_map(|axis| reshape_parts(c, shape, axis))
}

/// Reshapes every part on its own, so that they lie side by side along `axis` of the new shape.
fn reshape_parts(c: &Constant, shape: &Shape, axis: usize) -> Option<Constant> {
    let inner: usize = shape[axis + 1..].iter().product();
    let parts = c
        .parts()
        .iter()
        .map(|p| {
            let run: usize = p.shape[c.axis()..].iter().product();
            let mut dims = shape.to_vec();
            dims[axis] = run.checked_div(inner).filter(|n| n * inner == run)?;
            let dims = Shape::from(dims);
            let strides = reshaped_strides(&p.shape, &p.strides, &dims)?;
            Some(Part { bytes: p.bytes.clone(), offset: p.offset, shape: dims, strides })
        })
        .collect::<Option<Vec<_>>>()?;
    Constant::from_parts(c.dtype(), axis, parts).ok().filter(|c| c.shape() == shape)
}

/// Strides that read the window `old` row by row under the extents `new`, if there are any.
///
/// Axes are matched in groups of equal element count; within a group the old axes must follow each other in memory.
fn reshaped_strides(old: &[usize], strides: &[usize], new: &Shape) -> Option<Vec<usize>> {
    if new.contains(&0) {
        return Some(new.strides());
    }
    let old: Vec<(usize, usize)> =
        old.iter().copied().zip(strides.iter().copied()).filter(|&(d, _)| d != 1).collect();
    let mut out = vec![1; new.len()];
    let (mut i, mut j) = (0, 0);
    while i < old.len() {
        let (first, mut olds) = (i, old[i].0);
        let (start, mut news) = (j, *new.get(j)?);
        j += 1;
        i += 1;
        while olds != news {
            if olds < news {
                olds *= old.get(i)?.0;
                i += 1;
            } else {
                news *= *new.get(j)?;
                j += 1;
            }
        }
        if !old[first..i].windows(2).all(|w| w[0].1 == w[1].1 * w[1].0) {
            return None;
        }
        let mut stride = old[i - 1].1;
        for axis in (start..j).rev() {
            out[axis] = stride;
            stride *= new[axis];
        }
    }
    Some(out)
}

/// Axes in another order: axis `a` of the result is axis `perm[a]` of `c`.
pub fn transpose(c: &Constant, perm: &[usize]) -> Option<Constant> {
    let parts = c
        .parts()
        .iter()
        .map(|p| {
            let shape = perm.iter().map(|&a| p.shape.get(a).copied()).collect::<Option<Vec<_>>>()?;
            let strides = perm.iter().map(|&a| p.strides.get(a).copied()).collect::<Option<Vec<_>>>()?;
            Some(Part { bytes: p.bytes.clone(), offset: p.offset, shape: shape.into(), strides })
        })
        .collect::<Option<Vec<_>>>()?;
    let axis = if parts.len() == 1 { 0 } else { perm.iter().position(|&a| a == c.axis())? };
    Constant::from_parts(c.dtype(), axis, parts).ok()
}

/// Indices `range` of `axis`.
pub fn slice(c: &Constant, axis: usize, range: Range<usize>) -> Option<Constant> {
    if axis >= c.shape().len() || range.start > range.end || range.end > c.shape()[axis] {
        return None;
    }
    let along_parts = c.parts().len() > 1 && axis == c.axis();
    let mut base = 0;
    let mut parts = Vec::with_capacity(c.parts().len());
    for p in c.parts() {
        let extent = p.shape[axis];
        let (from, to) = if along_parts {
            (range.start.clamp(base, base + extent) - base, range.end.clamp(base, base + extent) - base)
        } else {
            (range.start, range.end)
        };
        base += extent;
        if along_parts && from >= to {
            continue;
        }
        let mut shape = p.shape.to_vec();
        shape[axis] = to - from;
        parts.push(Part {
            bytes: p.bytes.clone(),
            offset: p.offset + from * p.strides[axis],
            shape: shape.into(),
            strides: p.strides.clone(),
        });
    }
    Constant::from_parts(c.dtype(), c.axis(), parts).ok()
}

/// Constants side by side along `axis`.
pub fn concat(all: &[&Constant], axis: usize) -> Option<Constant> {
    let dtype = all.first()?.dtype();
    if all.iter().any(|c| c.dtype() != dtype || (c.parts().len() > 1 && c.axis() != axis)) {
        return None;
    }
    let parts = all.iter().flat_map(|c| c.parts().iter().cloned()).collect();
    Constant::from_parts(dtype, axis, parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::Tensor;
    use proptest::prelude::*;

    fn iota(shape: &[usize], from: i32) -> Constant {
        let n: usize = shape.iter().product();
        Tensor::from_slice(shape, &(from..from + n as i32).collect::<Vec<_>>()).unwrap().into()
    }

    fn elements(c: &Constant) -> Vec<i32> {
        c.to_tensor().unwrap().to_vec().unwrap()
    }

    fn dims() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(1usize..5, 3)
    }

    #[test]
    fn merging_axes_of_a_transpose_needs_a_copy() {
        let t = transpose(&iota(&[2, 3], 0), &[1, 0]).unwrap();
        assert!(reshape(&t, &[6].into()).is_none());
        assert_eq!(reshape(&t, &[3, 1, 2].into()).unwrap().shape().dims(), [3, 1, 2]);
    }

    #[test]
    fn rows_of_a_concat_split_further() {
        let c = concat(&[&iota(&[2, 4], 0), &iota(&[3, 4], 8)], 0).unwrap();
        let r = reshape(&c, &[10, 2].into()).unwrap();
        assert_eq!(r.parts().len(), 2);
        assert_eq!(elements(&r), (0..20).collect::<Vec<_>>());
        assert!(reshape(&c, &[4, 5].into()).is_none());
    }

    proptest! {
        #[test]
        fn views_equal_copies(d in dims(), perm in Just(vec![0usize, 1, 2]).prop_shuffle(), axis in 0usize..3,
                              extra in 1usize..4, cut in 0usize..5, split in 1usize..4) {
            let a = iota(&d, 0);
            let mut e = d.clone();
            e[axis] = extra;
            let c = concat(&[&a, &iota(&e, 1000)], axis).unwrap();
            let t = transpose(&c, &perm).unwrap();
            let copied: Constant = t.to_tensor().unwrap().into();
            for along in 0..3 {
                let n = t.shape()[along];
                let range = cut.min(n)..(cut + split).min(n);
                if range.is_empty() && t.parts().len() > 1 && along == t.axis() {
                    continue;
                }
                let s = slice(&t, along, range.clone()).unwrap();
                prop_assert_eq!(elements(&s), elements(&slice(&copied, along, range).unwrap()));
            }
            let s = t.shape();
            for shape in [vec![s[0] * s[1], s[2]], vec![s[0], s[1] * s[2]], vec![s[0] * s[1] * s[2]],
                          vec![s[0], 1, s[1], s[2], 1]] {
                if let Some(r) = reshape(&t, &shape.clone().into()) {
                    prop_assert_eq!(r.shape().dims(), &shape[..]);
                    prop_assert_eq!(elements(&r), elements(&t));
                }
                let r = reshape(&copied, &shape.into()).unwrap();
                prop_assert_eq!(elements(&r), elements(&t));
            }
        }
    }
}
