//! The Doyen command line, as a library so that its reference can be generated and its pieces reused.
//!
//! | module | what lives there |
//! |---|---|
//! | [`cli`] | one file per verb: options, help, what it prints |
//! | [`model`] | a package on a backend: engine, tokenizer, template, manifest |
//! | [`mod@bench`] | measuring models and describing the machine |
//! | [`device`] | the CPU, or a card |
//! | [`builtin`] | the model embedded in the binary |
//!
//! This is the only crate that names a backend.

#![forbid(unsafe_code)]

pub mod bench;
pub mod builtin;
pub mod cli;
pub mod conformance;
mod console;
pub mod device;
pub mod generate;
pub mod inventory;
pub mod model;
pub mod verify;
