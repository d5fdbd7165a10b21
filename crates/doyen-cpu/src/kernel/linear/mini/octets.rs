//! Int8 activations against E2M1 with scales of 32 or 16 columns (MXFP4, NVFP4) in vectors of 256 bits: rows one after the other,
//! nothing is written but results (and codes of lines that hold columns, gathered first).
//!
//! The bits are those of `fast`. A row is walked by octets, eight groups, one a lane of the canonical order. A look-up makes codes
//! bytes, once for the tokens that a row meets together; sums of a group are exact, whatever the [`Products`].

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]
#![allow(clippy::needless_range_loop, reason = "t and v index several arrays at once")]

use super::{
    fast, gather,
    products::{Plain, Products, Vnni},
};
use crate::kernel::{
    linear::{
        Columns, LANES,
        int::{Avx512Vl, AvxVnni, lane_sums, pairs},
        tiles,
    },
    quantize::{GROUP, Int8Row, Prepared},
};
use doyen_tensor::{
    FloatView,
    format::{Element, MiniMatrix, MiniScales},
};
use std::{arch::x86_64::*, ops::Range};

/// Rows of activations that a row of weights meets at a time.
const MOST: usize = 4;
/// Bytes of a vector of codes, and its columns.
const BYTES: usize = 32;
const COLS: usize = 2 * BYTES;
/// Bytes of an octet's codes at most.
const OCTET: usize = LANES * GROUP / 2;
/// Rows of lines that hold columns are gathered so many at a time, of so many bytes together at most.
const GATHERED: usize = 16;
const GATHERED_BYTES: usize = 64 << 10;
/// Distance of prefetching in bytes.
const AHEAD: usize = 4096;

/// The kernels of an instruction set: `entry!(name, features, Products)`.
macro_rules! entry {
    ($name:ident, $features:literal, $products:ty) => {
        /// Rows of a matrix of E2M1 times prepared tokens.
        ///
        /// # Safety
        /// The features are there; matrix, activations, bias and output are of each other's shapes.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(
            w: &MiniMatrix<'_>,
            acts: &Prepared<'_>,
            bias: Option<FloatView<'_>>,
            out: &mut Columns<'_>,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                match w.scales {
                    _ if w.element != Element::E2M1 || (w.transposed && w.cols > 2 * GATHERED_BYTES) => {
                        fast::rows(w, acts, bias, out);
                    }
                    MiniScales::E8M0(scales) => rows::<$products, 32>(w, scales, acts, bias, out),
                    MiniScales::E4M3(scales) => rows::<$products, 16>(w, scales, acts, bias, out),
                    MiniScales::None | MiniScales::Tiles { .. } => fast::rows(w, acts, bias, out),
                }
            }
        }
    };
}

entry!(avx2, "avx2,fma", Plain);
entry!(avxvnni, "avx2,fma,avxvnni", Vnni<AvxVnni>);
entry!(avx512, "avx2,fma,avx512f,avx512vl,avx512vnni", Vnni<Avx512Vl>);

/// A product under way: the scales of groups of `UNIT` columns, and what they meet.
struct Job<'a, const UNIT: usize> {
    scales: &'a [u8],
    /// Where the parts of an activation row begin.
    at: Int8Row,
    acts: &'a Prepared<'a>,
}

/// As the entries.
///
/// # Safety
/// As the entries; scales are E8M0 of 32 or E4M3 of 16 columns.
#[inline(always)]
unsafe fn rows<P: Products, const UNIT: usize>(
    w: &MiniMatrix<'_>,
    scales: &[u8],
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let at = Int8Row::new(w.cols, UNIT, GROUP);
    let job = Job::<UNIT> { scales, at, acts };
    let line = w.cols.div_ceil(2);
    if !w.transposed {
        for rows in tiles(out.range(), LANES) {
            let codes = &w.codes[rows.start * line..rows.end * line];
            // SAFETY: the caller's promise.
            unsafe { job.tile::<P>(codes, line, rows, 0.5 * w.global, bias, out) }
        }
        return;
    }
    #[allow(clippy::large_stack_arrays, reason = "a staged tile, on stacks of 2 MiB and more")]
    let mut stage = [0u8; GATHERED_BYTES];
    for gathered in tiles(out.range(), (GATHERED_BYTES / line.max(1)).min(GATHERED)) {
        gather(w, gathered.clone(), 0..w.cols, (&mut stage[..gathered.len() * line], line));
        for rows in tiles(gathered.clone(), LANES) {
            let codes = &stage[(rows.start - gathered.start) * line..][..rows.len() * line];
            // SAFETY: the caller's promise.
            unsafe { job.tile::<P>(codes, line, rows, 0.5 * w.global, bias, out) }
        }
    }
}

impl<const UNIT: usize> Job<'_, UNIT> {
    /// Up to eight rows, whose `codes` take `line` bytes each, for all tokens.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn tile<P: Products>(
        &self,
        codes: &[u8],
        line: usize,
        rows: Range<usize>,
        factor: f32,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        for batch in tiles(0..self.acts.rows(), MOST) {
            let mut sums = [[0f32; LANES]; MOST];
            // SAFETY: the caller's promise; the batch has as many rows.
            unsafe {
                match batch.len() {
                    1 => self.batch::<P, 1>(codes, line, &rows, batch.start, &mut sums),
                    2 => self.batch::<P, 2>(codes, line, &rows, batch.start, &mut sums),
                    3 => self.batch::<P, 3>(codes, line, &rows, batch.start, &mut sums),
                    _ => self.batch::<P, MOST>(codes, line, &rows, batch.start, &mut sums),
                }
            }
            let terms = self.acts.layout().terms();
            for (t, sums) in batch.zip(&mut sums) {
                let bias = bias.filter(|_| t.is_multiple_of(terms));
                for (sum, n) in sums.iter_mut().zip(rows.clone()) {
                    *sum = *sum * factor + bias.map_or(0.0, |b| b.get(n));
                }
                out.put(t, terms, rows.clone(), sums);
            }
        }
    }

    /// The sums of a tile for `T` rows of activations from `first` on.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn batch<P: Products, const T: usize>(
        &self,
        codes: &[u8],
        line: usize,
        rows: &Range<usize>,
        first: usize,
        sums: &mut [[f32; LANES]; MOST],
    ) {
        let mut x = [std::ptr::null(); T];
        for t in 0..T {
            x[t] = self.acts.row(first + t).as_ptr();
        }
        // SAFETY: the caller's promise; eight floats.
        unsafe {
            let mut acc = [[_mm256_setzero_ps(); LANES]; T];
            for (i, n) in rows.clone().enumerate() {
                let scales = &self.scales[n * self.at.groups..][..self.at.groups];
                let row = self.row::<P, T>(&codes[i * line..][..line], scales, x);
                for t in 0..T {
                    acc[t][i] = row[t];
                }
            }
            for t in 0..T {
                _mm256_storeu_ps(sums[t].as_mut_ptr(), lane_sums(acc[t]));
            }
        }
    }

    /// The lanes of a row.
    ///
    /// # Safety
    /// As [`rows`]; `x` point to prepared rows.
    #[inline(always)]
    unsafe fn row<P: Products, const T: usize>(
        &self,
        codes: &[u8],
        scales: &[u8],
        x: [*const u8; T],
    ) -> [__m256; T] {
        let bytes = const { LANES * UNIT / 2 };
        let whole = codes.len() / bytes;
        let (eights, last) = scales.split_at(whole * LANES);
        // SAFETY: the caller's promise; whole octets are in the row, and activations and their numbers are padded to whole octets.
        unsafe {
            let mut acc = [_mm256_setzero_ps(); T];
            for (o, scales) in eights.as_chunks::<LANES>().0.iter().enumerate() {
                let at = codes.as_ptr().add(o * bytes);
                acc = self.octet::<P, T>(at, scales, o, x, acc);
            }
            if !last.is_empty() {
                let (mut padded, mut eight) = ([0u8; OCTET], [0u8; LANES]);
                let left = &codes[whole * bytes..];
                padded[..left.len()].copy_from_slice(left);
                eight[..last.len()].copy_from_slice(last);
                acc = self.octet::<P, T>(padded.as_ptr(), &eight, whole, x, acc);
            }
            acc
        }
    }

    /// Adds octet `o`.
    ///
    /// # Safety
    /// As [`Job::row`]; `codes` point to a whole octet.
    #[inline(always)]
    unsafe fn octet<P: Products, const T: usize>(
        &self,
        codes: *const u8,
        scales: &[u8; LANES],
        o: usize,
        x: [*const u8; T],
        mut acc: [__m256; T],
    ) -> [__m256; T] {
        let vectors = const { UNIT * LANES / COLS };
        // SAFETY: the caller's promise; prefetches may go anywhere.
        unsafe {
            let mut quads = [[_mm256_setzero_si256(); 2]; T];
            for half in 0..vectors / 2 {
                let at = codes.add(2 * BYTES * half);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
                let a = P::weights(_mm256_loadu_si256(at.cast()));
                let b = P::weights(_mm256_loadu_si256(at.add(BYTES).cast()));
                for t in 0..T {
                    let x = x[t].add(COLS * (vectors * o + 2 * half));
                    let x = |i: usize| _mm256_loadu_si256(x.add(BYTES * i).cast());
                    quads[t][half] = pairs(P::dots(a, [x(0), x(1)]), P::dots(b, [x(2), x(3)]), true);
                }
            }
            let scale = if UNIT == 32 { e8m0(scales) } else { e4m3(scales) };
            for t in 0..T {
                let numbers = x[t].add(4 * LANES * o);
                let mut dots = _mm256_cvtepi32_ps(groups::<UNIT>(quads[t], P::OFFSET == 0));
                if P::OFFSET != 0 {
                    let sums = _mm256_loadu_ps(numbers.add(self.at.sums).cast());
                    dots = _mm256_fnmadd_ps(_mm256_set1_ps(f32::from(P::OFFSET)), sums, dots);
                }
                let scale_a = _mm256_loadu_ps(numbers.add(self.at.scales).cast());
                acc[t] = _mm256_fmadd_ps(dots, _mm256_mul_ps(scale, scale_a), acc[t]);
            }
        }
        acc
    }
}

/// The sums of eight groups of `UNIT` columns, out of sums of sixteen columns; `short` says that those fit 16 bits: 16 * 12 * 127 do,
/// 16 * 24 * 127 do not.
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn groups<const UNIT: usize>(quads: [__m256i; 2], short: bool) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        if UNIT == 16 {
            return _mm256_permute4x64_epi64::<0b11_01_10_00>(quads[0]);
        }
        let sums = pairs(quads[0], quads[1], short);
        _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    }
}

/// Eight scales of E8M0, as [`doyen_tensor::format::mini::e8m0`].
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn e8m0(codes: &[u8; LANES]) -> __m256 {
    // SAFETY: the caller's promise; eight bytes.
    unsafe {
        let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.as_ptr().cast()));
        // 2^-127 is subnormal.
        let bits = _mm256_max_epu32(_mm256_slli_epi32::<23>(codes), _mm256_set1_epi32(1 << 22));
        let nan = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255));
        _mm256_castsi256_ps(_mm256_or_si256(bits, nan))
    }
}

/// Eight scales of E4M3FN, as [`doyen_tensor::format::mini::e4m3`].
///
/// # Safety
/// AVX2 is there.
#[inline(always)]
unsafe fn e4m3(codes: &[u8; LANES]) -> __m256 {
    // SAFETY: the caller's promise; eight bytes.
    unsafe {
        let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.as_ptr().cast()));
        let size = _mm256_and_si256(codes, _mm256_set1_epi32(127));
        // As bits of f32 a size is 2^120 times too small, subnormal ones as well.
        let value = _mm256_castsi256_ps(_mm256_slli_epi32::<20>(size));
        let value = _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32((120 + 127) << 23)));
        let sign = _mm256_slli_epi32::<24>(_mm256_andnot_si256(_mm256_set1_epi32(127), codes));
        let nan = _mm256_cmpeq_epi32(size, _mm256_set1_epi32(127));
        _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_or_si256(sign, nan)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::format::mini;

    #[test]
    fn eight_scales_are_those_of_the_format() {
        if crate::detect::Avx2::detect().is_none() {
            return;
        }
        for first in (0..=255u8).step_by(LANES) {
            let codes: [u8; LANES] = std::array::from_fn(|i| first + i as u8);
            let (mut exponents, mut floats) = ([0f32; LANES], [0f32; LANES]);
            // SAFETY: AVX2 is there; eight floats.
            unsafe {
                _mm256_storeu_ps(exponents.as_mut_ptr(), e8m0(&codes));
                _mm256_storeu_ps(floats.as_mut_ptr(), e4m3(&codes));
            }
            for (i, &code) in codes.iter().enumerate() {
                for (got, want) in [(exponents[i], mini::e8m0(code)), (floats[i], mini::e4m3(code))] {
                    assert!(
                        got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                        "{code}: {got} {want}"
                    );
                }
            }
        }
    }
}
