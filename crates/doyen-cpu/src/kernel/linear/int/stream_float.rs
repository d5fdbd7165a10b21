//! [`Octets`] of f32 activations: lanes are the eight groups of an octet, which go through their columns together.
//!
//! Prepared activations lie by octets, so that a column of all groups is one vector; a 32-bit word of codes of each group is one too. Each
//! lane is the canonical chain of its group: `part = fma(code - zero point, x, part)` over ascending columns from zero. The chain's
//! latency is what bounds it with one token, as far as out-of-order execution does not reach the next octet; two octets at a time took
//! twice as long, because the compiler left their words in memory.

use super::{
    super::LANES,
    avx2::Eight,
    lanes::Lanes,
    stream::{Job, Numbers, Octets},
};
use crate::kernel::quantize::Layout;
use std::arch::x86_64::*;

/// Distance of prefetching in bytes; the loop is bound by arithmetic.
const AHEAD: usize = 4096;

/// Octets of f32 activations.
pub(super) struct Floats;

impl Octets for Floats {
    const CENTRED: bool = false;
    const WHOLE: bool = true;

    #[inline(always)]
    fn begins_at(layout: Layout) -> usize {
        layout.octets_at()
    }

    #[inline(always)]
    fn scales_ahead<const BITS: usize, const UNIT: usize>() -> Option<usize> {
        None
    }

    #[inline(always)]
    unsafe fn add<const BITS: usize, const UNIT: usize, const ZEROS: u8, const T: usize>(
        job: &Job<'_, T>,
        codes: *const u8,
        _groups: usize,
        numbers: &Numbers,
        o: usize,
        mut acc: [__m256; T],
    ) -> [__m256; T] {
        // SAFETY: the caller's promise: an octet's codes are there, activations are padded to whole octets.
        unsafe {
            for line in (0..UNIT * BITS).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(AHEAD + line).cast());
            }
            let words = words::<BITS, UNIT>(codes);
            let mut part = [_mm256_setzero_ps(); T];
            for i in 0..UNIT * BITS / 32 {
                for j in 0..32 / BITS {
                    let code = Eight::code(words[i], (BITS * j) as i32, (1 << BITS) - 1);
                    let weight = _mm256_sub_ps(_mm256_cvtepi32_ps(code), numbers.zero);
                    let place = LANES * (UNIT * o + i * (32 / BITS) + j);
                    for t in 0..T {
                        let x = _mm256_loadu_ps(job.acts[t].add(4 * place).cast());
                        part[t] = _mm256_fmadd_ps(weight, x, part[t]);
                    }
                }
            }
            for t in 0..T {
                acc[t] = _mm256_fmadd_ps(part[t], numbers.scale, acc[t]);
            }
        }
        acc
    }
}

/// Words of the codes of eight groups: vector `i` holds word `i` of each group.
///
/// # Safety
/// AVX2 is there; `codes` points to the bytes of an octet.
#[inline(always)]
unsafe fn words<const BITS: usize, const UNIT: usize>(codes: *const u8) -> [__m256i; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut words = [_mm256_setzero_si256(); 8];
        match UNIT * BITS / 8 {
            4 => words[0] = Eight::load_int(codes),
            8 => {
                let (a, b) = (Eight::load_int(codes), Eight::load_int(codes.add(32)));
                let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
                let first = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
                let second = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
                // Words come out as those of groups 0 1 4 5 | 2 3 6 7.
                words[0] = _mm256_permute4x64_epi64::<0b11_01_10_00>(first);
                words[1] = _mm256_permute4x64_epi64::<0b11_01_10_00>(second);
            }
            bytes => {
                for part in 0..bytes / 16 {
                    let four = Eight::transpose(codes.add(16 * part), bytes);
                    words[4 * part..4 * part + 4].copy_from_slice(&four);
                }
            }
        }
        words
    }
}
