//! Products with f32 activations.
//!
//! A group's weights become `code - zero_point` in f32; `part` is the chain of fused products over the group's columns, from
//! zero; then `acc = fma(part, scale, acc)`. Weights are dequantized into a staging buffer, a segment of two vectors of rows at a
//! time, that all tokens of a batch meet from the first-level cache.

use super::{
    super::{Columns, LANES, scalar, tiles},
    lanes::{FloatLanes, MAX_ROWS},
    panel::Panel,
    tile::{Geometry, Segment, lane_sum, step_bytes, step_cols, write},
};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{FloatView, format::QuantMatrix};
use std::{mem::MaybeUninit, ops::Range};

/// Columns that are staged at a time: 2 x 8 rows of them are 16 KiB of floats.
const STAGED: usize = 256;
/// Tokens that meet a staged segment before the next segment is staged.
const BATCH: usize = 64;

/// A product under way.
struct Job<'a> {
    w: &'a QuantMatrix<'a>,
    g: Geometry,
    acts: &'a Prepared<'a>,
    bias: Option<FloatView<'a>>,
}

/// Dequantized codes of a segment for one vector of rows: a vector a column.
#[repr(align(64))]
struct Stage([MaybeUninit<f32>; STAGED * MAX_ROWS]);

/// Rows of quantized weights times prepared tokens; units of `UNIT` columns.
///
/// # Safety
/// As [`super::lanes::Lanes`] says. The matrix is valid, of `BITS` and units of `UNIT`; the activations are of its layout, output and bias of its
/// rows.
#[inline(always)]
pub(super) unsafe fn rows<L: FloatLanes, const BITS: usize, const UNIT: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    if w.rows < 2 * L::ROWS {
        return scalar::exact(w, acts, bias, out);
    }
    let job = Job { w, g: Geometry::new(w, UNIT), acts, bias };
    // SAFETY: the caller's promise, and two full vectors of rows.
    unsafe { job.staged::<L, BITS, UNIT>(out) }
}

impl Job<'_> {
    /// All rows of `out`.
    ///
    /// # Safety
    /// As [`rows`]; the matrix has two full vectors of rows.
    #[inline(always)]
    unsafe fn staged<L: FloatLanes, const BITS: usize, const UNIT: usize>(&self, out: &mut Columns<'_>) {
        let tile = 2 * L::ROWS;
        let mut panel = Panel::new();
        let mut stages = [
            Stage([MaybeUninit::uninit(); STAGED * MAX_ROWS]),
            Stage([MaybeUninit::uninit(); STAGED * MAX_ROWS]),
        ];
        let mut scales = [[MaybeUninit::<f32>::uninit(); STAGED / 16 * MAX_ROWS]; 2];
        // Two vectors of rows, then lanes, then tokens; every token's lanes are written before they are read.
        let mut sums = [const { MaybeUninit::<[f32; 2 * LANES * MAX_ROWS]>::uninit() }; BATCH];
        let sums = sums.as_mut_ptr().cast::<f32>();
        for tokens in tiles(0..self.acts.tokens(), BATCH) {
            for rows in tiles(out.range(), tile) {
                let first = rows.start.min(self.w.rows - tile);
                for columns in tiles(0..self.w.cols, STAGED) {
                    // SAFETY: the caller's promise; the stages hold a segment each.
                    unsafe {
                        for (h, stage) in stages.iter_mut().enumerate() {
                            let rows = (first + h * L::ROWS, L::ROWS);
                            let segment = Segment::new(self.w, &self.g, rows, (columns.start, STAGED));
                            let blocks =
                                self.g.block_of_unit(segment.unit + segment.units - 1) + 1 - segment.block;
                            panel.fill::<L>(self.w, &self.g, rows.0, &segment, blocks, 0.0);
                            self.fill_stage::<L, BITS, UNIT>(
                                &segment,
                                &panel,
                                stage.0.as_mut_ptr().cast(),
                                scales[h].as_mut_ptr().cast(),
                            );
                        }
                        let weights = Staged {
                            values: [stages[0].0.as_ptr().cast(), stages[1].0.as_ptr().cast()],
                            scales: [scales[0].as_ptr().cast(), scales[1].as_ptr().cast()],
                            columns,
                        };
                        self.add_staged::<L, UNIT>(&weights, tokens.clone(), sums);
                    }
                }
                for (t, i) in tokens.clone().zip(0..) {
                    let middle = (first + L::ROWS).clamp(rows.start, rows.end);
                    for (h, rows) in [rows.start..middle, middle..rows.end].into_iter().enumerate() {
                        if !rows.is_empty() {
                            // SAFETY: the batch's lanes were written.
                            unsafe {
                                let acc = lane_sum::<L>(sums.add((2 * i + h) * LANES * MAX_ROWS));
                                write::<L>(out, (t, 1), rows, first + h * L::ROWS, acc, self.bias);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Dequantizes a segment, and copies the scale of each unit.
    ///
    /// # Safety
    /// As [`super::lanes::Lanes`] says; `panel` was filled for the segment; `values` has room for its steps, `scales` for its units.
    #[inline(always)]
    unsafe fn fill_stage<L: FloatLanes, const BITS: usize, const UNIT: usize>(
        &self,
        segment: &Segment,
        panel: &Panel,
        values: *mut f32,
        scales: *mut f32,
    ) {
        let default = f32::from(self.w.bits.default_zero_point());
        // SAFETY: the caller's promise; every word's columns are in a unit of the segment, or behind them all.
        unsafe {
            for u in 0..segment.units {
                let (scale, _) = segment.numbers::<L>(&self.g, panel, u);
                L::store(scales.add(u * L::ROWS), L::load(scale));
            }
            for s in 0..segment.steps {
                let (p, stride) = segment.step(s, step_bytes(BITS));
                segment.prefetch(s, step_bytes(BITS), L::ROWS);
                for part in 0..step_bytes(BITS) / 16 {
                    let words = L::transpose(p.add(16 * part), stride);
                    for (i, &word) in words.iter().enumerate() {
                        let col = s * step_cols(BITS) + (4 * part + i) * (32 / BITS);
                        let zero = if self.g.centred {
                            L::splat(&raw const default)
                        } else {
                            let (_, zero) =
                                segment.numbers::<L>(&self.g, panel, (col / UNIT).min(segment.units - 1));
                            L::load(zero)
                        };
                        for j in 0..32 / BITS {
                            let code = L::to_float(L::code(word, (BITS * j) as i32, (1 << BITS) - 1));
                            L::store(values.add((col + j) * L::ROWS), L::sub(code, zero));
                        }
                    }
                }
            }
        }
    }

    /// Adds a staged segment for a batch of tokens.
    ///
    /// # Safety
    /// As [`super::lanes::Lanes`] says; the stages were filled with the segment.
    #[inline(always)]
    unsafe fn add_staged<L: FloatLanes, const UNIT: usize>(
        &self,
        weights: &Staged,
        tokens: Range<usize>,
        sums: *mut f32,
    ) {
        let mut t = 0;
        while t < tokens.len() {
            let (at, sums) = (tokens.start + t, sums.wrapping_add(2 * t * LANES * MAX_ROWS));
            // SAFETY: the caller's promise.
            t += unsafe {
                match tokens.len() - t {
                    8.. if L::TOKENS == 8 => self.tokens::<L, UNIT, 8>(weights, at, sums),
                    6.. if L::TOKENS == 6 => self.tokens::<L, UNIT, 6>(weights, at, sums),
                    4.. => self.tokens::<L, UNIT, 4>(weights, at, sums),
                    2.. => self.tokens::<L, UNIT, 2>(weights, at, sums),
                    _ => self.tokens::<L, UNIT, 1>(weights, at, sums),
                }
            };
        }
    }

    /// Adds a staged segment for tokens `at .. at + T`; returns `T`.
    ///
    /// # Safety
    /// As [`Job::add_staged`].
    #[inline(always)]
    unsafe fn tokens<L: FloatLanes, const UNIT: usize, const T: usize>(
        &self,
        weights: &Staged,
        at: usize,
        sums: *mut f32,
    ) -> usize {
        let mut acts = [std::ptr::null(); T];
        for (t, a) in acts.iter_mut().enumerate() {
            *a = self.acts.row(at + t)[4 * weights.columns.start..].as_ptr();
        }
        let cols = weights.columns.len();
        // The first unit of a segment is in the first lane, as segments are whole rounds of lanes.
        let first = weights.columns.start / UNIT;
        // SAFETY: the caller's promise; units are inside of the segment, lanes in the sums.
        unsafe {
            for u in 0..cols.div_ceil(UNIT) {
                let part = match (cols - u * UNIT).min(UNIT) {
                    len if len == UNIT => weights.unit::<L, UNIT, T>(u, UNIT, acts),
                    len => weights.unit::<L, UNIT, T>(u, len, acts),
                };
                for h in 0..2 {
                    let scale = L::load(weights.scales[h].add(u * L::ROWS));
                    for (t, part) in part.iter().enumerate() {
                        let sum = sums.wrapping_add(((2 * t + h) * LANES + u % LANES) * MAX_ROWS);
                        let acc = if first + u < LANES { L::zero() } else { L::load(sum) };
                        L::store(sum, L::mul_add(part[h], scale, acc));
                    }
                }
            }
            for lane in cols.div_ceil(UNIT)..if first == 0 { LANES } else { 0 } {
                for i in 0..2 * T {
                    L::store(sums.wrapping_add((i * LANES + lane) * MAX_ROWS), L::zero());
                }
            }
        }
        T
    }
}

/// A staged segment of two vectors of rows.
struct Staged {
    values: [*const f32; 2],
    /// A vector a unit.
    scales: [*const f32; 2],
    columns: Range<usize>,
}

impl Staged {
    /// The chains of the first `len` columns of unit `u`.
    ///
    /// # Safety
    /// As [`super::lanes::Lanes`] says; the segment has the unit, and `acts` point to the activations of the segment's columns.
    #[inline(always)]
    unsafe fn unit<L: FloatLanes, const UNIT: usize, const T: usize>(
        &self,
        u: usize,
        len: usize,
        acts: [*const u8; T],
    ) -> [[L::Float; 2]; T] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut part = [[L::zero(); 2]; T];
            for k in u * UNIT..u * UNIT + len {
                let w = [L::load(self.values[0].add(k * L::ROWS)), L::load(self.values[1].add(k * L::ROWS))];
                for t in 0..T {
                    let x = L::splat(acts[t].add(4 * k).cast());
                    part[t][0] = L::mul_add(w[0], x, part[t][0]);
                    part[t][1] = L::mul_add(w[1], x, part[t][1]);
                }
            }
            part
        }
    }
}
