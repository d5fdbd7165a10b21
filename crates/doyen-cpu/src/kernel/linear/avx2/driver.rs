//! The loops around register tiles, and the stack buffers that tiles read.

use super::{BlockMap, Geometry, SEGMENT, SEGMENT_BLOCKS, hsum, scales};
use crate::kernel::{
    linear::{Columns, tiles},
    quantize::Prepared,
};
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use std::{arch::x86_64::*, mem::MaybeUninit, ops::Range};

/// Most weight rows of a tile.
const MAX_ROWS: usize = 4;
/// Weight rows that meet all tokens before the next ones: their packed bytes stay in the second-level cache.
const ROW_BLOCK: usize = 64;

/// Distance of prefetching in bytes.
const AHEAD: usize = 1024;

/// A way to compute tiles: one accumulator of eight lanes for each of `R` rows times `T` tokens.
pub(super) trait Numerics {
    /// Whether default zero points need not be written into the panel.
    const TAKES_DEFAULT_ZERO: bool;

    /// Makes what all token tiles of one row tile and segment share.
    ///
    /// # Safety
    /// AVX2, FMA and F16C are there; `s` describes a valid segment.
    unsafe fn begin<const R: usize>(s: &RowTile<'_, R>, panel: &mut Panel);

    /// Adds the segment to the accumulators.
    ///
    /// # Safety
    /// As [`Numerics::begin`], and the activation rows reach over the whole row in this width's layout.
    unsafe fn add<const R: usize, const T: usize>(
        s: &RowTile<'_, R>,
        panel: &Panel,
        acts: [*const u8; T],
        acc: &mut [[__m256; R]; T],
    );
}

/// `R` rows and one segment of their columns: spans `first .. first + spans`.
pub(super) struct RowTile<'a, const R: usize> {
    pub(super) w: &'a QuantMatrix<'a>,
    pub(super) g: &'a Geometry,
    pub(super) map: &'a BlockMap,
    pub(super) first: usize,
    pub(super) spans: usize,
    /// Spans whose 32 bytes are all inside the row; the one behind them is in [`Panel::tail`].
    pub(super) whole: usize,
    /// First block with columns in the segment, and how many have.
    pub(super) block: usize,
    pub(super) blocks: usize,
    /// The rows' codes from span `first` on.
    pub(super) codes: [*const u8; R],
}

/// What a tile of rows needs beside its packed codes, for one segment.
pub(super) struct Panel {
    /// Scales of the segment's blocks, and eight zeros.
    pub(super) scale: [[f32; SEGMENT_BLOCKS]; MAX_ROWS],
    /// Zero points of the segment's blocks (fast: made ready by [`Numerics::begin`]), and eight zeros.
    pub(super) zero: [[f32; SEGMENT_BLOCKS]; MAX_ROWS],
    /// The partial last span of each row, zero-padded.
    pub(super) tail: [[u8; 32]; MAX_ROWS],
    /// Dequantized rows, for numerics that share them among many tokens.
    pub(super) values: [[MaybeUninit<f32>; SEGMENT]; 2],
}

/// All rows of `out`, in tiles of `R` rows and up to `T` tokens, `BATCH` tokens per pass over a row block.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows<N: Numerics, const R: usize, const T: usize, const BATCH: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let g = Geometry::new(w);
    let job = Job { w, acts, bias, map: BlockMap::new(&g), g };
    let mut panel = Panel {
        scale: [[0.0; SEGMENT_BLOCKS]; MAX_ROWS],
        zero: [[0.0; SEGMENT_BLOCKS]; MAX_ROWS],
        tail: [[0; 32]; MAX_ROWS],
        values: [[MaybeUninit::uninit(); SEGMENT]; 2],
    };
    if T == 1 {
        one_token::<N, R>(&job, &mut panel, out);
    } else {
        many_tokens::<N, R, T, BATCH>(&job, &mut panel, out);
    }
}

/// One token: a tile takes one row from each of `R` equal parts of the range, so that the packed bytes are read as `R`
/// long streams, which hardware prefetchers follow. (Neighbouring rows are short streams in the same page: 4-bit rows of
/// 2048 columns came from DRAM at 6 GB/s, at 8 GB/s with prefetching by hand, and at 17 GB/s this way; Zen 4, one core,
/// plain read loop 21 GB/s.)
#[target_feature(enable = "avx2,fma,f16c")]
fn one_token<N: Numerics, const R: usize>(job: &Job<'_>, panel: &mut Panel, out: &mut Columns<'_>) {
    let range = out.range();
    let step = range.len() / R;
    for t in 0..job.acts.tokens() {
        for n in range.start..range.start + step {
            row_tile::<N, R, 1, 1>(job, Rows { n, step }, t..t + 1, panel, out);
        }
        for n in range.start + R * step..range.end {
            row_tile::<N, 1, 1, 1>(job, Rows { n, step: 1 }, t..t + 1, panel, out);
        }
    }
}

/// Blocks of rows that stay in cache while all tokens meet them, `BATCH` tokens at a time.
#[target_feature(enable = "avx2,fma,f16c")]
fn many_tokens<N: Numerics, const R: usize, const T: usize, const BATCH: usize>(
    job: &Job<'_>,
    panel: &mut Panel,
    out: &mut Columns<'_>,
) {
    for block in tiles(out.range(), ROW_BLOCK) {
        for tokens in tiles(0..job.acts.tokens(), BATCH) {
            let mut n = block.start;
            while n + R <= block.end {
                row_tile::<N, R, T, BATCH>(job, Rows { n, step: 1 }, tokens.clone(), panel, out);
                n += R;
            }
            for n in n..block.end {
                row_tile::<N, 1, T, BATCH>(job, Rows { n, step: 1 }, tokens.clone(), panel, out);
            }
        }
    }
}

/// Rows `n`, `n + step`, ... of a tile.
#[derive(Debug, Clone, Copy)]
struct Rows {
    n: usize,
    step: usize,
}

struct Job<'a> {
    w: &'a QuantMatrix<'a>,
    acts: &'a Prepared<'a>,
    bias: Option<FloatView<'a>>,
    map: BlockMap,
    g: Geometry,
}

impl<'a> Job<'a> {
    fn segment<const R: usize>(&'a self, rows: Rows, first: usize) -> RowTile<'a, R> {
        let g = &self.g;
        let spans = g.segment_spans().min(g.spans - first);
        let block = self.map.first_block(first);
        let last_column = ((first + spans) * g.span).min(self.w.cols) - 1;
        RowTile {
            w: self.w,
            g,
            map: &self.map,
            first,
            spans,
            whole: spans.min(g.row_len / 32 - first),
            block,
            blocks: last_column / g.block + 1 - block,
            codes: std::array::from_fn(|r| self.w.row(rows.n + r * rows.step)[32 * first..].as_ptr()),
        }
    }
}

/// `R` rows for the tokens of a batch.
#[target_feature(enable = "avx2,fma,f16c")]
fn row_tile<N: Numerics, const R: usize, const T: usize, const BATCH: usize>(
    job: &Job<'_>,
    rows: Rows,
    tokens: Range<usize>,
    panel: &mut Panel,
    out: &mut Columns<'_>,
) {
    let mut acc = [[_mm256_setzero_ps(); R]; BATCH];
    let mut first = 0;
    while first < job.g.spans {
        let seg = job.segment::<R>(rows, first);
        for r in 0..R {
            fill::<N, R>(&seg, rows.n + r * rows.step, r, panel);
        }
        // SAFETY: this function's own features, and a segment of a matrix that the kernel's caller validated.
        unsafe { N::begin(&seg, panel) };
        let mut t = 0;
        while t < tokens.len() {
            let (at, acc) = (tokens.start + t, &mut acc[t..]);
            t += match tokens.len() - t {
                4.. if T >= 4 => token_tile::<N, R, 4>(&seg, panel, job.acts, at, acc),
                2.. if T >= 2 => token_tile::<N, R, 2>(&seg, panel, job.acts, at, acc),
                _ => token_tile::<N, R, 1>(&seg, panel, job.acts, at, acc),
            };
        }
        first += seg.spans;
    }
    for (t, sums) in acc[..tokens.len()].iter().enumerate() {
        for (r, v) in sums.iter().enumerate() {
            let n = rows.n + r * rows.step;
            out.set(tokens.start + t, n, hsum(*v) + job.bias.map_or(0.0, |b| b.get(n)));
        }
    }
}

/// Tokens `at .. at + T` over one segment; returns `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn token_tile<N: Numerics, const R: usize, const T: usize>(
    seg: &RowTile<'_, R>,
    panel: &Panel,
    acts: &Prepared<'_>,
    at: usize,
    acc: &mut [[__m256; R]],
) -> usize {
    let rows = std::array::from_fn(|t| acts.row(at + t).as_ptr());
    if let Some(acc) = acc.first_chunk_mut::<T>() {
        // SAFETY: this function's own features, a validated matrix, and whole activation rows of the layout that was
        // chosen with the kernel.
        unsafe { N::add::<R, T>(seg, panel, rows, acc) };
    }
    T
}

/// Widens scales and zero points of row `n` and copies its partial last span, as row `r` of the panel.
#[target_feature(enable = "avx2,fma,f16c")]
fn fill<N: Numerics, const R: usize>(seg: &RowTile<'_, R>, n: usize, r: usize, panel: &mut Panel) {
    let w = seg.w;
    scales::widen(w.scales, n * seg.g.blocks + seg.block, seg.blocks, &mut panel.scale[r]);
    if !(N::TAKES_DEFAULT_ZERO && seg.default_zero()) {
        scales::zero_points(w, n, seg.block, seg.blocks, &mut panel.zero[r]);
    }
    if seg.whole < seg.spans {
        let partial = &w.row(n)[32 * (seg.first + seg.whole)..seg.g.row_len];
        panel.tail[r] = [0; 32];
        panel.tail[r][..partial.len()].copy_from_slice(partial);
    }
}

impl<const R: usize> RowTile<'_, R> {
    /// Codes of span `s` of the segment, as eight 32-bit lanes. Asks for what the stream holds a kilobyte later, since
    /// hardware prefetchers stop at the end of a page.
    ///
    /// # Safety
    /// `s < spans`, and `panel` was filled for this tile.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn load(&self, r: usize, s: usize, panel: &Panel) -> __m256i {
        _mm_prefetch::<_MM_HINT_T0>(self.codes[r].wrapping_add(32 * s + AHEAD).cast());
        let p = if s < self.whole { self.codes[r].wrapping_add(32 * s) } else { panel.tail[r].as_ptr() };
        // SAFETY: spans below `whole` have all their 32 bytes in the row; the one behind them is in the panel.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    /// The widened number of each lane's block in span `s` of the segment, which has `PER` blocks.
    ///
    /// Reads no more than the span's own numbers: they have just been written by eights, and a read that straddles two
    /// writes has to wait until they are in the cache.
    ///
    /// # Safety
    /// `s < spans`, and `of` was filled for this tile.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn lanes<const PER: usize>(&self, of: &[f32; SEGMENT_BLOCKS], s: usize) -> __m256 {
        let first = self.map.first_block(self.first + s) - self.block;
        // SAFETY: `first` is one of the segment's blocks, and eight zeros follow the last one.
        unsafe {
            let p = of.as_ptr().add(first);
            match PER {
                1 => _mm256_broadcast_ss(&*p),
                2 => {
                    let two = _mm256_castpd_ps(_mm256_set1_pd(f64::from_ne_bytes(*p.cast::<[u8; 8]>())));
                    _mm256_permutevar_ps(two, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
                }
                4 => {
                    let four = _mm_loadu_ps(p);
                    let four = _mm256_set_m128(four, four);
                    _mm256_permutevar_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))
                }
                _ => _mm256_loadu_ps(p),
            }
        }
    }

    /// Whether zero points are all the default of the format.
    pub(super) const fn default_zero(&self) -> bool {
        matches!(self.w.zero_points, ZeroPoints::Default)
    }

    /// Whether the segment's first block began in an earlier one.
    pub(super) const fn continues_block(&self) -> bool {
        self.block * self.g.block < self.first * self.g.span
    }

    /// Width of a code.
    pub(super) const fn bits(&self) -> Bits {
        self.w.bits
    }
}
