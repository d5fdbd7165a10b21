//! Scales, zero points and codes of one row.
//!
//! The scale is rounded *up* to its stored type, so the codes always reach both ends of a block's range and every
//! value dequantizes to within half a step. (Rounding to nearest would leave the ends of an 8-bit block up to
//! `255 * 2^-12` steps out of reach in float16, and half a step in bfloat16.)

use super::{QuantSpec, ZeroPointKind};
use doyen_tensor::{FloatType, format::Bits};
use half::{bf16, f16};

/// One row's result, reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct RowCodes {
    /// One code a column, unpacked.
    pub codes: Vec<u8>,
    /// One scale a block, exact in the stored type.
    pub scales: Vec<f32>,
    /// One zero point a block.
    pub zero_points: Vec<u8>,
}

/// Quantizes finite values. Fails with the scale that overflows its stored type.
pub(crate) fn quantize_row(values: &[f32], spec: &QuantSpec, out: &mut RowCodes) -> Result<(), f32> {
    out.codes.clear();
    out.scales.clear();
    out.zero_points.clear();
    for block in values.chunks(spec.block) {
        let (lo, hi) = range(block);
        let (scale, zero_point) = if spec.zero_points == ZeroPointKind::Implied {
            (symmetric(lo, hi, spec.bits, spec.scale_type)?, spec.bits.default_zero_point())
        } else {
            asymmetric(lo, hi, spec.bits, spec.scale_type)?
        };
        out.scales.push(scale);
        out.zero_points.push(zero_point);
        encode(block, scale, (f32::from(zero_point), f32::from(spec.bits.max_code())), &mut out.codes);
    }
    Ok(())
}

/// Values that are worked on at a time. Loops over arrays of this many become vectors in plain SSE2, where those over slices stay
/// one by one, as do `f32::min` (for its care for NaN), `round` (a library call) and casts to integers (for theirs).
const LANES: usize = 16;

/// Appends the codes nearest to `block / scale + zero_point` from 0 to `top`; of two, the larger.
fn encode(block: &[f32], scale: f32, (zero_point, top): (f32, f32), out: &mut Vec<u8>) {
    // A float32 sum with 2^23 is the other term rounded to an integer, ties to even, which is then in its lowest bits.
    const SHIFT: f32 = 8_388_608.0;
    let code = |v: f32| {
        let code = v / scale + zero_point;
        let code = if code > 0.0 { code } else { 0.0 };
        let code = if code < top { code } else { top };
        let nearest = (code + SHIFT) - SHIFT;
        let nearest = if code - nearest >= 0.5 { nearest + 1.0 } else { nearest };
        (nearest + SHIFT).to_bits()
    };
    let (lanes, rest) = block.as_chunks::<LANES>();
    for lane in lanes {
        let (mut wide, mut codes) = ([0u32; LANES], [0u8; LANES]);
        for (w, &v) in wide.iter_mut().zip(lane) {
            *w = code(v);
        }
        for (c, w) in codes.iter_mut().zip(wide) {
            *c = w as u8;
        }
        out.extend_from_slice(&codes);
    }
    out.extend(rest.iter().map(|&v| code(v) as u8));
}

/// Smallest and largest value, zero included.
fn range(block: &[f32]) -> (f32, f32) {
    let least = |a: f32, b: f32| if b < a { b } else { a };
    let most = |a: f32, b: f32| if b > a { b } else { a };
    let (mut lo, mut hi) = ([0f32; LANES], [0f32; LANES]);
    let (lanes, rest) = block.as_chunks::<LANES>();
    for lane in lanes {
        for (i, &v) in lane.iter().enumerate() {
            (lo[i], hi[i]) = (least(lo[i], v), most(hi[i], v));
        }
    }
    for (i, &v) in rest.iter().enumerate() {
        (lo[i], hi[i]) = (least(lo[i], v), most(hi[i], v));
    }
    // Halves against halves: one after the other would take as long as the block itself.
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            (lo[i], hi[i]) = (least(lo[i], lo[i + half]), most(hi[i], hi[i + half]));
        }
    }
    (lo[0], hi[0])
}

/// The whole range, zero included, over all codes.
fn asymmetric(lo: f32, hi: f32, bits: Bits, ty: FloatType) -> Result<(f32, u8), f32> {
    let top = f64::from(bits.max_code());
    let scale = round_up((f64::from(hi) - f64::from(lo)) / top, ty)?;
    // Truncated after adding half, as the codes are.
    let zero_point = (-f64::from(lo) / f64::from(scale) + 0.5).min(top);
    Ok((scale, zero_point as u8))
}

/// Codes run from `-2^(bits-1)` to `2^(bits-1) - 1` around the implied zero point; the scale's sign puts the longer
/// arm of the range on the side with one code more.
fn symmetric(lo: f32, hi: f32, bits: Bits, ty: FloatType) -> Result<f32, f32> {
    let half = f64::from(bits.default_zero_point());
    let (neg, pos) = (-f64::from(lo), f64::from(hi));
    let (long, short) = (neg.max(pos), neg.min(pos));
    let scale = round_up((long / half).max(short / (half - 1.0)), ty)?;
    Ok(if pos > neg { -scale } else { scale })
}

/// The smallest number of the stored type that is not below `scale`; 1 for a block of zeros.
fn round_up(scale: f64, ty: FloatType) -> Result<f32, f32> {
    if scale == 0.0 {
        return Ok(1.0);
    }
    // Positive floats of one type are ordered as their bits. Rounding twice, to float32 first, ends at one of the two neighbours
    // of `scale` all the same.
    let rounded = match ty {
        FloatType::F32 => {
            let s = scale as f32;
            if f64::from(s) < scale { s.next_up() } else { s }
        }
        FloatType::F16 => {
            let s = f16::from_f32(scale as f32);
            if f64::from(s.to_f32()) < scale { f16::from_bits(s.to_bits() + 1) } else { s }.to_f32()
        }
        FloatType::BF16 => {
            let s = bf16::from_f32(scale as f32);
            if f64::from(s.to_f32()) < scale { bf16::from_bits(s.to_bits() + 1) } else { s }.to_f32()
        }
    };
    if rounded.is_finite() { Ok(rounded) } else { Err(scale as f32) }
}
