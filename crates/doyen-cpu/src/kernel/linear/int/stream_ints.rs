//! [`Octets`] of int8 activations: sums of spans from a [`Spans`], [`Plain`] with AVX2 or `vnni` with dot products of bytes, and how they
//! become those of groups.

use super::{
    super::{Columns, LANES},
    stream::{DEFAULT, EIGHT, Job, Numbers, Octets, put},
    stream_stack::Stack,
    tile::Geometry,
};
use crate::kernel::quantize::{Layout, Prepared};
use doyen_tensor::{FloatView, format::QuantMatrix};
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

/// Octets of int8 activations, whose spans `S` multiplies.
pub(super) struct Ints<S>(PhantomData<S>);

/// What an octet of int8 activations has beside its codes.
#[derive(Clone, Copy)]
pub(super) struct ActNumbers {
    pub(super) scales: __m256,
    pub(super) sums: __m256,
    pub(super) centres: __m256i,
}

/// Whether the loop over codes of a width is prefetched for in two steps.
const fn prefetches_twice<S: Spans, const BITS: usize, const UNIT: usize>() -> bool {
    UNIT <= 32 && (BITS == 4 || (BITS == 8 && S::CENTRES_BYTES))
}

/// As [`super::stream::rows`] with int8 activations; rows shorter than an octet share one.
///
/// # Safety
/// As [`super::stream::rows`].
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
    let (mut range, terms) = (out.range(), acts.layout().terms());
    // SAFETY: the caller's promise.
    unsafe {
        let job = Job::<T>::new::<Ints<S>>(w, UNIT, acts);
        if let Some(stack) = Stack::new::<BITS, UNIT>(&job) {
            while stack.has_rows(&range) {
                let sums = stack.rows::<S, BITS, UNIT, TY, ZEROS>(range.start);
                for t in 0..T {
                    put(out, (t, terms), range.start..range.start + EIGHT, sums[t], bias);
                }
                range.start += EIGHT;
            }
        }
        job.rows::<Ints<S>, BITS, UNIT, TY, ZEROS>(range, terms, bias, out);
    }
}

impl<S: Spans> Ints<S> {
    /// Dot products of the groups of an octet whose codes are at `codes`, as far as the first `there` vectors of sums have them. Span `s`
    /// meets the activations of span `s & wrap` from `place` on.
    ///
    /// # Safety
    /// As [`Octets::add`].
    #[inline(always)]
    pub(super) unsafe fn dots<const BITS: usize, const UNIT: usize, const T: usize>(
        job: &Job<'_, T>,
        codes: *const u8,
        there: usize,
        (place, wrap): (usize, usize),
    ) -> [__m256i; T] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); LANES]; T];
            let (vectors, spans) = const { (vectors(BITS, UNIT), UNIT * BITS / 32 / vectors(BITS, UNIT)) };
            // Two loops, which the compiler unrolls where it would leave one of eight.
            for half in 0..vectors.div_ceil(4) {
                for v in 4 * half..4 * half + vectors.min(4) {
                    if v < there {
                        let spans = spans * v..spans * (v + 1);
                        let sum = Self::spans::<BITS, UNIT, T>(job, codes, (place, wrap), spans);
                        for t in 0..T {
                            sums[t][v] = sum[t];
                        }
                    }
                }
            }
            let mut dots = [_mm256_setzero_si256(); T];
            for t in 0..T {
                dots[t] = eight_groups::<BITS, UNIT>(&sums[t]);
            }
            dots
        }
    }

    /// What an octet adds to its lanes: dot products of activations whose numbers are `acts`.
    ///
    /// # Safety
    /// AVX2 is there.
    #[inline(always)]
    pub(super) unsafe fn value<const BITS: usize, const ZEROS: u8>(
        mut dots: __m256i,
        weights: &Numbers,
        acts: &ActNumbers,
        acc: __m256,
    ) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            if BITS != 8 || !S::CENTRES_BYTES {
                dots = _mm256_add_epi32(dots, acts.centres);
            }
            let mut value = _mm256_cvtepi32_ps(dots);
            if ZEROS != DEFAULT {
                value = _mm256_fnmadd_ps(weights.zero, acts.sums, value);
            }
            _mm256_fmadd_ps(value, _mm256_mul_ps(weights.scale, acts.scales), acc)
        }
    }

    /// Sums of spans of an octet whose codes are at `codes`, with activations as in [`Ints::dots`].
    ///
    /// # Safety
    /// As [`Octets::add`].
    #[inline(always)]
    unsafe fn spans<const BITS: usize, const UNIT: usize, const T: usize>(
        job: &Job<'_, T>,
        codes: *const u8,
        (place, wrap): (usize, usize),
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
                    *a = a.wrapping_add(place + 32 * 8 / BITS * (s & wrap));
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
        // SAFETY: the caller's promise; activations and their numbers are padded to whole octets.
        unsafe {
            let there = (groups * vectors(BITS, UNIT)).div_ceil(LANES);
            let dots = Self::dots::<BITS, UNIT, T>(job, codes, there, (LANES * UNIT * o, usize::MAX));
            for t in 0..T {
                let acts = ActNumbers::new(&job.g, job.acts[t], o);
                acc[t] = Self::value::<BITS, ZEROS>(dots[t], numbers, &acts, acc[t]);
            }
        }
        acc
    }
}

impl ActNumbers {
    /// Those of octet `o` of a row at `acts`.
    ///
    /// # Safety
    /// AVX2 is there; the row is of int8 activations.
    #[inline(always)]
    pub(super) unsafe fn new(g: &Geometry, acts: *const u8, o: usize) -> Self {
        let at = acts.wrapping_add(4 * LANES * o);
        // SAFETY: the caller's promise; numbers are padded to whole octets.
        unsafe {
            Self {
                scales: _mm256_loadu_ps(at.add(g.acts.scales).cast()),
                sums: _mm256_loadu_ps(at.add(g.acts.sums).cast()),
                centres: _mm256_loadu_si256(at.add(g.acts.centres).cast()),
            }
        }
    }
}

/// Vectors of sums that the eight groups of an octet have.
pub(super) const fn vectors(bits: usize, unit: usize) -> usize {
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
pub(in super::super) unsafe fn pairs(a: __m256i, b: __m256i, short: bool) -> __m256i {
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
