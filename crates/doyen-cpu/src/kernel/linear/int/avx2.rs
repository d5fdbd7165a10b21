//! [`Lanes`] of eight and of sixteen rows with AVX2, FMA and F16C, and the kernels made of them.
//!
//! Codes below 16 are multiplied as they are: eight `vpmaddubsw` add up to at most `8 * 2 * 15 * 127 = 30480`, so 32 columns
//! stay in 16 bits. 8-bit codes would overflow there, so they are taken as signed (`code - 128`) and multiplied as
//! `|w| * (a with w's sign)`: at most `2 * 128 * 127`.

use super::{
    entries::entries,
    lanes::{ByteLanes, FloatLanes, Lanes, RUN, offset},
    stream_ints::Plain,
};
use std::{
    arch::{asm, x86_64::*},
    marker::PhantomData,
};

entries!("avx2", "avx2,fma,f16c", Sixteen<Plain>, Eight, Plain);

/// Eight lanes.
pub(super) struct Eight;

impl FloatLanes for Eight {
    const TOKENS: usize = 6;
}

impl Eight {
    /// Reads a vector.
    ///
    /// # Safety
    /// As [`Lanes`] says.
    #[inline(always)]
    pub(super) unsafe fn load_int(p: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
}

impl Lanes for Eight {
    const ROWS: usize = 8;
    type Int = __m256i;
    type Float = __m256;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_set1_ps(p.read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn neg_mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn to_float(v: __m256i) -> __m256 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut u8, v: __m256i) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }

    #[inline(always)]
    unsafe fn transpose(base: *const u8, stride: usize) -> [__m256i; 4] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let mut row = [_mm256_setzero_si256(); 4];
            for (r, row) in row.iter_mut().enumerate() {
                let low = _mm_loadu_si128(base.add(r * stride).cast());
                let high = _mm_loadu_si128(base.add((r + 4) * stride).cast());
                *row = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            }
            let (a, b) = (_mm256_unpacklo_epi32(row[0], row[1]), _mm256_unpackhi_epi32(row[0], row[1]));
            let (c, d) = (_mm256_unpacklo_epi32(row[2], row[3]), _mm256_unpackhi_epi32(row[2], row[3]));
            [
                _mm256_unpacklo_epi64(a, c),
                _mm256_unpackhi_epi64(a, c),
                _mm256_unpacklo_epi64(b, d),
                _mm256_unpackhi_epi64(b, d),
            ]
        }
    }
    #[inline(always)]
    unsafe fn plane(v: __m256i, n: i32, mask: u8) -> __m256i {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_and_si256(_mm256_srl_epi32(v, _mm_cvtsi32_si128(n)), _mm256_set1_epi8(mask as i8)) }
    }
    #[inline(always)]
    unsafe fn code(v: __m256i, n: i32, mask: i32) -> __m256i {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm256_and_si256(_mm256_srl_epi32(v, _mm_cvtsi32_si128(n)), _mm256_set1_epi32(mask)) }
    }
    #[inline(always)]
    unsafe fn transpose_floats(rows: *const f32, stride: usize, len: usize, out: *mut f32) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { transpose_eight(rows, stride, len, out, 8) }
    }
}

/// Sixteen lanes: two vectors, which share the broadcast of activations. Bytes are multiplied as `D` does it.
pub(super) struct Sixteen<D>(PhantomData<D>);

impl<D> Lanes for Sixteen<D> {
    const ROWS: usize = 16;
    type Int = [__m256i; 2];
    type Float = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::zero(); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::load(p), Eight::load(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::Float) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            Eight::store(p, v[0]);
            Eight::store(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::splat(p); 2] }
    }
    #[inline(always)]
    unsafe fn add(a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::add(a[0], b[0]), Eight::add(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::sub(a[0], b[0]), Eight::sub(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::mul(a[0], b[0]), Eight::mul(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::mul_add(a[0], b[0], c[0]), Eight::mul_add(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn neg_mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::neg_mul_add(a[0], b[0], c[0]), Eight::neg_mul_add(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn to_float(v: Self::Int) -> Self::Float {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::to_float(v[0]), Eight::to_float(v[1])] }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut u8, v: Self::Int) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            Eight::store_int(p, v[0]);
            Eight::store_int(p.add(32), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn transpose(base: *const u8, stride: usize) -> [Self::Int; 4] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let (low, high) =
                (Eight::transpose(base, stride), Eight::transpose(base.add(8 * stride), stride));
            [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
        }
    }
    #[inline(always)]
    unsafe fn plane(v: Self::Int, n: i32, mask: u8) -> Self::Int {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::plane(v[0], n, mask), Eight::plane(v[1], n, mask)] }
    }
    #[inline(always)]
    unsafe fn code(v: Self::Int, n: i32, mask: i32) -> Self::Int {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { [Eight::code(v[0], n, mask), Eight::code(v[1], n, mask)] }
    }
    #[inline(always)]
    unsafe fn transpose_floats(rows: *const f32, stride: usize, len: usize, out: *mut f32) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            transpose_eight(rows, stride, len, out, 16);
            transpose_eight(rows.add(8 * stride), stride, len, out.add(8), 16);
        }
    }
}

impl ByteLanes for Sixteen<Plain> {
    const TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn code8(v: Self::Int) -> Self::Int {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let signed = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(v[0], signed), _mm256_xor_si256(v[1], signed)]
        }
    }

    #[inline(always)]
    unsafe fn dots<const BITS: usize, const V: usize, const T: usize>(
        w: *const u8,
        acts: [*const u8; T],
        centre: [*const i32; T],
    ) -> [Self::Int; T] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            if BITS != 8 {
                for t in 0..T {
                    sums[t] = [_mm256_set1_epi32(centre[t].read_unaligned()); 2];
                }
            }
            for run in (0..V).step_by(RUN) {
                let mut acts = acts;
                for a in &mut acts {
                    *a = a.add(offset(BITS, run));
                }
                let w = w.add(64 * run);
                if BITS == 8 {
                    add_bytes::<V, T>(&mut sums, w, acts);
                } else {
                    add_codes::<BITS, V, T>(&mut sums, w, acts);
                }
            }
            sums
        }
    }
}

/// Adds the products of up to [`RUN`] vectors of signed bytes.
///
/// # Safety
/// As [`ByteLanes::dots`].
#[inline(always)]
unsafe fn add_bytes<const V: usize, const T: usize>(
    sums: &mut [[__m256i; 2]; T],
    w: *const u8,
    acts: [*const u8; T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        for v in 0..RUN.min(V) {
            let w = [Eight::load_int(w.add(64 * v)), Eight::load_int(w.add(64 * v + 32))];
            for t in 0..T {
                let a = _mm256_set1_epi32(acts[t].add(offset(8, v)).cast::<i32>().read_unaligned());
                for h in 0..2 {
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(a, w[h]));
                    sums[t][h] = _mm256_add_epi32(sums[t][h], _mm256_madd_epi16(pairs, ones));
                }
            }
            for t in 0..T {
                sums[t] = [pin(sums[t][0]), pin(sums[t][1])];
            }
        }
    }
}

/// Adds the products of up to [`RUN`] vectors of codes below 16, whose sums fit 16 bits.
///
/// # Safety
/// As [`ByteLanes::dots`].
#[inline(always)]
unsafe fn add_codes<const BITS: usize, const V: usize, const T: usize>(
    sums: &mut [[__m256i; 2]; T],
    w: *const u8,
    acts: [*const u8; T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut pairs = [[_mm256_setzero_si256(); 2]; T];
        for v in 0..RUN.min(V) {
            let w = [Eight::load_int(w.add(64 * v)), Eight::load_int(w.add(64 * v + 32))];
            for t in 0..T {
                let a = _mm256_set1_epi32(acts[t].add(offset(BITS, v)).cast::<i32>().read_unaligned());
                for h in 0..2 {
                    let products = _mm256_maddubs_epi16(w[h], a);
                    pairs[t][h] = if v == 0 { products } else { _mm256_add_epi16(pairs[t][h], products) };
                }
            }
            for t in 0..T {
                pairs[t] = [pin(pairs[t][0]), pin(pairs[t][1])];
            }
        }
        for t in 0..T {
            for h in 0..2 {
                sums[t][h] = _mm256_add_epi32(_mm256_madd_epi16(pairs[t][h], ones), sums[t][h]);
            }
        }
    }
}

/// The same vector, computed before whatever is pinned next. Without it the compiler takes one token after the other and keeps
/// every vector of codes on the stack meanwhile.
///
/// # Safety
/// AVX2 is there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn pin(mut v: __m256i) -> __m256i {
    // SAFETY: no instruction.
    unsafe { asm!("/* {0} */", inout(ymm_reg) v, options(nostack, preserves_flags)) };
    v
}

/// `out[b * width + r] = rows[r * stride + b]` for eight rows and `b < len`.
///
/// # Safety
/// As [`Lanes::transpose_floats`] says, for eight rows and `out` in steps of `width`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn transpose_eight(
    rows: *const f32,
    stride: usize,
    len: usize,
    out: *mut f32,
    width: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let whole = len / 8 * 8;
        for b in (0..whole).step_by(8) {
            let mut v = [_mm256_setzero_ps(); 8];
            for (r, v) in v.iter_mut().enumerate() {
                *v = _mm256_loadu_ps(rows.add(r * stride + b));
            }
            for (i, v) in transpose8(v).into_iter().enumerate() {
                _mm256_storeu_ps(out.add((b + i) * width), v);
            }
        }
        for b in whole..len {
            for r in 0..8 {
                *out.add(b * width + r) = *rows.add(r * stride + b);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose8(v: [__m256; 8]) -> [__m256; 8] {
    let pairs = |a: __m256, b: __m256| (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let ((a0, a1), (a2, a3)) = (pairs(v[0], v[1]), pairs(v[2], v[3]));
    let ((b0, b1), (b2, b3)) = (pairs(v[4], v[5]), pairs(v[6], v[7]));
    let quads = |a: __m256, b: __m256| (_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b));
    let ((c0, c1), (c2, c3)) = (quads(a0, a2), quads(a1, a3));
    let ((d0, d1), (d2, d3)) = (quads(b0, b2), quads(b1, b3));
    let low = |a: __m256, b: __m256| _mm256_permute2f128_ps::<0x20>(a, b);
    let high = |a: __m256, b: __m256| _mm256_permute2f128_ps::<0x31>(a, b);
    [
        low(c0, d0),
        low(c1, d1),
        low(c2, d2),
        low(c3, d3),
        high(c0, d0),
        high(c1, d1),
        high(c2, d2),
        high(c3, d3),
    ]
}
