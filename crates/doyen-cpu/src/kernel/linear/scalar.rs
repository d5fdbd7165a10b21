//! Products in portable Rust: every format, every block size. They judge the vector kernels, run where there is no
//! vector unit, and take the blocks that vector kernels do not (neither a power of two nor the whole row).
//!
//! Order of an element: blocks ascending; in a block, groups of at most 32 columns ascending (fast) or four interleaved
//! partial sums (exact); one rounding to f32 after every operation.

use super::{Columns, FloatMatrix};
use crate::kernel::quantize::{GROUP, Prepared, groups};
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix},
};
use std::ops::Range;

/// Tokens that share one unpacking of a weight row.
const TOKENS: usize = 8;

fn f32_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

fn bias_of(bias: Option<FloatView<'_>>, n: usize) -> f32 {
    bias.map_or(0.0, |b| b.get(n))
}

/// Columns of a row in runs of at most [`GROUP`] that begin anew at each block, with the block's number.
fn runs(cols: usize, block: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..cols.div_ceil(block))
        .flat_map(move |b| super::tiles(b * block..((b + 1) * block).min(cols), GROUP).map(move |r| (b, r)))
}

fn unpack(bits: Bits, row: &[u8], run: Range<usize>, out: &mut [u8; GROUP]) {
    for (o, c) in out.iter_mut().zip(run) {
        *o = bits.code(row, c);
    }
}

/// Quantized weights, f32 activations.
pub(super) fn exact(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let block = w.block.min(w.cols);
    for n in out.range() {
        let row = w.row(n);
        for ts in super::tiles(0..acts.tokens(), TOKENS) {
            let (mut acc, mut part) = ([0f32; TOKENS], [0f32; TOKENS]);
            let mut current = 0;
            let mut codes = [0u8; GROUP];
            for (b, run) in runs(w.cols, block) {
                if b != current {
                    close_block(&mut acc, &mut part, w.scale(n, current));
                    current = b;
                }
                let zero = w.zero_point(n, b);
                unpack(w.bits, row, run.clone(), &mut codes);
                for (p, t) in part.iter_mut().zip(ts.clone()) {
                    *p += dot_f32(&codes[..run.len()], zero, &acts.row(t)[4 * run.start..4 * run.end]);
                }
            }
            close_block(&mut acc, &mut part, w.scale(n, current));
            for (a, t) in acc.iter().zip(ts) {
                out.set(t, n, a + bias_of(bias, n));
            }
        }
    }
}

fn close_block(acc: &mut [f32; TOKENS], part: &mut [f32; TOKENS], scale: f32) {
    for (a, p) in acc.iter_mut().zip(part) {
        *a += *p * scale;
        *p = 0.0;
    }
}

fn dot_f32(codes: &[u8], zero: f32, x: &[u8]) -> f32 {
    let mut sums = [0f32; 4];
    for (i, &q) in codes.iter().enumerate() {
        sums[i % 4] += (f32::from(q) - zero) * f32_at(x, i);
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// Quantized weights, int8 activations.
pub(super) fn fast(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let block = w.block.min(w.cols);
    // Eight-bit codes are taken as signed, and so are their zero points: most are then near 0.
    let centre = if w.bits == Bits::B8 { 128 } else { 0 };
    let scales_at = w.cols.next_multiple_of(4);
    let sums_at = scales_at + 4 * groups(w.cols, block);
    for n in out.range() {
        let row = w.row(n);
        for ts in super::tiles(0..acts.tokens(), TOKENS) {
            let (mut acc, mut part) = ([0f32; TOKENS], [0f32; TOKENS]);
            let mut current = 0;
            let mut codes = [0u8; GROUP];
            for (g, (b, run)) in runs(w.cols, block).enumerate() {
                if b != current {
                    close_block(&mut acc, &mut part, w.scale(n, current));
                    current = b;
                }
                unpack(w.bits, row, run.clone(), &mut codes);
                for (p, t) in part.iter_mut().zip(ts.clone()) {
                    let a = acts.row(t);
                    let dot = dot_i8(&codes[..run.len()], centre, &a[run.clone()]);
                    *p += dot as f32 * f32_at(&a[scales_at..], g);
                }
            }
            close_block(&mut acc, &mut part, w.scale(n, current));
            for (a, t) in acc.iter().zip(ts) {
                let zero = zero_term(w, n, centre, &acts.row(t)[sums_at..]);
                out.set(t, n, a - zero + bias_of(bias, n));
            }
        }
    }
}

fn dot_i8(codes: &[u8], centre: i32, a: &[u8]) -> i32 {
    codes.iter().zip(a).map(|(&q, &a)| (i32::from(q) - centre) * i32::from(a as i8)).sum()
}

/// What the zero points take off: `sum_b scale_b * zero_b * (sum of the block's activations)`.
fn zero_term(w: &QuantMatrix<'_>, n: usize, centre: i32, sums: &[u8]) -> f32 {
    (0..w.blocks()).map(|b| w.scale(n, b) * (w.zero_point(n, b) - centre as f32) * f32_at(sums, b)).sum()
}

/// Float weights of either orientation, f32 activations.
pub(super) fn float(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    for n in out.range() {
        for ts in super::tiles(0..acts.tokens(), TOKENS) {
            let mut sums = [[0f32; 4]; TOKENS];
            for k in 0..w.cols {
                let weight = w.get(n, k);
                for (s, t) in sums.iter_mut().zip(ts.clone()) {
                    s[k % 4] += weight * f32_at(acts.row(t), k);
                }
            }
            for (s, t) in sums.iter().zip(ts) {
                out.set(t, n, (s[0] + s[1]) + (s[2] + s[3]) + bias_of(bias, n));
            }
        }
    }
}
