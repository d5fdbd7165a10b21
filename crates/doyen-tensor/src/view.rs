//! Borrowed runs of float numbers in their stored type.

use crate::{DType, TensorError};
use half::{bf16, f16};

/// A float type that scales, zero points and biases may be stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum FloatType {
    F32,
    F16,
    BF16,
}

impl FloatType {
    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// The float type of a tensor type, if it is one of these three.
    #[inline]
    pub const fn from_dtype(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::BF16),
            _ => None,
        }
    }

    /// The tensor type.
    #[inline]
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// The nearest number of this type; infinite beyond its range.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::BF16 => bf16::from_f32(x).to_f32(),
        }
    }
}

/// Float numbers as bytes in a stored type, little-endian, at any alignment.
#[derive(Debug, Clone, Copy)]
pub struct FloatView<'a> {
    ty: FloatType,
    bytes: &'a [u8],
}

impl<'a> FloatView<'a> {
    /// A view over whole elements.
    ///
    /// # Errors
    /// When `bytes` is not a whole number of elements.
    #[inline]
    pub fn new(ty: FloatType, bytes: &'a [u8]) -> Result<Self, TensorError> {
        if !bytes.len().is_multiple_of(ty.size()) {
            return Err(TensorError::Format(format!(
                "{} bytes are not a whole number of {} elements",
                bytes.len(),
                ty.dtype()
            )));
        }
        Ok(Self { ty, bytes })
    }

    /// The stored type.
    #[inline]
    pub const fn float_type(self) -> FloatType {
        self.ty
    }

    /// The raw bytes.
    #[inline]
    pub const fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// Number of elements.
    #[inline]
    pub const fn len(self) -> usize {
        self.bytes.len() / self.ty.size()
    }

    /// Whether there is no element.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.bytes.is_empty()
    }

    /// Element `i` as f32.
    ///
    /// # Panics
    /// When `i` is out of range.
    #[inline]
    pub fn get(self, i: usize) -> f32 {
        match self.ty {
            FloatType::F32 => {
                let b = &self.bytes[4 * i..4 * i + 4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
            FloatType::F16 => {
                let b = &self.bytes[2 * i..2 * i + 2];
                f16::from_le_bytes([b[0], b[1]]).to_f32()
            }
            FloatType::BF16 => {
                let b = &self.bytes[2 * i..2 * i + 2];
                bf16::from_le_bytes([b[0], b[1]]).to_f32()
            }
        }
    }

    /// Elements `start .. start + len` as a view.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[inline]
    pub fn slice(self, start: usize, len: usize) -> Self {
        let s = self.ty.size();
        Self { ty: self.ty, bytes: &self.bytes[start * s..(start + len) * s] }
    }
}
