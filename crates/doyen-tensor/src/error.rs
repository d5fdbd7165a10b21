//! The error of this crate: what a tensor or a format refuses, with expected and found.

use crate::{DType, Shape};

/// Why a tensor could not be built or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// The element count or byte count does not fit the address space.
    #[error("shape {0:?} overflows the address space")]
    Overflow(Vec<usize>),
    /// The data has another length than type and shape demand.
    #[error("{dtype} tensor of shape {shape} needs {expected} bytes, found {found}")]
    Length {
        /// Element type.
        dtype: DType,
        /// Shape asked for.
        shape: Shape,
        /// Bytes that type and shape demand.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The element type is not the one asked for.
    #[error("expected {expected} elements, found {found}")]
    Type {
        /// What the caller wanted.
        expected: &'static str,
        /// What the tensor holds.
        found: DType,
    },
    /// A quantized format with impossible parameters.
    #[error("{0}")]
    Format(String),
}
