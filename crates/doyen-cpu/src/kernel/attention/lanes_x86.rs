//! Vectors of AVX2 (with FMA and F16C) and of AVX-512.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::lanes::Lanes;
use std::arch::x86_64::*;

/// Eight lanes.
pub(super) struct Ymm;
/// Sixteen lanes.
pub(super) struct Zmm;

impl Lanes for Ymm {
    type V = __m256;
    const LANES: usize = 8;
    /// 3 rows and 4 keys are 12 accumulators; with 3 rows and a key in registers that is all 16.
    const ROWS: usize = 3;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller has AVX2, as the trait asks for.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the caller has AVX2, as the trait asks for.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: AVX2 and eight numbers, as the trait asks for.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: AVX2 and room for eight numbers, as the trait asks for.
        unsafe { _mm256_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the caller has FMA, as the trait asks for.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        // SAFETY: the caller has AVX2, as the trait asks for.
        unsafe { _mm_cvtss_f32(sums_ymm([v; 4])) }
    }

    #[inline(always)]
    unsafe fn sum4(v: [__m256; 4], out: *mut f32) {
        // SAFETY: AVX2 and room for four numbers, as the trait asks for.
        unsafe { _mm_storeu_ps(out, sums_ymm(v)) }
    }

    #[inline(always)]
    unsafe fn f16(p: *const u8) -> __m256 {
        // SAFETY: F16C and eight numbers of two bytes, as the trait asks for.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> __m256 {
        // SAFETY: AVX2 and eight numbers of two bytes, as the trait asks for.
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn int8(p: *const u8) -> __m256 {
        // SAFETY: AVX2 and eight bytes, as the trait asks for.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }

    #[inline(always)]
    unsafe fn int4(p: *const u8) -> __m256 {
        // SAFETY: AVX2 and eight nibbles, as the trait asks for.
        unsafe {
            let codes = nibbles(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()));
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
        }
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a hint, which no address makes fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

impl Lanes for Zmm {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller has AVX-512, as the trait asks for.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the caller has AVX-512, as the trait asks for.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: AVX-512 and sixteen numbers, as the trait asks for.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: AVX-512 and room for sixteen numbers, as the trait asks for.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller has AVX-512, as the trait asks for.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        // SAFETY: the caller has AVX-512, as the trait asks for.
        unsafe { _mm_cvtss_f32(sums_zmm([v; 4])) }
    }

    #[inline(always)]
    unsafe fn sum4(v: [__m512; 4], out: *mut f32) {
        // SAFETY: AVX-512 and room for four numbers, as the trait asks for.
        unsafe { _mm_storeu_ps(out, sums_zmm(v)) }
    }

    #[inline(always)]
    unsafe fn f16(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and sixteen numbers of two bytes, as the trait asks for.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and sixteen numbers of two bytes, as the trait asks for.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn int8(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and sixteen bytes, as the trait asks for.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }

    #[inline(always)]
    unsafe fn int4(p: *const u8) -> __m512 {
        // SAFETY: AVX-512 and sixteen nibbles, as the trait asks for.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(nibbles(_mm_loadl_epi64(p.cast())))) }
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        Ymm::prefetch(p);
    }
}

/// Sixteen signed codes out of the nibbles of the low eight bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(bytes: __m128i) -> __m128i {
    let pairs = _mm_cvtepu8_epi16(bytes);
    let codes = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16::<4>(pairs)), _mm_set1_epi8(15));
    _mm_sub_epi8(codes, _mm_set1_epi8(8))
}

/// Sums of four registers: lanes i and i + 2 of each 128 bits, then i and i + 1, then the halves.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_ymm([a, b, c, d]: [__m256; 4]) -> __m128 {
    let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    let (low, high) = (_mm256_unpacklo_pd(ab, cd), _mm256_unpackhi_pd(ab, cd));
    halves(_mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn halves(v: __m256) -> __m128 {
    _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v))
}

/// Sums of four registers: as [`sums_ymm`] within 128 bits, then the halves of the register, then theirs.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn sums_zmm([a, b, c, d]: [__m512; 4]) -> __m128 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    let v = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    halves(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
}
