//! Quantized weight formats as they lie in ONNX files, each with its scalar reference.
//!
//! `int` holds 2/4/8-bit integer blocks (MatMulNBits, QMoE, GatherBlockQuantized). Backends write kernels
//! against these views; they never reinterpret the bytes on their own.

pub mod int;

pub use int::{Bits, QuantMatrix, ZeroPoints};
