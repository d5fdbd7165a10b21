//! One token with int8 activations times short rows: at most 256 packed bytes and eight blocks.
//!
//! A short row's scales and zero points are fewer than a vector, so that filling a panel row by row
//! ([`super::driver`]) costs more than the product. But they follow those of the row before: here they are
//! widened and multiplied for many rows at a time, whole vectors of them, and rows are taken four neighbours
//! at a time. (Streams need not be long: a tile of four rows is shorter than what prefetching looks ahead.) Every sum
//! is the one that `fast` defines.

use super::{
    super::{Columns, Kernel, tiles},
    BlockMap, Geometry, blocks_per_span,
    fast::{dot, unpack},
    hsum, scales,
};
use crate::kernel::quantize::Prepared;
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use std::arch::x86_64::*;

/// Most spans of a row; a span has at most one block, so this bounds the blocks too.
const MAX_SPANS: usize = 8;
/// Numbers of a panel: the scales of 16 rows of eight blocks, or of 128 rows of one.
const NUMBERS: usize = 128;
/// Distance of prefetching in bytes.
const AHEAD: usize = 1024;

/// The kernel, where rows are whole spans, few, and no span has several blocks.
pub(super) fn kernel(bits: Bits, block: usize, cols: usize) -> Option<Kernel> {
    let span = 32 * bits.per_byte();
    if !cols.is_multiple_of(span) || cols / span > MAX_SPANS || blocks_per_span(bits, block, cols) != 1 {
        return None;
    }
    Some(match bits {
        Bits::B2 => Kernel::int("avx2-int2-fast-short-4x1", rows::<2>),
        Bits::B4 => Kernel::int("avx2-int4-fast-short-4x1", rows::<4>),
        Bits::B8 => Kernel::int("avx2-int8-fast-short-4x1", rows::<8>),
    })
}

/// Scales of consecutive rows, and `scale * (zero - offset)`; row after row, block after block.
struct Panel {
    scale: [f32; NUMBERS + 8],
    zero: [f32; NUMBERS + 8],
}

struct Job<'a> {
    w: &'a QuantMatrix<'a>,
    g: Geometry,
    map: BlockMap,
    /// Signed codes with their default zero point: nothing to take off.
    centred: bool,
}

/// All rows of `out`.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const BITS: i32>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let g = Geometry::new(w);
    let centred = BITS == 8 && matches!(w.zero_points, ZeroPoints::Default);
    let job = Job { w, map: BlockMap::new(&g), g, centred };
    let mut panel = Panel { scale: [0.0; NUMBERS + 8], zero: [0.0; NUMBERS + 8] };
    for t in 0..acts.tokens() {
        let a = acts.row(t);
        for tile in tiles(out.range(), NUMBERS / job.g.blocks) {
            job.fill::<BITS>(&mut panel, tile.start, tile.len());
            let mut n = tile.start;
            while n + 4 <= tile.end {
                // SAFETY: rows n .. n + 4 are in the tile that the panel was filled for.
                let acc = unsafe { job.sums::<BITS, 4>(&panel, n, n - tile.start, a) };
                let mut y = [0f32; 4];
                // SAFETY: `y` is four floats long.
                unsafe { _mm_storeu_ps(y.as_mut_ptr(), hsum4(acc)) };
                let to = out.row(t, n..n + 4);
                for (i, (to, y)) in to.iter_mut().zip(y).enumerate() {
                    *to = y + bias.map_or(0.0, |b| b.get(n + i));
                }
                n += 4;
            }
            for n in n..tile.end {
                // SAFETY: row n is in the tile that the panel was filled for.
                let [acc] = unsafe { job.sums::<BITS, 1>(&panel, n, n - tile.start, a) };
                out.set(t, n, hsum(acc) + bias.map_or(0.0, |b| b.get(n)));
            }
        }
    }
}

impl Job<'_> {
    /// Fills the panel for rows `first .. first + rows`.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn fill<const BITS: i32>(&self, panel: &mut Panel, first: usize, rows: usize) {
        let blocks = self.g.blocks;
        scales::widen(self.w.scales, first * blocks, rows * blocks, &mut panel.scale);
        if self.centred {
            return;
        }
        scales::zero_points_of_rows(self.w, first, rows, &mut panel.zero);
        let offset = _mm256_set1_ps(if BITS == 8 { 128.0 } else { 0.0 });
        let eights = |of: &mut [f32; NUMBERS + 8]| of.as_mut_ptr();
        let (scale, zero) = (eights(&mut panel.scale), eights(&mut panel.zero));
        for i in (0..rows * blocks).step_by(8) {
            // SAFETY: `rows * blocks <= NUMBERS`, and both arrays have eight more.
            unsafe {
                let z = _mm256_sub_ps(_mm256_loadu_ps(zero.add(i)), offset);
                _mm256_storeu_ps(zero.add(i), _mm256_mul_ps(z, _mm256_loadu_ps(scale.add(i))));
            }
        }
    }

    /// The accumulators of rows `n .. n + R`, which are rows `at .. at + R` of the panel, with the activations `a`.
    ///
    /// # Safety
    /// The rows are in the matrix and in the panel; `a` is a prepared row of this width's layout.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums<const BITS: i32, const R: usize>(
        &self,
        panel: &Panel,
        n: usize,
        at: usize,
        a: &[u8],
    ) -> [__m256; R] {
        let (g, stride) = (&self.g, self.w.row_bytes);
        let a = a.as_ptr();
        let codes = self.w.codes.as_ptr().wrapping_add(n * stride);
        let mut acc = [_mm256_setzero_ps(); R];
        // SAFETY: by the caller's promise: every row has `spans` whole spans and `blocks` numbers in the panel, and the
        // activations have as many records, followed by the sums of the blocks and eight numbers more.
        unsafe {
            let scale = panel.scale.as_ptr().add(at * g.blocks);
            if !self.centred {
                let sums = _mm256_loadu_ps(a.add(g.spans * (g.span + 32)).cast());
                let zero = panel.zero.as_ptr().add(at * g.blocks);
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(g.blocks as i32), lanes);
                for r in 0..R {
                    acc[r] = _mm256_fnmadd_ps(_mm256_maskload_ps(zero.add(r * g.blocks), mask), sums, acc[r]);
                }
            }
            for s in 0..g.spans {
                let record = a.add(s * (g.span + 32));
                let scale_a = _mm256_loadu_ps(record.add(g.span).cast());
                let scale = scale.add(self.map.first_block(s));
                for r in 0..R {
                    let codes = codes.add(r * stride + 32 * s);
                    if s % 2 == 0 {
                        _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(AHEAD).cast());
                    }
                    let dot = dot::<BITS>(&unpack::<BITS>(_mm256_loadu_si256(codes.cast())), record);
                    let scale_w = _mm256_broadcast_ss(&*scale.add(r * g.blocks));
                    let dot = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale_w);
                    acc[r] = _mm256_fmadd_ps(dot, scale_a, acc[r]);
                }
            }
        }
        acc
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
