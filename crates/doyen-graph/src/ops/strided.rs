//! Strided walks, broadcasting, and moving elements without knowing their type.
//!
//! Everything here is about positions; arithmetic lives in the operators and in `value`.

use super::OpError;
use super::util::buffer;
use crate::ir::Dim;
use bytes::Bytes;
use doyen_tensor::{DType, Shape, Tensor};

/// Offsets (in elements) of every index of `dims` in row-major order, for strides that may be zero or negative.
#[derive(Debug, Clone)]
pub(super) struct Offsets {
    dims: Vec<usize>,
    strides: Vec<isize>,
    index: Vec<usize>,
    offset: isize,
    left: usize,
}

impl Offsets {
    /// A walk over `dims` from element `start`. The caller guarantees that `dims` has at most `MAX_ELEMENTS` elements
    /// and that no offset is negative.
    pub(super) fn new(dims: &[usize], strides: Vec<isize>, start: usize) -> Self {
        Self {
            index: vec![0; dims.len()],
            dims: dims.to_vec(),
            strides,
            offset: start as isize,
            left: if dims.contains(&0) { 0 } else { dims.iter().product() },
        }
    }

    /// A walk over `out` that reads an operand of shape `src` broadcast to it.
    pub(super) fn broadcast(src: &[usize], out: &[usize]) -> Self {
        let lead = out.len() - src.len();
        let own = strides(src);
        let strides =
            (0..out.len()).map(|i| if i < lead || src[i - lead] == 1 { 0 } else { own[i - lead] }).collect();
        Self::new(out, strides, 0)
    }
}

impl Iterator for Offsets {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let current = self.offset;
        for axis in (0..self.dims.len()).rev() {
            self.index[axis] += 1;
            self.offset += self.strides[axis];
            if self.index[axis] < self.dims[axis] {
                break;
            }
            self.offset -= self.strides[axis] * self.index[axis] as isize;
            self.index[axis] = 0;
        }
        Some(current as usize)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Offsets {}

/// Row-major strides, signed so that they can be negated.
pub(super) fn strides(dims: &[usize]) -> Vec<isize> {
    Shape::from(dims).strides().into_iter().map(|s| s as isize).collect()
}

/// The shape all of these broadcast to, numpy's rule; `None` when they do not.
pub(super) fn broadcast_shape(shapes: &[&[usize]]) -> Option<Shape> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![1usize; rank];
    for s in shapes {
        for (o, &d) in out[rank - s.len()..].iter_mut().zip(*s) {
            match (*o, d) {
                (a, b) if a == b => {}
                (1, b) => *o = b,
                (_, 1) => {}
                _ => return None,
            }
        }
    }
    Some(Shape::from(out))
}

/// [`broadcast_shape`] over extents that may be symbolic. Where a name meets a number above 1 the number is the
/// only extent that can work; two different names give an unknown extent.
pub(super) fn broadcast_dims(shapes: &[&[Dim]]) -> Option<Vec<Dim>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![Dim::Known(1); rank];
    for s in shapes {
        for (o, d) in out[rank - s.len()..].iter_mut().zip(*s) {
            *o = match (&*o, d) {
                (a, b) if a == b => continue,
                (Dim::Known(1), b) => b.clone(),
                (a, Dim::Known(1)) => a.clone(),
                (Dim::Known(_), Dim::Known(_)) => return None,
                (Dim::Known(n), _) | (_, Dim::Known(n)) => Dim::Known(*n),
                _ => Dim::Unknown,
            };
        }
    }
    Some(out)
}

/// The elements of a tensor as cells of whole bytes; 4-bit elements get a byte each.
pub(super) fn cells(t: &Tensor) -> (Bytes, usize) {
    let bits = t.dtype().bits();
    if bits >= 8 {
        return (t.shared_bytes().clone(), bits / 8);
    }
    let unpacked = (0..t.numel()).map(|i| (t.bytes()[i / 2] >> (4 * (i % 2))) & 15).collect::<Vec<u8>>();
    (Bytes::from(unpacked), 1)
}

/// The inverse of [`cells`].
pub(super) fn from_cells(dtype: DType, shape: Shape, cells: Vec<u8>) -> Result<Tensor, OpError> {
    let bytes = if dtype.bits() >= 8 {
        cells
    } else {
        cells.chunks(2).map(|pair| (pair[0] & 15) | (pair.get(1).map_or(0, |hi| hi << 4))).collect()
    };
    Ok(Tensor::from_bytes(dtype, shape, Bytes::from(bytes))?)
}

/// A tensor of shape `shape` whose elements are those of `t` at `offsets`, in order.
pub(super) fn take(
    t: &Tensor,
    shape: Shape,
    offsets: impl IntoIterator<Item = usize>,
) -> Result<Tensor, OpError> {
    let (src, size) = cells(t);
    let mut out = buffer(&shape, size)?;
    for o in offsets {
        out.extend_from_slice(&src[o * size..(o + 1) * size]);
    }
    from_cells(t.dtype(), shape, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walks_backwards_and_broadcasts() {
        let back = Offsets::new(&[2, 2], vec![-2, -1], 3).collect::<Vec<_>>();
        assert_eq!(back, [3, 2, 1, 0]);
        let b = Offsets::broadcast(&[2, 1], &[2, 2, 3]).collect::<Vec<_>>();
        assert_eq!(b, [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]);
        assert_eq!(Offsets::broadcast(&[], &[2]).collect::<Vec<_>>(), [0, 0]);
        assert_eq!(Offsets::broadcast(&[1], &[0]).count(), 0);
        assert_eq!(Offsets::new(&[], vec![], 0).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn shapes_broadcast_as_numpy_does() {
        assert_eq!(broadcast_shape(&[&[3, 1], &[4]]).unwrap().dims(), [3, 4]);
        assert_eq!(broadcast_shape(&[&[0], &[1]]).unwrap().dims(), [0]);
        assert!(broadcast_shape(&[&[0], &[2]]).is_none());
        assert_eq!(broadcast_shape(&[]).unwrap().dims(), [0usize; 0]);
    }

    #[test]
    fn names_survive_broadcasting() {
        let b: Dim = "batch".into();
        let s: Dim = "seq".into();
        let out = broadcast_dims(&[&[b.clone(), 1.into(), 4.into()], &[s.clone(), 4.into()]]).unwrap();
        assert_eq!(out, [b.clone(), s.clone(), 4.into()]);
        assert_eq!(broadcast_dims(&[std::slice::from_ref(&b), &[s]]).unwrap(), [Dim::Unknown]);
        assert_eq!(broadcast_dims(&[&[b], &[7.into()]]).unwrap(), [Dim::Known(7)]);
    }

    #[test]
    fn nibbles_move_like_bytes() {
        let t = Tensor::from_bytes(DType::U4, [3], Bytes::from(vec![0x21, 0x03])).unwrap();
        let r = take(&t, [3].into(), [2, 1, 0]).unwrap();
        assert_eq!(r.bytes(), [0x23, 0x01]);
    }
}
