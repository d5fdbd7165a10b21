//! Dot products of bytes with `vpdpbusd` in vectors of 256 bits, and the kernels of AVX-VNNI made of them.
//!
//! The instruction has two encodings: one belongs to AVX-512 VNNI with VL, the other to AVX-VNNI, of processors that have no
//! AVX-512. Everything but the instruction is the same for both. It takes codes of any width unsigned, as they are stored, and adds
//! four products to a 32-bit sum exactly.

use super::{
    avx2::{Eight, Sixteen, pin},
    entries::entries,
    lanes::{ByteLanes, RUN, offset},
    stream_ints::{Spans, plane},
};
use std::{arch::x86_64::*, marker::PhantomData};

entries!("avxvnni", "avx2,fma,f16c,avxvnni", Sixteen<Vnni<AvxVnni>>, Eight, Vnni<AvxVnni>);

/// An encoding of `vpdpbusd`.
pub(in super::super) trait Dpbusd {
    /// Unsigned bytes of `w` times signed ones of `a`, four products added to each lane of `sum`.
    ///
    /// # Safety
    /// The instruction is there, and the caller is compiled for it.
    unsafe fn dpbusd(sum: __m256i, w: __m256i, a: __m256i) -> __m256i;
}

/// That of AVX-512 VNNI and VL.
pub(in super::super) struct Avx512Vl;

impl Dpbusd for Avx512Vl {
    #[inline(always)]
    unsafe fn dpbusd(sum: __m256i, w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_dpbusd_epi32(sum, w, a) }
    }
}

/// That of AVX-VNNI.
pub(in super::super) struct AvxVnni;

impl Dpbusd for AvxVnni {
    #[inline(always)]
    unsafe fn dpbusd(sum: __m256i, w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_dpbusd_avx_epi32(sum, w, a) }
    }
}

/// Dot products with an encoding.
pub(super) struct Vnni<I>(PhantomData<I>);

impl<I: Dpbusd> Spans for Vnni<I> {
    const CENTRES_BYTES: bool = false;

    #[inline(always)]
    unsafe fn add<const BITS: usize, const T: usize>(
        sums: &mut [__m256i; T],
        codes: __m256i,
        acts: [*const u8; T],
    ) {
        // SAFETY: the caller's promise; plane `p` of a span's activations is 32 bytes.
        unsafe {
            for p in 0..8 / BITS {
                let w = plane::<BITS>(codes, p);
                for t in 0..T {
                    let a = _mm256_loadu_si256(acts[t].add(32 * p).cast());
                    sums[t] = I::dpbusd(sums[t], w, a);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish<const BITS: usize>(sum: __m256i) -> __m256i {
        sum
    }
}

impl<I: Dpbusd> ByteLanes for Sixteen<Vnni<I>> {
    const TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn code8(v: [__m256i; 2]) -> [__m256i; 2] {
        v
    }

    #[inline(always)]
    unsafe fn dots<const BITS: usize, const V: usize, const T: usize>(
        w: *const u8,
        acts: [*const u8; T],
        centre: [*const i32; T],
    ) -> [[__m256i; 2]; T] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            for t in 0..T {
                sums[t] = [_mm256_set1_epi32(centre[t].read_unaligned()); 2];
            }
            for run in (0..V).step_by(RUN) {
                for v in 0..RUN.min(V) {
                    let w = w.add(64 * (run + v));
                    let w = [Eight::load_int(w), Eight::load_int(w.add(32))];
                    let at = offset(BITS, run) + offset(BITS, v);
                    for t in 0..T {
                        let a = _mm256_set1_epi32(acts[t].add(at).cast::<i32>().read_unaligned());
                        for h in 0..2 {
                            sums[t][h] = pin(I::dpbusd(sums[t][h], w[h], a));
                        }
                    }
                }
            }
            sums
        }
    }
}

/// Staged products in the encoding that machines with AVX-512 can run; they stream with it anyway.
#[cfg(test)]
pub(super) mod on_avx512 {
    use super::{
        super::{avx512, entries::kernels},
        *,
    };

    kernels!("avxvnni-on-avx512", rows::<BITS, UNIT>, avx512::exact_rows::<BITS, FLOAT_UNIT>);

    /// # Safety
    /// As `fast_rows`.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni")]
    unsafe fn rows<const BITS: usize, const UNIT: usize>(
        w: &QuantMatrix<'_>,
        acts: &Prepared<'_>,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        // SAFETY: the caller's promise.
        unsafe { fast::rows::<Sixteen<Vnni<Avx512Vl>>, BITS, UNIT>(w, acts, bias, out) }
    }
}
