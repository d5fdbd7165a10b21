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
    // Of the last eight, what lies behind the wanted numbers in the view is overwritten below.
    let eights = &mut out.as_chunks_mut::<8>().0[..len.div_ceil(8)];
    let whole = 8 * eights.len().min(v.len() / 8);
    // SAFETY: chunks of 8 numbers of the type.
    unsafe {
        match v.float_type() {
            FloatType::F32 => each_eight::<32>(v.bytes(), eights, |p| load8(FloatType::F32, p.as_ptr())),
            FloatType::F16 => each_eight::<16>(v.bytes(), eights, |p| load8(FloatType::F16, p.as_ptr())),
            FloatType::BF16 => each_eight::<16>(v.bytes(), eights, |p| load8(FloatType::BF16, p.as_ptr())),
        }
    }
    for (j, o) in out.iter_mut().enumerate().take(len).skip(whole) {
        *o = v.get(j);
    }
    zero_eight(out, len);
}

/// Writes `read` of every `N` bytes to the next eight numbers, as long as there are both.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn each_eight<const N: usize>(bytes: &[u8], out: &mut [[f32; 8]], read: impl Fn(&[u8; N]) -> __m256) {
    for (p, o) in bytes.as_chunks::<N>().0.iter().zip(out) {
        // SAFETY: `o` is eight floats long.
        unsafe { _mm256_storeu_ps(o.as_mut_ptr(), read(p)) };
    }
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
        ZeroPoints::AcrossRows(packed) if blocks == 1 => codes(w.bits, packed, first, len, out),
        ZeroPoints::PerBlock { packed, row_bytes } if row_bytes * w.bits.per_byte() == blocks => {
            codes(w.bits, packed, first * blocks, len, out);
        }
        // A byte a row: lane l gets byte l / blocks, and of that code l % blocks.
        ZeroPoints::PerBlock { packed, row_bytes: 1 } if blocks.is_power_of_two() => {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let log = _mm_cvtsi32_si128(blocks.trailing_zeros() as i32);
            let byte = _mm256_srl_epi32(lanes, log);
            let code = _mm256_sub_epi32(lanes, _mm256_sll_epi32(byte, log));
            let shift = _mm256_mullo_epi32(code, _mm256_set1_epi32(w.bits.get() as i32));
            let mask = _mm256_set1_epi32(i32::from(w.bits.max_code()));
            for (i, o) in out.as_chunks_mut::<8>().0.iter_mut().enumerate().take(len.div_ceil(8)) {
                let bytes = eight_codes(Bits::B8, packed, first + 8 * i / blocks);
                let codes = _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(bytes, byte), shift);
                store8(_mm256_and_si256(codes, mask), o);
            }
        }
        ZeroPoints::AcrossRows(_) | ZeroPoints::PerBlock { .. } => {
            for (i, o) in out.iter_mut().enumerate().take(len) {
                *o = w.zero_point(first + i / blocks, i % blocks);
            }
        }
    }
}

/// Codes `first .. first + len` as numbers.
#[target_feature(enable = "avx2,fma,f16c")]
fn codes(bits: Bits, packed: &[u8], first: usize, len: usize, out: &mut [f32]) {
    let out = &mut out.as_chunks_mut::<8>().0[..len.div_ceil(8)];
    // Eight codes are as many bytes as a code has bits.
    let mut done = 0;
    if first.is_multiple_of(bits.per_byte()) {
        let bytes = &packed[first / bits.per_byte()..];
        done = out.len().min(bytes.len() / bits.get());
        let number = |v| _mm256_cvtepi32_ps(v);
        match bits {
            Bits::B2 => {
                each_eight::<2>(bytes, out, |p| number(lanes(Bits::B2, u64::from(u16::from_le_bytes(*p)))));
            }
            Bits::B4 => {
                each_eight::<4>(bytes, out, |p| number(lanes(Bits::B4, u64::from(u32::from_le_bytes(*p)))));
            }
            Bits::B8 => each_eight::<8>(bytes, out, |p| number(lanes(Bits::B8, u64::from_le_bytes(*p)))),
        }
    }
    for (i, o) in out.iter_mut().enumerate().skip(done) {
        store8(eight_codes(bits, packed, first + 8 * i), o);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store8(v: __m256i, out: &mut [f32; 8]) {
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtepi32_ps(v)) };
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
    lanes(bits, word >> (bits.get() * (i % p)))
}

/// The eight lowest codes of a word.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn lanes(bits: Bits, word: u64) -> __m256i {
    let (shifts, mask) = match bits {
        Bits::B8 => return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(word as i64)),
        Bits::B4 => (_mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), 15),
        Bits::B2 => (_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), 3),
    };
    let all = _mm256_set1_epi32(word as i32);
    _mm256_and_si256(_mm256_srlv_epi32(all, shifts), _mm256_set1_epi32(mask))
}
