//! Moving elements: strided reads into a contiguous result (Transpose, Slice, Split, Expand) and parts of a
//! concatenation. Elements of any size that is `Copy`; nothing is computed.

use super::rows::for_rows;
use crate::pool::{Pool, UnsafeSlice};

/// Axes a view may have after joining those that continue each other.
const MAX_RANK: usize = 8;

/// A view that leaves its source or has too many axes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// An element outside of the source.
    #[error("the view reaches elements {first} to {last} of a source of {len}")]
    Bounds {
        /// Lowest element.
        first: isize,
        /// Highest element.
        last: isize,
        /// Length of the source.
        len: usize,
    },
    /// Extents and strides that differ in number.
    #[error("{extents} extents and {strides} strides")]
    Strides {
        /// Extents.
        extents: usize,
        /// Strides.
        strides: usize,
    },
    /// More than eight axes that do not continue each other.
    #[error("more than {MAX_RANK} axes remain after joining those that continue each other")]
    Rank,
}

/// A strided view of a source, checked against its length; made per call without allocating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StridedView {
    /// `(extent, stride)`, innermost first.
    axes: [(usize, isize); MAX_RANK],
    rank: usize,
    offset: usize,
    len: usize,
    source: usize,
}

impl StridedView {
    /// The elements `source[offset + sum index * stride]`, row-major over `extents`. Strides may be 0 or negative.
    ///
    /// # Errors
    /// When an element lies outside of the `source` elements, or there are too many axes.
    pub fn new(
        source: usize,
        offset: usize,
        extents: &[usize],
        strides: &[isize],
    ) -> Result<Self, LayoutError> {
        if extents.len() != strides.len() {
            return Err(LayoutError::Strides { extents: extents.len(), strides: strides.len() });
        }
        let mut this = Self {
            axes: [(1, 0); MAX_RANK],
            rank: 0,
            offset,
            len: extents.iter().copied().fold(1, usize::saturating_mul),
            source,
        };
        let (mut first, mut last) = (offset as isize, offset as isize);
        for (&extent, &stride) in extents.iter().zip(strides).rev() {
            let reach = stride.saturating_mul(extent.saturating_sub(1) as isize);
            first = first.saturating_add(reach.min(0));
            last = last.saturating_add(reach.max(0));
            this.push(extent, stride)?;
        }
        if this.len > 0 && (first < 0 || last >= source as isize) {
            return Err(LayoutError::Bounds { first, last, len: source });
        }
        Ok(this)
    }

    fn push(&mut self, extent: usize, stride: isize) -> Result<(), LayoutError> {
        if extent == 1 {
            return Ok(());
        }
        if let Some((inner, step)) = self.rank.checked_sub(1).map(|i| &mut self.axes[i])
            && stride == *step * *inner as isize
        {
            *inner *= extent;
            return Ok(());
        }
        *self.axes.get_mut(self.rank).ok_or(LayoutError::Rank)? = (extent, stride);
        self.rank += 1;
        Ok(())
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Position in the source of the first element of run `i`; a run is one pass of the innermost axis.
    fn start(&self, mut i: usize) -> isize {
        let mut at = self.offset as isize;
        for &(extent, stride) in &self.axes[1..self.rank.max(1)] {
            at += (i % extent) as isize * stride;
            i /= extent;
        }
        at
    }

    /// Writes the elements of the view of `src`, row-major.
    ///
    /// # Panics
    /// When `src` is not as long as the view was checked for, or `dst` not as long as the view.
    pub fn copy<T: Copy + Send + Sync>(&self, pool: &Pool, src: &[T], dst: &mut [T]) {
        assert_eq!(src.len(), self.source, "length of the source");
        assert_eq!(dst.len(), self.len, "length of the result");
        if dst.is_empty() {
            return;
        }
        let (run, step) = self.axes[0];
        let dst = UnsafeSlice::new(dst);
        for_rows(pool, self.len / run, run, &|runs| {
            for i in runs {
                // SAFETY: runs are disjoint, and each belongs to one worker.
                let dst = unsafe { dst.range(i * run..(i + 1) * run) };
                let start = self.start(i);
                if step == 1 {
                    dst.copy_from_slice(&src[start as usize..start as usize + run]);
                } else {
                    for (k, d) in dst.iter_mut().enumerate() {
                        *d = src[(start + k as isize * step) as usize];
                    }
                }
            }
        });
    }
}

/// One operand of a concatenation: for every outer index `o`, copies row `o` of `src [outer, width]` to columns
/// `at .. at + width` of row `o` of `dst [outer, total]`.
///
/// # Panics
/// When the lengths do not agree.
pub fn concat_part<T: Copy>(dst: &mut [T], total: usize, at: usize, src: &[T], width: usize) {
    assert!(at + width <= total, "columns {at} to {} of {total}", at + width);
    if width == 0 {
        return;
    }
    assert_eq!(dst.len() / total, src.len() / width, "rows of source and result");
    for (d, s) in dst.chunks_exact_mut(total).zip(src.chunks_exact(width)) {
        d[at..at + width].copy_from_slice(s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
    }

    proptest! {
        #[test]
        fn copies_what_indexing_says(
            axes in prop::collection::vec((0usize..6, 1usize..4, any::<bool>(), any::<bool>()), 0..5), seed: u64,
            threads in 1usize..3,
        ) {
            // Axes of a source, in a shuffled order, each with a step and maybe backwards or repeated.
            let mut order: Vec<usize> = (0..axes.len()).collect();
            order.sort_by_key(|&i| seed.rotate_left(i as u32 * 13) % 97);
            let full: Vec<usize> = axes.iter().map(|&(e, step, _, repeat)| if repeat { 1 } else { e * step }).collect();
            let mut stride = vec![1isize; axes.len()];
            for i in (0..axes.len().saturating_sub(1)).rev() {
                stride[i] = stride[i + 1] * full[i + 1] as isize;
            }
            let source: usize = full.iter().product();
            let (mut extents, mut strides, mut offset) = (Vec::new(), Vec::new(), 0);
            for &i in &order {
                let (e, step, backwards, repeat) = axes[i];
                let s = if repeat { 0 } else { stride[i] * step as isize };
                extents.push(e);
                strides.push(if backwards { -s } else { s });
                if backwards && e > 0 {
                    offset += (s * (e as isize - 1)) as usize;
                }
            }
            let view = StridedView::new(source, offset, &extents, &strides).unwrap();
            let src: Vec<u64> = (0..source as u64).collect();
            let mut dst = vec![u64::MAX; view.len()];
            view.copy(&pool(threads), &src, &mut dst);
            for (n, &d) in dst.iter().enumerate() {
                let (mut rest, mut at) = (n, offset as isize);
                for (&e, &s) in extents.iter().zip(&strides).rev() {
                    at += (rest % e) as isize * s;
                    rest /= e;
                }
                prop_assert_eq!(d, at as u64);
            }
        }
    }

    #[test]
    fn large_transpose_on_threads() {
        let (rows, cols) = (301, 203);
        let src: Vec<u32> = (0..rows * cols).collect();
        let view =
            StridedView::new(src.len(), 0, &[cols as usize, rows as usize], &[1, cols as isize]).unwrap();
        let mut dst = vec![0; src.len()];
        view.copy(&pool(3), &src, &mut dst);
        assert!((0..rows * cols).all(|i| dst[i as usize] == (i % rows) * cols + i / rows));
    }

    #[test]
    fn views_stay_inside() {
        assert!(StridedView::new(10, 0, &[2, 5], &[5, 1]).is_ok());
        assert_eq!(
            StridedView::new(10, 1, &[2, 5], &[5, 1]).unwrap_err(),
            LayoutError::Bounds { first: 1, last: 10, len: 10 }
        );
        assert!(StridedView::new(10, 3, &[5], &[-1]).is_err());
        assert!(StridedView::new(0, 0, &[0, 5], &[5, 1]).is_ok());
        assert!(StridedView::new(1, 0, &[2], &[]).is_err());
        assert!(StridedView::new(9, 0, &[usize::MAX / 2], &[isize::MAX]).is_err());
    }

    #[test]
    fn concatenation() {
        let mut dst = [0; 10];
        concat_part(&mut dst, 5, 0, &[1, 2, 3, 4], 2);
        concat_part(&mut dst, 5, 2, &[5, 6, 7, 8, 9, 10], 3);
        assert_eq!(dst, [1, 2, 5, 6, 7, 3, 4, 8, 9, 10]);
        concat_part(&mut dst, 5, 5, &[], 0);
    }
}
