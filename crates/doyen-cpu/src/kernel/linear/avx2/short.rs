//! One token with int8 activations times short rows: 32, 64, 128 or 256 packed bytes, at most eight blocks.
//!
//! A short row's scales and zero points are fewer than a vector, so that filling a panel row by row
//! ([`super::driver`]) costs more than the product. But they follow those of the row before: here they are
//! widened and multiplied for many rows at a time, whole vectors of them, and rows are taken four neighbours
//! at a time, with loops unrolled. (Streams need not be long: a tile of four rows is shorter than what prefetching looks ahead.) Every sum
//! is the one that `fast` defines.

use super::{
    super::{Columns, Kernel, tiles},
    blocks_per_span,
    fast::{dot, unpack},
    hsum, scales,
};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use std::arch::x86_64::*;

/// Numbers of a panel: the scales of 16 rows of eight blocks, or of 128 rows of one.
const NUMBERS: usize = 128;
/// Distance of prefetching in bytes.
const AHEAD: usize = 1024;

/// The kernel for rows of 1, 2, 4 or 8 whole spans that are cut evenly into blocks.
pub(super) fn kernel(bits: Bits, block: usize, cols: usize) -> Option<Kernel> {
    let span = 32 * bits.per_byte();
    if !cols.is_multiple_of(span) || !cols.is_multiple_of(block) || blocks_per_span(bits, block, cols) != 1 {
        return None;
    }
    macro_rules! table {
        ($($spans:literal: $($blocks:literal)*),* $(,)?) => {
            match (bits, cols / span, cols / block) {
                $($((Bits::B2, $spans, $blocks) =>
                    Some(Kernel::int("avx2-int2-fast-short-4x1", rows::<2, $spans, $blocks>)),
                (Bits::B4, $spans, $blocks) =>
                    Some(Kernel::int("avx2-int4-fast-short-4x1", rows::<4, $spans, $blocks>)),
                (Bits::B8, $spans, $blocks) =>
                    Some(Kernel::int("avx2-int8-fast-short-4x1", rows::<8, $spans, $blocks>)),)*)*
                _ => None,
            }
        };
    }
    table! { 1: 1, 2: 1 2, 4: 1 2 4, 8: 1 2 4 8 }
}

/// Scales of consecutive rows, and `scale * (zero - offset)`; row after row, block after block.
struct Panel {
    scale: [f32; NUMBERS + 8],
    zero: [f32; NUMBERS + 8],
}

/// A matrix, and where the parts of a prepared row of activations begin.
struct Job<'a> {
    w: &'a QuantMatrix<'a>,
    /// `SPANS` records of codes and scales; the sums of the blocks follow.
    acts: *const u8,
    /// Signed codes with their default zero point: nothing to take off.
    centred: bool,
}

/// All rows of `out`.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const BITS: i32, const SPANS: usize, const BLOCKS: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let centred = BITS == 8 && matches!(w.zero_points, ZeroPoints::Default);
    let mut panel = Panel { scale: [0.0; NUMBERS + 8], zero: [0.0; NUMBERS + 8] };
    for t in 0..acts.tokens() {
        let job = Job { w, acts: acts.row(t).as_ptr(), centred };
        for tile in tiles(out.range(), NUMBERS / BLOCKS) {
            job.fill::<BITS, BLOCKS>(&mut panel, tile.start, tile.len());
            let y = out.row(t, tile.clone());
            let (fours, rest) = y.as_chunks_mut::<4>();
            for (i, y) in fours.iter_mut().enumerate() {
                // SAFETY: rows 4 i .. 4 i + 4 of the tile that the panel was filled for; `y` is four floats long.
                unsafe {
                    let acc = job.sums::<BITS, SPANS, BLOCKS, 4>(&panel, tile.start, 4 * i);
                    _mm_storeu_ps(y.as_mut_ptr(), hsum4(acc));
                }
            }
            let first = tile.len() - rest.len();
            for (i, y) in rest.iter_mut().enumerate() {
                // SAFETY: a row of the tile that the panel was filled for.
                let [acc] = unsafe { job.sums::<BITS, SPANS, BLOCKS, 1>(&panel, tile.start, first + i) };
                *y = hsum(acc);
            }
            // Apart from the loop above: a call in there would make it keep its registers in memory.
            match bias {
                // As with a bias of zero: a sum of -0 becomes 0.
                None => y.iter_mut().for_each(|y| *y += 0.0),
                Some(bias) => y.iter_mut().zip(tile).for_each(|(y, n)| *y += bias.get(n)),
            }
        }
    }
}

impl Job<'_> {
    /// Fills the panel for rows `first .. first + rows`.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn fill<const BITS: i32, const BLOCKS: usize>(&self, panel: &mut Panel, first: usize, rows: usize) {
        scales::widen(self.w.scales, first * BLOCKS, rows * BLOCKS, &mut panel.scale);
        if self.centred {
            return;
        }
        scales::zero_points_of_rows(self.w, first, rows, &mut panel.zero);
        let offset = _mm256_set1_ps(if BITS == 8 { 128.0 } else { 0.0 });
        let (scale, zero) = (panel.scale.as_chunks::<8>().0, panel.zero.as_chunks_mut::<8>().0);
        for (scale, zero) in scale.iter().zip(zero).take((rows * BLOCKS).div_ceil(8)) {
            // SAFETY: both are eight floats long.
            unsafe {
                let z = _mm256_sub_ps(_mm256_loadu_ps(zero.as_ptr()), offset);
                _mm256_storeu_ps(zero.as_mut_ptr(), _mm256_mul_ps(z, _mm256_loadu_ps(scale.as_ptr())));
            }
        }
    }

    /// The accumulators of rows `at .. at + R` of a panel that begins with row `first` of the matrix.
    ///
    /// # Safety
    /// The rows are in the matrix, and the panel was filled with them; the matrix and the activations are of this width
    /// with `SPANS` and `BLOCKS`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums<const BITS: i32, const SPANS: usize, const BLOCKS: usize, const R: usize>(
        &self,
        panel: &Panel,
        first: usize,
        at: usize,
    ) -> [__m256; R] {
        let record = 32 * (8 / BITS as usize) + 32;
        let stride = self.w.row_bytes;
        let codes = self.w.codes.as_ptr().wrapping_add((first + at) * stride);
        let mut acc = [_mm256_setzero_ps(); R];
        // SAFETY: by the caller's promise: every row has `SPANS` whole spans and `BLOCKS` numbers in the panel, and the
        // activations have as many records, followed by the sums of the blocks and at least eight numbers more.
        unsafe {
            let scale = panel.scale.as_ptr().add(at * BLOCKS);
            if !self.centred {
                let sums = _mm256_loadu_ps(self.acts.add(SPANS * record).cast());
                let zero = panel.zero.as_ptr().add(at * BLOCKS);
                for r in 0..R {
                    acc[r] = _mm256_fnmadd_ps(first_lanes::<BLOCKS>(zero.add(r * BLOCKS)), sums, acc[r]);
                }
            }
            for s in 0..SPANS {
                let a = self.acts.add(s * record);
                let scale_a = _mm256_loadu_ps(a.add(record - 32).cast());
                for r in 0..R {
                    let codes = codes.add(r * stride + 32 * s);
                    if s % 2 == 0 {
                        _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(AHEAD).cast());
                    }
                    let dot = dot::<BITS>(&unpack::<BITS>(_mm256_loadu_si256(codes.cast())), a);
                    let scale_w = _mm256_broadcast_ss(&*scale.add(r * BLOCKS + s * BLOCKS / SPANS));
                    let dot = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale_w);
                    acc[r] = _mm256_fmadd_ps(dot, scale_a, acc[r]);
                }
            }
        }
        acc
    }
}

/// `N` numbers and zeros behind them.
///
/// # Safety
/// `p` points to `N` numbers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn first_lanes<const N: usize>(p: *const f32) -> __m256 {
    // SAFETY: each arm reads `N` numbers.
    unsafe {
        match N {
            1 => _mm256_zextps128_ps256(_mm_load_ss(p)),
            2 => _mm256_zextps128_ps256(_mm_castpd_ps(_mm_load_sd(p.cast()))),
            4 => _mm256_zextps128_ps256(_mm_loadu_ps(p)),
            _ => _mm256_loadu_ps(p),
        }
    }
}

/// [`hsum`] of four: lanes i and i + 4, then i and i + 2, then the last two.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn hsum4(v: [__m256; 4]) -> __m128 {
    let half = v.map(|v| _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v)));
    let pairs = |a, b| _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
    let (low, high) = (pairs(half[0], half[1]), pairs(half[2], half[3]));
    _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(low, high), _mm_shuffle_ps::<0b11_01_11_01>(low, high))
}
