//! Tiles with f32 activations: codes become `code - zero` in f32, in registers or, for many tokens, once per tile of
//! rows in the panel; both ways give the same numbers.

use super::driver::{Numerics, Panel, RowTile, rows};
use crate::kernel::linear::{Kernel, RowClass};
use doyen_tensor::format::Bits;
use std::arch::x86_64::*;

/// The kernel of a width, number of blocks per span and row class.
pub(super) fn kernel(bits: Bits, per_span: usize, class: RowClass) -> Kernel {
    macro_rules! table {
        ($($bits:ident $n:literal $per:literal $name:literal),* $(,)?) => {
            match (bits, per_span, class) {
                $((Bits::$bits, $per, RowClass::One) =>
                    Kernel::int(concat!("avx2-", $name, "-exact-4x1"), rows::<Registers<$n, $per>, 4, 1, 1>),
                (Bits::$bits, $per, RowClass::Few) =>
                    Kernel::int(concat!("avx2-", $name, "-exact-1x4"), rows::<Registers<$n, $per>, 1, 4, 8>),
                (Bits::$bits, $per, RowClass::Many) =>
                    Kernel::int(concat!("avx2-", $name, "-exact-panel-2x4"), rows::<Shared<$n, $per>, 2, 4, 16>),)*
                _ => unreachable!("{per_span} blocks in a span"),
            }
        };
    }
    table! {
        B2 2 1 "int2", B2 2 2 "int2-b64", B2 2 4 "int2-b32", B2 2 8 "int2-b16",
        B4 4 1 "int4", B4 4 2 "int4-b32", B4 4 4 "int4-b16",
        B8 8 1 "int8", B8 8 2 "int8-b16",
    }
}

/// Dequantizes in registers; `PER` blocks to a span.
struct Registers<const BITS: i32, const PER: usize>;

impl<const BITS: i32, const PER: usize> Numerics for Registers<BITS, PER> {
    const TAKES_DEFAULT_ZERO: bool = false;

    #[inline(always)]
    unsafe fn begin<const R: usize>(_: &RowTile<'_, R>, _: &mut Panel) {}

    #[inline(always)]
    unsafe fn add<const R: usize, const T: usize>(
        s: &RowTile<'_, R>,
        panel: &Panel,
        acts: [*const u8; T],
        acc: &mut [[__m256; R]; T],
    ) {
        // SAFETY: the caller's promise.
        unsafe { add_packed::<BITS, PER, R, T>(s, panel, acts, acc) }
    }
}

/// Dequantizes once per row tile and segment, for all tokens of the batch.
struct Shared<const BITS: i32, const PER: usize>;

impl<const BITS: i32, const PER: usize> Numerics for Shared<BITS, PER> {
    const TAKES_DEFAULT_ZERO: bool = false;

    #[inline(always)]
    unsafe fn begin<const R: usize>(s: &RowTile<'_, R>, panel: &mut Panel) {
        // SAFETY: the caller's promise.
        unsafe { dequantize::<BITS, PER, R>(s, panel) }
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const T: usize>(
        s: &RowTile<'_, R>,
        panel: &Panel,
        acts: [*const u8; T],
        acc: &mut [[__m256; R]; T],
    ) {
        // SAFETY: the caller's promise.
        unsafe { add_panel::<BITS, PER, R, T>(s, panel, acts, acc) }
    }
}

/// `code - zero` of the lowest code of each lane, and the lanes shifted to the next one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn next<const BITS: i32>(v: __m256i, zero: __m256) -> (__m256, __m256i) {
    let code = _mm256_and_si256(v, _mm256_set1_epi32((1 << BITS) - 1));
    (_mm256_sub_ps(_mm256_cvtepi32_ps(code), zero), _mm256_srli_epi32::<BITS>(v))
}

/// # Safety
/// As [`Numerics::add`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_packed<const BITS: i32, const PER: usize, const R: usize, const T: usize>(
    s: &RowTile<'_, R>,
    panel: &Panel,
    acts: [*const u8; T],
    acc: &mut [[__m256; R]; T],
) {
    let per_lane = 32 / BITS as usize;
    let mut x = acts.map(|p| p.wrapping_add(4 * s.first * s.g.span));
    for i in 0..s.spans {
        // SAFETY: `i < spans`, and the panel was filled for this tile.
        let mut codes: [__m256i; R] = std::array::from_fn(|r| unsafe { s.load(r, i, panel) });
        // SAFETY: as above.
        let zero: [__m256; R] = std::array::from_fn(|r| unsafe { s.lanes::<PER>(&panel.zero[r], i) });
        let mut part = [[_mm256_setzero_ps(); R]; T];
        for c in 0..per_lane {
            // SAFETY: a span is `8 * per_lane` numbers.
            let xs: [__m256; T] =
                std::array::from_fn(|t| unsafe { _mm256_loadu_ps(x[t].add(32 * c).cast()) });
            for r in 0..R {
                let (w, rest) = next::<BITS>(codes[r], zero[r]);
                codes[r] = rest;
                for t in 0..T {
                    part[t][r] = _mm256_fmadd_ps(w, xs[t], part[t][r]);
                }
            }
        }
        for r in 0..R {
            // SAFETY: as for the zero points.
            let scale = unsafe { s.lanes::<PER>(&panel.scale[r], i) };
            for t in 0..T {
                acc[t][r] = _mm256_fmadd_ps(part[t][r], scale, acc[t][r]);
            }
        }
        x = x.map(|p| p.wrapping_add(4 * s.g.span));
    }
}

/// # Safety
/// As [`Numerics::begin`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize<const BITS: i32, const PER: usize, const R: usize>(
    s: &RowTile<'_, R>,
    panel: &mut Panel,
) {
    for r in 0..R {
        for i in 0..s.spans {
            // SAFETY: `i < spans`, and the panel was filled for this tile.
            let (mut codes, zero) = unsafe { (s.load(r, i, panel), s.lanes::<PER>(&panel.zero[r], i)) };
            for o in panel.values[r][i * s.g.span..(i + 1) * s.g.span].chunks_exact_mut(8) {
                let (w, rest) = next::<BITS>(codes, zero);
                codes = rest;
                // SAFETY: `o` is eight numbers long.
                unsafe { _mm256_storeu_ps(o.as_mut_ptr().cast(), w) };
            }
        }
    }
}

/// # Safety
/// As [`Numerics::add`], after [`dequantize`] for the same tile.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_panel<const BITS: i32, const PER: usize, const R: usize, const T: usize>(
    s: &RowTile<'_, R>,
    panel: &Panel,
    acts: [*const u8; T],
    acc: &mut [[__m256; R]; T],
) {
    let per_lane = 32 / BITS as usize;
    let mut at = 0;
    let x = acts.map(|p| p.wrapping_add(4 * s.first * s.g.span));
    for i in 0..s.spans {
        let mut part = [[_mm256_setzero_ps(); R]; T];
        for _ in 0..per_lane {
            // SAFETY: the segment's `spans` spans of `8 * per_lane` numbers are in the panel and in each row.
            let (w, xs): ([__m256; R], [__m256; T]) = unsafe {
                (
                    std::array::from_fn(|r| _mm256_loadu_ps(panel.values[r].as_ptr().add(at).cast())),
                    std::array::from_fn(|t| _mm256_loadu_ps(x[t].add(4 * at).cast())),
                )
            };
            for r in 0..R {
                for t in 0..T {
                    part[t][r] = _mm256_fmadd_ps(w[r], xs[t], part[t][r]);
                }
            }
            at += 8;
        }
        for r in 0..R {
            // SAFETY: `i < spans`, and the panel was filled for this tile.
            let scale = unsafe { s.lanes::<PER>(&panel.scale[r], i) };
            for t in 0..T {
                acc[t][r] = _mm256_fmadd_ps(part[t][r], scale, acc[t][r]);
            }
        }
    }
}
