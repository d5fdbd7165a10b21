//! Checkpoints to quantized ONNX packages.
//!
//! [`Input`] opens a Hugging Face checkpoint folder or GGUF files, [`convert`] writes a package: `model.onnx` with its
//! weights in `model.onnx.data`, `genai_config.json`, and the tokenizer's files.
//!
//! | module | what lives there |
//! |---|---|
//! | [`source`] | safetensors files: mapped, checked, read a few rows at a time |
//! | [`gguf`] | GGUF files: container, block formats, names, configuration, tokenizer |
//! | [`config`] | `config.json` as a typed description of a decoder |
//! | [`options`] | which weight gets which width |
//! | `blocks` | one recipe per building block: nodes, and the tensors they need |
//! | `graph` | a decoder from its blocks |
//! | `store`, `job` | where every weight will lie, and how its bytes are made |
//! | [`quant`] | round-to-nearest quantization and the packed layouts |
//! | `manifest` | `genai_config.json` and the files that are copied |
//! | `write` | the package, whole or not at all |
//!
//! Nothing here runs a model, and nothing prints: progress and results go to the caller.

#![forbid(unsafe_code)]

mod blocks;
pub mod config;
mod error;
pub mod gguf;
mod graph;
mod input;
mod job;
mod manifest;
pub mod options;
pub mod quant;
pub mod report;
pub mod source;
mod store;
mod write;

pub use error::ConvertError;
pub use input::Input;
pub use options::Options;
pub use report::{Part, Progress, Report, Silent, Step};
pub use write::{Target, convert, convert_input};
