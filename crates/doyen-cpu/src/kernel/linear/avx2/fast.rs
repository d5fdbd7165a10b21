//! Tiles with int8 activations.
//!
//! 2- and 4-bit codes are multiplied as they are (at most 15 * 127 * 4 in a 16-bit sum), and zero points are taken off
//! through the sums of the activations. 8-bit codes would overflow the 16-bit pair sums, so they are
//! taken as signed (`code - 128`) and multiplied as `|w| * (a with w's sign)`: at most 128 * 127 * 2.

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
                    Kernel::int(concat!("avx2-", $name, "-fast-4x1"), rows::<Fast<$n, $per>, 4, 1, 1>),
                (Bits::$bits, $per, _) =>
                    Kernel::int(concat!("avx2-", $name, "-fast-1x4"), rows::<Fast<$n, $per>, 1, 4, 8>),)*
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

/// `PER` blocks to a span.
struct Fast<const BITS: i32, const PER: usize>;

impl<const BITS: i32, const PER: usize> Numerics for Fast<BITS, PER> {
    const TAKES_DEFAULT_ZERO: bool = true;

    #[inline(always)]
    unsafe fn begin<const R: usize>(s: &RowTile<'_, R>, panel: &mut Panel) {
        // SAFETY: the caller's promise.
        unsafe { scale_zero_points(s, panel) }
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const T: usize>(
        s: &RowTile<'_, R>,
        panel: &Panel,
        acts: [*const u8; T],
        acc: &mut [[__m256; R]; T],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            take_off_zero::<R, T>(s, panel, acts, acc);
            add_spans::<BITS, PER, R, T>(s, panel, acts, acc);
        }
    }
}

/// Whether nothing is left to take off: signed codes with their default zero point.
const fn centred<const R: usize>(s: &RowTile<'_, R>) -> bool {
    matches!(s.bits(), Bits::B8) && s.default_zero()
}

/// Turns the panel's zero points into `scale * (zero - offset)`, and 0 for a block that began in an earlier segment.
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_zero_points<const R: usize>(s: &RowTile<'_, R>, panel: &mut Panel) {
    if s.default_zero() {
        return;
    }
    let offset = _mm256_set1_ps(if matches!(s.bits(), Bits::B8) { 128.0 } else { 0.0 });
    for r in 0..R {
        for b in (0..s.blocks).step_by(8) {
            // SAFETY: eight zeros follow the segment's blocks in both arrays; the scale makes them zeros again.
            unsafe {
                let zero = panel.zero[r].as_mut_ptr().add(b);
                let scale = _mm256_loadu_ps(panel.scale[r].as_ptr().add(b));
                _mm256_storeu_ps(zero, _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(zero), offset), scale));
            }
        }
        if s.continues_block() {
            panel.zero[r][0] = 0.0;
        }
    }
}

/// `acc -= scale * zero * sum of the block's activations`, eight blocks at a time.
///
/// # Safety
/// As [`Numerics::add`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn take_off_zero<const R: usize, const T: usize>(
    s: &RowTile<'_, R>,
    panel: &Panel,
    acts: [*const u8; T],
    acc: &mut [[__m256; R]; T],
) {
    if centred(s) {
        return;
    }
    let sums_at = s.g.spans * (s.g.span + 32) + 4 * s.block;
    let default = _mm256_set1_ps(f32::from(s.bits().default_zero_point()));
    let continued = s.continues_block();
    for b in (0..s.blocks).step_by(8) {
        for r in 0..R {
            // SAFETY: eight zeros follow the segment's blocks in the panel.
            let zero = unsafe {
                if s.default_zero() {
                    let zero = _mm256_mul_ps(_mm256_loadu_ps(panel.scale[r].as_ptr().add(b)), default);
                    let none = _mm256_setzero_ps();
                    if continued && b == 0 { _mm256_blend_ps::<1>(zero, none) } else { zero }
                } else {
                    _mm256_loadu_ps(panel.zero[r].as_ptr().add(b))
                }
            };
            for t in 0..T {
                // SAFETY: eight numbers follow every block sum in a prepared row.
                let sums = unsafe { _mm256_loadu_ps(acts[t].add(sums_at + 4 * b).cast()) };
                acc[t][r] = _mm256_fnmadd_ps(zero, sums, acc[t][r]);
            }
        }
    }
}

/// The segment's spans.
///
/// # Safety
/// As [`Numerics::add`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_spans<const BITS: i32, const PER: usize, const R: usize, const T: usize>(
    s: &RowTile<'_, R>,
    panel: &Panel,
    acts: [*const u8; T],
    acc: &mut [[__m256; R]; T],
) {
    let record = s.g.span + 32;
    let mut a = acts.map(|p| p.wrapping_add(s.first * record));
    let mut sum = *acc;
    for i in 0..s.spans {
        for r in 0..R {
            // SAFETY: `i < spans`, and the panel was filled for this tile.
            let (codes, scale) = unsafe { (s.load(r, i, panel), s.lanes::<PER>(&panel.scale[r], i)) };
            let planes = unpack::<BITS>(codes);
            for t in 0..T {
                // SAFETY: a record is `span` codes and eight scales, and the row holds `first + spans` of them.
                unsafe {
                    let dot = _mm256_cvtepi32_ps(dot::<BITS>(&planes, a[t]));
                    let scale_a = _mm256_loadu_ps(a[t].add(s.g.span).cast());
                    sum[t][r] = _mm256_fmadd_ps(_mm256_mul_ps(dot, scale), scale_a, sum[t][r]);
                }
            }
        }
        a = a.map(|p| p.wrapping_add(record));
    }
    *acc = sum;
}

/// Planes of codes; for 8 bits magnitude and signed value.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack<const BITS: i32>(v: __m256i) -> [__m256i; 4] {
    match BITS {
        2 => {
            let mask = _mm256_set1_epi8(3);
            [
                _mm256_and_si256(v, mask),
                _mm256_and_si256(_mm256_srli_epi16::<2>(v), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask),
                _mm256_and_si256(_mm256_srli_epi16::<6>(v), mask),
            ]
        }
        4 => {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask), v, v]
        }
        _ => {
            let signed = _mm256_xor_si256(v, _mm256_set1_epi8(-128));
            [_mm256_abs_epi8(signed), signed, v, v]
        }
    }
}

/// Products of a span with the activations at `a`, summed per 32-bit lane.
///
/// # Safety
/// `a` points to the span's codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dot<const BITS: i32>(w: &[__m256i; 4], a: *const u8) -> __m256i {
    // SAFETY: plane `i` of a span's codes is 32 bytes.
    let plane = |i: usize| unsafe { _mm256_loadu_si256(a.add(32 * i).cast()) };
    let pairs = match BITS {
        2 => {
            let s01 =
                _mm256_add_epi16(_mm256_maddubs_epi16(w[0], plane(0)), _mm256_maddubs_epi16(w[1], plane(1)));
            let s23 =
                _mm256_add_epi16(_mm256_maddubs_epi16(w[2], plane(2)), _mm256_maddubs_epi16(w[3], plane(3)));
            _mm256_add_epi16(s01, s23)
        }
        4 => _mm256_add_epi16(_mm256_maddubs_epi16(w[0], plane(0)), _mm256_maddubs_epi16(w[1], plane(1))),
        _ => _mm256_maddubs_epi16(w[0], _mm256_sign_epi8(plane(0), w[1])),
    };
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}
