//! Products of few tokens with int8 activations: rows one after the other, lanes are groups of columns.
//!
//! With few tokens a product runs at the speed of memory or not at all, and memory is fast for a reader that goes through
//! it in order and does not store: from DRAM one core read eight neighbouring rows side by side at 7 GB/s, with prefetching by hand at
//! 12, one after the other at 19 (Zen 4, rows of 1 KiB), and a kernel that left its integer sums in a small buffer lost a seventh. So a row is walked by octets,
//! eight groups of columns whose sums end up in the eight lanes that the canonical order ([`super::super`]) has for them, and nothing is
//! written but results. Out-of-order execution sees only a few hundred bytes ahead of such a loop; [`AHEAD`] makes up for it.
//!
//! Called by `entries`. The sums of spans come from a [`Spans`]: [`Plain`] with AVX2, or `vnni` with dot products of bytes.

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
use std::{arch::x86_64::*, marker::PhantomData, ops::Range};

/// Distance of prefetching in bytes, where the arithmetic leaves out-of-order execution some sight of its own, or is what limits.
/// (2 KiB lost a third, 4 KiB a twentieth, 8 and 16 KiB nothing; Zen 4.)
const AHEAD: usize = 6144;

/// Distances of prefetching into the first and, long before, the second level, and rows ahead for scales: a loop with fifty
/// instructions for 128 bytes keeps too few lines on their way otherwise. (4 bits on one and two cores of Zen 4: 4 to 13 percent faster
/// than with [`AHEAD`] alone, a third of it by the scales; lighter loops got slower by as much.)
const NEAR: usize = 2048;
const FAR: usize = 16384;
const SCALES_AHEAD: usize = 12;

/// Distance of prefetching into the second level alone, where groups are long and the loop so light that out-of-order execution sees
/// kilobytes ahead. (Prefetching into the first level at [`AHEAD`] held it up: 8 bits 41 GB/s instead of 53, 4 bits 28 instead of 35,
/// without any prefetching 53 and 29; two cores of Zen 4.)
const WIDE: usize = 8192;

/// Every zero point is the default.
pub(super) const DEFAULT: u8 = 0;
/// Zero points are packed by blocks.
pub(super) const PACKED: u8 = 1;
/// Zero points are floats, or one a row.
pub(super) const OTHER: u8 = 2;
/// Zero points of any kind, or scales of any type: found out for each octet, which costs nothing where octets are long.
pub(super) const ANY: u8 = 3;

/// Rows whose lanes are added together.
const EIGHT: usize = 8;

/// Bytes of an octet at most: 8 groups of 128 columns of 8 bits.
const OCTET: usize = 1024;

/// Sums of products of a span.
pub(super) trait Spans {
    /// Whether the sums of 8-bit codes come out centred, which costs as many instructions as the products.
    const CENTRES_BYTES: bool;

    /// Adds codes of 32 bytes times the activations of their span for `T` tokens to sums that [`Spans::finish`] makes one of each
    /// 32-bit lane; of at most 16 columns a lane. Sums of codes below 16 are not centred.
    ///
    /// # Safety
    /// The instruction set is there, and the caller is compiled for it. `acts` point to the span's activations.
    unsafe fn add<const BITS: usize, const T: usize>(
        sums: &mut [__m256i; T],
        codes: __m256i,
        acts: [*const u8; T],
    );

    /// The sums of 32-bit lanes.
    ///
    /// # Safety
    /// As [`Spans::add`].
    unsafe fn finish<const BITS: usize>(sum: __m256i) -> __m256i;
}

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

/// Octets of int8 activations, whose spans `S` multiplies.
pub(super) struct Ints<S>(PhantomData<S>);

/// A product under way.
pub(super) struct Job<'a, const T: usize> {
    w: &'a QuantMatrix<'a>,
    g: Geometry,
    pub(super) acts: [*const u8; T],
    /// Which of the eight scales that begin with an octet's first each of its groups has.
    spread: __m256i,
    /// Where the packed zero points begin, and bytes from one row of them to the next; null when they are of another kind.
    zeros: (*const u8, usize),
}

/// Whether the loop over codes of a width is prefetched for in two steps.
const fn prefetches_twice<S: Spans, const BITS: usize, const UNIT: usize>() -> bool {
    UNIT <= 32 && (BITS == 4 || (BITS == 8 && S::CENTRES_BYTES))
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
    let g = Geometry::new(w, UNIT);
    let mut rows = [std::ptr::null(); T];
    for (t, row) in rows.iter_mut().enumerate() {
        *row = acts.row(t)[O::begins_at(acts.layout())..].as_ptr();
    }
    let mut spread = [0i32; LANES];
    for (lane, s) in spread.iter_mut().enumerate() {
        *s = g.block_of(UNIT * lane) as i32;
    }
    let zeros = match w.zero_points {
        ZeroPoints::PerBlock { packed, row_bytes } => (packed.as_ptr(), row_bytes),
        _ => (std::ptr::null(), 0),
    };
    // SAFETY: the caller's promise; eight i32.
    let job = unsafe { Job { w, g, acts: rows, spread: _mm256_loadu_si256(spread.as_ptr().cast()), zeros } };
    let (range, terms) = (out.range(), acts.layout().terms());
    let safe = job.safe_rows::<O>(BITS, UNIT).clamp(range.start, range.end);
    // SAFETY: the caller's promise; only rows below `safe` are read past their end.
    unsafe {
        for eight in tiles(range.start..safe, EIGHT) {
            let mut acc = [[_mm256_setzero_ps(); EIGHT]; T];
            for (i, n) in eight.clone().enumerate() {
                let row = job.row::<O, BITS, UNIT, TY, ZEROS>(n);
                for t in 0..T {
                    acc[t][i] = row[t];
                }
            }
            write(out, terms, eight, &acc, bias);
        }
        for n in safe..range.end {
            let mut acc = [[_mm256_setzero_ps(); EIGHT]; T];
            let row = job.last_row::<O, BITS, UNIT, ZEROS>(n);
            for t in 0..T {
                acc[t][0] = row[t];
            }
            write(out, terms, n..n + 1, &acc, bias);
        }
    }
}

/// Adds lanes and biases of up to eight rows and writes them.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn write<const T: usize>(
    out: &mut Columns<'_>,
    terms: usize,
    rows: Range<usize>,
    acc: &[[__m256; EIGHT]; T],
    bias: Option<FloatView<'_>>,
) {
    for t in 0..T {
        let bias = bias.filter(|_| t.is_multiple_of(terms));
        // SAFETY: the caller's promise. As with a bias of zero: a sum of -0 becomes 0.
        let acc = unsafe { _mm256_add_ps(lane_sums(acc[t]), _mm256_setzero_ps()) };
        if let (Some(y), None) = (out.row(t / terms, rows.clone()).first_chunk_mut::<EIGHT>(), bias) {
            let y = y.as_mut_ptr();
            // SAFETY: eight floats.
            unsafe {
                let sum = if t.is_multiple_of(terms) { acc } else { _mm256_add_ps(_mm256_loadu_ps(y), acc) };
                _mm256_storeu_ps(y, sum);
            }
            continue;
        }
        let mut sums = [0f32; EIGHT];
        // SAFETY: eight floats.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), acc) };
        for (sum, n) in sums.iter_mut().zip(rows.clone()) {
            *sum += bias.map_or(0.0, |b| b.get(n));
        }
        out.put(t, terms, rows.clone(), &sums);
    }
}

impl<const T: usize> Job<'_, T> {
    /// The stored type of scales that `TY` stands for.
    const fn float_type(&self, ty: u8) -> FloatType {
        match ty {
            0 => FloatType::F32,
            1 => FloatType::F16,
            2 => FloatType::BF16,
            _ => self.w.scales.float_type(),
        }
    }

    /// Rows from the first on for which whole vectors of codes, and eight numbers from any block on, are inside of the matrix.
    fn safe_rows<O: Octets>(&self, bits: usize, unit: usize) -> usize {
        let (w, blocks) = (self.w, self.g.blocks);
        let groups = if O::WHOLE { LANES * self.octets() } else { self.g.acts.groups };
        let codes = (groups * unit * bits / 8).next_multiple_of(32);
        // Rows of `step` numbers of which `reach` are read from the beginning of each.
        let rows = |len: usize, reach: usize, step: usize| {
            len.checked_sub(reach).map_or(0, |left| left.checked_div(step).unwrap_or(0) + 1)
        };
        let codes = rows(w.codes.len(), codes, w.row_bytes);
        let scales = rows(w.scales.len(), blocks + LANES - 1, blocks);
        let zeros = match w.zero_points {
            ZeroPoints::PerBlock { packed, row_bytes } => rows(packed.len(), row_bytes + 7, row_bytes),
            // None, or read one by one.
            ZeroPoints::Default | ZeroPoints::AcrossRows(_) | ZeroPoints::Float(_) => usize::MAX,
        };
        codes.min(scales).min(zeros)
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
        // SAFETY: the caller's promise.
        unsafe {
            Numbers {
                scale: _mm256_permutevar8x32_ps(load8(ty, scales.add(block * ty.size())), self.spread),
                zero: match (ZEROS, self.w.zero_points) {
                    (DEFAULT, _) | (ANY, ZeroPoints::Default) => {
                        _mm256_set1_ps(if O::CENTRED { 0.0 } else { (1 << (BITS - 1)) as f32 })
                    }
                    (PACKED, _) | (ANY, ZeroPoints::PerBlock { .. }) => self.zeros::<O, BITS>(n, block),
                    _ => self.zeros_one_by_one::<O>(n, block),
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
        // SAFETY: the caller's promise: eight bytes from the block's on are in the matrix.
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

impl<S: Spans> Ints<S> {
    /// Sums of spans of an octet whose codes are at `codes` and whose activations begin at `place`.
    ///
    /// # Safety
    /// As [`Octets::add`].
    #[inline(always)]
    unsafe fn spans<const BITS: usize, const UNIT: usize, const T: usize>(
        job: &Job<'_, T>,
        codes: *const u8,
        place: usize,
        spans: Range<usize>,
    ) -> [__m256i; T] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [_mm256_setzero_si256(); T];
            for s in spans {
                if s % 2 == 0 {
                    Self::prefetch::<BITS, UNIT>(codes.wrapping_add(32 * s));
                }
                let mut acts = job.acts;
                for a in &mut acts {
                    *a = a.wrapping_add(place + 32 * 8 / BITS * s);
                }
                S::add::<BITS, T>(&mut sums, _mm256_loadu_si256(codes.add(32 * s).cast()), acts);
            }
            for sum in &mut sums {
                *sum = S::finish::<BITS>(*sum);
            }
            sums
        }
    }

    /// Asks for codes that are needed later than those at `codes`; the addresses need not exist.
    #[inline(always)]
    fn prefetch<const BITS: usize, const UNIT: usize>(codes: *const u8) {
        // SAFETY: a prefetch is a hint, valid for any address; SSE is part of x86-64.
        unsafe {
            if UNIT > 32 {
                _mm_prefetch::<_MM_HINT_T1>(codes.wrapping_add(WIDE).cast());
            } else if prefetches_twice::<S, BITS, UNIT>() {
                _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(NEAR).cast());
                _mm_prefetch::<_MM_HINT_T1>(codes.wrapping_add(FAR).cast());
            } else {
                _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(AHEAD).cast());
            }
        }
    }
}

impl<S: Spans> Octets for Ints<S> {
    const CENTRED: bool = true;
    const WHOLE: bool = false;

    #[inline(always)]
    fn begins_at(_: Layout) -> usize {
        0
    }

    #[inline(always)]
    fn scales_ahead<const BITS: usize, const UNIT: usize>() -> Option<usize> {
        prefetches_twice::<S, BITS, UNIT>().then_some(SCALES_AHEAD)
    }

    #[inline(always)]
    unsafe fn add<const BITS: usize, const UNIT: usize, const ZEROS: u8, const T: usize>(
        job: &Job<'_, T>,
        codes: *const u8,
        groups: usize,
        numbers: &Numbers,
        o: usize,
        mut acc: [__m256; T],
    ) -> [__m256; T] {
        let at = &job.g.acts;
        // SAFETY: the caller's promise; activations and their numbers are padded to whole octets.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); LANES]; T];
            let (vectors, spans) = const { (vectors(BITS, UNIT), UNIT * BITS / 32 / vectors(BITS, UNIT)) };
            let there = (groups * vectors).div_ceil(LANES);
            // Two loops, which the compiler unrolls where it would leave one of eight.
            for half in 0..vectors.div_ceil(4) {
                for v in 4 * half..4 * half + vectors.min(4) {
                    if v < there {
                        let sum = Self::spans::<BITS, UNIT, T>(
                            job,
                            codes,
                            LANES * UNIT * o,
                            spans * v..spans * (v + 1),
                        );
                        for t in 0..T {
                            sums[t][v] = sum[t];
                        }
                    }
                }
            }
            for t in 0..T {
                let number = |array: usize| job.acts[t].wrapping_add(array + 4 * LANES * o);
                let mut dots = eight_groups::<BITS, UNIT>(&sums[t]);
                if BITS != 8 || !S::CENTRES_BYTES {
                    dots = _mm256_add_epi32(dots, _mm256_loadu_si256(number(at.centres).cast()));
                }
                let mut value = _mm256_cvtepi32_ps(dots);
                if ZEROS != DEFAULT {
                    value = _mm256_fnmadd_ps(numbers.zero, _mm256_loadu_ps(number(at.sums).cast()), value);
                }
                let scale = _mm256_mul_ps(numbers.scale, _mm256_loadu_ps(number(at.scales).cast()));
                acc[t] = _mm256_fmadd_ps(value, scale, acc[t]);
            }
        }
        acc
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
unsafe fn lane_sums(v: [__m256; EIGHT]) -> __m256 {
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

/// Vectors of sums that the eight groups of an octet have.
const fn vectors(bits: usize, unit: usize) -> usize {
    let vectors = unit * bits / 32;
    if vectors < LANES { vectors } else { LANES }
}

/// Sums of eight groups of `UNIT` columns out of the lanes of their [`vectors`].
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn eight_groups<const BITS: usize, const UNIT: usize>(m: &[__m256i; LANES]) -> __m256i {
    // SAFETY: the caller's promise. Lanes are of at most 16 columns, of at most 16 after the first sums as well but for wide groups.
    unsafe {
        let (short, shorter) = (BITS < 8, BITS < 8 && (UNIT <= 32 || BITS == 2));
        match vectors(BITS, UNIT) {
            1 => m[0],
            2 => _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs(m[0], m[1], short)),
            4 => {
                let quads = pairs(pairs(m[0], m[1], short), pairs(m[2], m[3], short), shorter);
                _mm256_permutevar8x32_epi32(quads, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
            }
            _ => {
                let low = pairs(pairs(m[0], m[1], short), pairs(m[2], m[3], short), shorter);
                let high = pairs(pairs(m[4], m[5], short), pairs(m[6], m[7], short), shorter);
                _mm256_add_epi32(
                    _mm256_permute2x128_si256::<0x20>(low, high),
                    _mm256_permute2x128_si256::<0x31>(low, high),
                )
            }
        }
    }
}

/// Sums of neighbours, those of `a` before those of `b` in each half. Those that fit 16 bits (`short`) need two shuffles less: codes
/// below 16 of up to 16 columns, below 4 of up to 64.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn pairs(a: __m256i, b: __m256i, short: bool) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        if short {
            _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1))
        } else {
            _mm256_hadd_epi32(a, b)
        }
    }
}

/// The codes of 32 bytes that are number `p` of their byte.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
pub(super) unsafe fn plane<const BITS: usize>(v: __m256i, p: usize) -> __m256i {
    if BITS == 8 {
        return v;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let mask = _mm256_set1_epi8(((1u32 << BITS) - 1) as i8);
        let shifted = match BITS * p {
            0 => v,
            2 => _mm256_srli_epi16::<2>(v),
            4 => _mm256_srli_epi16::<4>(v),
            _ => _mm256_srli_epi16::<6>(v),
        };
        _mm256_and_si256(shifted, mask)
    }
}

/// Dot products with what AVX2 has.
pub(super) struct Plain;

impl Spans for Plain {
    const CENTRES_BYTES: bool = true;

    #[inline(always)]
    unsafe fn add<const BITS: usize, const T: usize>(
        sums: &mut [__m256i; T],
        codes: __m256i,
        acts: [*const u8; T],
    ) {
        // SAFETY: the caller's promise; plane `p` of a span's activations is 32 bytes.
        unsafe {
            for p in 0..8 / BITS {
                let mut w = plane::<BITS>(codes, p);
                if BITS == 8 {
                    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                }
                for t in 0..T {
                    let a = _mm256_loadu_si256(acts[t].add(32 * p).cast());
                    sums[t] = if BITS == 8 {
                        let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
                        _mm256_add_epi32(sums[t], _mm256_madd_epi16(products, _mm256_set1_epi16(1)))
                    } else {
                        _mm256_add_epi16(sums[t], _mm256_maddubs_epi16(w, a))
                    };
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish<const BITS: usize>(sum: __m256i) -> __m256i {
        // SAFETY: the caller's promise. Sums of codes below 16 of up to 16 columns are in halves of 16 bits.
        unsafe { if BITS == 8 { sum } else { _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) } }
    }
}
