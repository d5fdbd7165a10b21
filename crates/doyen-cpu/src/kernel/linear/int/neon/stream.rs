//! Products of few tokens: rows one after the other, as in the x86 `stream`.
//!
//! A row is walked by octets, eight groups of columns whose sums end up in the eight lanes that the canonical order has for them. The
//! 32-bit lanes of an octet's dot products follow the order of columns, so that sums of neighbours, again and again, are the groups'.

use super::{
    super::{super::LANES, tile::Geometry},
    sdot,
};
use crate::kernel::{linear::Columns, quantize::Prepared};
use doyen_tensor::{FloatView, format::QuantMatrix};
use std::arch::aarch64::*;

/// Bytes of a vector.
const VECTOR: usize = 16;
/// Bytes of an octet at most: 8 groups of 128 columns of 8 bits.
const OCTET: usize = 1024;
/// Vectors of sums of an octet at most: those of longer groups are added lane by lane.
const SUMS: usize = 16;

/// The eight lanes of the canonical order.
type Eight = [float32x4_t; 2];

/// A product under way.
struct Job<'a, const T: usize> {
    w: &'a QuantMatrix<'a>,
    g: Geometry,
    acts: [*const u8; T],
}

/// Scales and zero points of an octet, less the default ones.
struct Numbers {
    scale: [f32; LANES],
    zero: [f32; LANES],
}

/// Rows of quantized weights times `T` rows of activations; units of `UNIT` columns.
///
/// # Safety
/// NEON and its dot products are there. The matrix is valid, of `BITS` and units of `UNIT`; the activations are `T` rows of its
/// layout, output and bias of its rows.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn rows<const BITS: usize, const UNIT: usize, const T: usize>(
    w: &QuantMatrix<'_>,
    acts: &Prepared<'_>,
    bias: Option<FloatView<'_>>,
    out: &mut Columns<'_>,
) {
    let mut rows = [std::ptr::null(); T];
    for (t, row) in rows.iter_mut().enumerate() {
        *row = acts.row(t).as_ptr();
    }
    let (job, terms) = (Job { w, g: Geometry::new(w, UNIT), acts: rows }, acts.layout().terms());
    for n in out.range() {
        // SAFETY: the caller's promise.
        let acc = unsafe { job.row::<BITS, UNIT>(n) };
        for (t, &acc) in acc.iter().enumerate() {
            let bias = bias.filter(|_| t.is_multiple_of(terms)).map_or(0.0, |b| b.get(n));
            out.put(t, terms, n..n + 1, &[lane_sum(acc) + bias]);
        }
    }
}

impl<const T: usize> Job<'_, T> {
    /// The lanes of row `n` for each token.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn row<const BITS: usize, const UNIT: usize>(&self, n: usize) -> [Eight; T] {
        // What is behind the row meets activations of zero; what is behind the matrix must not be read.
        let codes = &self.w.codes[n * self.w.row_bytes..];
        let mut acc = [[vdupq_n_f32(0.0); 2]; T];
        for o in 0..self.g.acts.groups.div_ceil(LANES) {
            let numbers = self.numbers(n, o);
            let groups = LANES.min(self.g.acts.groups - LANES * o);
            let bytes = (groups * UNIT * BITS / 8).next_multiple_of(2 * VECTOR);
            let left = &codes[o * UNIT * BITS..];
            let mut copy = [0u8; OCTET];
            let octet = if left.len() >= bytes {
                left.as_ptr()
            } else {
                copy[..left.len()].copy_from_slice(left);
                copy.as_ptr()
            };
            // SAFETY: the caller's promise, and the bytes of the groups.
            acc = unsafe { self.octet::<BITS, UNIT>(octet, bytes / VECTOR, &numbers, o, acc) };
        }
        acc
    }

    /// Scales and zero points of octet `o` of row `n`; zeros behind the row.
    #[inline]
    fn numbers(&self, n: usize, o: usize) -> Numbers {
        let default = f32::from(self.w.bits.default_zero_point());
        let mut numbers = Numbers { scale: [0.0; LANES], zero: [0.0; LANES] };
        for i in 0..LANES.min(self.g.acts.groups - LANES * o) {
            let block = self.g.block_of_unit(LANES * o + i);
            numbers.scale[i] = self.w.scale(n, block);
            if !self.g.centred {
                numbers.zero[i] = self.w.zero_point(n, block) - default;
            }
        }
        numbers
    }

    /// Adds octet `o`, of which there are `vectors` vectors of codes.
    ///
    /// # Safety
    /// As [`rows`]; `codes` points to the vectors.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn octet<const BITS: usize, const UNIT: usize>(
        &self,
        codes: *const u8,
        vectors: usize,
        numbers: &Numbers,
        o: usize,
        mut acc: [Eight; T],
    ) -> [Eight; T] {
        let at = &self.g.acts;
        let mut sums = [[vdupq_n_s32(0); SUMS]; T];
        let (all, each) = const {
            let all = UNIT * BITS / VECTOR;
            if all > SUMS { (LANES, all / LANES) } else { (all, 1) }
        };
        // Two vectors of codes are a span, and plane `p` of a span's activations is 32 bytes.
        // SAFETY: the caller's promise; activations and their numbers are padded to whole octets.
        unsafe {
            for v in 0..vectors {
                let packed = vld1q_u8(codes.add(VECTOR * v));
                let place = LANES * UNIT * o + v / 2 * 2 * VECTOR * 8 / BITS + v % 2 * VECTOR;
                for p in 0..8 / BITS {
                    let w = plane::<BITS>(packed, p);
                    for t in 0..T {
                        let a = vld1q_s8(self.acts[t].add(place + 2 * VECTOR * p).cast());
                        sums[t][v / each] = sdot(sums[t][v / each], w, a);
                    }
                }
            }
            for t in 0..T {
                let groups = eight_groups(&mut sums[t], all);
                for h in 0..2 {
                    let number = |array: usize| self.acts[t].add(array + 4 * (LANES * o + 4 * h));
                    let mut dots = groups[h];
                    if BITS != 8 {
                        dots = vaddq_s32(dots, vld1q_s32(number(at.centres).cast()));
                    }
                    let mut value = vcvtq_f32_s32(dots);
                    if !self.g.centred {
                        let zero = vld1q_f32(numbers.zero[4 * h..].as_ptr());
                        value = vfmsq_f32(value, zero, vld1q_f32(number(at.sums).cast()));
                    }
                    let scale = vld1q_f32(numbers.scale[4 * h..].as_ptr());
                    let scale = vmulq_f32(scale, vld1q_f32(number(at.scales).cast()));
                    acc[t][h] = vfmaq_f32(acc[t][h], value, scale);
                }
            }
        }
        acc
    }
}

/// The codes of 16 bytes that are number `p` of their byte; 8-bit ones centred.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn plane<const BITS: usize>(v: uint8x16_t, p: usize) -> int8x16_t {
    if BITS == 8 {
        return vreinterpretq_s8_u8(veorq_u8(v, vdupq_n_u8(0x80)));
    }
    let shifted = vshlq_u8(v, vdupq_n_s8(-((BITS * p) as i8)));
    vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8(((1u32 << BITS) - 1) as u8)))
}

/// Sums of eight groups out of the lanes of their `vectors` vectors.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn eight_groups(sums: &mut [int32x4_t; SUMS], mut vectors: usize) -> [int32x4_t; 2] {
    while vectors > 2 {
        vectors /= 2;
        for i in 0..vectors {
            sums[i] = vpaddq_s32(sums[2 * i], sums[2 * i + 1]);
        }
    }
    [sums[0], sums[1]]
}

/// The lanes added: i and i + 4, then i and i + 2, then the last two.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn lane_sum(v: Eight) -> f32 {
    let half = vaddq_f32(v[0], v[1]);
    let quarter = vadd_f32(vget_low_f32(half), vget_high_f32(half));
    vget_lane_f32::<0>(quarter) + vget_lane_f32::<1>(quarter)
}
