//! Kernels: one file or folder per operation, scalar and vector versions side by side.
//!
//! A kernel is chosen when a step is bound (by [`crate::detect::Isa`], format and shape class) and is a plain
//! function from then on. Simple loops have one body that is compiled once per instruction set (`multiversion`); hot
//! ones are written out per instruction set. Either way the judge is a slow f64 evaluation of the operator's contract.
//!
//! Results do not depend on how many threads the pool has, nor on which other rows a call works on.

pub mod attention;
pub mod elementwise;
pub mod experts;
pub mod gated;
pub mod gather;
pub mod latent;
pub mod linear;
mod math;
mod multiversion;
pub mod norm;
pub mod quantize;
pub mod recurrent;
pub mod rotary;
pub mod route;
pub(crate) mod rows;
pub mod softmax;
#[cfg(test)]
mod test_data;
pub mod widen;
