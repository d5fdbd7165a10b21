//! Quantized products with AVX2, FMA and F16C.
//!
//! A weight row is walked in spans of 32 bytes: eight 32-bit lanes, each with the codes of `span / 8` neighbouring
//! columns, so that a lane has one block and one group of activations. Every element of the result has one
//! accumulator of eight lanes that takes the spans in ascending order; tiles of `R` rows times `T` tokens only decide how
//! many accumulators live at a time. That is the whole canonical order:
//!
//! * fast: `acc = fma(i32 dot * scale_w, scale_a, acc)` span by span, and at the start of each segment
//!   `acc = fma(-scale_w * zero, block sum, acc)` over its blocks, eight at a time;
//! * exact: `part = sum over the lane's codes, ascending, of fma(code - zero, x, part)`, `acc = fma(part, scale_w, acc)`;
//! * the eight lanes are added by halves, then the bias.
//!
//! Segments of [`SEGMENT`] columns bound the stack: the scales and zero points of a segment are widened into a buffer
//! once per tile (`scales`), which keeps scale types and kinds of zero points out of the inner loops. [`driver`] holds the
//! loops around tiles, [`fast`] and [`exact`] the tiles; [`short`] has both for one token and rows of few blocks.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]
#![allow(clippy::needless_range_loop, reason = "r and t index a tile in several arrays at once")]

mod driver;
mod exact;
mod fast;
mod scales;
mod short;

pub(super) use scales::load8;

use super::{Kernel, Mode, RowClass};
use doyen_tensor::format::{Bits, QuantMatrix};
use std::arch::x86_64::*;

/// Columns of a segment; a multiple of every span.
const SEGMENT: usize = 2048;
/// Blocks of a segment at most, and eight zeros behind them.
const SEGMENT_BLOCKS: usize = SEGMENT / 16 + 8;

/// The kernel of a width, block, mode and row class.
pub(super) fn kernel(bits: Bits, block: usize, cols: usize, mode: Mode, class: RowClass) -> Kernel {
    let per_span = blocks_per_span(bits, block, cols);
    match mode {
        Mode::Fast => match class {
            RowClass::One => short::kernel(bits, block, cols),
            RowClass::Few | RowClass::Many => None,
        }
        .unwrap_or_else(|| fast::kernel(bits, per_span, class)),
        Mode::Exact => exact::kernel(bits, per_span, class),
    }
}

/// How blocks meet spans in a row.
#[derive(Debug, Clone, Copy)]
struct Geometry {
    /// Columns of a span.
    span: usize,
    /// Bytes of a row's codes.
    row_len: usize,
    /// Spans of a row, the last one possibly partial.
    spans: usize,
    block: usize,
    blocks: usize,
}

impl Geometry {
    fn new(w: &QuantMatrix<'_>) -> Self {
        let span = 32 * w.bits.per_byte();
        let block = w.block.min(w.cols);
        Self {
            span,
            row_len: w.bits.packed_len(w.cols),
            spans: w.cols.div_ceil(span),
            block,
            blocks: w.cols.div_ceil(block),
        }
    }

    /// Spans of a segment.
    const fn segment_spans(&self) -> usize {
        SEGMENT / self.span
    }
}

/// Where a span begins among the blocks of its row.
#[derive(Debug, Clone, Copy)]
struct BlockMap {
    /// Span `s` of the row begins in block `(s << up) >> down`.
    up: u32,
    down: u32,
}

impl BlockMap {
    fn new(g: &Geometry) -> Self {
        if g.blocks == 1 {
            return Self { up: 0, down: usize::BITS - 1 };
        }
        // Both are powers of two here.
        let (span, block) = (g.span.trailing_zeros(), g.block.trailing_zeros());
        Self { up: span.saturating_sub(block), down: block.saturating_sub(span) }
    }

    const fn first_block(self, span: usize) -> usize {
        (span << self.up) >> self.down
    }
}

/// Blocks of a span: 1, 2, 4 or 8, as blocks have at least 16 columns unless there is only one.
const fn blocks_per_span(bits: Bits, block: usize, cols: usize) -> usize {
    let span = 32 * bits.per_byte();
    if block < cols && block < span { span / block } else { 1 }
}

/// Adds the lanes: halves, quarters, pairs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn hsum(v: __m256) -> f32 {
    let s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps::<1>(s, s)))
}
