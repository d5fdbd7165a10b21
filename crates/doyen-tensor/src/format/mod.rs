//! Quantized weight formats as they lie in ONNX files, each with its scalar reference.
//!
//! `int` holds 2/4/8-bit integer blocks (MatMulNBits, QMoE, GatherBlockQuantized), `mini` the floats of 4 and 8 bits
//! that QMoE has beside them (MXFP4, NVFP4, FP8). Backends write kernels
//! against these views; they never reinterpret the bytes on their own.

pub mod int;
pub mod mini;

pub use int::{Bits, QuantMatrix, ZeroPoints};
pub use mini::{Element, MiniMatrix, MiniScales};
