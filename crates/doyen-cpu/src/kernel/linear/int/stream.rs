//! Products of few tokens with int8 activations: rows one after the other, lanes are groups of columns.
//!
//! With few tokens a product runs at the speed of memory or not at all, and memory is fast for a reader that goes through
//! it in order and does not store: from DRAM one core read eight neighbouring rows side by side at 7 GB/s, with prefetching by hand at
//! 12, one after the other at 19 (Zen 4, rows of 1 KiB), and a kernel that left its integer sums in a small buffer lost a seventh. So a row is walked by octets,
//! eight groups of columns whose sums end up in the eight lanes that the canonical order ([`super::super`]) has for them, and nothing is
//! written but results. Out-of-order execution sees only a few hundred bytes ahead of such a loop; [`AHEAD`] makes up for it.
//!
//! Called by `entries`. The sums of a span come from a [`Spans`]: [`Plain`] with AVX2, or `vnni` with dot products of bytes.

use super::{
    super::{Columns, LANES, tiles},
    scales::load8,
    tile::Geometry,
};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{
    FloatType, FloatView,
    format::{QuantMatrix, ZeroPoints},
};
use std::{arch::x86_64::*, ops::Range};

/// Distance of prefetching in bytes, where the arithmetic leaves out-of-order execution some sight of its own, or is what limits.
/// (2 KiB lost a third, 4 KiB a twentieth, 8 and 16 KiB nothing; Zen 4.)
const AHEAD: usize = 6144;

/// Distances of prefetching into the first and, long before, the second level, and rows ahead for scales: a loop with fifty
/// instructions for 128 bytes keeps too few lines on their way otherwise. (4 bits on one and two cores of Zen 4: 4 to 13 percent faster
/// than with [`AHEAD`] alone, a third of it by the scales; lighter loops got slower by as much.)
const NEAR: usize = 2048;
const FAR: usize = 16384;
const SCALES_AHEAD: usize = 12;

/// Every zero point is the default.
pub(super) const DEFAULT: u8 = 0;
/// Zero points are packed by blocks.
pub(super) const PACKED: u8 = 1;
/// Zero points are floats, or one a row.
pub(super) const OTHER: u8 = 2;

/// Rows whose lanes are added together.
const EIGHT: usize = 8;

/// Sums of products of a span.
pub(super) trait Spans {
    /// Whether the sums of 8-bit codes come out centred, which costs as many instructions as the products.
    const CENTRES_BYTES: bool;

    /// Codes of 32 bytes times the activations of their span for `T` tokens, summed per 32-bit lane. Sums of codes below
    /// 16 are not centred.
    ///
    /// # Safety
    /// The instruction set is there, and the caller is compiled for it. `acts` point to the span's activations.
    unsafe fn span<const BITS: usize, const T: usize>(codes: __m256i, acts: [*const u8; T]) -> [__m256i; T];
}

/// A product under way.
struct Job<'a, const T: usize> {
    w: &'a QuantMatrix<'a>,
    g: Geometry,
    acts: [*const u8; T],
    /// Which of the eight scales that begin with an octet's first each of its groups has.
    spread: __m256i,
    /// Where the packed zero points begin, and bytes from one row of them to the next; null when they are of another kind.
    zeros: (*const u8, usize),
}

/// Whether the loop over codes of a width is prefetched for in two steps.
const fn prefetches_twice<S: Spans, const BITS: usize>() -> bool {
    BITS == 4 || (BITS == 8 && S::CENTRES_BYTES)
}

/// Scales and zero points of an octet, spread over its groups.
struct Numbers {
    scale: __m256,
    zero: __m256,
}

/// Rows of quantized weights times `T` tokens; units of `UNIT` columns, scales of [`float_type`] `TY`, zero
/// points of kind `ZEROS`.
///
/// # Safety
/// As [`super::fast::rows`] and [`Spans::span`]; there are `T` tokens, and scales and zero points as the parameters say.
#[inline(always)]
pub(super) unsafe fn rows<
    S: Spans,
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
    let g = Geometry::new(w);
    let mut rows = [std::ptr::null(); T];
    for (t, row) in rows.iter_mut().enumerate() {
        *row = acts.row(t).as_ptr();
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
    let safe = job.safe_rows(UNIT * BITS).clamp(range.start, range.end);
    // SAFETY: the caller's promise; only rows below `safe` are read past their end.
    unsafe {
        for eight in tiles(range.start..safe, EIGHT) {
            let mut acc = [[_mm256_setzero_ps(); EIGHT]; T];
            for (i, n) in eight.clone().enumerate() {
                let row = job.row::<S, BITS, UNIT, TY, ZEROS>(n);
                for t in 0..T {
                    acc[t][i] = row[t];
                }
            }
            write(out, terms, eight, &acc, bias);
        }
        for n in safe..range.end {
            let mut acc = [[_mm256_setzero_ps(); EIGHT]; T];
            let row = job.last_row::<S, BITS, UNIT, ZEROS>(n);
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

/// The stored type of scales that `TY` stands for.
pub(super) const fn float_type(ty: u8) -> FloatType {
    match ty {
        0 => FloatType::F32,
        1 => FloatType::F16,
        _ => FloatType::BF16,
    }
}

impl<const T: usize> Job<'_, T> {
    /// Rows from the first on for which whole octets of codes, and eight numbers from any block on, are inside of the matrix.
    fn safe_rows(&self, octet: usize) -> usize {
        let (w, blocks) = (self.w, self.g.blocks);
        // Rows of `step` numbers of which `reach` are read from the beginning of each.
        let rows = |len: usize, reach: usize, step: usize| {
            len.checked_sub(reach).map_or(0, |left| left.checked_div(step).unwrap_or(0) + 1)
        };
        let codes = rows(w.codes.len(), self.octets() * octet, w.row_bytes);
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
    unsafe fn row<S: Spans, const BITS: usize, const UNIT: usize, const TY: u8, const ZEROS: u8>(
        &self,
        n: usize,
    ) -> [__m256; T] {
        let (groups, size) = (self.g.acts.groups, float_type(TY).size());
        // SAFETY: the caller's promise: octets and numbers are inside of the matrix, the last octet's lanes behind the row are masked.
        unsafe {
            let mut acc = [_mm256_setzero_ps(); T];
            let codes = self.w.codes.as_ptr().add(n * self.w.row_bytes);
            let scales = self.w.scales.bytes().as_ptr().add(n * self.g.blocks * size);
            if prefetches_twice::<S, BITS>() {
                let ahead = scales.wrapping_add(SCALES_AHEAD * self.g.blocks * size);
                for line in (0..self.g.blocks * size).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast());
                }
            }
            for o in 0..groups / LANES {
                let at = codes.add(o * UNIT * BITS);
                let numbers = self.numbers::<BITS, UNIT, TY, ZEROS>(n, scales, o);
                acc = self.octet::<S, BITS, UNIT, ZEROS, false>(at, &numbers, o, acc);
            }
            let (o, left) = (groups / LANES, groups % LANES);
            if left > 0 {
                let at = codes.add(o * UNIT * BITS);
                let numbers = self.numbers::<BITS, UNIT, TY, ZEROS>(n, scales, o).first(left);
                acc = if left <= LANES / 2 {
                    self.octet::<S, BITS, UNIT, ZEROS, true>(at, &numbers, o, acc)
                } else {
                    self.octet::<S, BITS, UNIT, ZEROS, false>(at, &numbers, o, acc)
                };
            }
            acc
        }
    }

    /// Scales and zero points of octet `o` of row `n`, whose scales begin at `scales`.
    ///
    /// # Safety
    /// As [`Job::row`].
    #[inline(always)]
    unsafe fn numbers<const BITS: usize, const UNIT: usize, const TY: u8, const ZEROS: u8>(
        &self,
        n: usize,
        scales: *const u8,
        o: usize,
    ) -> Numbers {
        let block = self.g.block_of(LANES * UNIT * o);
        let ty = float_type(TY);
        // SAFETY: the caller's promise.
        unsafe {
            Numbers {
                scale: _mm256_permutevar8x32_ps(load8(ty, scales.add(block * ty.size())), self.spread),
                zero: match ZEROS {
                    DEFAULT => _mm256_setzero_ps(),
                    PACKED => self.zeros::<BITS>(n, block),
                    _ => self.zeros_one_by_one(n, block),
                },
            }
        }
    }

    /// Zero points of an octet that begins with block `block` of row `n`, less the default.
    ///
    /// # Safety
    /// As [`Job::row`].
    #[inline(always)]
    unsafe fn zeros<const BITS: usize>(&self, n: usize, block: usize) -> __m256 {
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
            _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(1 << (BITS - 1))))
        }
    }

    /// As [`Job::zeros`], for any kind of zero points and any row.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn zeros_one_by_one(&self, n: usize, block: usize) -> __m256 {
        let default = f32::from(self.w.bits.default_zero_point());
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
    unsafe fn last_row<S: Spans, const BITS: usize, const UNIT: usize, const ZEROS: u8>(
        &self,
        n: usize,
    ) -> [__m256; T] {
        let bytes = UNIT * BITS;
        let row = &self.w.codes[n * self.w.row_bytes..];
        // SAFETY: the caller's promise; what is behind the copied codes meets activations of zero.
        unsafe {
            let mut acc = [_mm256_setzero_ps(); T];
            for o in 0..self.octets() {
                let mut codes = [0u8; 256];
                let left = &row[o * bytes..];
                let len = left.len().min(bytes);
                codes[..len].copy_from_slice(&left[..len]);
                let mut scale = [0f32; LANES];
                let groups = LANES.min(self.g.acts.groups - LANES * o);
                for (lane, s) in scale.iter_mut().enumerate().take(groups) {
                    *s = self.w.scale(n, self.g.block_of(UNIT * (LANES * o + lane)));
                }
                let scale = _mm256_loadu_ps(scale.as_ptr());
                let zero = self.zeros_one_by_one(n, self.g.block_of(UNIT * LANES * o));
                let numbers = Numbers { scale, zero }.first(groups);
                acc = self.octet::<S, BITS, UNIT, ZEROS, false>(codes.as_ptr(), &numbers, o, acc);
            }
            acc
        }
    }

    /// Adds octet `o`, or only its first half.
    ///
    /// # Safety
    /// As [`rows`]; `codes` points to the octet's bytes.
    #[inline(always)]
    unsafe fn octet<S: Spans, const BITS: usize, const UNIT: usize, const ZEROS: u8, const HALF: bool>(
        &self,
        codes: *const u8,
        numbers: &Numbers,
        o: usize,
        mut acc: [__m256; T],
    ) -> [__m256; T] {
        let at = &self.g.acts;
        // SAFETY: the caller's promise; activations and their numbers are padded to whole octets.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 8]; T];
            let spans = UNIT * BITS / 32;
            for s in 0..if HALF { spans.div_ceil(2) } else { spans } {
                if s % 2 == 0 && prefetches_twice::<S, BITS>() {
                    _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(NEAR + 32 * s).cast());
                    _mm_prefetch::<_MM_HINT_T1>(codes.wrapping_add(FAR + 32 * s).cast());
                } else if s % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(AHEAD + 32 * s).cast());
                }
                let mut acts = self.acts;
                for a in &mut acts {
                    *a = a.wrapping_add(LANES * UNIT * o + 32 * 8 / BITS * s);
                }
                let span = S::span::<BITS, T>(_mm256_loadu_si256(codes.add(32 * s).cast()), acts);
                for t in 0..T {
                    sums[t][s] = span[t];
                }
            }
            for t in 0..T {
                let number = |array: usize| self.acts[t].wrapping_add(array + 4 * LANES * o);
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

/// Sums of eight groups of `UNIT` columns out of the lanes of their `UNIT * BITS / 32` spans.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn eight_groups<const BITS: usize, const UNIT: usize>(m: &[__m256i; 8]) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        match UNIT * BITS / 32 {
            1 => m[0],
            2 => _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs::<BITS>(m[0], m[1])),
            4 => {
                let quads = pairs::<BITS>(pairs::<BITS>(m[0], m[1]), pairs::<BITS>(m[2], m[3]));
                _mm256_permutevar8x32_epi32(quads, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
            }
            _ => {
                let low = pairs::<BITS>(pairs::<BITS>(m[0], m[1]), pairs::<BITS>(m[2], m[3]));
                let high = pairs::<BITS>(pairs::<BITS>(m[4], m[5]), pairs::<BITS>(m[6], m[7]));
                _mm256_add_epi32(
                    _mm256_permute2x128_si256::<0x20>(low, high),
                    _mm256_permute2x128_si256::<0x31>(low, high),
                )
            }
        }
    }
}

/// Sums of neighbours, those of `a` before those of `b` in each half. Sums of codes below 16 fit 16 bits up to 16 columns, which
/// saves two shuffles.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn pairs<const BITS: usize>(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        if BITS == 8 {
            _mm256_hadd_epi32(a, b)
        } else {
            _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1))
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
    unsafe fn span<const BITS: usize, const T: usize>(codes: __m256i, acts: [*const u8; T]) -> [__m256i; T] {
        // SAFETY: the caller's promise; plane `p` of a span's activations is 32 bytes.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut sums = [_mm256_setzero_si256(); T];
            for p in 0..8 / BITS {
                let mut w = plane::<BITS>(codes, p);
                if BITS == 8 {
                    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                }
                for t in 0..T {
                    let a = _mm256_loadu_si256(acts[t].add(32 * p).cast());
                    let products = if BITS == 8 {
                        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
                    } else {
                        _mm256_maddubs_epi16(w, a)
                    };
                    sums[t] = if p == 0 { products } else { _mm256_add_epi16(sums[t], products) };
                }
            }
            for sum in &mut sums {
                *sum = _mm256_madd_epi16(*sum, ones);
            }
            sums
        }
    }
}
