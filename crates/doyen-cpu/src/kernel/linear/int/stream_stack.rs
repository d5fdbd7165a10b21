//! Rows of fewer groups than an octet has: several of them make one.
//!
//! Where the codes of neighbouring rows follow each other without a gap, and so do their scales and zero points, eight groups are two, four
//! or eight whole rows, that meet the same activations. Alone, a row of 256 columns in wide groups left six lanes of eight idle.

use super::{
    super::LANES,
    scales::load8,
    stream::{DEFAULT, EIGHT, Job, Numbers, float_zeros, rows_within},
    stream_ints::{ActNumbers, Ints, Spans, vectors},
};
use doyen_tensor::{FloatView, format::ZeroPoints};
use std::{arch::x86_64::*, ops::Range};

/// How rows share octets.
#[derive(Clone, Copy)]
pub(super) struct Stack<'a, const T: usize> {
    job: Job<'a, T>,
    /// Which of the eight scales that begin with an octet's first each lane has.
    spread: __m256i,
    /// Groups of a row: 1, 2 or 4.
    groups: usize,
    /// Spans of a row, less one.
    wrap: usize,
    /// Rows with which an octet may begin.
    safe: usize,
    zeros: Zeros<'a>,
    /// Numbers of the activations, again for each row of an octet.
    acts: [ActNumbers; T],
}

#[derive(Clone, Copy)]
enum Zeros<'a> {
    Default,
    Packed(Packed),
    Float(FloatView<'a>),
}

/// Packed zero points of the rows of an octet, each lane's in one of a few bytes.
#[derive(Clone, Copy)]
struct Packed {
    first: *const u8,
    row_bytes: usize,
    /// Whether they are in eight bytes; else in four.
    wide: bool,
    /// The byte of each lane, as a shuffle, and what comes before its code there.
    bytes: __m256i,
    shifts: __m256i,
}

impl<'a, const T: usize> Stack<'a, T> {
    /// `None` if rows do not share octets.
    ///
    /// # Safety
    /// As [`super::stream::rows`].
    #[inline(always)]
    pub(super) unsafe fn new<const BITS: usize, const UNIT: usize>(job: &Job<'a, T>) -> Option<Self> {
        let (w, g) = (job.w, &job.g);
        let (groups, row) = (g.acts.groups, w.row_bytes);
        // A vector of sums must not hold groups of two rows.
        let whole = row == groups * UNIT * BITS / 8 && row.is_multiple_of(UNIT * BITS / vectors(BITS, UNIT));
        if !(matches!(groups, 1 | 2 | 4) && whole) {
            return None;
        }
        let (mut spread, mut again, mut block) = ([0i32; LANES], [0i32; LANES], [0i32; LANES]);
        for lane in 0..LANES {
            again[lane] = (lane % groups) as i32;
            block[lane] = g.block_of(UNIT * (lane % groups)) as i32;
            spread[lane] = block[lane] + (lane / groups * g.blocks) as i32;
        }
        let mut safe = rows_within(w.scales.len(), LANES, g.blocks);
        // SAFETY: the caller's promise; eight i32.
        unsafe {
            let zeros = match w.zero_points {
                ZeroPoints::Default => Zeros::Default,
                ZeroPoints::PerBlock { packed, row_bytes } if row_bytes <= groups => {
                    let zeros = Packed::new::<BITS>(packed.as_ptr(), row_bytes, groups, &block);
                    safe = safe.min(rows_within(packed.len(), if zeros.wide { 8 } else { 4 }, row_bytes));
                    Zeros::Packed(zeros)
                }
                ZeroPoints::Float(zeros) => {
                    safe = safe.min(rows_within(zeros.len(), LANES, g.blocks));
                    Zeros::Float(zeros)
                }
                ZeroPoints::PerBlock { .. } | ZeroPoints::AcrossRows(_) => return None,
            };
            let again = _mm256_loadu_si256(again.as_ptr().cast());
            let mut acts = [ActNumbers::new(g, job.acts[0], 0); T];
            for t in 0..T {
                let one = ActNumbers::new(g, job.acts[t], 0);
                acts[t] = ActNumbers {
                    scales: _mm256_permutevar8x32_ps(one.scales, again),
                    sums: _mm256_permutevar8x32_ps(one.sums, again),
                    centres: _mm256_permutevar8x32_epi32(one.centres, again),
                };
            }
            let spread = _mm256_loadu_si256(spread.as_ptr().cast());
            Some(Self { job: *job, spread, groups, wrap: row / 32 - 1, safe, zeros, acts })
        }
    }

    /// Whether `rows` are at least eight, with which [`Stack::rows`] can begin.
    #[inline(always)]
    pub(super) fn has_rows(&self, rows: &Range<usize>) -> bool {
        rows.len() >= EIGHT && rows.start + EIGHT - LANES / self.groups < self.safe
    }

    /// The results of the eight rows from `n` on.
    ///
    /// # Safety
    /// As [`super::stream::rows`]; there are the rows, as [`Stack::has_rows`] says.
    #[inline(always)]
    pub(super) unsafe fn rows<
        S: Spans,
        const BITS: usize,
        const UNIT: usize,
        const TY: u8,
        const ZEROS: u8,
    >(
        &self,
        n: usize,
    ) -> [__m256; T] {
        let (job, rows) = (&self.job, LANES / self.groups);
        // SAFETY: the caller's promise.
        unsafe {
            let mut octets = [[_mm256_setzero_ps(); 4]; T];
            for o in 0..self.groups {
                let n = n + rows * o;
                let codes = job.w.codes.as_ptr().add(n * job.w.row_bytes);
                let scales = job.w.scales.bytes().as_ptr().add(n * job.g.blocks * job.float_type(TY).size());
                let numbers = Numbers {
                    scale: _mm256_permutevar8x32_ps(load8(job.float_type(TY), scales), self.spread),
                    zero: match self.zeros {
                        Zeros::Packed(packed) if ZEROS != DEFAULT => packed.zeros::<BITS>(n),
                        Zeros::Float(zeros) if ZEROS != DEFAULT => _mm256_sub_ps(
                            float_zeros(zeros, n * job.g.blocks, self.spread),
                            _mm256_set1_ps((1 << (BITS - 1)) as f32),
                        ),
                        _ => _mm256_setzero_ps(),
                    },
                };
                let dots = Ints::<S>::dots::<BITS, UNIT, T>(job, codes, LANES, (0, self.wrap));
                for t in 0..T {
                    octets[t][o] = Ints::<S>::value::<BITS, ZEROS>(
                        dots[t],
                        &numbers,
                        &self.acts[t],
                        _mm256_setzero_ps(),
                    );
                }
            }
            let mut sums = [_mm256_setzero_ps(); T];
            for t in 0..T {
                sums[t] = self.row_sums(octets[t]);
            }
            sums
        }
    }

    /// Sums of the [`EIGHT`] rows in the lanes of as many octets as a row has groups: in the canonical order, whose other lanes are zero.
    ///
    /// # Safety
    /// AVX2 is there.
    #[inline(always)]
    unsafe fn row_sums(&self, v: [__m256; 4]) -> __m256 {
        const { assert!(EIGHT == LANES) };
        // SAFETY: the caller's promise.
        unsafe {
            match self.groups {
                1 => v[0],
                2 => {
                    let pairs = _mm256_castps_pd(_mm256_hadd_ps(v[0], v[1]));
                    _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(pairs))
                }
                _ => {
                    // Lanes i and i + 2 of two rows, then their sums of four rows.
                    let mut half = [_mm256_setzero_ps(); 2];
                    for i in 0..2 {
                        let (a, b) = (v[2 * i], v[2 * i + 1]);
                        half[i] =
                            _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b));
                    }
                    let sums = _mm256_hadd_ps(half[0], half[1]);
                    _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
                }
            }
        }
    }
}

impl Packed {
    /// Those of a matrix whose packed zero points begin at `first`; `block` is that of each lane in its row.
    ///
    /// # Safety
    /// AVX2 is there.
    #[inline(always)]
    unsafe fn new<const BITS: usize>(
        first: *const u8,
        row_bytes: usize,
        groups: usize,
        block: &[i32; LANES],
    ) -> Self {
        let (mut bytes, mut shifts) = ([-1i32; LANES], [0i32; LANES]);
        for lane in 0..LANES {
            let bit = block[lane] as usize * BITS;
            // The other bytes of a lane become zero.
            bytes[lane] = 0x8080_8000_u32 as i32 | (lane / groups * row_bytes + bit / 8) as i32;
            shifts[lane] = (bit % 8) as i32;
        }
        // SAFETY: eight i32.
        unsafe {
            let (bytes, shifts) =
                (_mm256_loadu_si256(bytes.as_ptr().cast()), _mm256_loadu_si256(shifts.as_ptr().cast()));
            Self { first, row_bytes, wide: row_bytes * LANES / groups > 4, bytes, shifts }
        }
    }

    /// Those of the octet that begins with row `n`, less the default.
    ///
    /// # Safety
    /// As [`Stack::rows`].
    #[inline(always)]
    unsafe fn zeros<const BITS: usize>(&self, n: usize) -> __m256 {
        // SAFETY: the caller's promise: four or eight bytes are there.
        unsafe {
            let at = self.first.add(n * self.row_bytes);
            let eight = if self.wide {
                _mm_loadl_epi64(at.cast())
            } else {
                _mm_cvtsi32_si128(at.cast::<i32>().read_unaligned())
            };
            let codes = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(eight), self.bytes);
            let codes =
                _mm256_and_si256(_mm256_srlv_epi32(codes, self.shifts), _mm256_set1_epi32((1 << BITS) - 1));
            _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(1 << (BITS - 1))))
        }
    }
}
