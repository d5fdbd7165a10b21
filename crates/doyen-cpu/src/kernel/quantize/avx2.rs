//! Int8 activations, vectorised; the values are those of the scalar functions, bit for bit.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::{FLUSH, GROUP, Int8Row, SPAN_BYTES, leaves, put_group};
use doyen_tensor::format::Bits;
use std::arch::x86_64::*;

/// Codes of up to 32 columns in column order, the scales of their two halves and the sums of the codes of each half.
struct Quantized {
    codes: __m256i,
    scales: [f32; 2],
    sums: [i32; 2],
}

/// Writes one row. `block` is a power of two of at least 16, or the whole row.
///
/// # Panics
/// When `out` is shorter than a row.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int8_row(x: &[f32], bits: Bits, block: usize, out: &mut [u8], mut rest: Option<&mut [u8]>) {
    let at = Int8Row::new(x.len(), block);
    let halves = block == 16 && x.len() > 16;
    let span = SPAN_BYTES * bits.per_byte();
    for (s, xs) in x.chunks(span).enumerate() {
        let mut codes = [[_mm256_setzero_si256(); 4]; 2];
        for (i, xg) in xs.chunks(GROUP).enumerate() {
            let g = s * span / GROUP + i;
            let q = quantize32(xg, halves);
            codes[0][i] = q.codes;
            put_groups(out, &at, g, bits, &q, (halves, xg.len()));
            if let Some(rest) = &mut rest {
                let left = what_is_left(xg, &q);
                let q = quantize32(&left[..xg.len()], halves);
                codes[1][i] = q.codes;
                put_groups(rest, &at, g, bits, &q, (halves, xg.len()));
            }
        }
        store_planes(bits, codes[0], &mut out[s * span..(s + 1) * span]);
        if let Some(rest) = &mut rest {
            store_planes(bits, codes[1], &mut rest[s * span..(s + 1) * span]);
        }
    }
    for row in std::iter::once(out).chain(rest) {
        row[x.len().next_multiple_of(span)..at.scales].fill(0);
        for array in [at.scales, at.sums, at.centres] {
            row[array + 4 * at.groups..array + at.sums - at.scales].fill(0);
        }
    }
}

/// Writes the numbers of 32 columns, the `g`-th, of which `len` are there; as two groups or one.
fn put_groups(
    row: &mut [u8],
    at: &Int8Row,
    g: usize,
    bits: Bits,
    q: &Quantized,
    (halves, len): (bool, usize),
) {
    if halves {
        put_group(row, at, 2 * g, bits, q.scales[0], q.sums[0]);
        if len > GROUP / 2 {
            put_group(row, at, 2 * g + 1, bits, q.scales[1], q.sums[1]);
        }
    } else {
        put_group(row, at, g, bits, q.scales[0], q.sums[0] + q.sums[1]);
    }
}

/// What the codes of up to 32 columns leave.
#[target_feature(enable = "avx2,fma,f16c")]
fn what_is_left(x: &[f32], q: &Quantized) -> [f32; GROUP] {
    let mut codes = [0i8; GROUP];
    // SAFETY: 32 bytes.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), q.codes) };
    let mut left = [0f32; GROUP];
    for (i, (l, &v)) in left.iter_mut().zip(x).enumerate() {
        *l = leaves(v, q.scales[i / (GROUP / 2)], codes[i]);
    }
    left
}

/// Quantizes 1 to 32 columns as one group, or as two of 16.
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize32(x: &[f32], halves: bool) -> Quantized {
    let mut padded = [0f32; GROUP];
    let src = if x.len() == GROUP {
        x.as_ptr()
    } else {
        padded[..x.len()].copy_from_slice(x);
        padded.as_ptr()
    };
    let zero = _mm256_setzero_ps();
    let magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFF_FFFF));
    // SAFETY: `src` points to 32 floats.
    let v: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(src.add(8 * i)) });
    let a = v.map(|v| _mm256_and_ps(v, magnitude));
    let mut amax = [hmax(_mm256_max_ps(a[0], a[1])), hmax(_mm256_max_ps(a[2], a[3]))];
    // 0 * x is 0 for a number and NaN for an infinity or a NaN; `max` alone may lose a NaN.
    let taint = |i: usize| _mm256_fmadd_ps(v[i], zero, _mm256_mul_ps(v[i + 1], zero));
    let mut tainted = [any_nan(taint(0)), any_nan(taint(2))];
    if !halves {
        amax = [amax[0].max(amax[1]); 2];
        tainted = [tainted[0] | tainted[1]; 2];
    }
    let factor = |h: usize| match (tainted[h], amax[h] < FLUSH) {
        (true, _) => (f32::NAN, 0.0),
        (_, true) => (0.0, 0.0),
        _ => (amax[h] / 127.0, 127.0 / amax[h]),
    };
    let ((s0, i0), (s1, i1)) = (factor(0), factor(1));
    let (i0, i1) = (_mm256_set1_ps(i0), _mm256_set1_ps(i1));
    let q = [
        _mm256_cvtps_epi32(_mm256_mul_ps(v[0], i0)),
        _mm256_cvtps_epi32(_mm256_mul_ps(v[1], i0)),
        _mm256_cvtps_epi32(_mm256_mul_ps(v[2], i1)),
        _mm256_cvtps_epi32(_mm256_mul_ps(v[3], i1)),
    ];
    let (lo, hi) = (_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    // The packs work within 128-bit halves: dwords come out as 0 2 4 6 | 1 3 5 7 of the column order.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lo, hi), order);
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    let quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    let sums = [hsum_epi32(_mm256_castsi256_si128(quads)), hsum_epi32(_mm256_extracti128_si256::<1>(quads))];
    Quantized { codes, scales: [s0, s1], sums }
}

/// Writes column-ordered codes of a span plane by plane: all columns that are the first code of their byte, ...
#[target_feature(enable = "avx2,fma,f16c")]
fn store_planes(bits: Bits, codes: [__m256i; 4], out: &mut [u8]) {
    let planes = match bits {
        Bits::B8 => codes,
        Bits::B4 => {
            let (even, odd) = deinterleave(codes[0], codes[1]);
            [even, odd, codes[2], codes[3]]
        }
        Bits::B2 => {
            let (e0, o0) = deinterleave(codes[0], codes[1]);
            let (e1, o1) = deinterleave(codes[2], codes[3]);
            let (p0, p2) = deinterleave(e0, e1);
            let (p1, p3) = deinterleave(o0, o1);
            [p0, p1, p2, p3]
        }
    };
    for (o, plane) in out.chunks_exact_mut(SPAN_BYTES).zip(planes) {
        // SAFETY: `o` is 32 bytes long.
        unsafe { _mm256_storeu_si256(o.as_mut_ptr().cast(), plane) };
    }
}

/// Even and odd bytes of 64.
#[target_feature(enable = "avx2,fma,f16c")]
fn deinterleave(a: __m256i, b: __m256i) -> (__m256i, __m256i) {
    let low = _mm256_set1_epi16(0xFF);
    let even = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    let odd = _mm256_packus_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
    (_mm256_permute4x64_epi64::<0b11_01_10_00>(even), _mm256_permute4x64_epi64::<0b11_01_10_00>(odd))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn hmax(v: __m256) -> f32 {
    let m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps::<1>(m, m)))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn any_nan(v: __m256) -> bool {
    _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v)) != 0
}

#[target_feature(enable = "avx2,fma,f16c")]
fn hsum_epi32(v: __m128i) -> i32 {
    let s = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
    _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32::<0b00_00_00_01>(s)))
}
