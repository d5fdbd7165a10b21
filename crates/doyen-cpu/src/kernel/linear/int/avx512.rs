//! [`Lanes`] of sixteen rows with AVX-512 F, BW, DQ, VL and VNNI, and the kernels made of them.
//!
//! `vpdpbusd` takes codes of any width unsigned, as they are stored, and adds four products to a 32-bit sum exactly.

use super::{
    avx2::transpose_eight,
    entries::entries,
    lanes::{ByteLanes, FloatLanes, Lanes, RUN, offset},
    vnni::{Avx512Vl, Vnni},
};
use std::arch::{asm, x86_64::*};

entries!(
    "avx512",
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    Sixteen,
    Sixteen,
    Vnni<Avx512Vl>
);

/// Sixteen lanes.
pub(super) struct Sixteen;

impl Lanes for Sixteen {
    const ROWS: usize = 16;
    type Int = __m512i;
    type Float = __m512;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_set1_ps(p.read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn neg_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn to_float(v: __m512i) -> __m512 {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut u8, v: __m512i) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }

    #[inline(always)]
    unsafe fn transpose(base: *const u8, stride: usize) -> [__m512i; 4] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let mut row = [_mm512_setzero_si512(); 4];
            for (r, row) in row.iter_mut().enumerate() {
                let at = |i: usize| _mm_loadu_si128(base.add((r + 4 * i) * stride).cast());
                let v = _mm512_castsi128_si512(at(0));
                let v = _mm512_inserti32x4::<1>(v, at(1));
                let v = _mm512_inserti32x4::<2>(v, at(2));
                *row = _mm512_inserti32x4::<3>(v, at(3));
            }
            let (a, b) = (_mm512_unpacklo_epi32(row[0], row[1]), _mm512_unpackhi_epi32(row[0], row[1]));
            let (c, d) = (_mm512_unpacklo_epi32(row[2], row[3]), _mm512_unpackhi_epi32(row[2], row[3]));
            [
                _mm512_unpacklo_epi64(a, c),
                _mm512_unpackhi_epi64(a, c),
                _mm512_unpacklo_epi64(b, d),
                _mm512_unpackhi_epi64(b, d),
            ]
        }
    }
    #[inline(always)]
    unsafe fn plane(v: __m512i, n: i32, mask: u8) -> __m512i {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_and_si512(_mm512_srl_epi32(v, _mm_cvtsi32_si128(n)), _mm512_set1_epi8(mask as i8)) }
    }
    #[inline(always)]
    unsafe fn code(v: __m512i, n: i32, mask: i32) -> __m512i {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { _mm512_and_si512(_mm512_srl_epi32(v, _mm_cvtsi32_si128(n)), _mm512_set1_epi32(mask)) }
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

/// The same vector, computed before whatever is pinned next. Without it the compiler takes one token after the other, each a chain of
/// products that wait for one another: 4 bits took 1.19 times as long, 2 bits 1.22 (512 tokens, Zen 4).
///
/// # Safety
/// AVX-512 F is there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pin(mut v: __m512i) -> __m512i {
    // SAFETY: no instruction.
    unsafe { asm!("/* {0} */", inout(zmm_reg) v, options(pure, nomem, nostack, preserves_flags)) };
    v
}

impl FloatLanes for Sixteen {
    const TOKENS: usize = 8;
}

impl ByteLanes for Sixteen {
    const TOKENS: usize = 8;

    #[inline(always)]
    unsafe fn code8(v: __m512i) -> __m512i {
        v
    }

    #[inline(always)]
    unsafe fn dots<const BITS: usize, const V: usize, const T: usize>(
        w: *const u8,
        acts: [*const u8; T],
        centre: [*const i32; T],
    ) -> [__m512i; T] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let mut sums = [_mm512_setzero_si512(); T];
            for t in 0..T {
                sums[t] = _mm512_set1_epi32(centre[t].read_unaligned());
            }
            for run in (0..V).step_by(RUN) {
                for v in 0..RUN.min(V) {
                    let w = _mm512_loadu_si512(w.add(64 * (run + v)).cast());
                    let at = offset(BITS, run) + offset(BITS, v);
                    for t in 0..T {
                        let a = _mm512_set1_epi32(acts[t].add(at).cast::<i32>().read_unaligned());
                        let sum = _mm512_dpbusd_epi32(sums[t], w, a);
                        // Wide groups have a loop of their own, and are in order.
                        sums[t] = if V > RUN { sum } else { pin(sum) };
                    }
                }
            }
            sums
        }
    }
}
