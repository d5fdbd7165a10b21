//! [`Lanes`] of four rows with NEON and its dot products of bytes, and the kernels made of them.
//!
//! `sdot` adds four products of signed bytes to a 32-bit sum exactly. Codes below 16 are signed bytes as they are stored, and centred by
//! their group's number; 8-bit codes are centred before.

mod stream;

use super::{
    Unit,
    entries::{STREAMED, kernels},
    exact, fast,
    lanes::{ByteLanes, FloatLanes, Lanes, RUN, offset},
};
use crate::kernel::{
    linear::{Columns, Kernel, Mode},
    quantize::Prepared,
};
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix},
};
use std::arch::{aarch64::*, asm};

kernels!("neon", fast_rows::<BITS, UNIT>, exact_rows::<BITS, FLOAT_UNIT>);

/// # Safety
/// NEON and its dot products are there; the matrix is valid, of `BITS` and units of `UNIT`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn fast_rows<const BITS: usize, const UNIT: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match acts.rows() {
            0 => {}
            1 => stream::rows::<BITS, UNIT, 1>(w, acts, bias, out),
            2 => stream::rows::<BITS, UNIT, 2>(w, acts, bias, out),
            3 => stream::rows::<BITS, UNIT, 3>(w, acts, bias, out),
            STREAMED => stream::rows::<BITS, UNIT, STREAMED>(w, acts, bias, out),
            _ => fast::rows::<Four, BITS, UNIT>(w, acts, bias, out),
        }
    }
}

/// # Safety
/// As [`fast_rows`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn exact_rows<const BITS: usize, const UNIT: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe { exact::rows::<Four, BITS, UNIT>(w, acts, bias, out) }
}

/// Signed bytes of `a` times those of `b`, four products added to each lane of `sum`. (The intrinsic is not stable yet.)
///
/// # Safety
/// The instruction is there, and the caller is compiled for it.
#[inline(always)]
unsafe fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's promise; registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Four lanes.
struct Four;

impl Lanes for Four {
    const ROWS: usize = 4;
    type Int = uint32x4_t;
    type Float = float32x4_t;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vdupq_n_f32(p.read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn neg_mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vfmsq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn to_float(v: uint32x4_t) -> float32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(v)) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut u8, v: uint32x4_t) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vst1q_u8(p, vreinterpretq_u8_u32(v)) }
    }

    #[inline(always)]
    unsafe fn transpose(base: *const u8, stride: usize) -> [uint32x4_t; 4] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let row = |r: usize| vreinterpretq_u32_u8(vld1q_u8(base.add(r * stride)));
            let (a, b) = (vtrn1q_u32(row(0), row(1)), vtrn2q_u32(row(0), row(1)));
            let (c, d) = (vtrn1q_u32(row(2), row(3)), vtrn2q_u32(row(2), row(3)));
            let wide = |v: uint32x4_t| vreinterpretq_u64_u32(v);
            let low = |v, w| vreinterpretq_u32_u64(vtrn1q_u64(wide(v), wide(w)));
            let high = |v, w| vreinterpretq_u32_u64(vtrn2q_u64(wide(v), wide(w)));
            [low(a, c), low(b, d), high(a, c), high(b, d)]
        }
    }
    #[inline(always)]
    unsafe fn plane(v: uint32x4_t, n: i32, mask: u8) -> uint32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vandq_u32(vshlq_u32(v, vdupq_n_s32(-n)), vreinterpretq_u32_u8(vdupq_n_u8(mask))) }
    }
    #[inline(always)]
    unsafe fn code(v: uint32x4_t, n: i32, mask: i32) -> uint32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { vandq_u32(vshlq_u32(v, vdupq_n_s32(-n)), vdupq_n_u32(mask as u32)) }
    }

    #[inline(always)]
    unsafe fn transpose_floats(rows: *const f32, stride: usize, len: usize, out: *mut f32) {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let whole = len / 4 * 4;
            for b in (0..whole).step_by(4) {
                let words = Self::transpose(rows.add(b).cast(), 4 * stride);
                for (i, word) in words.into_iter().enumerate() {
                    Self::store(out.add((b + i) * Self::ROWS), vreinterpretq_f32_u32(word));
                }
            }
            for b in whole..len {
                for r in 0..Self::ROWS {
                    *out.add(b * Self::ROWS + r) = *rows.add(r * stride + b);
                }
            }
        }
    }
}

impl FloatLanes for Four {
    const TOKENS: usize = 8;
}

impl ByteLanes for Four {
    const TOKENS: usize = 8;

    #[inline(always)]
    unsafe fn code8(v: uint32x4_t) -> uint32x4_t {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe { veorq_u32(v, vdupq_n_u32(0x8080_8080)) }
    }

    #[inline(always)]
    unsafe fn dots<const BITS: usize, const V: usize, const T: usize>(
        w: *const u8,
        acts: [*const u8; T],
        centre: [*const i32; T],
    ) -> [uint32x4_t; T] {
        // SAFETY: what `Lanes` demands of its callers.
        unsafe {
            let mut sums = [vdupq_n_s32(0); T];
            if BITS != 8 {
                for t in 0..T {
                    sums[t] = vdupq_n_s32(centre[t].read_unaligned());
                }
            }
            for run in (0..V).step_by(RUN) {
                for v in 0..RUN.min(V) {
                    let w = vreinterpretq_s8_u8(vld1q_u8(w.add(16 * (run + v))));
                    let at = offset(BITS, run) + offset(BITS, v);
                    for t in 0..T {
                        let a = vdupq_n_s32(acts[t].add(at).cast::<i32>().read_unaligned());
                        sums[t] = sdot(sums[t], w, vreinterpretq_s8_s32(a));
                    }
                }
            }
            sums.map(|v| vreinterpretq_u32_s32(v))
        }
    }
}
