//! Codes that the source holds, kept: which stored format holds them, and how they get there.
//!
//! Codes `q` with a scale become unsigned codes around the implied zero point `2^(bits-1)`; nothing else changes. Codes
//! with a scale and a minimum (`scale * q + min`) keep their codes and get the float zero point `-min / scale`, so that
//! `(q - zero_point) * scale` differs by the rounding of the quotient alone. Unsigned codes with zero points are what is
//! stored anyway. Scales are rounded to the type they are
//! stored in; float32 holds all of them exactly.

use super::{Deviation, Layout, Packed, QuantSpec, ScaleOverflow, ZeroPointKind, push_float};
use crate::gguf::{Codes, Unpacked};
use doyen_tensor::format::Bits;

/// Width, block and zero points of the narrowest stored format that holds the codes.
pub(crate) fn form(codes: Codes) -> (Bits, usize, ZeroPointKind) {
    if codes.zero_points {
        let bits = match codes.range.1 {
            3 => Bits::B2,
            15 => Bits::B4,
            _ => Bits::B8,
        };
        // The widest block that all operators have and that divides the group.
        let block = [128, 64, 32, 16].into_iter().find(|b| codes.group.is_multiple_of(*b)).unwrap_or(16);
        return (bits, block, ZeroPointKind::Packed);
    }
    let holds = |bits: &Bits| {
        let (low, high) = (i16::from(codes.range.0), i16::from(codes.range.1));
        let offset = i16::from(offset(*bits, codes.minimum));
        low + offset >= 0 && high + offset <= i16::from(bits.max_code())
    };
    let bits = Bits::ALL.into_iter().find(holds).unwrap_or(Bits::B8);
    let zero_points = if codes.minimum { ZeroPointKind::Float } else { ZeroPointKind::Implied };
    (bits, codes.group, zero_points)
}

/// The format that holds all of several kinds of codes: a wider code and a smaller block change no value.
pub(crate) fn common_form(kinds: &[Codes]) -> Option<(Bits, usize, ZeroPointKind)> {
    // Zero points of two kinds, packed and float or implied, have no format in common.
    if kinds.iter().any(|c| c.zero_points != kinds[0].zero_points) {
        return None;
    }
    kinds.iter().map(|&c| form(c)).reduce(|a, b| (a.0.max(b.0), a.1.min(b.1), a.2.max(b.2)))
}

/// What is added to a code to make it unsigned.
const fn offset(bits: Bits, minimum: bool) -> u8 {
    if minimum { 0 } else { bits.default_zero_point() }
}

/// Rows of codes with their kind.
#[derive(Debug)]
pub(crate) struct CodeRows {
    pub kind: Codes,
    pub cols: usize,
    pub unpacked: Unpacked,
}

/// A block as it will be stored.
#[derive(Debug, Clone, Copy)]
struct Block {
    scale: f32,
    zero_point: f32,
    /// Whether all codes are 0, the block's value being `-zero_point * scale`.
    constant: bool,
}

impl QuantSpec {
    /// Packs rows into a format that holds their codes ([`form`], or [`common_form`] of their kind and others).
    pub(crate) fn carry(
        &self,
        rows: &CodeRows,
        layout: Layout,
        deviation: &mut Deviation,
    ) -> Result<Packed, ScaleOverflow> {
        let (cols, group) = (rows.cols, rows.kind.group);
        let count = rows.unpacked.codes.len() / cols;
        let mut out = Packed::with_capacity(self, count, cols, layout);
        let shift = offset(self.bits, rows.kind.minimum || rows.kind.zero_points);
        let mut zero_points = Vec::new();
        let mut codes = Vec::with_capacity(cols);
        for (row, source) in rows.unpacked.codes.chunks_exact(cols).enumerate() {
            codes.clear();
            zero_points.clear();
            for (b, columns) in source.chunks(self.block).enumerate() {
                let g = row * (cols / group) + b * self.block / group;
                let (scale, min) = (rows.unpacked.scales[g], rows.unpacked.mins.get(g).copied());
                let zero = rows.unpacked.zero_points.get(g).copied();
                let block = match zero {
                    None => self.block(scale, min),
                    Some(z) => self.zeroed(scale, z),
                }
                .map_err(|scale| ScaleOverflow { row, scale })?;
                zero_points.extend(zero);
                push_float(self.scale_type, block.scale, &mut out.scales);
                if self.zero_points == ZeroPointKind::Float {
                    push_float(self.scale_type, block.zero_point, &mut out.zero_points);
                }
                for &q in columns {
                    let code = if block.constant { 0 } else { q.wrapping_add_unsigned(shift) as u8 };
                    codes.push(code);
                    let steps = match zero {
                        None => f64::from(q),
                        Some(z) => f64::from(q.cast_unsigned()) - f64::from(z),
                    };
                    let exact = f64::from(scale) * steps + f64::from(min.unwrap_or(0.0));
                    let stored = (f64::from(code) - f64::from(block.zero_point)) * f64::from(block.scale);
                    deviation.add(exact, stored);
                }
            }
            self.push_codes(&mut codes, cols, layout, &mut out);
            super::pack_into(self.bits, &zero_points, &mut out.zero_points);
        }
        Ok(out)
    }

    /// A block with an integer zero point.
    fn zeroed(&self, scale: f32, zero_point: u8) -> Result<Block, f32> {
        let stored = self.scale_type.round(scale);
        if stored.is_finite() {
            Ok(Block { scale: stored, zero_point: f32::from(zero_point), constant: false })
        } else {
            Err(scale)
        }
    }

    fn block(&self, scale: f32, min: Option<f32>) -> Result<Block, f32> {
        let stored = self.scale_type.round(scale);
        if !stored.is_finite() {
            return Err(scale);
        }
        let Some(min) = min else {
            let zero_point = f32::from(self.bits.default_zero_point());
            return Ok(Block { scale: stored, zero_point, constant: false });
        };
        if min == 0.0 {
            return Ok(Block { scale: stored, zero_point: 0.0, constant: false });
        }
        let quotient = self.scale_type.round((-f64::from(min) / f64::from(stored)) as f32);
        if quotient.is_finite() {
            return Ok(Block { scale: stored, zero_point: quotient, constant: false });
        }
        // The codes' steps are nothing (or, in float16, less than the rounding of the minimum): what is left is the
        // minimum.
        let stored = self.scale_type.round(min.abs());
        if stored.is_finite() {
            Ok(Block { scale: stored, zero_point: -min.signum(), constant: true })
        } else {
            Err(min)
        }
    }
}

#[cfg(test)]
mod tests;
