//! Products of many tokens with int8 activations on AMX tiles, and the kernels made of them.
//!
//! A tile product is one group of columns (of 128, the sum of two products) for sixteen tokens and sixteen weight rows: `A` the tokens' codes, `B` staged codes of the
//! rows, less the default zero point, so that results are the centred sums of the canonical order. They pass through a small buffer,
//! as tile registers have no way to vector registers, and are scaled with AVX-512 meanwhile the next lane's are multiplied: that takes
//! longer than the products.
//!
//! Everything else is as with AVX-512: streaming, fewer tokens, f32 activations.

mod tiles;

use super::{
    super::{Columns, Kernel, LANES, Mode, tiles as ranges},
    Unit,
    avx512::{self, Sixteen},
    entries::kernels,
    fast::{Job, STAGED, Stage, VECTOR, unpack},
    lanes::{Lanes, MAX_ROWS, offset},
    panel::Panel,
    tile::{Segment, lane_sum, step_bytes, step_cols, unit_place, write},
};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix},
};
use std::{arch::x86_64::*, mem::MaybeUninit};
use tiles::{AT_ONCE, Amx, STRIDE, TILE, Tiles};

kernels!("amx", rows::<Amx, BITS, UNIT>, avx512::exact_rows::<BITS, FLOAT_UNIT>);

/// Tokens from which on tiles are used.
const MANY: usize = 16;
/// Tokens that meet a staged segment before the next segment is staged.
const BATCH: usize = 64;
/// Bytes of activations that are put in the order of tiles at once: spans of every width fit.
const CHUNK: usize = 128;
/// Units of a lane in a segment at most.
const LANE_UNITS: usize = STAGED / 16 / LANES;
/// Tokens whose products are scaled at once: their accumulators and pointers stay in registers.
const SCALED: usize = 8;

/// Activations of a segment for [`TILE`] tokens: by [`STRIDE`] bytes of columns, then tokens.
#[repr(align(64))]
struct Acts([MaybeUninit<u8>; STAGED * TILE]);

/// Products of two lanes.
#[repr(align(64))]
struct Dots([MaybeUninit<i32>; 2 * LANE_UNITS * TILE * TILE]);

/// Rows of quantized weights times prepared tokens; units of `UNIT` columns.
///
/// # Safety
/// AVX-512 and the instructions of `T` are there; the matrix is valid, of `BITS` and units of `UNIT`.
unsafe fn rows<T: Tiles, const BITS: usize, const UNIT: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller's promise; a full tile of rows.
    unsafe {
        if acts.rows() < MANY || w.rows < TILE {
            avx512::fast_rows::<BITS, UNIT>(w, acts, bias, out);
        } else {
            Job::new(w, UNIT, acts, bias).in_tiles::<T, BITS, UNIT>(out);
        }
    }
}

impl Job<'_> {
    /// All rows of `out`.
    ///
    /// # Safety
    /// As [`rows`]; the matrix has a full tile of rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn in_tiles<T: Tiles, const BITS: usize, const UNIT: usize>(&self, out: &mut Columns<'_>) {
        let terms = self.acts.layout().terms();
        let mut panel = Panel::new();
        let mut stage = Stage::new();
        let stage = stage.0.as_mut_ptr().cast::<u8>();
        let mut acts = Acts([MaybeUninit::uninit(); STAGED * TILE]);
        let mut dots = Dots([MaybeUninit::uninit(); 2 * LANE_UNITS * TILE * TILE]);
        // Every token's lanes are written before they are read.
        let mut sums = [const { MaybeUninit::<[f32; LANES * MAX_ROWS]>::uninit() }; BATCH];
        let sums = sums.as_mut_ptr().cast::<f32>();
        // SAFETY: the caller's promise; the thread does nothing else meanwhile.
        let mut tiles = unsafe { T::new(UNIT.min(STRIDE) / VECTOR) };
        for tokens in ranges(0..self.acts.rows(), BATCH) {
            for rows in ranges(out.range(), TILE) {
                let first = self.tile::<Sixteen>(rows.start);
                // SAFETY: the caller's promise; buffers have room for a segment and a batch.
                unsafe {
                    for start in (0..self.w.cols).step_by(STAGED) {
                        let segment = self.segment::<Sixteen>(first, (start, STAGED), &mut panel);
                        fill_stage::<BITS>(&segment, stage);
                        for at in tokens.clone().step_by(TILE) {
                            let last = tokens.end - 1;
                            let of_tile = Tile {
                                job: self,
                                segment: &segment,
                                panel: &panel,
                                stage,
                                // The last tile has its last token more than once; what comes of that is not written.
                                tokens: std::array::from_fn(|t| self.acts.row((at + t).min(last)).as_ptr()),
                                acts: acts.0.as_mut_ptr().cast(),
                                dots: dots.0.as_mut_ptr().cast(),
                                sums: sums.add((at - tokens.start) * LANES * MAX_ROWS),
                            };
                            of_tile.order_activations::<BITS, UNIT>();
                            of_tile.add::<T, UNIT>(&mut tiles);
                        }
                    }
                    for (t, i) in tokens.clone().zip(0..) {
                        let acc = lane_sum::<Sixteen>(sums.add(i * LANES * MAX_ROWS));
                        write::<Sixteen>(out, (t, terms), rows.clone(), first, acc, self.bias);
                    }
                }
            }
        }
    }
}

/// A staged segment for [`TILE`] tokens.
struct Tile<'a> {
    job: &'a Job<'a>,
    segment: &'a Segment,
    panel: &'a Panel,
    stage: *const u8,
    tokens: [*const u8; TILE],
    acts: *mut u8,
    dots: *mut i32,
    sums: *mut f32,
}

impl Tile<'_> {
    /// Writes the tokens' codes of the segment unit by unit, in the order of the staged vectors.
    ///
    /// # Safety
    /// AVX-512 is there; `tokens` are prepared rows.
    #[inline(always)]
    unsafe fn order_activations<const BITS: usize, const UNIT: usize>(&self) {
        const { assert!(Sixteen::ROWS == TILE && CHUNK == 2 * STRIDE) };
        let order = const { order::<BITS, UNIT>() };
        let start = self.segment.unit * UNIT;
        // SAFETY: the caller's promise; rows are padded to whole chunks, and the buffer has room for a segment.
        unsafe {
            let order =
                [_mm512_loadu_si512(order[0].as_ptr().cast()), _mm512_loadu_si512(order[1].as_ptr().cast())];
            for (t, token) in self.tokens.iter().enumerate() {
                for at in (0..self.segment.units * UNIT).step_by(CHUNK) {
                    let from = token.add(start + at);
                    let words =
                        [_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(STRIDE).cast())];
                    for h in 0..2 {
                        let to = self.acts.add((at + h * STRIDE) * TILE + t * STRIDE);
                        let ordered = _mm512_permutex2var_epi32(words[0], order[h], words[1]);
                        _mm512_store_si512(to.cast(), if BITS == 8 { words[h] } else { ordered });
                    }
                }
            }
        }
    }

    /// Adds the segment to the lanes of the tokens.
    ///
    /// # Safety
    /// AVX-512 is there, `tiles` are the thread's, stage and activations were filled.
    #[inline(always)]
    unsafe fn add<T: Tiles, const UNIT: usize>(&self, tiles: &mut T) {
        // SAFETY: the caller's promise.
        unsafe {
            self.multiply::<T, UNIT>(tiles, 0);
            for lane in 0..LANES {
                if lane + 1 < LANES {
                    self.multiply::<T, UNIT>(tiles, lane + 1);
                }
                for t in (0..TILE).step_by(SCALED) {
                    self.scale::<UNIT>(lane, t);
                }
            }
        }
    }

    /// Products of unit `i` of a lane.
    #[inline(always)]
    const fn dots(&self, lane: usize, i: usize) -> *mut i32 {
        self.dots.wrapping_add((lane % 2 * LANE_UNITS + i) * TILE * TILE)
    }

    /// The products of a lane's units.
    ///
    /// # Safety
    /// As [`Tile::add`].
    #[inline(always)]
    unsafe fn multiply<T: Tiles, const UNIT: usize>(&self, tiles: &mut T, lane: usize) {
        let step = LANES * UNIT * TILE;
        let units = self.segment.units.saturating_sub(lane).div_ceil(LANES);
        let a = self.acts.wrapping_add(lane * UNIT / STRIDE * STRIDE * TILE + lane * UNIT % STRIDE);
        let b = self.stage.wrapping_add(lane * UNIT * TILE);
        let mut i = 0;
        // SAFETY: the caller's promise; units are inside of the buffers.
        unsafe {
            while UNIT > STRIDE && i < units {
                tiles.long_product(a.add(i * step), b.add(i * step), self.dots(lane, i), STRIDE * TILE);
                i += 1;
            }
            while i + AT_ONCE <= units {
                tiles.products(a.add(i * step), b.add(i * step), self.dots(lane, i), step);
                i += AT_ONCE;
            }
            while i < units {
                tiles.product(a.add(i * step), b.add(i * step), self.dots(lane, i));
                i += 1;
            }
        }
    }

    /// Adds the products of a lane for tokens `t .. t + SCALED`.
    ///
    /// # Safety
    /// As [`Tile::add`]; the lane was multiplied.
    #[inline(always)]
    unsafe fn scale<const UNIT: usize>(&self, lane: usize, t: usize) {
        let mut tokens = [std::ptr::null(); SCALED];
        tokens.copy_from_slice(&self.tokens[t..t + SCALED]);
        let place = self.job.place(self.segment);
        let sum = |i: usize| self.sums.wrapping_add(((t + i) * LANES + lane) * MAX_ROWS);
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = [Sixteen::zero(); SCALED];
            if self.segment.unit > 0 {
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = Sixteen::load(sum(i));
                }
            }
            for (n, u) in (lane..self.segment.units).step_by(LANES).enumerate() {
                let dots = self.dots(lane, n).wrapping_add(t * TILE);
                let dots = std::array::from_fn(|i| _mm512_load_si512(dots.wrapping_add(i * TILE).cast()));
                acc = place.add_dots::<Sixteen, SCALED>(self.panel, (u, UNIT), dots, tokens, acc);
            }
            for (i, &acc) in acc.iter().enumerate() {
                Sixteen::store(sum(i), acc);
            }
        }
    }
}

/// Which words of a chunk of prepared activations make it up unit by unit, in the order of the staged vectors.
const fn order<const BITS: usize, const UNIT: usize>() -> [[i32; 16]; 2] {
    let mut order = [[0; 16]; 2];
    let vectors = UNIT / VECTOR;
    let mut i = 0;
    while i < CHUNK / VECTOR {
        let place = unit_place(BITS, UNIT, i / vectors) + offset(BITS, i % vectors);
        order[i / 16][i % 16] = (place / VECTOR) as i32;
        i += 1;
    }
    order
}

/// Unpacks a segment, as signed bytes.
///
/// # Safety
/// As [`unpack`]; the stage has room for the segment.
#[inline(always)]
unsafe fn fill_stage<const BITS: usize>(segment: &Segment, stage: *mut u8) {
    for s in 0..segment.steps {
        let (p, stride) = segment.step(s, step_bytes(BITS));
        segment.prefetch(s, step_bytes(BITS), TILE);
        // SAFETY: the caller's promise; a step's vectors follow those of the step before.
        unsafe {
            let w = unpack::<Sixteen, BITS>(p, stride);
            let centre = _mm512_set1_epi8(1i8.wrapping_shl(BITS as u32 - 1));
            let to = stage.add(s * step_cols(BITS) * TILE);
            for v in 0..step_cols(BITS) / VECTOR {
                let signed = _mm512_sub_epi8(w[v / 8][v % 8], centre);
                Sixteen::store_int(to.add(v * VECTOR * TILE), signed);
            }
        }
    }
}

/// The same loops on emulated tiles.
#[cfg(test)]
pub(super) mod emulated {
    use super::{tiles::Emulated, *};

    kernels!("amx-emulated", rows::<Emulated, BITS, UNIT>, avx512::exact_rows::<BITS, FLOAT_UNIT>);
}
