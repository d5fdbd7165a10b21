//! Round-to-nearest quantization of weight rows to 2, 4 and 8 bits.
//!
//! `row` chooses scales, zero points and codes of one row; this file packs rows the way their consumer stores them.
//! Operator contract, section 0: codes least-significant bits first along K, value `(code - zero_point) * scale`.

mod row;

pub(crate) use row::{RowCodes, quantize_row};

use doyen_tensor::{FloatType, format::Bits};
use half::{bf16, f16};

/// How a matrix is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantSpec {
    /// Code width.
    pub bits: Bits,
    /// Columns that share a scale.
    pub block: usize,
    /// Whether blocks have their own zero point (asymmetric), or the implied `2^(bits-1)`.
    pub zero_points: bool,
    /// Type the scales are stored in; codes are chosen against the scale as stored.
    pub scale_type: FloatType,
}

/// Where the parts of a row lie in the consumer's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Each block of codes padded to a whole block; zero points start a new byte each row (MatMulNBits).
    PaddedBlocks,
    /// Codes of a row without padding; zero points start a new byte each row (block-wise QMoE, GatherBlockQuantized).
    TightRows,
    /// One block a row; zero points packed across rows (row-wise QMoE).
    RowWise,
}

/// A scale does not fit the type it is stored in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ScaleOverflow {
    /// Row within the quantized rows.
    pub row: usize,
    /// The scale.
    pub scale: f32,
}

/// Packed rows, ready to be written.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Packed {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub zero_points: Vec<u8>,
}

impl QuantSpec {
    /// Blocks of a row of `cols`.
    pub const fn blocks(&self, cols: usize) -> usize {
        cols.div_ceil(self.block)
    }

    /// Bytes of the codes of a row.
    pub const fn code_row_bytes(&self, cols: usize, layout: Layout) -> usize {
        match layout {
            Layout::PaddedBlocks => self.blocks(cols) * self.bits.packed_len(self.block),
            Layout::TightRows | Layout::RowWise => self.bits.packed_len(cols),
        }
    }

    /// Bytes of the zero points of `rows` rows, were there any.
    pub const fn zero_point_bytes(&self, rows: usize, cols: usize, layout: Layout) -> usize {
        match layout {
            Layout::PaddedBlocks | Layout::TightRows => rows * self.bits.packed_len(self.blocks(cols)),
            Layout::RowWise => self.bits.packed_len(rows),
        }
    }

    /// Quantizes and packs rows of `cols` values. With [`Layout::RowWise`], rows must come in multiples of a whole
    /// byte of zero points, the last rows of a matrix excepted.
    pub(crate) fn pack(&self, values: &[f32], cols: usize, layout: Layout) -> Result<Packed, ScaleOverflow> {
        let rows = values.len() / cols;
        let mut out = Packed {
            codes: Vec::with_capacity(rows * self.code_row_bytes(cols, layout)),
            scales: Vec::with_capacity(rows * self.blocks(cols) * self.scale_type.size()),
            zero_points: Vec::new(),
        };
        let mut across = Vec::new();
        let mut codes = RowCodes::default();
        for (row, x) in values.chunks_exact(cols).enumerate() {
            quantize_row(x, self, &mut codes).map_err(|scale| ScaleOverflow { row, scale })?;
            if layout == Layout::PaddedBlocks {
                codes.codes.resize(self.blocks(cols) * self.block, 0);
            }
            pack_into(self.bits, &codes.codes, &mut out.codes);
            for &s in &codes.scales {
                push_float(self.scale_type, s, &mut out.scales);
            }
            match layout {
                _ if !self.zero_points => {}
                Layout::RowWise => across.extend_from_slice(&codes.zero_points),
                Layout::PaddedBlocks | Layout::TightRows => {
                    pack_into(self.bits, &codes.zero_points, &mut out.zero_points);
                }
            }
        }
        pack_into(self.bits, &across, &mut out.zero_points);
        Ok(out)
    }
}

/// Appends packed codes; the pad bits of the last byte are zero.
fn pack_into(bits: Bits, codes: &[u8], out: &mut Vec<u8>) {
    match bits {
        Bits::B8 => out.extend_from_slice(codes),
        Bits::B4 => {
            let (pairs, rest) = codes.as_chunks::<2>();
            out.extend(pairs.iter().map(|c| c[0] | c[1] << 4));
            out.extend_from_slice(rest);
        }
        Bits::B2 => {
            let (quads, rest) = codes.as_chunks::<4>();
            out.extend(quads.iter().map(|c| c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6));
            if !rest.is_empty() {
                out.push(rest.iter().enumerate().fold(0, |b, (i, c)| b | c << (2 * i)));
            }
        }
    }
}

/// Appends a value that is exact in `ty`.
fn push_float(ty: FloatType, value: f32, out: &mut Vec<u8>) {
    match ty {
        FloatType::F32 => out.extend_from_slice(&value.to_le_bytes()),
        FloatType::F16 => out.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
        FloatType::BF16 => out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
    }
}

/// Appends values rounded to `ty`. Returns the index of the first that overflows it.
pub(crate) fn narrow(ty: FloatType, values: &[f32], out: &mut Vec<u8>) -> Result<(), usize> {
    for (i, &v) in values.iter().enumerate() {
        let finite = match ty {
            FloatType::F32 => true,
            FloatType::F16 => f16::from_f32(v).is_finite(),
            FloatType::BF16 => bf16::from_f32(v).is_finite(),
        };
        if !finite {
            return Err(i);
        }
        push_float(ty, v, out);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
