//! A few rows of int8 activations against E2M1 with power-of-two scales (MXFP4), with AVX2 and FMA: rows one after the other, nothing is
//! written but results.
//!
//! The bits are those of `fast`. A span of 64 columns is 32 bytes of codes, two scales, and eight runs, one a lane. What depends on
//! activations alone is laid out once: their scales, spread over the lanes of their spans.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]
#![allow(clippy::needless_range_loop, reason = "s and t index several arrays at once")]

use crate::kernel::{
    linear::{Columns, LANES, int::lane_sums, tiles},
    quantize::{GROUP, Int8Row, Prepared},
};
use doyen_tensor::{
    FloatView,
    format::{
        Element, MiniMatrix, MiniScales,
        mini::{E2M1_DOUBLED, e8m0},
    },
};
use std::{arch::x86_64::*, mem::MaybeUninit};

/// Most rows of activations that are streamed for.
pub(super) const MOST: usize = 4;

/// Bytes of codes of a span, and its columns.
const BYTES: usize = 32;
const COLS: usize = 2 * BYTES;
/// Columns of a scale.
const BLOCK: usize = 32;
/// Spans of a row at most: what a stack has room for.
const MAX_SPANS: usize = 256;
/// Distance of prefetching in bytes.
const AHEAD: usize = 4096;

/// Codes and scales of a matrix that is streamed, row by row.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
    /// What sums are multiplied by: codes stand for twice their value.
    factor: f32,
}

/// Scales of activations, spread over lanes, for each span.
type Spread = [MaybeUninit<__m256>; MAX_SPANS];

impl<'a> Rows<'a> {
    /// `None` where another kernel has to do it.
    pub(super) fn new(w: &MiniMatrix<'a>) -> Option<Self> {
        let (MiniScales::E8M0(scales), Element::E2M1, false) = (w.scales, w.element, w.transposed) else {
            return None;
        };
        let fits = w.cols.is_multiple_of(BLOCK) && w.cols <= MAX_SPANS * COLS;
        fits.then_some(Self { codes: w.codes, scales, cols: w.cols, factor: 0.5 * w.global })
    }

    /// All rows of `out` for `T` rows of activations.
    ///
    /// # Safety
    /// AVX2 and FMA are there; activations, bias and output are of the matrix's shapes; there are `T` rows of activations.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn run<const T: usize>(
        &self,
        acts: &Prepared<'_>,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        let terms = acts.layout().terms();
        let mut spread: [Spread; T] = [const { [const { MaybeUninit::uninit() }; MAX_SPANS] }; T];
        let mut x = [std::ptr::null(); T];
        for t in 0..T {
            x[t] = acts.row(t).as_ptr();
            self.spread(acts.row(t), &mut spread[t]);
        }
        for rows in tiles(out.range(), LANES) {
            let mut acc = [[_mm256_setzero_ps(); LANES]; T];
            for (i, n) in rows.clone().enumerate() {
                // SAFETY: the caller's promise.
                let row = unsafe { self.row::<T>(n, x, &spread) };
                for t in 0..T {
                    acc[t][i] = row[t];
                }
            }
            for t in 0..T {
                let mut sums = [0f32; LANES];
                // SAFETY: AVX2 is there; eight floats.
                unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), lane_sums(acc[t])) };
                let bias = bias.filter(|_| t.is_multiple_of(terms));
                for (sum, n) in sums.iter_mut().zip(rows.clone()) {
                    *sum = *sum * self.factor + bias.map_or(0.0, |b| b.get(n));
                }
                out.put(t, terms, rows.clone(), &sums);
            }
        }
    }

    /// Writes the scales of a row of activations.
    #[target_feature(enable = "avx2,fma")]
    fn spread(&self, acts: &[u8], out: &mut Spread) {
        let at = Int8Row::new(self.cols, BLOCK, GROUP);
        let lanes = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
        for (s, out) in out.iter_mut().enumerate().take(self.cols.div_ceil(COLS)) {
            // Numbers are padded to a multiple of eight, with zeros.
            let two: [u8; 8] = *acts[at.scales + 8 * s..].first_chunk().expect("two scales");
            let two = _mm_cvtsi64_si128(i64::from_le_bytes(two));
            out.write(_mm256_castsi256_ps(_mm256_permutevar8x32_epi32(_mm256_castsi128_si256(two), lanes)));
        }
    }

    /// The lanes of row `n`.
    ///
    /// # Safety
    /// As [`Rows::run`]; `x` point to rows of activations, whose spread scales are `spread`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn row<const T: usize>(&self, n: usize, x: [*const u8; T], spread: &[Spread; T]) -> [__m256; T] {
        let codes = &self.codes[n * self.cols / 2..][..self.cols / 2];
        let scales = &self.scales[n * self.cols / BLOCK..][..self.cols / BLOCK];
        let mut acc = [_mm256_setzero_ps(); T];
        let (spans, last) = codes.as_chunks::<BYTES>();
        let (pairs, single) = scales.as_chunks::<2>();
        for s in 0..spans.len() {
            _mm_prefetch::<_MM_HINT_T0>(spans[s].as_ptr().wrapping_add(AHEAD).cast());
            // SAFETY: the caller's promise; rows of activations are padded to whole spans.
            unsafe {
                let codes = _mm256_loadu_si256(spans[s].as_ptr().cast());
                add(&mut acc, codes, pairs[s], x, spread, s);
            }
        }
        if let [scale] = *single {
            let mut codes = [0u8; BYTES];
            codes[..last.len()].copy_from_slice(last);
            // SAFETY: as above.
            unsafe {
                let codes = _mm256_loadu_si256(codes.as_ptr().cast());
                add(&mut acc, codes, [scale, 0], x, spread, spans.len());
            }
        }
        acc
    }
}

/// Adds span `s`.
///
/// # Safety
/// As [`Rows::row`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const T: usize>(
    acc: &mut [__m256; T],
    codes: __m256i,
    scales: [u8; 2],
    x: [*const u8; T],
    spread: &[Spread; T],
    s: usize,
) {
    // SAFETY: the caller's promise; tables of sixteen bytes.
    unsafe {
        let signed = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1_DOUBLED.as_ptr().cast()));
        let sizes = _mm256_abs_epi8(signed);
        let low = _mm256_set1_epi8(15);
        let even = _mm256_and_si256(codes, low);
        let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low);
        let weights = [_mm256_shuffle_epi8(signed, even), _mm256_shuffle_epi8(signed, odd)];
        let sizes = [_mm256_shuffle_epi8(sizes, even), _mm256_shuffle_epi8(sizes, odd)];
        let scale = two_scales(scales);
        for t in 0..T {
            let x = x[t].add(COLS * s);
            let x = [_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(BYTES).cast())];
            let pairs = _mm256_add_epi16(
                _mm256_maddubs_epi16(sizes[0], _mm256_sign_epi8(x[0], weights[0])),
                _mm256_maddubs_epi16(sizes[1], _mm256_sign_epi8(x[1], weights[1])),
            );
            let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            acc[t] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, spread[t][s].assume_init()), acc[t]);
        }
    }
}

/// Each scale in four lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn two_scales([a, b]: [u8; 2]) -> __m256 {
    // 0 and 255 are no exponents of normal numbers: 2^-127 and NaN.
    if a.wrapping_add(1) <= 1 || b.wrapping_add(1) <= 1 {
        let (a, b) = (e8m0(a), e8m0(b));
        return _mm256_setr_ps(a, a, a, a, b, b, b, b);
    }
    let both = _mm256_set1_epi16(i16::from_le_bytes([a, b]));
    // The byte of each lane as the lowest of four, the others zero.
    let (a, b) = (0x8080_8000_u32 as i32, 0x8080_8001_u32 as i32);
    let exponents = _mm256_shuffle_epi8(both, _mm256_setr_epi32(a, a, a, a, b, b, b, b));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponents))
}
