//! CUDA kernels, their compilation at run time, and a device that runs lowered graphs with them.
//!
//! * [`module`]: the table of kernels and variants, from CUDA C++ files in `kernels/`.
//! * [`compile`]: NVRTC, loaded when needed, and the cache of what it made.
//! * `driver`: the context of a card, its memory, launches.
//! * `params`: the structures that kernels take, field for field as the CUDA files declare them.
//! * `bind`: from a lowered node to its launches, once, at load.
//! * `session`: [`CudaDevice`] and the memory of a loaded program; [`CudaPlanner`], which needs no card.
//! * [`survey`]: what there is to compute with, and how fast it is.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that has it: the driver and NVRTC are looked for
//! when a device is opened, and what is missing is an error that says so.
//!
//! # Numerics
//! Values between nodes are float32. In exact numerics products are computed in float32 as well; otherwise products of more
//! than a few rows round activations and weights to float16 or bfloat16 for the tensor cores and sum in float32.
//! Which kernel a product takes depends on the number of its rows, so logits of a sequence may differ in their last bits
//! with the company it has in a step.

mod bind;
pub mod compile;
mod driver;
mod error;
mod mini;
pub mod module;
mod params;
mod session;
mod weights;

pub use bind::HOST_REFERENCE;
pub use driver::survey;
pub use error::CudaError;
pub use session::{CudaDevice, CudaOptions, CudaPlanner, Dense, KvType};
