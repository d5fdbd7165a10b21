//! Int8 activations with AVX2 and FMA: a span is 32 bytes of codes, 64 columns.
//!
//! A table look-up makes codes signed bytes. Their magnitudes are multiplied with the activations that take their signs
//! (`vpmaddubsw`): at most `2 * 2 * 12 * 127` in 16 bits. A vector's lane `l` then holds the sum of the columns `8 l ..
//! 8 l + 8` of the span, as the canonical order has it.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::{Piece, each_piece, stream};
use crate::kernel::{
    linear::{Columns, LANES},
    quantize::{GROUP, Int8Row, Prepared},
};
use doyen_tensor::{
    FloatView,
    format::{MiniMatrix, mini::E2M1_DOUBLED},
};
use std::arch::x86_64::*;

/// Bytes of a span, and its columns.
const BYTES: usize = 32;
const COLS: usize = 2 * BYTES;

/// Rows of a matrix of E2M1 times prepared tokens.
///
/// # Safety
/// AVX2 and FMA are there; matrix, activations, bias and output are of each other's shapes.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn rows(
    w: &MiniMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    if let Some(few) = stream::Rows::new(w).filter(|_| acts.rows() <= stream::MOST) {
        // SAFETY: the caller's promise.
        return unsafe {
            match acts.rows() {
                0 => {}
                1 => few.run::<1>(acts, bias, out),
                2 => few.run::<2>(acts, bias, out),
                3 => few.run::<3>(acts, bias, out),
                _ => few.run::<{ stream::MOST }>(acts, bias, out),
            }
        };
    }
    let at = Int8Row::new(w.cols, w.scales.block(w.cols), GROUP);
    each_piece(w, acts, bias, out, 0.5 * w.global, |piece, r, batch, sums| {
        let mut t = batch.start;
        while t < batch.end {
            let own = &mut sums[t - batch.start..];
            // SAFETY: the caller's promise.
            t += unsafe {
                match (batch.end - t, piece.block) {
                    (4.., 16) => add::<4, 4>(piece, &at, acts, t, r, own),
                    (4.., _) => add::<4, 2>(piece, &at, acts, t, r, own),
                    (_, 16) => add::<1, 4>(piece, &at, acts, t, r, own),
                    (..) => add::<1, 2>(piece, &at, acts, t, r, own),
                }
            };
        }
    });
}

/// Adds a piece for `T` rows of activations from `t` on, to the sums of weight row `r`; a span has `GROUPS` scales. Returns
/// `T`.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const T: usize, const GROUPS: usize>(
    piece: &Piece<'_>,
    at: &Int8Row,
    acts: &Prepared<'_>,
    t: usize,
    r: usize,
    sums: &mut [[[f32; LANES]; super::ROWS]],
) -> usize {
    let rows: [&[u8]; T] = std::array::from_fn(|i| acts.row(t + i));
    let table = _mm256_broadcastsi128_si256(table());
    let spread = match GROUPS {
        4 => _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3),
        _ => _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1),
    };
    let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    // SAFETY: sums are arrays of eight numbers.
    let mut acc: [__m256; T] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(sums[i][r].as_ptr()) });
    for s in 0..piece.codes.len().div_ceil(BYTES) {
        let codes = span(&piece.codes[BYTES * s..]);
        let even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low));
        let odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low));
        let (even_size, odd_size) = (_mm256_abs_epi8(even), _mm256_abs_epi8(odd));
        let scale = four(&piece.scales[GROUPS * s..]);
        let col = piece.cols.start + COLS * s;
        for i in 0..T {
            let x = &rows[i][col..col + COLS];
            // SAFETY: the slice holds both vectors.
            let (x_even, x_odd) = unsafe {
                (_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(BYTES).cast()))
            };
            let pairs = _mm256_add_epi16(
                _mm256_maddubs_epi16(even_size, _mm256_sign_epi8(x_even, even)),
                _mm256_maddubs_epi16(odd_size, _mm256_sign_epi8(x_odd, odd)),
            );
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
            let scale_a = &rows[i][at.scales + 4 * GROUPS * (col / COLS)..][..16];
            // SAFETY: the slice holds four numbers.
            let both = _mm_mul_ps(scale, unsafe { _mm_loadu_ps(scale_a.as_ptr().cast()) });
            let both = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(both), spread);
            acc[i] = _mm256_fmadd_ps(dot, both, acc[i]);
        }
    }
    for (sums, acc) in sums.iter_mut().zip(acc) {
        // SAFETY: sums are arrays of eight numbers.
        unsafe { _mm256_storeu_ps(sums[r].as_mut_ptr(), acc) };
    }
    T
}

/// Twice the value of each code.
#[target_feature(enable = "avx2,fma")]
fn table() -> __m128i {
    // SAFETY: the array holds sixteen bytes.
    unsafe { _mm_loadu_si128(E2M1_DOUBLED.as_ptr().cast()) }
}

/// The first bytes of a span, and zeros where it ends early.
#[target_feature(enable = "avx2,fma")]
fn span(codes: &[u8]) -> __m256i {
    if let Some(whole) = codes.first_chunk::<BYTES>() {
        // SAFETY: the array holds 32 bytes.
        return unsafe { _mm256_loadu_si256(whole.as_ptr().cast()) };
    }
    let mut padded = [0u8; BYTES];
    padded[..codes.len()].copy_from_slice(codes);
    // SAFETY: the array holds 32 bytes.
    unsafe { _mm256_loadu_si256(padded.as_ptr().cast()) }
}

/// Four scales; there are zeros behind the last one.
#[target_feature(enable = "avx2,fma")]
fn four(scales: &[f32]) -> __m128 {
    let four = &scales[..4];
    // SAFETY: the slice holds four numbers.
    unsafe { _mm_loadu_ps(four.as_ptr()) }
}
