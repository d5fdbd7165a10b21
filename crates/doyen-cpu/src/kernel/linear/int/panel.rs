//! Scales and zero points of a tile's segment, block by block, a lane for each row.

use super::{
    lanes::{Lanes, MAX_ROWS},
    scales,
    tile::{Geometry, SEGMENT_BLOCKS, Segment},
};
use doyen_tensor::format::QuantMatrix;
use std::mem::MaybeUninit;

/// Numbers of a panel.
const NUMBERS: usize = SEGMENT_BLOCKS * MAX_ROWS;

/// Widened numbers of a tile of up to [`MAX_ROWS`] rows and [`SEGMENT_BLOCKS`] blocks.
pub(super) struct Panel {
    /// Row after row, as they are stored; eight more than a vector writes at once.
    rows: [f32; NUMBERS + 8],
    scale: [MaybeUninit<f32>; NUMBERS],
    zero: [MaybeUninit<f32>; NUMBERS],
}

impl Panel {
    pub(super) const fn new() -> Self {
        let none = MaybeUninit::uninit();
        Self { rows: [0.0; NUMBERS + 8], scale: [none; NUMBERS], zero: [none; NUMBERS] }
    }

    /// Fills the panel for `L::ROWS` rows from `first` on; zero points only where they are not the default, and less
    /// `offset`.
    ///
    /// # Safety
    /// As [`Lanes`] says; the matrix is valid and has the rows, and the segment is one of its.
    #[inline(always)]
    pub(super) unsafe fn fill<L: Lanes>(
        &mut self,
        w: &QuantMatrix<'_>,
        g: &Geometry,
        first: usize,
        segment: &Segment,
        blocks: usize,
        offset: f32,
    ) {
        // SAFETY: the caller's promise, for `scales` too; the buffer has room for all rows and eight numbers behind the last one.
        unsafe {
            if blocks == g.blocks {
                scales::widen(w.scales, first * blocks, L::ROWS * blocks, &mut self.rows);
            } else {
                for r in 0..L::ROWS {
                    let at = (first + r) * g.blocks + segment.block;
                    scales::widen(w.scales, at, blocks, &mut self.rows[r * blocks..]);
                }
            }
            L::transpose_floats(self.rows.as_ptr(), blocks, blocks, self.scale.as_mut_ptr().cast());
            if g.centred {
                return;
            }
            if blocks == g.blocks {
                scales::zero_points_of_rows(w, first, L::ROWS, &mut self.rows);
            } else {
                for r in 0..L::ROWS {
                    scales::zero_points(w, first + r, segment.block, blocks, &mut self.rows[r * blocks..]);
                }
            }
            for z in &mut self.rows[..L::ROWS * blocks] {
                *z -= offset;
            }
            L::transpose_floats(self.rows.as_ptr(), blocks, blocks, self.zero.as_mut_ptr().cast());
        }
    }

    /// Scales of a block of the segment: a number a row.
    #[inline(always)]
    pub(super) fn scales<L: Lanes>(&self, block: usize) -> *const f32 {
        self.scale.as_ptr().wrapping_add(block * L::ROWS).cast()
    }

    /// Zero points of a block of the segment: a number a row.
    #[inline(always)]
    pub(super) fn zeros<L: Lanes>(&self, block: usize) -> *const f32 {
        self.zero.as_ptr().wrapping_add(block * L::ROWS).cast()
    }
}
