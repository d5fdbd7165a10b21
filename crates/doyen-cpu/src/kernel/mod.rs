//! Kernels: one file or folder per operation, scalar and vector versions side by side.
//!
//! A kernel is chosen when a step is bound (by [`crate::detect::Isa`], format and shape class) and is a plain
//! function from then on. The scalar version is written from the operator's contract and judges the others.

pub mod linear;
pub mod quantize;
