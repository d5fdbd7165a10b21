//! Rows, segments, steps and groups: how a tile walks over its columns.
//!
//! A row is cut into segments of at most [`SEGMENT`] columns, so that panels and staged codes have a bounded size; a segment into
//! steps, the bytes that are transposed at once, and into units, the groups of 16, 32 or 128 columns that share an activation scale.

use super::{
    super::Columns,
    lanes::{Lanes, MAX_ROWS},
    panel::Panel,
};
use crate::kernel::quantize::{GROUP, Int8Row, SPAN_BYTES};
use doyen_tensor::{
    FloatView,
    format::{QuantMatrix, ZeroPoints},
};
use std::ops::Range;

/// Columns of a segment at most; a multiple of every step.
pub(super) const SEGMENT: usize = 1024;
/// Blocks of a segment at most.
pub(super) const SEGMENT_BLOCKS: usize = SEGMENT / 16;

/// Packed bytes of a row that a step takes.
pub(super) const fn step_bytes(bits: usize) -> usize {
    if bits == 8 { 32 } else { 16 }
}

/// Columns of a step: 64 at 2 bits, 32 otherwise.
pub(super) const fn step_cols(bits: usize) -> usize {
    8 * step_bytes(bits) / bits
}

/// Where the activations of a unit of `width` columns begin in a prepared row.
#[inline(always)]
pub(super) const fn unit_place(bits: usize, width: usize, unit: usize) -> usize {
    let (bytes, cols) = (width * bits / 8, SPAN_BYTES * 8 / bits);
    if bytes >= SPAN_BYTES {
        return unit * width;
    }
    let per_span = SPAN_BYTES / bytes;
    unit / per_span * cols + unit % per_span * bytes
}

/// What all tiles of a matrix share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    /// Columns of a unit.
    pub(super) unit: usize,
    /// Blocks of a row.
    pub(super) blocks: usize,
    /// Column `c` of a row is in block `c >> shift`.
    shift: u32,
    /// Bytes of a row's codes.
    pub(super) row_len: usize,
    /// Where the parts of an activation row begin.
    pub(super) acts: Int8Row,
    /// Whether every zero point is the width's default.
    pub(super) centred: bool,
}

impl Geometry {
    /// `w` is valid; its block is a power of two of at least 16, or the whole row; a unit is not longer than a block, but for the
    /// last.
    pub(super) fn new(w: &QuantMatrix<'_>, unit: usize) -> Self {
        let block = w.block.min(w.cols);
        let blocks = w.cols.div_ceil(block);
        Self {
            unit,
            blocks,
            shift: if blocks == 1 { usize::BITS - 1 } else { block.trailing_zeros() },
            row_len: w.bits.packed_len(w.cols),
            acts: Int8Row::new(w.cols, block, if unit < GROUP { GROUP } else { unit }),
            centred: matches!(w.zero_points, ZeroPoints::Default),
        }
    }

    /// Block of a column.
    #[inline(always)]
    pub(super) const fn block_of(&self, column: usize) -> usize {
        column >> self.shift
    }

    /// Block of a unit.
    #[inline(always)]
    pub(super) const fn block_of_unit(&self, unit: usize) -> usize {
        self.block_of(unit * self.unit)
    }
}

/// Consecutive rows of a matrix from `first` on, and a segment of their columns.
#[derive(Debug)]
pub(super) struct Segment {
    /// Code of row 0, column `start`.
    pub(super) codes: *const u8,
    /// Bytes from row to row.
    pub(super) stride: usize,
    /// First unit and block.
    pub(super) unit: usize,
    pub(super) block: usize,
    /// Units and steps of the segment.
    pub(super) units: usize,
    pub(super) steps: usize,
    /// Steps whose bytes are all in the row; the bytes of the one behind them are in `tail`.
    pub(super) whole: usize,
    tail: [[u8; 32]; MAX_ROWS],
}

impl Segment {
    /// The segment of `rows` rows from `first` on that begins with column `start` and has at most `most`, which is
    /// at most [`SEGMENT`] and a multiple of every step.
    ///
    /// # Panics
    /// When the matrix has no such rows.
    pub(super) fn new(
        w: &QuantMatrix<'_>,
        g: &Geometry,
        (first, rows): (usize, usize),
        (start, most): (usize, usize),
    ) -> Self {
        let bits = w.bits.get();
        let (bytes, cols) = (step_bytes(bits), (w.cols - start).min(most));
        let at = start * bits / 8;
        let steps = cols.div_ceil(step_cols(bits));
        let mut segment = Self {
            codes: w.codes[first * w.row_bytes + at..].as_ptr(),
            stride: w.row_bytes,
            unit: start / g.unit,
            block: g.block_of(start),
            units: cols.div_ceil(g.unit),
            steps,
            whole: steps.min((g.row_len - at) / bytes),
            tail: [[0; 32]; MAX_ROWS],
        };
        if segment.whole < steps {
            for (r, tail) in segment.tail.iter_mut().enumerate().take(rows) {
                let left = &w.row(first + r)[at + segment.whole * bytes..g.row_len];
                tail[..left.len()].copy_from_slice(left);
            }
        }
        segment
    }

    /// Where the bytes of step `s` lie, and their stride.
    #[inline(always)]
    pub(super) const fn step(&self, s: usize, bytes: usize) -> (*const u8, usize) {
        if s < self.whole {
            (self.codes.wrapping_add(s * bytes), self.stride)
        } else {
            (self.tail.as_ptr().cast(), 32)
        }
    }

    /// Asks for the lines of the next tile that lie where step `s` of this one does, so that they come while tokens are
    /// computed: rows side by side are streams that hardware follows badly. The addresses need not exist.
    #[inline(always)]
    pub(super) fn prefetch(&self, s: usize, bytes: usize, rows: usize) {
        // A line is four steps of 16 bytes or two of 32; each asks for its share of the rows.
        let steps = 64 / bytes;
        let next = self.codes.wrapping_add(rows * self.stride + s / steps * 64);
        let share = rows / steps;
        for r in s % steps * share..(s % steps + 1) * share {
            prefetch_line(next.wrapping_add(r * self.stride));
        }
    }

    /// Scales of the block of the segment's unit `u`, and its zero points.
    #[inline(always)]
    pub(super) fn numbers<L: Lanes>(
        &self,
        g: &Geometry,
        panel: &Panel,
        u: usize,
    ) -> (*const f32, *const f32) {
        let block = g.block_of_unit(self.unit + u) - self.block;
        (panel.scales::<L>(block), panel.zeros::<L>(block))
    }
}

/// Asks for a line in the second-level cache.
#[inline(always)]
fn prefetch_line(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, valid for any address; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch is a hint, valid for any address.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
}

/// Writes rows `rows` of a tile that begins with row `first`, and adds the bias to the first of a token's `terms`.
///
/// # Safety
/// As [`Lanes`] says.
///
/// # Panics
/// When the rows are not held by `out`, or not in the tile.
#[inline(always)]
pub(super) unsafe fn write<L: Lanes>(
    out: &mut Columns<'_>,
    (t, terms): (usize, usize),
    rows: Range<usize>,
    first: usize,
    acc: L::Float,
    bias: Option<FloatView<'_>>,
) {
    let bias = bias.filter(|_| t.is_multiple_of(terms));
    // SAFETY: the caller's promise. As with a bias of zero: a sum of -0 becomes 0.
    let acc = unsafe { L::add(acc, L::zero()) };
    let y = out.row(t / terms, rows.clone());
    if bias.is_none() && y.len() == L::ROWS {
        let y = y.as_mut_ptr();
        // SAFETY: the caller's promise; `y` is as long as the vector.
        return unsafe { L::store(y, if t.is_multiple_of(terms) { acc } else { L::add(L::load(y), acc) }) };
    }
    let mut sums = [0f32; MAX_ROWS];
    // SAFETY: the caller's promise; the buffer is as long as any vector.
    unsafe { L::store(sums.as_mut_ptr(), acc) };
    for (sum, n) in sums.iter_mut().skip(rows.start - first).zip(rows.clone()) {
        *sum += bias.map_or(0.0, |b| b.get(n));
    }
    out.put(t, terms, rows.clone(), &sums[rows.start - first..]);
}

/// The lanes of an element (eight of them, [`MAX_ROWS`] numbers apart) added: i and i + 4, then i and i + 2, then the last two.
///
/// # Safety
/// As [`Lanes`] says; `sums` points to the lanes.
#[inline(always)]
pub(super) unsafe fn lane_sum<L: Lanes>(sums: *const f32) -> L::Float {
    // SAFETY: the caller's promise.
    unsafe {
        let mut half = [L::zero(); 4];
        for (i, half) in half.iter_mut().enumerate() {
            *half = L::add(L::load(sums.add(i * MAX_ROWS)), L::load(sums.add((i + 4) * MAX_ROWS)));
        }
        L::add(L::add(half[0], half[2]), L::add(half[1], half[3]))
    }
}
