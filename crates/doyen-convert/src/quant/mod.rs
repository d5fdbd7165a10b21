//! Quantization of weight rows to 2, 4 and 8 bits.
//!
//! `row` chooses scales, zero points and codes of one row by rounding to nearest, `carry` keeps those that the source
//! holds; this file packs rows the way their consumer stores them.
//! Operator contract, section 0: codes least-significant bits first along K, value `(code - zero_point) * scale`.

mod carry;
mod row;

pub(crate) use carry::{CodeRows, common_form, form};
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
    /// Zero points of the blocks.
    pub zero_points: ZeroPointKind,
    /// Type the scales are stored in; codes are chosen against the scale as stored.
    pub scale_type: FloatType,
}

/// How the zero points of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroPointKind {
    /// Not at all: they are `2^(bits-1)`.
    Implied,
    /// One code a block, packed as the weights are.
    Packed,
    /// One float a block, in the type of the scales; only MatMulNBits has them.
    Float,
}

impl ZeroPointKind {
    /// What rounding makes.
    pub(crate) const fn rounded(asymmetric: bool) -> Self {
        if asymmetric { Self::Packed } else { Self::Implied }
    }
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
        match (self.zero_points, layout) {
            (ZeroPointKind::Float, _) => rows * self.blocks(cols) * self.scale_type.size(),
            (_, Layout::PaddedBlocks | Layout::TightRows) => rows * self.bits.packed_len(self.blocks(cols)),
            (_, Layout::RowWise) => self.bits.packed_len(rows),
        }
    }

    /// Quantizes and packs rows of `cols` values. With [`Layout::RowWise`], rows must come in multiples of a whole
    /// byte of zero points, the last rows of a matrix excepted. `deviation` is told how far off each value is.
    pub(crate) fn pack(
        &self,
        values: &[f32],
        cols: usize,
        layout: Layout,
        mut deviation: Option<&mut Deviation>,
    ) -> Result<Packed, ScaleOverflow> {
        let mut out = Packed::with_capacity(self, values.len() / cols, cols, layout);
        let mut across = Vec::new();
        let mut codes = RowCodes::default();
        for (row, x) in values.chunks_exact(cols).enumerate() {
            quantize_row(x, self, &mut codes).map_err(|scale| ScaleOverflow { row, scale })?;
            if let Some(d) = deviation.as_deref_mut() {
                d.add_rounded(x, &codes, self.block);
            }
            self.push_codes(&mut codes.codes, cols, layout, &mut out);
            for &s in &codes.scales {
                push_float(self.scale_type, s, &mut out.scales);
            }
            match layout {
                _ if self.zero_points == ZeroPointKind::Implied => {}
                Layout::RowWise => across.extend_from_slice(&codes.zero_points),
                Layout::PaddedBlocks | Layout::TightRows => {
                    pack_into(self.bits, &codes.zero_points, &mut out.zero_points);
                }
            }
        }
        pack_into(self.bits, &across, &mut out.zero_points);
        Ok(out)
    }

    /// Appends a row's codes, padded where the layout wants it.
    fn push_codes(&self, codes: &mut Vec<u8>, cols: usize, layout: Layout, out: &mut Packed) {
        if layout == Layout::PaddedBlocks {
            codes.resize(self.blocks(cols) * self.block, 0);
        }
        pack_into(self.bits, codes, &mut out.codes);
    }
}

impl Packed {
    fn with_capacity(spec: &QuantSpec, rows: usize, cols: usize, layout: Layout) -> Self {
        Self {
            codes: Vec::with_capacity(rows * spec.code_row_bytes(cols, layout)),
            scales: Vec::with_capacity(rows * spec.blocks(cols) * spec.scale_type.size()),
            zero_points: Vec::new(),
        }
    }
}

/// How far stored values are from those of the source, over many of them.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Deviation {
    /// Sum of squared differences.
    pub error: f64,
    /// Sum of squared source values.
    pub energy: f64,
}

impl Deviation {
    /// Root mean square of the differences over that of the source's values; 0 when nothing differs.
    pub fn relative(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.energy).sqrt() }
    }

    pub(crate) fn add(&mut self, source: f64, stored: f64) {
        self.error += (stored - source).powi(2);
        self.energy += source.powi(2);
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.error += other.error;
        self.energy += other.energy;
    }

    fn add_rounded(&mut self, values: &[f32], row: &RowCodes, block: usize) {
        for (c, (&v, &q)) in values.iter().zip(&row.codes).enumerate() {
            let b = c / block;
            let stored = (f64::from(q) - f64::from(row.zero_points[b])) * f64::from(row.scales[b]);
            self.add(f64::from(v), stored);
        }
    }
}

/// Appends packed codes; the pad bits of the last byte are zero.
fn pack_into(bits: Bits, codes: &[u8], out: &mut Vec<u8>) {
    match bits {
        Bits::B8 => out.extend_from_slice(codes),
        Bits::B4 => {
            // Sixteen bytes at a time are made with vectors.
            let (lanes, rest) = codes.as_chunks::<32>();
            for lane in lanes {
                let mut bytes = [0u8; 16];
                for (i, b) in bytes.iter_mut().enumerate() {
                    *b = lane[2 * i] | lane[2 * i + 1] << 4;
                }
                out.extend_from_slice(&bytes);
            }
            let (pairs, rest) = rest.as_chunks::<2>();
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
