//! Int8 activations, vectorised; the values are those of the scalar functions, bit for bit.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::{FLUSH, Int8Row, SPAN_BYTES, WIDE_GROUP, leaves, put_group};
use doyen_tensor::format::Bits;
use std::arch::x86_64::*;

/// Columns that are quantized at once: whole spans of every width, and whole groups of every length.
const CHUNK: usize = WIDE_GROUP;
/// Columns of a vector of codes, and vectors of a chunk.
const VECTOR: usize = 32;
const VECTORS: usize = CHUNK / VECTOR;

/// A chunk's codes in column order, the scales of its halves of vectors and the sums of their codes.
struct Quantized {
    codes: [__m256i; VECTORS],
    scales: [[f32; 2]; VECTORS],
    sums: [[i32; 2]; VECTORS],
}

/// Writes one row, in groups of `group` columns: 16, 32 or a chunk.
///
/// # Panics
/// When `out` is shorter than a row.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int8_row(
    x: &[f32],
    bits: Bits,
    group: usize,
    at: &Int8Row,
    out: &mut [u8],
    mut rest: Option<&mut [u8]>,
) {
    for (c, xs) in x.chunks(CHUNK).enumerate() {
        let mut padded = [0f32; CHUNK];
        padded[..xs.len()].copy_from_slice(xs);
        let q = quantize(&padded, group);
        let place = Chunk { at, bits, group, start: c * CHUNK, len: xs.len() };
        place.write(&q, out);
        if let Some(rest) = &mut rest {
            place.write(&quantize(&what_is_left(&padded, &q), group), rest);
        }
    }
    let span = SPAN_BYTES * bits.per_byte();
    for row in std::iter::once(out).chain(rest) {
        row[x.len().next_multiple_of(span)..at.scales].fill(0);
        for array in [at.scales, at.sums, at.centres] {
            row[array + 4 * at.groups..array + at.sums - at.scales].fill(0);
        }
    }
}

/// Where a chunk's codes and numbers go.
struct Chunk<'a> {
    at: &'a Int8Row,
    bits: Bits,
    /// Columns of a group: 16, 32 or a chunk.
    group: usize,
    /// First column, and how many there are.
    start: usize,
    len: usize,
}

impl Chunk<'_> {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn write(&self, q: &Quantized, row: &mut [u8]) {
        let span = SPAN_BYTES * self.bits.per_byte();
        for s in (0..self.len).step_by(span) {
            let mut codes = [_mm256_setzero_si256(); VECTORS];
            codes[..span / VECTOR].copy_from_slice(&q.codes[s / VECTOR..][..span / VECTOR]);
            store_planes(self.bits, codes, &mut row[self.start + s..][..span]);
        }
        let (scales, sums) = (q.scales.as_flattened(), q.sums.as_flattened());
        for c in (0..self.len).step_by(self.group) {
            let halves = c / 16..(c + self.group) / 16;
            let number = (self.start + c) / self.group;
            put_group(row, self.at, number, self.bits, scales[c / 16], sums[halves].iter().sum());
        }
    }
}

/// What the codes of a chunk leave.
#[target_feature(enable = "avx2,fma,f16c")]
fn what_is_left(x: &[f32; CHUNK], q: &Quantized) -> [f32; CHUNK] {
    let mut left = [0f32; CHUNK];
    for (v, (left, x)) in left.chunks_exact_mut(VECTOR).zip(x.chunks_exact(VECTOR)).enumerate() {
        let mut codes = [0i8; VECTOR];
        // SAFETY: 32 bytes.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), q.codes[v]) };
        for (i, (l, &x)) in left.iter_mut().zip(x).enumerate() {
            *l = leaves(x, q.scales[v][i / 16], codes[i]);
        }
    }
    left
}

/// Quantizes a chunk in groups of `group` columns: 16, 32 or all of it.
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize(x: &[f32; CHUNK], group: usize) -> Quantized {
    let mut extents = [[Extent::default(); 2]; VECTORS];
    for (e, x) in extents.iter_mut().zip(x.as_chunks().0) {
        *e = extent(x);
    }
    if group > 16 {
        for e in &mut extents {
            *e = [e[0].max(e[1]); 2];
        }
    }
    if group > VECTOR {
        let all = extents.iter().fold(Extent::default(), |all, e| all.max(e[0]));
        extents = [[all; 2]; VECTORS];
    }
    let mut q = Quantized {
        codes: [_mm256_setzero_si256(); VECTORS],
        scales: [[0.0; 2]; VECTORS],
        sums: [[0; 2]; VECTORS],
    };
    for (v, x) in x.as_chunks().0.iter().enumerate() {
        let factors = extents[v].map(Extent::factors);
        q.scales[v] = factors.map(|(scale, _)| scale);
        (q.codes[v], q.sums[v]) = codes(x, factors.map(|(_, inverse)| inverse));
    }
    q
}

/// Largest magnitude of some columns, and whether one of them is no finite number.
#[derive(Clone, Copy, Default)]
struct Extent {
    amax: f32,
    tainted: bool,
}

impl Extent {
    fn max(self, other: Self) -> Self {
        Self { amax: self.amax.max(other.amax), tainted: self.tainted | other.tainted }
    }

    /// The scale, and what numbers are multiplied by to become codes.
    fn factors(self) -> (f32, f32) {
        match (self.tainted, self.amax < FLUSH) {
            (true, _) => (f32::NAN, 0.0),
            (_, true) => (0.0, 0.0),
            _ => (self.amax / 127.0, 127.0 / self.amax),
        }
    }
}

/// The extents of two halves.
#[target_feature(enable = "avx2,fma,f16c")]
fn extent(x: &[f32; VECTOR]) -> [Extent; 2] {
    let v = load(x);
    let magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFF_FFFF));
    let a = v.map(|v| _mm256_and_ps(v, magnitude));
    // 0 * x is 0 for a number and NaN for an infinity or a NaN; `max` alone may lose a NaN.
    let zero = _mm256_setzero_ps();
    let taint = |i: usize| _mm256_fmadd_ps(v[i], zero, _mm256_mul_ps(v[i + 1], zero));
    [
        Extent { amax: hmax(_mm256_max_ps(a[0], a[1])), tainted: any_nan(taint(0)) },
        Extent { amax: hmax(_mm256_max_ps(a[2], a[3])), tainted: any_nan(taint(2)) },
    ]
}

/// Codes of 32 columns whose halves are multiplied by `inverse`, and the sum of each half's.
#[target_feature(enable = "avx2,fma,f16c")]
fn codes(x: &[f32; VECTOR], inverse: [f32; 2]) -> (__m256i, [i32; 2]) {
    let v = load(x);
    let (i0, i1) = (_mm256_set1_ps(inverse[0]), _mm256_set1_ps(inverse[1]));
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
    (codes, sums)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn load(x: &[f32; VECTOR]) -> [__m256; 4] {
    let mut v = [_mm256_setzero_ps(); 4];
    for (v, x) in v.iter_mut().zip(x.as_chunks::<8>().0) {
        // SAFETY: eight floats.
        *v = unsafe { _mm256_loadu_ps(x.as_ptr()) };
    }
    v
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
