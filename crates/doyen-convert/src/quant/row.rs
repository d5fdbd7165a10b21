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
        // Adding half and truncating rounds to nearest in plain SSE2; `round` is a library call there.
        let (shift, top) = (f32::from(zero_point) + 0.5, f32::from(spec.bits.max_code()));
        let code = |v: f32| (v / scale + shift).clamp(0.0, top) as i32 as u8;
        let (lanes, rest) = block.as_chunks::<LANES>();
        for lane in lanes {
            out.codes.extend_from_slice(&lane.map(code));
        }
        out.codes.extend(rest.iter().copied().map(code));
    }
    Ok(())
}

/// Values that are worked on at a time, which compilers turn into vectors where a loop over a slice stays one by one.
const LANES: usize = 16;

/// Smallest and largest value, zero included.
fn range(block: &[f32]) -> (f32, f32) {
    let (mut lo, mut hi) = ([0f32; LANES], [0f32; LANES]);
    // Not `f32::min`, whose care for NaN keeps it from being one instruction.
    let mut widen = |i: usize, v: f32| {
        lo[i] = if v < lo[i] { v } else { lo[i] };
        hi[i] = if v > hi[i] { v } else { hi[i] };
    };
    let (lanes, rest) = block.as_chunks::<LANES>();
    for lane in lanes {
        for (i, &v) in lane.iter().enumerate() {
            widen(i, v);
        }
    }
    for &v in rest {
        widen(0, v);
    }
    (lo.into_iter().fold(0.0, f32::min), hi.into_iter().fold(0.0, f32::max))
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
