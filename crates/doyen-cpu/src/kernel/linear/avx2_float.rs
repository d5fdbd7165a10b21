//! Products with float weights (f32, f16, bf16 as stored) with AVX2, FMA and F16C.
//!
//! Row-major weights: an element has one accumulator of eight lanes, lane `j` takes columns `8 i + j` ascending, then the
//! lanes are added by halves. Column-major weights: vectors run over outputs, so that an element is one chain of fused
//! multiply-adds over ascending columns; between chunks of columns the chain rests in the output. Neither depends
//! on tiles or tokens.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]
#![allow(clippy::needless_range_loop, reason = "r and t index a tile in several arrays at once")]

use super::{Columns, FloatMatrix, Kernel, Orientation, int::load8, tiles};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{FloatType, FloatView};
use std::{arch::x86_64::*, ops::Range};

/// Weight rows that meet all tokens before the next ones (row-major).
const ROW_BLOCK: usize = 16;
/// Tokens per pass over a row block (row-major).
const BATCH: usize = 8;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

const fn float_type<const TY: u8>() -> FloatType {
    match TY {
        F32 => FloatType::F32,
        F16 => FloatType::F16,
        _ => FloatType::BF16,
    }
}

/// The kernel of a stored type and orientation.
pub(super) fn kernel(ty: FloatType, orientation: Orientation) -> Kernel {
    macro_rules! table {
        ($($float:ident $name:literal),* $(,)?) => {
            match (orientation, ty) {
                $((Orientation::RowMajor, FloatType::$float) =>
                    Kernel::float(concat!("avx2-", $name, "-rows"), rows::<$float>),
                (Orientation::ColumnMajor, FloatType::$float) =>
                    Kernel::float(concat!("avx2-", $name, "-columns"), columns::<$float>),)*
            }
        };
    }
    table! { F32 "f32", F16 "f16", BF16 "bf16" }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const TY: u8>(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    if acts.tokens() == 1 {
        row_major::<TY, 4, 1>(w, acts, bias, out);
    } else {
        row_major::<TY, 2, 4>(w, acts, bias, out);
    }
}

/// Few columns of the file at a time stream best for one token; many amortise the accumulators' trips.
#[target_feature(enable = "avx2,fma,f16c")]
fn columns<const TY: u8>(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    if acts.tokens() == 1 {
        column_major::<TY, 4, 1, 8>(w, acts, bias, out);
    } else {
        column_major::<TY, 2, 4, 64>(w, acts, bias, out);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn row_major<const TY: u8, const R: usize, const T: usize>(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    for block in tiles(out.range(), ROW_BLOCK) {
        for tokens in tiles(0..acts.tokens(), BATCH) {
            for rows in tiles(block.clone(), R) {
                let mut t = tokens.start;
                while t < tokens.end {
                    let left = tokens.end - t;
                    t += match (rows.len() == R, left) {
                        (true, 4..) if T >= 4 => row_tile::<TY, R, 4>(w, acts, bias, rows.start, t, out),
                        (true, _) => row_tile::<TY, R, 1>(w, acts, bias, rows.start, t, out),
                        (false, _) => {
                            for n in rows.clone() {
                                row_tile::<TY, 1, 1>(w, acts, bias, n, t, out);
                            }
                            1
                        }
                    };
                }
            }
        }
    }
}

/// `R` rows from `n` on times `T` tokens from `t` on; returns `T`.
#[target_feature(enable = "avx2,fma,f16c")]
fn row_tile<const TY: u8, const R: usize, const T: usize>(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    n: usize,
    t: usize,
    out: &mut Columns<'_>,
) -> usize {
    let (ty, size) = (float_type::<TY>(), float_type::<TY>().size());
    let rows: [&[u8]; R] =
        std::array::from_fn(|r| &w.values.bytes()[(n + r) * w.stride * size..][..w.cols * size]);
    let xs: [&[u8]; T] = std::array::from_fn(|i| &acts.row(t + i)[..4 * w.cols]);
    let mut acc = [[_mm256_setzero_ps(); R]; T];
    let whole = w.cols / 8 * 8;
    for k in (0..whole).step_by(8) {
        let mut x = [_mm256_setzero_ps(); T];
        for i in 0..T {
            // SAFETY: k + 8 <= cols, and each slice holds cols elements.
            x[i] = unsafe { _mm256_loadu_ps(xs[i].as_ptr().add(4 * k).cast()) };
        }
        for r in 0..R {
            // SAFETY: as above.
            let v = unsafe { load8(ty, rows[r].as_ptr().add(k * size)) };
            for i in 0..T {
                acc[i][r] = _mm256_fmadd_ps(v, x[i], acc[i][r]);
            }
        }
    }
    if whole < w.cols {
        let rest = w.cols - whole;
        let x: [__m256; T] = std::array::from_fn(|i| padded(FloatType::F32, &xs[i][4 * whole..], rest));
        for r in 0..R {
            let v = padded(ty, &rows[r][whole * size..], rest);
            for i in 0..T {
                acc[i][r] = _mm256_fmadd_ps(v, x[i], acc[i][r]);
            }
        }
    }
    for (i, sums) in acc.iter().enumerate() {
        for (r, (y, v)) in out.row(t + i, n..n + R).iter_mut().zip(sums).enumerate() {
            *y = hsum(*v) + bias.map_or(0.0, |b| b.get(n + r));
        }
    }
    T
}

/// `len < 8` numbers of a stored type, and zeros.
#[target_feature(enable = "avx2,fma,f16c")]
fn padded(ty: FloatType, bytes: &[u8], len: usize) -> __m256 {
    let mut buffer = [0u8; 32];
    buffer[..len * ty.size()].copy_from_slice(&bytes[..len * ty.size()]);
    // SAFETY: 32 bytes hold eight elements of any of the types.
    unsafe { load8(ty, buffer.as_ptr()) }
}

/// `V` vectors of outputs times `T` tokens, `CHUNK` columns at a time.
#[target_feature(enable = "avx2,fma,f16c")]
fn column_major<const TY: u8, const V: usize, const T: usize, const CHUNK: usize>(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let range = out.range();
    for t in 0..acts.tokens() {
        out.row(t, range.clone()).fill(0.0);
    }
    for ks in tiles(0..w.cols, CHUNK) {
        let mut n = range.start;
        while n < range.end {
            let step = match range.end - n {
                left if left >= 8 * V => 8 * V,
                8.. => 8,
                left => left,
            };
            let mut t = 0;
            while t < acts.tokens() {
                let many = T > 1 && acts.tokens() - t >= T;
                match (step == 8 * V, step >= 8) {
                    (true, _) if many => column_tile::<TY, V, T>(w, acts, ks.clone(), n, t, out),
                    (true, _) => column_tile::<TY, V, 1>(w, acts, ks.clone(), n, t, out),
                    (_, true) if many => column_tile::<TY, 1, T>(w, acts, ks.clone(), n, t, out),
                    (_, true) => column_tile::<TY, 1, 1>(w, acts, ks.clone(), n, t, out),
                    _ => {
                        for i in t..t + if many { T } else { 1 } {
                            column_rest(w, acts, ks.clone(), n, i, out);
                        }
                    }
                }
                t += if many { T } else { 1 };
            }
            n += step;
        }
    }
    if let Some(bias) = bias {
        for t in 0..acts.tokens() {
            for (y, n) in out.row(t, range.clone()).iter_mut().zip(range.clone()) {
                *y += bias.get(n);
            }
        }
    }
}

/// Bits of number `k`.
///
/// # Safety
/// `row` holds more than `k` numbers.
#[inline(always)]
unsafe fn read_i32(row: &[u8], k: usize) -> i32 {
    // SAFETY: the caller's promise; an array of bytes has no alignment.
    i32::from_le_bytes(unsafe { *row.as_ptr().add(4 * k).cast::<[u8; 4]>() })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn column_tile<const TY: u8, const V: usize, const T: usize>(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    ks: Range<usize>,
    n: usize,
    t: usize,
    out: &mut Columns<'_>,
) {
    let (ty, size) = (float_type::<TY>(), float_type::<TY>().size());
    let xs: [&[u8]; T] = std::array::from_fn(|i| &acts.row(t + i)[..4 * w.cols]);
    let mut acc: [[__m256; V]; T] = std::array::from_fn(|i| {
        let y = out.row(t + i, n..n + 8 * V);
        // SAFETY: `y` holds 8 * V numbers.
        std::array::from_fn(|v| unsafe { _mm256_loadu_ps(y.as_ptr().add(8 * v)) })
    });
    let ahead = ks.len() * w.stride * size;
    for k in ks {
        let line = &w.values.bytes()[(k * w.stride + n) * size..][..8 * V * size];
        if T == 1 {
            // The same place of the next chunk's line, which is the next to be read here; one token waits for nothing else.
            for at in (0..8 * V * size).step_by(64) {
                _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().wrapping_add(ahead + at).cast());
            }
        }
        // SAFETY: `line` holds 8 * V elements.
        let ws: [__m256; V] = std::array::from_fn(|v| unsafe { load8(ty, line.as_ptr().add(8 * v * size)) });
        for i in 0..T {
            // SAFETY: k < cols, and the row holds cols numbers.
            let x = _mm256_castsi256_ps(_mm256_set1_epi32(unsafe { read_i32(xs[i], k) }));
            for v in 0..V {
                acc[i][v] = _mm256_fmadd_ps(ws[v], x, acc[i][v]);
            }
        }
    }
    for (i, vs) in acc.iter().enumerate() {
        let y = out.row(t + i, n..n + 8 * V);
        for (v, a) in vs.iter().enumerate() {
            // SAFETY: `y` holds 8 * V numbers.
            unsafe { _mm256_storeu_ps(y.as_mut_ptr().add(8 * v), *a) };
        }
    }
}

/// The outputs from `n` to the end of the range, fewer than a vector; same chain per element.
#[target_feature(enable = "avx2,fma,f16c")]
fn column_rest(
    w: &FloatMatrix<'_>,
    acts: &Prepared<'_>,
    ks: Range<usize>,
    n: usize,
    t: usize,
    out: &mut Columns<'_>,
) {
    let row = acts.row(t);
    let end = out.range().end;
    for (y, n) in out.row(t, n..end).iter_mut().zip(n..end) {
        for k in ks.clone() {
            let x = f32::from_le_bytes([row[4 * k], row[4 * k + 1], row[4 * k + 2], row[4 * k + 3]]);
            *y = w.get(n, k).mul_add(x, *y);
        }
    }
}

/// Adds the lanes: halves, quarters, pairs.
#[target_feature(enable = "avx2,fma,f16c")]
fn hsum(v: __m256) -> f32 {
    let s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps::<1>(s, s)))
}
