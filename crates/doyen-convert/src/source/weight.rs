//! A tensor of a checkpoint, read a few rows at a time: as f32, or as the codes it is stored in.

use super::{
    Data, Entry,
    packed::{Packing, Part},
};
use crate::{
    ConvertError,
    gguf::{Codes, GgmlType, Unpacked, unpack},
};
use bytes::Bytes;
use half::f16;
use safetensors::Dtype;
use std::{fmt, ops::Range, sync::Arc};

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SourceType {
    F32,
    F16,
    BF16,
    F64,
    /// A type of a GGUF file that packs several values.
    Blocks(GgmlType),
    /// Several tensors that are one matrix.
    Packed(Packing),
    /// A type that holds no plain float weights.
    Other(Dtype),
}

impl SourceType {
    /// Bytes of a row of `cols` elements; 0 for types that are not read.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::F64 => 8 * cols,
            Self::F32 => 4 * cols,
            Self::F16 | Self::BF16 => 2 * cols,
            Self::Blocks(ty) => ty.row_bytes(cols).unwrap_or(0),
            Self::Packed(p) => p.row_bytes(cols),
            Self::Other(_) => 0,
        }
    }

    /// For a type whose values are not read: what would be accepted, and the type's name.
    pub(super) fn unread(self) -> Option<(String, String)> {
        match self {
            Self::Other(ty) => {
                Some(("float32, float16, bfloat16 or float64 values".into(), format!("{ty:?}")))
            }
            Self::Blocks(ty) if ty.codes().is_none() => {
                let known = GgmlType::read().map(GgmlType::name).collect::<Vec<_>>().join(", ");
                Some((format!("a type that is read ({known})"), ty.name().into()))
            }
            _ => None,
        }
    }

    /// Whether it is quantized in a way that no stored format keeps.
    pub const fn is_lost(self) -> bool {
        matches!(self, Self::Packed(Packing::Fp8 { .. }))
    }

    /// The codes of a quantized type.
    pub const fn codes(self) -> Option<Codes> {
        match self {
            Self::Blocks(ty) => ty.codes(),
            Self::Packed(p) => p.codes(),
            _ => None,
        }
    }
}

impl fmt::Display for SourceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.pad("F32"),
            Self::F16 => f.pad("F16"),
            Self::BF16 => f.pad("BF16"),
            Self::F64 => f.pad("F64"),
            Self::Blocks(ty) => ty.fmt(f),
            Self::Packed(p) => p.fmt(f),
            Self::Other(ty) => write!(f, "{ty:?}"),
        }
    }
}

/// Which stored row is which row of the model's matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// They are the same.
    Stored,
    /// Within each head of this many rows (or elements of a vector), channel pairs of the rotation lie beside each other
    /// (`2i` and `2i + 1`) and belong half a head apart (`i` and `i + head / 2`).
    RotaryPairs(usize),
    /// The matrix is stored transposed, its columns being stored rows: of this many elements, of which the matrix has those
    /// from `first` on.
    Transposed {
        /// Elements of a stored row.
        width: usize,
        /// The element that is the matrix's first row.
        first: usize,
    },
}

/// A matrix `[rows, cols]` of the checkpoint (vectors are one row), as a place in a file.
#[derive(Debug, Clone)]
pub struct Weight {
    name: Arc<str>,
    dtype: SourceType,
    rows: usize,
    cols: usize,
    data: Data,
    offset: u64,
    order: RowOrder,
    /// The tensors of [`SourceType::Packed`], and this matrix's first row in them.
    parts: Arc<[Part]>,
    first_row: usize,
}

impl Weight {
    pub(super) fn new(name: &str, entry: &Entry, (rows, cols): (usize, usize)) -> Self {
        let (dtype, data, offset, order) = (entry.dtype, entry.data.clone(), entry.offset, entry.order);
        let parts = entry.parts.as_slice().into();
        Self { name: name.into(), dtype, rows, cols, data, offset, order, parts, first_row: 0 }
    }

    /// Matrix `index` of several that lie one after the other.
    pub(super) fn matrix(name: &str, entry: &Entry, extents: (usize, usize), index: usize) -> Self {
        let mut out = Self::new(&format!("{name}[{index}]"), entry, extents);
        out.offset += index as u64 * out.source_bytes();
        out.first_row = index * out.rows;
        out
    }

    /// Some of the rows (or, of a vector, of the elements), as a weight of its own.
    #[must_use]
    pub fn part(&self, range: Range<usize>, vector: bool) -> Self {
        if range == (0..if vector { self.cols } else { self.rows }) {
            return self.clone();
        }
        let name = format!("{}[{}:{}]", self.name, range.start, range.end).into();
        let (rows, cols) = if vector { (self.rows, range.len()) } else { (range.len(), self.cols) };
        let part = Self { name, rows, cols, ..self.clone() };
        if let RowOrder::Transposed { width, first } = self.order {
            return Self { order: RowOrder::Transposed { width, first: first + range.start }, ..part };
        }
        let before = if vector { 1 } else { self.cols };
        let offset = self.offset + (range.start * self.dtype.row_bytes(before)) as u64;
        let first_row = self.first_row + if vector { 0 } else { range.start };
        Self { offset, first_row, ..part }
    }

    /// Name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub const fn dtype(&self) -> SourceType {
        self.dtype
    }

    /// Number of rows.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes in the checkpoint.
    pub fn source_bytes(&self) -> u64 {
        (self.rows * self.dtype.row_bytes(self.cols)) as u64
    }

    /// Widens `rows` to f32, appended to `out` row-major.
    ///
    /// # Errors
    /// When the file has changed and no longer holds the rows, or a value is not finite, as stored or after narrowing
    /// from float64: names the tensor and the place.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut Vec<f32>) -> Result<(), ConvertError> {
        let start = out.len();
        let bytes = match self.dtype {
            SourceType::Packed(_) => Bytes::new(),
            _ => self.bytes(&rows)?,
        };
        match self.dtype {
            SourceType::F32 => out.extend(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b))),
            SourceType::F16 => {
                out.extend(bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()));
            }
            SourceType::BF16 => {
                // As `bf16::to_f32`, but for the payload of NaNs, which are refused below.
                let wide = |&b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
                out.extend(bytes.as_chunks().0.iter().map(wide));
            }
            SourceType::F64 => out.extend(bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b) as f32)),
            SourceType::Blocks(ty) => {
                let mut blocks = Unpacked::default();
                unpack(ty, &bytes, &mut blocks);
                if let Some(codes) = ty.codes() {
                    out.extend(blocks.values(codes.group));
                }
            }
            SourceType::Packed(p) => match p.codes() {
                Some(codes) => {
                    out.extend(p.unpack(&self.parts, self.stored(&rows), self.cols)?.values(codes.group));
                }
                None => p.values(&self.parts, self.stored(&rows), self.cols, out)?,
            },
            SourceType::Other(_) => {}
        }
        let new = &out[start..];
        // All are asked before any is looked for: without a way out of the loop it is done in vectors.
        let any = new.iter().fold(false, |any, v| any | !v.is_finite());
        match any.then(|| new.iter().position(|v| !v.is_finite())).flatten() {
            None => Ok(()),
            Some(i) => Err(self.not_finite(rows.start + i / self.cols, i % self.cols, new[i])),
        }
    }

    /// The codes, scales and minimums of `rows`, for types that have them.
    ///
    /// # Errors
    /// When the file has changed and no longer holds the rows, or a scale or minimum is not finite: names the tensor and
    /// the place.
    pub fn read_codes(&self, rows: Range<usize>) -> Result<Unpacked, ConvertError> {
        let mut out = Unpacked::default();
        match self.dtype {
            SourceType::Blocks(ty) => unpack(ty, &self.bytes(&rows)?, &mut out),
            SourceType::Packed(p) => out = p.unpack(&self.parts, self.stored(&rows), self.cols)?,
            _ => {}
        }
        let groups = self.dtype.codes().map_or(1, |c| self.cols / c.group);
        let bad = |v: &[f32]| v.iter().position(|v| !v.is_finite()).map(|i| (i, v[i]));
        match bad(&out.scales).or_else(|| bad(&out.mins)) {
            None => Ok(out),
            Some((i, value)) => Err(self.bad_scale(value, (rows.start + i / groups, i % groups))),
        }
    }

    /// The bytes of `rows` in each tensor of a matrix of 4-bit floats: codes, then scales.
    ///
    /// # Errors
    /// When the file has changed and no longer holds the rows, or a scale is no number: names the tensor and the place.
    pub fn read_stored(&self, rows: Range<usize>) -> Result<Vec<Vec<u8>>, ConvertError> {
        let out = Packing::mxfp4_bytes(&self.parts, self.stored(&rows), self.cols)?;
        let groups = self.cols / Packing::MXFP4_GROUP;
        match out.get(1).and_then(|scales| scales.iter().position(|&s| s == u8::MAX)) {
            None => Ok(out),
            Some(i) => Err(self.bad_scale("NaN", (rows.start + i / groups, i % groups))),
        }
    }

    /// Where rows are in the tensors of [`SourceType::Packed`].
    const fn stored(&self, rows: &Range<usize>) -> Range<usize> {
        self.first_row + rows.start..self.first_row + rows.end
    }

    /// The stored bytes of `rows`, in the model's order.
    fn bytes(&self, rows: &Range<usize>) -> Result<Bytes, ConvertError> {
        let row_bytes = self.dtype.row_bytes(self.cols);
        let range = |rows: Range<usize>| {
            self.data.range(self.offset + (rows.start * row_bytes) as u64, rows.len() * row_bytes)
        };
        match self.order {
            RowOrder::Stored => range(rows.clone()),
            RowOrder::RotaryPairs(head) if self.rows == 1 => {
                let stored = range(rows.clone())?;
                Ok(half_heads(&stored, 0..self.cols, 0, (head, self.dtype.row_bytes(1))))
            }
            RowOrder::RotaryPairs(head) => {
                // Whole heads are read, since a head's rows are all over it.
                let first = rows.start / head * head;
                let stored = range(first..rows.end.next_multiple_of(head).min(self.rows))?;
                Ok(half_heads(&stored, rows.clone(), first, (head, row_bytes)))
            }
            RowOrder::Transposed { width, first } => {
                let stored = self.data.range(self.offset, width * row_bytes)?;
                let columns = first + rows.start..first + rows.end;
                Ok(transposed(&stored, columns, width, self.dtype.row_bytes(1)))
            }
        }
    }

    fn bad_scale(&self, value: impl fmt::Display, (row, group): (usize, usize)) -> ConvertError {
        let message =
            format!("holds the scale or minimum {value} at group {group} of row {row}; expected finite ones");
        ConvertError::tensor(&self.name, message)
    }

    fn not_finite(&self, row: usize, col: usize, value: f32) -> ConvertError {
        let what = match self.dtype {
            SourceType::F64 if value.is_infinite() => "a value beyond the range of float32".to_owned(),
            _ => format!("{value}"),
        };
        let place = if self.rows == 1 { format!("[{col}]") } else { format!("[{row},{col}]") };
        ConvertError::tensor(&self.name, format!("holds {what} at {place}; expected finite weights"))
    }
}

/// Columns `columns` of a matrix of `width` columns, each as a row.
fn transposed(stored: &[u8], columns: Range<usize>, width: usize, element: usize) -> Bytes {
    let mut out = Vec::with_capacity(columns.len() * (stored.len() / width.max(1)));
    for column in columns {
        for row in stored.chunks_exact(width * element) {
            out.extend_from_slice(&row[column * element..(column + 1) * element]);
        }
    }
    out.into()
}

/// Rows `rows` of heads whose pairs lie beside each other; `stored` starts at row `first`, a head's first.
fn half_heads(stored: &[u8], rows: Range<usize>, first: usize, (head, row_bytes): (usize, usize)) -> Bytes {
    let mut out = Vec::with_capacity(rows.len() * row_bytes);
    for row in rows {
        let (half, pair) = (row % head / (head / 2), row % (head / 2));
        let from = (row / head * head + 2 * pair + half - first) * row_bytes;
        out.extend_from_slice(&stored[from..from + row_bytes]);
    }
    out.into()
}
