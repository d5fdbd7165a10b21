//! Products with floats of 4 and 8 bits (MXFP4, NVFP4, FP8): rows are decoded, some columns at a time, where they are used.
//!
//! Numerics, of an element's eight accumulators:
//! * int8 activations (E2M1 only): columns are taken in groups of at most 32, anew at each block; group `g` goes to
//!   `acc = lane[g % 8]`, `acc = fma(dot, scale_w * scale_a, acc)`, `dot` the exact integer sum of twice the weights times the
//!   activation codes: the order of quantized products ([`super`]);
//! * f32 activations: column `c` goes to `lane[c % 8]`, `acc = fma(weight * scale_w, x, acc)`.
//!
//! Then the lanes are added, and the sum is multiplied by the matrix's global scale and gets the bias. `exact` and `fast` give these
//! bits in portable Rust, `octets` those of `fast` with vectors; they depend neither on the tokens of a call nor on its range of rows.

mod exact;
mod fast;
#[cfg(target_arch = "x86_64")]
mod octets;
#[cfg(target_arch = "x86_64")]
mod products;
#[cfg(test)]
mod tests;

use super::{Columns, Kernel, LANES, Mode, tiles};
use crate::{detect::Isa, kernel::quantize::Prepared};
use doyen_tensor::{
    FloatView,
    format::{Element, MiniMatrix},
};
use std::ops::Range;

/// Columns that are decoded at a time.
const CHUNK: usize = 2048;
/// Rows whose accumulators are kept at a time.
const ROWS: usize = 16;
/// Prepared rows of activations that meet decoded weights at a time.
const BATCH: usize = 8;
/// Scales of a chunk.
const SCALES: usize = CHUNK / 16;

/// Whether products of int8 activations exist for an element.
pub(super) const fn takes_int8(element: Element) -> bool {
    matches!(element, Element::E2M1)
}

/// The kernel of an element and mode.
pub(super) fn kernel(element: Element, mode: Mode, isa: Isa) -> Kernel {
    if matches!(mode, Mode::Exact) || !takes_int8(element) {
        let name = match element {
            Element::E2M1 => "e2m1-exact",
            Element::E4M3 => "e4m3-exact",
        };
        return Kernel::mini(name, exact::rows(isa));
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => Kernel::mini("avx2-e2m1-fast", octets::avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni(_) => Kernel::mini("avxvnni-e2m1-fast", octets::avxvnni),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) | Isa::Amx(_) => Kernel::mini("avx512-e2m1-fast", octets::avx512),
        _ => Kernel::mini("scalar-e2m1-fast", fast::rows),
    }
}

/// Accumulators of a batch of activation rows and a block of weight rows.
type Sums = [[[f32; LANES]; ROWS]; BATCH];

/// Some columns of one weight row: packed codes and scales.
#[derive(Clone, Copy)]
struct Piece<'a> {
    /// Packed codes, from `cols.start` on.
    codes: &'a [u8],
    /// Scale of each block of columns, from the one of `cols.start` on; zeros behind.
    scales: &'a [f32; SCALES],
    /// Columns of a block.
    block: usize,
    cols: &'a Range<usize>,
}

/// Codes of a block of rows and a chunk of columns, gathered from lines of columns and packed along the columns.
type Stage = [u8; ROWS * CHUNK];

/// Calls `piece(piece, row of the block, batch of activation rows, sums)` for all columns of all rows of `out`, and writes what
/// the lanes sum up to, times `factor`.
#[inline(always)]
fn each_piece(
    w: &MiniMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
    factor: f32,
    mut piece: impl FnMut(&Piece<'_>, usize, Range<usize>, &mut Sums),
) {
    if w.transposed {
        #[allow(clippy::large_stack_arrays, reason = "a staged tile, on stacks of 2 MiB and more")]
        let mut stage: Stage = [0; ROWS * CHUNK];
        pieces(w, acts, bias, out, factor, Some(&mut stage), &mut piece);
    } else {
        pieces(w, acts, bias, out, factor, None, &mut piece);
    }
}

#[inline(always)]
fn pieces(
    w: &MiniMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
    factor: f32,
    mut stage: Option<&mut Stage>,
    piece: &mut impl FnMut(&Piece<'_>, usize, Range<usize>, &mut Sums),
) {
    let terms = acts.layout().terms();
    let per_byte = w.element.per_byte();
    let mut scales = [0f32; SCALES];
    for rows in tiles(out.range(), ROWS) {
        for batch in tiles(0..acts.rows(), BATCH) {
            let mut sums: Sums = [[[0.0; LANES]; ROWS]; BATCH];
            for cols in tiles(0..w.cols, CHUNK) {
                if let Some(stage) = &mut stage {
                    gather(w, rows.clone(), cols.clone(), (&mut stage[..], CHUNK));
                }
                for (r, n) in rows.clone().enumerate() {
                    let block = widen(w, n, &cols, &mut scales);
                    let bytes = cols.len().div_ceil(per_byte);
                    let codes = match &stage {
                        Some(stage) => &stage[r * CHUNK..][..bytes],
                        None => &w.codes[n * w.line_bytes() + cols.start / per_byte..][..bytes],
                    };
                    let part = Piece { codes, scales: &scales, block, cols: &cols };
                    piece(&part, r, batch.clone(), &mut sums);
                }
            }
            for (t, sums) in batch.clone().zip(&sums) {
                for (n, lanes) in rows.clone().zip(sums) {
                    let bias = bias.filter(|_| t.is_multiple_of(terms)).map_or(0.0, |b| b.get(n));
                    out.put(t, terms, n..n + 1, &[lane_sum(lanes) * factor + bias]);
                }
            }
        }
    }
}

/// Adds lanes i and i + 4, then i and i + 2, then the last two.
fn lane_sum(l: &[f32; LANES]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// Writes the scales of some columns of a row; gives the columns of a block.
fn widen(w: &MiniMatrix<'_>, n: usize, cols: &Range<usize>, out: &mut [f32; SCALES]) -> usize {
    let block = w.scales.block(w.cols);
    let (first, end) = (cols.start / block, cols.end.div_ceil(block));
    for (o, b) in out.iter_mut().zip(first..end) {
        *o = w.scale(n, b);
    }
    out[end - first..].fill(0.0);
    block
}

/// Gathers the codes of `rows` and `cols`, a row every `pitch` bytes.
fn gather(w: &MiniMatrix<'_>, rows: Range<usize>, cols: Range<usize>, (stage, pitch): (&mut [u8], usize)) {
    stage.fill(0);
    let (per_byte, bytes) = (w.element.per_byte(), w.line_bytes());
    for (i, k) in cols.enumerate() {
        let line = &w.codes[k * bytes..(k + 1) * bytes];
        for (r, n) in rows.clone().enumerate() {
            stage[r * pitch + i / per_byte] |= w.element.code(line, n) << (8 / per_byte * (i % per_byte));
        }
    }
}
