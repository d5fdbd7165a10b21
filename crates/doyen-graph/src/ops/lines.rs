//! Walking the lines of a tensor along one axis (Softmax, CumSum, TopK, ArgMax).

use doyen_tensor::Shape;

/// The lines of a tensor along an axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lines {
    /// Lines that differ before the axis.
    pub(super) outer: usize,
    /// Elements of a line.
    pub(super) len: usize,
    /// Lines that differ after the axis; also the distance of two elements of a line.
    pub(super) inner: usize,
}

impl Lines {
    /// The lines of `shape` along `axis`, which must be within its rank.
    pub(super) fn along(shape: &Shape, axis: usize) -> Self {
        Self {
            outer: shape[..axis].iter().product(),
            len: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }

    /// The offset of the first element of every line, in order.
    pub(super) fn starts(self) -> impl Iterator<Item = usize> {
        (0..self.outer).flat_map(move |o| (0..self.inner).map(move |i| o * self.len * self.inner + i))
    }

    /// The elements of the line that starts at `start`.
    pub(super) fn gather<T: Copy>(self, values: &[T], start: usize) -> Vec<T> {
        (0..self.len).map(|i| values[start + i * self.inner]).collect()
    }

    /// Replaces the elements of the line that starts at `start`.
    pub(super) fn scatter<T: Copy>(self, values: &mut [T], start: usize, line: &[T]) {
        for (i, &v) in line.iter().enumerate() {
            values[start + i * self.inner] = v;
        }
    }
}
