//! Scales and zero points of a segment, widened to f32 from whatever type they are stored in.

use doyen_tensor::{
    FloatType, FloatView,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use std::arch::x86_64::*;

/// Widens `len` numbers from `start` on into `out`, and eight zeros behind them.
///
/// # Panics
/// When the view is too short, or `out` is shorter than `len + 8`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen(view: FloatView<'_>, start: usize, len: usize, out: &mut [f32]) {
    let v = view.slice(start, view.len() - start);
    let out = &mut out[..len + 8];
    for i in (0..len).step_by(8) {
        if i + 8 <= v.len() {
            // What lies behind the wanted numbers in the view is overwritten below.
            // SAFETY: elements i .. i + 8 are inside the view.
            let x = unsafe { load8(v.float_type(), v.bytes().as_ptr().add(i * v.float_type().size())) };
            let o = &mut out[i..i + 8];
            // SAFETY: `o` is eight floats long.
            unsafe { _mm256_storeu_ps(o.as_mut_ptr(), x) };
        } else {
            for (j, o) in out.iter_mut().enumerate().take(len).skip(i) {
                *o = v.get(j);
            }
        }
    }
    zero_eight(out, len);
}

/// Zeros behind the numbers of a segment.
#[inline]
fn zero_eight(out: &mut [f32], at: usize) {
    if let Some(eight) = out[at..].first_chunk_mut::<8>() {
        *eight = [0.0; 8];
    }
}

/// Eight numbers of a stored type as f32.
///
/// # Safety
/// `p` points to eight elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernel::linear) unsafe fn load8(ty: FloatType, p: *const u8) -> __m256 {
    match ty {
        // SAFETY: eight f32 are 32 bytes, by the caller's promise.
        FloatType::F32 => unsafe { _mm256_loadu_ps(p.cast()) },
        // SAFETY: eight f16 are 16 bytes, by the caller's promise.
        FloatType::F16 => _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) }),
        FloatType::BF16 => {
            // SAFETY: eight bf16 are 16 bytes, by the caller's promise.
            let half = unsafe { _mm_loadu_si128(p.cast()) };
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
        }
    }
}

/// Zero points of blocks `start .. start + len` of row `n` into `out`, and zeros up to eight behind them.
///
/// # Panics
/// When the matrix is not valid for them, or `out` is shorter than `len + 8`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn zero_points(w: &QuantMatrix<'_>, n: usize, start: usize, len: usize, out: &mut [f32]) {
    match w.zero_points {
        ZeroPoints::Default => {
            out[..len].fill(f32::from(w.bits.default_zero_point()));
            zero_eight(out, len);
        }
        ZeroPoints::Float(v) => widen(v, n * w.blocks() + start, len, out),
        ZeroPoints::AcrossRows(_) => {
            out[..len].fill(w.zero_point(n, 0));
            zero_eight(out, len);
        }
        ZeroPoints::PerBlock { packed, row_bytes } => {
            // From the row on, not the row alone: most rows have fewer than eight bytes, and what is read behind them is
            // overwritten below.
            let rows = &packed[n * row_bytes..];
            for i in (0..len).step_by(8) {
                let z = _mm256_cvtepi32_ps(eight_codes(w.bits, rows, start + i));
                let o = &mut out[i..i + 8];
                // SAFETY: `o` is eight floats long.
                unsafe { _mm256_storeu_ps(o.as_mut_ptr(), z) };
            }
            zero_eight(out, len);
        }
    }
}

/// Zero points of all blocks of rows `first .. first + rows`, row after row.
///
/// # Panics
/// When the matrix is not valid for them, or `out` is shorter than eight more.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn zero_points_of_rows(w: &QuantMatrix<'_>, first: usize, rows: usize, out: &mut [f32]) {
    let blocks = w.blocks();
    let len = rows * blocks;
    let out = &mut out[..len + 8];
    match w.zero_points {
        ZeroPoints::Default => out.fill(f32::from(w.bits.default_zero_point())),
        ZeroPoints::Float(v) => widen(v, first * blocks, len, out),
        ZeroPoints::AcrossRows(packed) if blocks == 1 => {
            eights(len, out, |i| eight_codes(w.bits, packed, first + i));
        }
        ZeroPoints::PerBlock { packed, row_bytes } if row_bytes * w.bits.per_byte() == blocks => {
            eights(len, out, |i| eight_codes(w.bits, packed, first * blocks + i));
        }
        // The lowest code of each byte.
        ZeroPoints::PerBlock { packed, row_bytes: 1 } if blocks == 1 => {
            let mask = _mm256_set1_epi32(i32::from(w.bits.max_code()));
            eights(len, out, |i| _mm256_and_si256(eight_codes(Bits::B8, packed, first + i), mask));
        }
        ZeroPoints::AcrossRows(_) | ZeroPoints::PerBlock { .. } => {
            for (i, o) in out.iter_mut().enumerate().take(len) {
                *o = w.zero_point(first + i / blocks, i % blocks);
            }
        }
    }
}

/// Writes `codes(i)` at `i` for every eighth `i` below `len`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eights(len: usize, out: &mut [f32], codes: impl Fn(usize) -> __m256i) {
    for i in (0..len).step_by(8) {
        let o = &mut out[i..i + 8];
        // SAFETY: `o` is eight floats long.
        unsafe { _mm256_storeu_ps(o.as_mut_ptr(), _mm256_cvtepi32_ps(codes(i))) };
    }
}

/// Codes `i .. i + 8` of packed codes; those past their end are zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_codes(bits: Bits, row: &[u8], i: usize) -> __m256i {
    let p = bits.per_byte();
    let at = &row[i / p..];
    let word = if let Some(eight) = at.first_chunk::<8>() {
        u64::from_le_bytes(*eight)
    } else {
        let mut eight = [0u8; 8];
        eight[..at.len()].copy_from_slice(at);
        u64::from_le_bytes(eight)
    };
    let word = word >> (bits.get() * (i % p));
    let (shifts, mask) = match bits {
        Bits::B8 => return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(word as i64)),
        Bits::B4 => (_mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), 15),
        Bits::B2 => (_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), 3),
    };
    let all = _mm256_set1_epi32(word as i32);
    _mm256_and_si256(_mm256_srlv_epi32(all, shifts), _mm256_set1_epi32(mask))
}
