//! Products of more than a few tokens with int8 activations: lanes are weight rows.
//!
//! Tokens meet codes that are unpacked into a staging buffer first, a segment of a tile at a time, which fits the first-level
//! cache. A group's products are summed as integers, exactly. The groups of one of the canonical order's lanes follow each other, so that
//! accumulators stay in registers.

use super::{
    super::{Columns, LANES, scalar, tiles},
    lanes::{ByteLanes, Lanes, MAX_ROWS},
    panel::Panel,
    tile::{Geometry, SEGMENT, Segment, lane_sum, step_bytes, step_cols, unit_place, write},
};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{FloatView, format::QuantMatrix};
use std::mem::MaybeUninit;

/// Tokens that meet a staged segment before the next segment is staged; a multiple of those of any register tile.
const BATCH: usize = 64;
/// Columns that are staged at a time: with 16 rows their codes are half of a first-level cache.
pub(super) const STAGED: usize = SEGMENT;
/// Columns of a vector of codes: four bytes a row.
pub(super) const VECTOR: usize = 4;

/// A product under way.
pub(super) struct Job<'a> {
    pub(super) w: &'a QuantMatrix<'a>,
    g: Geometry,
    pub(super) acts: &'a Prepared<'a>,
    pub(super) bias: Option<FloatView<'a>>,
}

/// Unpacked codes of a segment: vectors in the order of columns.
#[repr(align(64))]
pub(super) struct Stage(pub(super) [MaybeUninit<u8>; STAGED * MAX_ROWS]);

impl Stage {
    pub(super) const fn new() -> Self {
        Self([MaybeUninit::uninit(); STAGED * MAX_ROWS])
    }
}

/// Rows of quantized weights times prepared tokens; units of `UNIT` columns.
///
/// # Safety
/// As [`super::lanes::Lanes`] says. The matrix is valid, of `BITS` and units of `UNIT`; the activations are of its layout, output and bias of its
/// rows.
#[inline(always)]
pub(super) unsafe fn rows<L: ByteLanes, const BITS: usize, const UNIT: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    if w.rows < L::ROWS {
        return scalar::fast(w, acts, bias, out);
    }
    // SAFETY: the caller's promise, and a full tile of rows.
    unsafe { Job::new(w, UNIT, acts, bias).staged::<L, BITS, UNIT>(out) }
}

impl<'a> Job<'a> {
    pub(super) fn new(
        w: &'a QuantMatrix<'a>,
        unit: usize,
        acts: &'a Prepared<'a>,
        bias: Option<FloatView<'a>>,
    ) -> Self {
        Self { w, g: Geometry::new(w, unit), acts, bias }
    }

    /// The first row of a tile that holds rows `n ..` as far as possible; the last tile of a matrix reaches back.
    pub(super) fn tile<L: ByteLanes>(&self, n: usize) -> usize {
        n.min(self.w.rows - L::ROWS)
    }

    /// A segment of a tile, its panel filled.
    ///
    /// # Safety
    /// As [`rows`]; the matrix has the tile.
    #[inline(always)]
    pub(super) unsafe fn segment<L: ByteLanes>(
        &self,
        first: usize,
        (start, most): (usize, usize),
        panel: &mut Panel,
    ) -> Segment {
        let segment = Segment::new(self.w, &self.g, (first, L::ROWS), (start, most));
        let blocks = self.g.block_of_unit(segment.unit + segment.units - 1) + 1 - segment.block;
        let offset = f32::from(self.w.bits.default_zero_point());
        // SAFETY: the caller's promise.
        unsafe { panel.fill::<L>(self.w, &self.g, first, &segment, blocks, offset) };
        segment
    }

    /// Where a segment lies.
    #[inline(always)]
    pub(super) const fn place(&self, segment: &Segment) -> Place {
        Place { g: self.g, unit: segment.unit, block: segment.block }
    }

    /// All rows of `out` for any number of tokens.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn staged<L: ByteLanes, const BITS: usize, const UNIT: usize>(&self, out: &mut Columns<'_>) {
        let terms = self.acts.layout().terms();
        let mut panel = Panel::new();
        let mut stage = Stage::new();
        let stage = stage.0.as_mut_ptr().cast::<u8>();
        // Every token's lanes are written before they are read.
        let mut sums = [const { MaybeUninit::<[f32; LANES * MAX_ROWS]>::uninit() }; BATCH];
        let sums = sums.as_mut_ptr().cast::<f32>();
        let mut acts = [std::ptr::null(); BATCH];
        for tokens in tiles(0..self.acts.rows(), BATCH) {
            // Once, not for every tile: a product of many tiles spent a fifteenth of its time there.
            for (a, t) in acts.iter_mut().zip(tokens.clone()) {
                *a = self.acts.row(t).as_ptr();
            }
            for rows in tiles(out.range(), L::ROWS) {
                let first = self.tile::<L>(rows.start);
                // SAFETY: the caller's promise; stage and sums have room for a segment and a batch.
                unsafe {
                    for start in (0..self.w.cols).step_by(STAGED) {
                        let segment = self.segment::<L>(first, (start, STAGED), &mut panel);
                        fill_stage::<L, BITS>(&segment, stage);
                        let acts = &acts[..tokens.len()];
                        self.add_staged::<L, BITS, UNIT>(&segment, &panel, stage, acts, sums);
                    }
                    for (t, i) in tokens.clone().zip(0..) {
                        let acc = lane_sum::<L>(sums.add(i * LANES * MAX_ROWS));
                        write::<L>(out, (t, terms), rows.clone(), first, acc, self.bias);
                    }
                }
            }
        }
    }

    /// Adds a staged segment for a batch of rows of activations.
    ///
    /// # Safety
    /// As [`rows`]; segment and panel belong to a tile of the matrix, and the stage holds the segment.
    #[inline(always)]
    unsafe fn add_staged<L: ByteLanes, const BITS: usize, const UNIT: usize>(
        &self,
        segment: &Segment,
        panel: &Panel,
        stage: *const u8,
        acts: &[*const u8],
        sums: *mut f32,
    ) {
        let mut t = 0;
        while t < acts.len() {
            let (left, sums) = (&acts[t..], sums.wrapping_add(t * LANES * MAX_ROWS));
            // SAFETY: the caller's promise.
            t += unsafe {
                match left.len() {
                    7.. if L::TOKENS == 8 => {
                        self.tokens::<L, BITS, UNIT, 8>(segment, panel, stage, left, sums)
                    }
                    3.. => self.tokens::<L, BITS, UNIT, 4>(segment, panel, stage, left, sums),
                    2 => self.tokens::<L, BITS, UNIT, 2>(segment, panel, stage, left, sums),
                    _ => self.tokens::<L, BITS, UNIT, 1>(segment, panel, stage, left, sums),
                }
            };
        }
    }

    /// Adds a staged segment for the first `T` rows of `left`; returns `T`. Where there are fewer, the last one is taken more than
    /// once: that costs less than going through the segment again for a few.
    ///
    /// # Safety
    /// As [`Job::add_staged`]; `sums` has room for `T` rows.
    #[inline(always)]
    unsafe fn tokens<L: ByteLanes, const BITS: usize, const UNIT: usize, const T: usize>(
        &self,
        segment: &Segment,
        panel: &Panel,
        stage: *const u8,
        left: &[*const u8],
        sums: *mut f32,
    ) -> usize {
        let mut acts = [std::ptr::null(); T];
        for (t, a) in acts.iter_mut().enumerate() {
            *a = left[t.min(left.len() - 1)];
        }
        // By value: what a pointer might change is read anew for every unit.
        let place = self.place(segment);
        // SAFETY: the caller's promise; a unit's vectors follow each other in the stage, a token's lanes in the sums.
        unsafe {
            for lane in 0..LANES {
                let sum = |t: usize| sums.wrapping_add((t * LANES + lane) * MAX_ROWS);
                let mut acc = [L::zero(); T];
                if place.unit > 0 {
                    for (t, acc) in acc.iter_mut().enumerate() {
                        *acc = L::load(sum(t));
                    }
                }
                for u in (lane..segment.units).step_by(LANES) {
                    let w = stage.add(u * UNIT * L::ROWS);
                    acc = match UNIT {
                        128 => place.add_unit::<L, BITS, 32, T>(panel, u, w, acts, acc),
                        32 => place.add_unit::<L, BITS, 8, T>(panel, u, w, acts, acc),
                        _ => place.add_unit::<L, BITS, 4, T>(panel, u, w, acts, acc),
                    };
                }
                for (t, &acc) in acc.iter().enumerate() {
                    L::store(sum(t), acc);
                }
            }
        }
        T
    }
}

/// Where a segment lies in its row.
#[derive(Clone, Copy)]
pub(super) struct Place {
    g: Geometry,
    /// First unit and block.
    unit: usize,
    block: usize,
}

impl Place {
    /// Adds unit `u` of a segment, whose codes are the `V` vectors at `w`.
    ///
    /// # Safety
    /// As [`Job::add_staged`]; the segment has the unit.
    #[inline(always)]
    unsafe fn add_unit<L: ByteLanes, const BITS: usize, const V: usize, const T: usize>(
        self,
        panel: &Panel,
        u: usize,
        w: *const u8,
        acts: [*const u8; T],
        acc: [L::Float; T],
    ) -> [L::Float; T] {
        let unit = self.unit + u;
        let (mut codes, mut centres) = ([std::ptr::null(); T], [std::ptr::null(); T]);
        for t in 0..T {
            codes[t] = acts[t].wrapping_add(unit_place(BITS, V * VECTOR, unit));
            centres[t] = acts[t].wrapping_add(self.g.acts.centres + 4 * unit).cast();
        }
        // SAFETY: a unit's codes are inside of the activation rows.
        unsafe {
            let dots = L::dots::<BITS, V, T>(w, codes, centres);
            self.add_dots::<L, T>(panel, (u, V * VECTOR), dots, acts, acc)
        }
    }

    /// Adds the centred sums of unit `u`, which is of `width` columns.
    ///
    /// # Safety
    /// As [`Place::add_unit`].
    #[inline(always)]
    pub(super) unsafe fn add_dots<L: Lanes, const T: usize>(
        self,
        panel: &Panel,
        (u, width): (usize, usize),
        dots: [L::Int; T],
        acts: [*const u8; T],
        mut acc: [L::Float; T],
    ) -> [L::Float; T] {
        let (at, unit) = (self.g.acts, self.unit + u);
        let block = self.g.block_of(width * unit) - self.block;
        // SAFETY: a unit's numbers are inside of the activation rows, its block is in the panel.
        unsafe {
            let scale = L::load(panel.scales::<L>(block));
            for t in 0..T {
                let mut value = L::to_float(dots[t]);
                if !self.g.centred {
                    let sum = L::splat(acts[t].add(at.sums + 4 * unit).cast());
                    value = L::neg_mul_add(L::load(panel.zeros::<L>(block)), sum, value);
                }
                let scale_a = L::splat(acts[t].add(at.scales + 4 * unit).cast());
                acc[t] = L::mul_add(value, L::mul(scale, scale_a), acc[t]);
            }
        }
        acc
    }
}

/// The codes of one step: a vector for each four columns of a group of 32.
///
/// # Safety
/// As [`super::lanes::Lanes`] says; `p` points to a step's bytes of every row, `stride` apart.
#[inline(always)]
pub(super) unsafe fn unpack<L: ByteLanes, const BITS: usize>(
    p: *const u8,
    stride: usize,
) -> [[L::Int; 8]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let words = L::transpose(p, stride);
        let mut out = [[words[0]; 8]; 2];
        match BITS {
            2 => {
                for i in 0..4 {
                    for plane in 0..4 {
                        out[i / 2][i % 2 * 4 + plane] = L::plane(words[i], 2 * plane as i32, 3);
                    }
                }
            }
            4 => {
                for i in 0..4 {
                    out[0][2 * i] = L::plane(words[i], 0, 15);
                    out[0][2 * i + 1] = L::plane(words[i], 4, 15);
                }
            }
            _ => {
                let more = L::transpose(p.add(16), stride);
                for i in 0..4 {
                    out[0][i] = L::code8(words[i]);
                    out[0][4 + i] = L::code8(more[i]);
                }
            }
        }
        out
    }
}

/// Unpacks a segment.
///
/// # Safety
/// As [`unpack`]; the stage has room for the segment.
#[inline(always)]
unsafe fn fill_stage<L: ByteLanes, const BITS: usize>(segment: &Segment, stage: *mut u8) {
    for s in 0..segment.steps {
        let (p, stride) = segment.step(s, step_bytes(BITS));
        segment.prefetch(s, step_bytes(BITS), L::ROWS);
        // SAFETY: the caller's promise; a step's vectors follow those of the step before.
        unsafe {
            let w = unpack::<L, BITS>(p, stride);
            let to = stage.add(s * step_cols(BITS) * L::ROWS);
            for v in 0..step_cols(BITS) / VECTOR {
                L::store_int(to.add(v * VECTOR * L::ROWS), w[v / 8][v % 8]);
            }
        }
    }
}
