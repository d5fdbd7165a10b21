//! A float tensor of a checkpoint, read a few rows at a time.

use super::file::Data;
use crate::ConvertError;
use half::{bf16, f16};
use safetensors::Dtype;
use std::{ops::Range, sync::Arc};

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SourceType {
    F32,
    F16,
    BF16,
    F64,
    /// A type that holds no plain float weights.
    Other(Dtype),
}

impl SourceType {
    /// Bytes of one element; 0 for types that are not read.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Other(_) => 0,
        }
    }
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
}

impl Weight {
    pub(super) fn new(
        name: &str,
        dtype: SourceType,
        (rows, cols): (usize, usize),
        data: Data,
        offset: u64,
    ) -> Self {
        Self { name: name.into(), dtype, rows, cols, data, offset }
    }

    /// Name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
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
    pub const fn source_bytes(&self) -> u64 {
        (self.rows * self.cols * self.dtype.size()) as u64
    }

    /// Widens `rows` to f32, appended to `out` row-major.
    ///
    /// # Errors
    /// When the file has changed and no longer holds the rows, or a value is not finite, as stored or after narrowing
    /// from float64: names the tensor and the place.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut Vec<f32>) -> Result<(), ConvertError> {
        let size = self.dtype.size();
        let row_bytes = self.cols * size;
        let at = self.offset + (rows.start * row_bytes) as u64;
        let bytes = self.data.range(at, rows.len() * row_bytes)?;
        let start = out.len();
        match self.dtype {
            SourceType::F32 => out.extend(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b))),
            SourceType::F16 => {
                out.extend(bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()));
            }
            SourceType::BF16 => {
                out.extend(bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()));
            }
            SourceType::F64 => out.extend(bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b) as f32)),
            SourceType::Other(_) => {}
        }
        match out[start..].iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(i) => Err(self.not_finite(rows.start + i / self.cols, i % self.cols, out[start + i])),
        }
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
