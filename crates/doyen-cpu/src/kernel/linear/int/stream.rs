//! Products of few tokens: rows one after the other, lanes are groups of columns.
//!
//! With few tokens a product runs at the speed of memory or not at all, and memory is fast for a reader that goes through
//! it in order and does not store: from DRAM one core read eight neighbouring rows side by side at 7 GB/s, with prefetching by hand at
//! 12, one after the other at 19 (Zen 4, rows of 1 KiB), and a kernel that left its integer sums in a small buffer lost a seventh. So a row is walked by octets,
//! eight groups of columns whose sums end up in the eight lanes that the canonical order ([`super::super`]) has for them, and nothing is
//! written but results. Out-of-order execution sees only a few hundred bytes ahead of such a loop; prefetching by distances makes up for it.
//!
//! Called by `entries`. What an octet adds comes from an [`Octets`]: `stream_ints` or `stream_float`.

use super::{
    super::{Columns, LANES, tiles},
    scales::load8,
    tile::Geometry,
};
use crate::kernel::quantize::{Layout, Prepared};
use doyen_tensor::{
    FloatType, FloatView,
    format::{QuantMatrix, ZeroPoints},
};
use std::{arch::x86_64::*, ops::Range};

/// Every zero point is the default.
pub(super) const DEFAULT: u8 = 0;
/// Zero points are packed by blocks.
pub(super) const PACKED: u8 = 1;
/// Zero points are floats, or one a row.
pub(super) const OTHER: u8 = 2;
/// Zero points of any kind, or scales of any type: found out for each octet, which costs nothing where octets are long.
pub(super) const ANY: u8 = 3;

/// Rows whose lanes are added together.
pub(super) const EIGHT: usize = 8;

/// Bytes of an octet at most: 8 groups of 128 columns of 8 bits.
const OCTET: usize = 1024;

/// What adds octets to the lanes of a row.
pub(super) trait Octets {
    /// What is taken off zero points: codes are centred by it already.
    const CENTRED: bool;
    /// Whether all codes of an octet are read, not those of its groups alone.
    const WHOLE: bool;

    /// Where the activations it reads begin in a prepared row.
    fn begins_at(layout: Layout) -> usize;
    /// Rows ahead for which scales are asked for.
    fn scales_ahead<const BITS: usize, const UNIT: usize>() -> Option<usize>;

    /// Adds octet `o`, of which `groups` are there.
    ///
    /// # Safety
    /// As [`rows`]; `codes` points to the groups' bytes, in whole vectors.
    unsafe fn add<const BITS: usize, const UNIT: usize, const ZEROS: u8, const T: usize>(
        job: &Job<'_, T>,
        codes: *const u8,
        groups: usize,
        numbers: &Numbers,
        o: usize,
        acc: [__m256; T],
    ) -> [__m256; T];
}

/// A product under way.
#[derive(Clone, Copy)]
pub(super) struct Job<'a, const T: usize> {
    pub(super) w: &'a QuantMatrix<'a>,
    pub(super) g: Geometry,
    pub(super) acts: [*const u8; T],
    /// Which of the eight scales that begin with an octet's first each of its groups has.
    spread: __m256i,
    /// Where the packed zero points begin, and bytes from one row of them to the next; null when they are of another kind.
    zeros: (*const u8, usize),
}

/// Scales and zero points of an octet, spread over its groups.
pub(super) struct Numbers {
    pub(super) scale: __m256,
    pub(super) zero: __m256,
}

/// Rows of quantized weights times `T` tokens; units of `UNIT` columns, scales of [`Job::float_type`] `TY`, zero
/// points of kind `ZEROS`.
///
/// # Safety
/// As [`super::fast::rows`] and [`Octets::add`]; there are `T` tokens, and scales and zero points as the parameters say.
#[inline(always)]
pub(super) unsafe fn rows<
    O: Octets,
    const BITS: usize,
    const UNIT: usize,
    const T: usize,
    const TY: u8,
    const ZEROS: u8,
>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let job = Job::<T>::new::<O>(w, UNIT, acts);
        job.rows::<O, BITS, UNIT, TY, ZEROS>(out.range(), acts.layout().terms(), bias, out);
    }
}

/// Rows of `step` numbers, of `len` numbers in all, of which `reach` can be read from the beginning of each.
pub(super) fn rows_within(len: usize, reach: usize, step: usize) -> usize {
    len.checked_sub(reach).map_or(0, |left| left.checked_div(step).unwrap_or(0) + 1)
}

/// Bytes that hold the packed zero points of eight blocks, wherever in a byte they begin.
const fn zeros_reach(bits: usize) -> usize {
    if bits == 8 { 8 } else { 4 }
}

/// Zero points of blocks from number `first` on, as `spread` picks from eight.
///
/// # Safety
/// AVX2, FMA and F16C are there; there are eight numbers.
#[inline(always)]
pub(super) unsafe fn float_zeros(zeros: FloatView<'_>, first: usize, spread: __m256i) -> __m256 {
    let ty = zeros.float_type();
    // SAFETY: the caller's promise.
    unsafe {
        let eight = load8(ty, zeros.bytes().as_ptr().add(first * ty.size()));
        _mm256_permutevar8x32_ps(eight, spread)
    }
}

/// Writes the sums of up to eight rows for term `t`, of which a token has `terms`, with their biases.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
pub(super) unsafe fn put(
    out: &mut Columns<'_>,
    (t, terms): (usize, usize),
    rows: Range<usize>,
    sums: __m256,
    bias: Option<FloatView<'_>>,
) {
    let bias = bias.filter(|_| t.is_multiple_of(terms));
    // SAFETY: the caller's promise. As with a bias of zero: a sum of -0 becomes 0.
    let acc = unsafe { _mm256_add_ps(sums, _mm256_setzero_ps()) };
    if let (Some(y), None) = (out.row(t / terms, rows.clone()).first_chunk_mut::<EIGHT>(), bias) {
        let y = y.as_mut_ptr();
        // SAFETY: eight floats.
        unsafe {
            let sum = if t.is_multiple_of(terms) { acc } else { _mm256_add_ps(_mm256_loadu_ps(y), acc) };
            _mm256_storeu_ps(y, sum);
        }
        return;
    }
    let mut sums = [0f32; EIGHT];
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), acc) };
    for (sum, n) in sums.iter_mut().zip(rows.clone()) {
        *sum += bias.map_or(0.0, |b| b.get(n));
    }
    out.put(t, terms, rows, &sums);
}

impl<'a, const T: usize> Job<'a, T> {
    /// The product of `w`, in units of `unit` columns, and `T` rows of activations.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    pub(super) unsafe fn new<O: Octets>(w: &'a QuantMatrix<'a>, unit: usize, acts: &Prepared<'a>) -> Self {
        let g = Geometry::new(w, unit);
        let mut rows = [std::ptr::null(); T];
        for (t, row) in rows.iter_mut().enumerate() {
            *row = acts.row(t)[O::begins_at(acts.layout())..].as_ptr();
        }
        let mut spread = [0i32; LANES];
        for (lane, s) in spread.iter_mut().enumerate() {
            *s = g.block_of(unit * lane) as i32;
        }
        let zeros = match w.zero_points {
            ZeroPoints::PerBlock { packed, row_bytes } => (packed.as_ptr(), row_bytes),
            _ => (std::ptr::null(), 0),
        };
        // SAFETY: the caller's promise; eight i32.
        unsafe { Self { w, g, acts: rows, spread: _mm256_loadu_si256(spread.as_ptr().cast()), zeros } }
    }

    /// Rows `range` of `out`, `terms` of the activations a token.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    pub(super) unsafe fn rows<
        O: Octets,
        const BITS: usize,
        const UNIT: usize,
        const TY: u8,
        const ZEROS: u8,
    >(
        &self,
        range: Range<usize>,
        terms: usize,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        let safe = self.safe_rows::<O>(BITS, UNIT).clamp(range.start, range.end);
        // SAFETY: the caller's promise; only rows below `safe` are read past their end.
        unsafe {
            for eight in tiles(range.start..safe, EIGHT) {
                let mut acc = [[_mm256_setzero_ps(); EIGHT]; T];
                for (i, n) in eight.clone().enumerate() {
                    let row = self.row::<O, BITS, UNIT, TY, ZEROS>(n);
                    for t in 0..T {
                        acc[t][i] = row[t];
                    }
                }
                for t in 0..T {
                    put(out, (t, terms), eight.clone(), lane_sums(acc[t]), bias);
                }
            }
            for n in safe..range.end {
                let row = self.last_row::<O, BITS, UNIT, ZEROS>(n);
                for t in 0..T {
                    let mut acc = [_mm256_setzero_ps(); EIGHT];
                    acc[0] = row[t];
                    put(out, (t, terms), n..n + 1, lane_sums(acc), bias);
                }
            }
        }
    }

    /// The stored type of scales that `TY` stands for.
    pub(super) const fn float_type(&self, ty: u8) -> FloatType {
        match ty {
            0 => FloatType::F32,
            1 => FloatType::F16,
            2 => FloatType::BF16,
            _ => self.w.scales.float_type(),
        }
    }

    /// Rows from the first on for which whole vectors of codes, and eight numbers from the first block of any octet on, are inside of the
    /// matrix.
    fn safe_rows<O: Octets>(&self, bits: usize, unit: usize) -> usize {
        let w = self.w;
        let groups = if O::WHOLE { LANES * self.octets() } else { self.g.acts.groups };
        let codes = (groups * unit * bits / 8).next_multiple_of(32);
        let last = self.g.block_of(unit * LANES * (self.octets() - 1));
        let zeros = match w.zero_points {
            ZeroPoints::PerBlock { packed, row_bytes } => {
                rows_within(packed.len(), last * bits / 8 + zeros_reach(bits), row_bytes)
            }
            ZeroPoints::Float(zeros) => rows_within(zeros.len(), last + LANES, self.g.blocks),
            // None, or one a row.
            ZeroPoints::Default | ZeroPoints::AcrossRows(_) => usize::MAX,
        };
        let scales = rows_within(w.scales.len(), last + LANES, self.g.blocks);
        rows_within(w.codes.len(), codes, w.row_bytes).min(scales).min(zeros)
    }

    fn octets(&self) -> usize {
        self.g.acts.groups.div_ceil(LANES)
    }

    /// The lanes of row `n` for each token.
    ///
    /// # Safety
    /// As [`rows`]; the row is below [`Job::safe_rows`].
    #[inline(always)]
    unsafe fn row<O: Octets, const BITS: usize, const UNIT: usize, const TY: u8, const ZEROS: u8>(
        &self,
        n: usize,
    ) -> [__m256; T] {
        let (groups, size) = (self.g.acts.groups, self.float_type(TY).size());
        // SAFETY: the caller's promise: octets and numbers are inside of the matrix, the last octet's lanes behind the row are masked.
        unsafe {
            let mut acc = [_mm256_setzero_ps(); T];
            let codes = self.w.codes.as_ptr().add(n * self.w.row_bytes);
            let scales = self.w.scales.bytes().as_ptr().add(n * self.g.blocks * size);
            if let Some(rows) = O::scales_ahead::<BITS, UNIT>() {
                let ahead = scales.wrapping_add(rows * self.g.blocks * size);
                for line in (0..self.g.blocks * size).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast());
                }
            }
            let (whole, left) = (groups / LANES, groups % LANES);
            for o in 0..whole {
                let at = codes.add(o * UNIT * BITS);
                let numbers = self.numbers::<O, BITS, UNIT, TY, ZEROS>(n, scales, o);
                acc = O::add::<BITS, UNIT, ZEROS, T>(self, at, LANES, &numbers, o, acc);
            }
            if left > 0 {
                let at = codes.add(whole * UNIT * BITS);
                let numbers = self.numbers::<O, BITS, UNIT, TY, ZEROS>(n, scales, whole).first(left);
                acc = O::add::<BITS, UNIT, ZEROS, T>(self, at, left, &numbers, whole, acc);
            }
            acc
        }
    }

    /// Scales and zero points of octet `o` of row `n`, whose scales begin at `scales`.
    ///
    /// # Safety
    /// As [`Job::row`].
    #[inline(always)]
    unsafe fn numbers<O: Octets, const BITS: usize, const UNIT: usize, const TY: u8, const ZEROS: u8>(
        &self,
        n: usize,
        scales: *const u8,
        o: usize,
    ) -> Numbers {
        let block = self.g.block_of(LANES * UNIT * o);
        let ty = self.float_type(TY);
        let default = (1 << (BITS - 1)) as f32;
        let offset = if O::CENTRED { default } else { 0.0 };
        // SAFETY: the caller's promise.
        unsafe {
            Numbers {
                scale: _mm256_permutevar8x32_ps(load8(ty, scales.add(block * ty.size())), self.spread),
                zero: match (ZEROS, self.w.zero_points) {
                    (DEFAULT, _) | (ANY, ZeroPoints::Default) => _mm256_set1_ps(default - offset),
                    (PACKED, _) | (ANY, ZeroPoints::PerBlock { .. }) => self.zeros::<O, BITS>(n, block),
                    (_, ZeroPoints::Float(zeros)) => {
                        let zeros = float_zeros(zeros, n * self.g.blocks + block, self.spread);
                        _mm256_sub_ps(zeros, _mm256_set1_ps(offset))
                    }
                    _ => _mm256_set1_ps(self.w.zero_point(n, block) - offset),
                },
            }
        }
    }

    /// Zero points of an octet that begins with block `block` of row `n`, less the default if codes are centred.
    ///
    /// # Safety
    /// As [`Job::row`].
    #[inline(always)]
    unsafe fn zeros<O: Octets, const BITS: usize>(&self, n: usize, block: usize) -> __m256 {
        let (packed, row_bytes) = self.zeros;
        // SAFETY: the caller's promise: `zeros_reach` bytes from the block's on are in the matrix.
        unsafe {
            let at = packed.add(n * row_bytes + block * BITS / 8);
            let codes = if BITS == 8 {
                _mm256_permutevar8x32_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())), self.spread)
            } else {
                // A word holds the zero points of eight blocks; each lane shifts down that of its block.
                let first = _mm256_set1_epi32((block * BITS % 8) as i32);
                let shifts =
                    _mm256_add_epi32(_mm256_mullo_epi16(self.spread, _mm256_set1_epi32(BITS as i32)), first);
                let words = _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
                _mm256_and_si256(_mm256_srlv_epi32(words, shifts), _mm256_set1_epi32((1 << BITS) - 1))
            };
            let offset = if O::CENTRED { 1 << (BITS - 1) } else { 0 };
            _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(offset)))
        }
    }

    /// As [`Job::zeros`], for any kind of zero points and any row.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn zeros_one_by_one<O: Octets>(&self, n: usize, block: usize) -> __m256 {
        let default = if O::CENTRED { f32::from(self.w.bits.default_zero_point()) } else { 0.0 };
        let mut zeros = [0f32; LANES];
        for (lane, z) in zeros.iter_mut().enumerate() {
            let b = (block + self.g.block_of(self.g.unit * lane)).min(self.g.blocks - 1);
            *z = self.w.zero_point(n, b) - default;
        }
        // SAFETY: eight floats.
        unsafe { _mm256_loadu_ps(zeros.as_ptr()) }
    }

    /// As [`Job::row`], for any row: nothing is read past the end of the matrix.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn last_row<O: Octets, const BITS: usize, const UNIT: usize, const ZEROS: u8>(
        &self,
        n: usize,
    ) -> [__m256; T] {
        let bytes = UNIT * BITS;
        let row = &self.w.codes[n * self.w.row_bytes..];
        // SAFETY: the caller's promise; what is behind the copied codes meets activations of zero.
        unsafe {
            let mut acc = [_mm256_setzero_ps(); T];
            for o in 0..self.octets() {
                let mut codes = [0u8; OCTET];
                let left = &row[o * bytes..];
                let len = left.len().min(bytes);
                codes[..len].copy_from_slice(&left[..len]);
                let mut scale = [0f32; LANES];
                let groups = LANES.min(self.g.acts.groups - LANES * o);
                for (lane, s) in scale.iter_mut().enumerate().take(groups) {
                    *s = self.w.scale(n, self.g.block_of(UNIT * (LANES * o + lane)));
                }
                let scale = _mm256_loadu_ps(scale.as_ptr());
                let zero = self.zeros_one_by_one::<O>(n, self.g.block_of(UNIT * LANES * o));
                let numbers = Numbers { scale, zero }.first(groups);
                acc = O::add::<BITS, UNIT, ZEROS, T>(self, codes.as_ptr(), groups, &numbers, o, acc);
            }
            acc
        }
    }
}

impl Numbers {
    /// The first `n` lanes, and zeros: what is behind a row may be anything.
    ///
    /// # Safety
    /// AVX2 is there.
    #[inline(always)]
    unsafe fn first(self, n: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let mask = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes));
            Self { scale: _mm256_and_ps(self.scale, mask), zero: _mm256_and_ps(self.zero, mask) }
        }
    }
}

/// The lanes of eight rows added: i and i + 4, then i and i + 2, then the last two.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
pub(in super::super) unsafe fn lane_sums(v: [__m256; EIGHT]) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        // Rows r and r + 4 side by side, so that sums come out in order.
        let mut half = [_mm256_setzero_ps(); 4];
        for r in 0..4 {
            let (a, b) = (v[r], v[r + 4]);
            half[r] =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
        }
        let mut quarter = [_mm256_setzero_ps(); 2];
        for i in 0..2 {
            let (a, b) = (half[2 * i], half[2 * i + 1]);
            quarter[i] = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b));
        }
        let [a, b] = quarter;
        _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b))
    }
}
