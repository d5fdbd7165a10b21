//! How bytes of weights and of activations are multiplied: what `octets` asks of an instruction set.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use crate::kernel::linear::int::Dpbusd;
use doyen_tensor::format::mini::E2M1_DOUBLED;
use std::{arch::x86_64::*, marker::PhantomData};

/// How an instruction set multiplies bytes.
pub(super) trait Products {
    /// Codes of 64 columns, ready to be multiplied.
    type Weights: Copy;
    /// What is added to every doubled weight.
    const OFFSET: i8;

    /// # Safety
    /// The instruction set is there, and the caller is compiled for it.
    unsafe fn weights(codes: __m256i) -> Self::Weights;

    /// Sums of eight columns each: weights times the activations of even and of odd columns.
    ///
    /// # Safety
    /// As [`Products::weights`].
    unsafe fn dots(w: Self::Weights, x: [__m256i; 2]) -> __m256i;
}

/// With what AVX2 has: magnitudes times activations that take the signs.
pub(super) struct Plain;

impl Products for Plain {
    /// Signed bytes of even and of odd columns, and their magnitudes.
    type Weights = ([__m256i; 2], [__m256i; 2]);
    const OFFSET: i8 = 0;

    #[inline(always)]
    unsafe fn weights(codes: __m256i) -> Self::Weights {
        // SAFETY: the caller's promise.
        unsafe {
            let [even, odd] = looked_up::<0>(codes);
            ([even, odd], [_mm256_abs_epi8(even), _mm256_abs_epi8(odd)])
        }
    }

    #[inline(always)]
    unsafe fn dots((w, sizes): Self::Weights, x: [__m256i; 2]) -> __m256i {
        // SAFETY: the caller's promise. At most 2 * 2 * 12 * 127 in 16 bits.
        unsafe {
            let sums = _mm256_add_epi16(
                _mm256_maddubs_epi16(sizes[0], _mm256_sign_epi8(x[0], w[0])),
                _mm256_maddubs_epi16(sizes[1], _mm256_sign_epi8(x[1], w[1])),
            );
            _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
        }
    }
}

/// With `vpdpbusd`, whose weights are unsigned.
pub(super) struct Vnni<I>(PhantomData<I>);

impl<I: Dpbusd> Products for Vnni<I> {
    type Weights = [__m256i; 2];
    const OFFSET: i8 = 12;

    #[inline(always)]
    unsafe fn weights(codes: __m256i) -> Self::Weights {
        // SAFETY: the caller's promise.
        unsafe { looked_up::<12>(codes) }
    }

    #[inline(always)]
    unsafe fn dots(w: Self::Weights, x: [__m256i; 2]) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { I::dpbusd(I::dpbusd(_mm256_setzero_si256(), w[0], x[0]), w[1], x[1]) }
    }
}

/// Twice the values of the codes of even and of odd columns, plus `OFFSET`.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn looked_up<const OFFSET: i8>(codes: __m256i) -> [__m256i; 2] {
    // SAFETY: the caller's promise; a table of sixteen bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1_DOUBLED.as_ptr().cast()));
        let table = _mm256_add_epi8(table, _mm256_set1_epi8(OFFSET));
        let low = _mm256_set1_epi8(15);
        let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low);
        [_mm256_shuffle_epi8(table, _mm256_and_si256(codes, low)), _mm256_shuffle_epi8(table, odd)]
    }
}
