//! Products in portable Rust: every format, every block size. They judge the vector kernels, run where there is no
//! vector unit, and take the blocks that vector kernels do not (neither a power of two nor the whole row).
//!
//! They follow the canonical order of [`super`] to the letter, so that vector kernels have to give the same bits.

use super::{Columns, FloatMatrix, LANES};
use crate::kernel::quantize::{GROUP, Int8Row, Prepared, WIDE_GROUP, place};
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

/// Columns of a row in runs of at most `len` that begin anew at each block, with the block's number.
fn runs(cols: usize, block: usize, len: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..cols.div_ceil(block))
        .flat_map(move |b| super::tiles(b * block..((b + 1) * block).min(cols), len).map(move |r| (b, r)))
}

fn unpack(bits: Bits, row: &[u8], run: Range<usize>, out: &mut [u8]) {
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
            let mut acc = [[0f32; LANES]; TOKENS];
            let mut codes = [0u8; GROUP];
            for (g, (b, run)) in runs(w.cols, block, GROUP).enumerate() {
                let (scale, zero) = (w.scale(n, b), w.zero_point(n, b));
                unpack(w.bits, row, run.clone(), &mut codes);
                for (a, t) in acc.iter_mut().zip(ts.clone()) {
                    let x = &acts.row(t)[4 * run.start..4 * run.end];
                    let lane = &mut a[g % LANES];
                    *lane = dot_f32(&codes[..run.len()], zero, x).mul_add(scale, *lane);
                }
            }
            for (a, t) in acc.iter().zip(ts) {
                out.set(t, n, lane_sum(a) + bias_of(bias, n));
            }
        }
    }
}

/// Sum of the lanes of an element: i and i + 4, then i and i + 2, then the last two.
fn lane_sum(lanes: &[f32; LANES]) -> f32 {
    let half = |i: usize| lanes[i] + lanes[i + 4];
    (half(0) + half(2)) + (half(1) + half(3))
}

fn dot_f32(codes: &[u8], zero: f32, x: &[u8]) -> f32 {
    codes.iter().enumerate().fold(0.0, |sum, (i, &q)| (f32::from(q) - zero).mul_add(f32_at(x, i), sum))
}

/// Quantized weights, int8 activations.
pub(super) fn fast(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let block = w.block.min(w.cols);
    let len = acts.layout().group();
    let at = Int8Row::new(w.cols, block, len);
    let centre = w.bits.default_zero_point();
    let terms = acts.layout().terms();
    for n in out.range() {
        let row = w.row(n);
        for ts in super::tiles(0..acts.rows(), TOKENS) {
            let mut acc = [[0f32; LANES]; TOKENS];
            let mut codes = [0u8; WIDE_GROUP];
            for (g, (b, run)) in runs(w.cols, block, len).enumerate() {
                let (scale, zero) = (w.scale(n, b), w.zero_point(n, b) - f32::from(centre));
                unpack(w.bits, row, run.clone(), &mut codes);
                for (acc, t) in acc.iter_mut().zip(ts.clone()) {
                    let (a, lane) = (acts.row(t), &mut acc[g % LANES]);
                    let dot = dot_i8(w.bits, &codes[..run.len()], run.start, a) as f32;
                    let value = (-zero).mul_add(f32_at(&a[at.sums..], g), dot);
                    *lane = value.mul_add(scale * f32_at(&a[at.scales..], g), *lane);
                }
            }
            for (a, t) in acc.iter().zip(ts) {
                let bias = if t.is_multiple_of(terms) { bias_of(bias, n) } else { 0.0 };
                out.put(t, terms, n..n + 1, &[lane_sum(a) + bias]);
            }
        }
    }
}

/// Centred codes of the columns from `col` on times theirs in `a`.
fn dot_i8(bits: Bits, codes: &[u8], col: usize, a: &[u8]) -> i32 {
    let centre = i32::from(bits.default_zero_point());
    let activation = |c: usize| i32::from(a[place(bits, c)] as i8);
    codes.iter().zip(col..).map(|(&q, c)| (i32::from(q) - centre) * activation(c)).sum()
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
