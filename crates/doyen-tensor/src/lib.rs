//! Data types, shapes, tensors and quantized weight formats.
//!
//! The lowest crate: everything above speaks in these types. It knows no graph, no file format and no
//! kernel; the quantized formats carry their own slow, obvious reference (`format`), which is the judge of
//! every fast kernel in the backends.
//!
//! * [`DType`], [`Shape`], [`Tensor`]: element types, checked extents, contiguous little-endian data that may
//!   be a slice of a mapped file (cloning never copies bytes).
//! * [`mod@format`]: 2/4/8-bit block quantization as it lies in ONNX files: layout, pack, unpack, scalar dot.
//! * [`ids`]: newtypes, so that an expert index cannot be passed for a layer or a page.

#![forbid(unsafe_code)]

mod dtype;
mod error;
pub mod format;
pub mod ids;
mod shape;
mod tensor;
mod view;

pub use dtype::{DType, bf16_from_f64, bf16_round, f16_from_f64, f16_round};
pub use error::TensorError;
pub use ids::{ByteCount, ExpertId, LayerId, PageId, TokenId};
pub use shape::Shape;
pub use tensor::{Element, Tensor};
pub use view::{FloatType, FloatView};
