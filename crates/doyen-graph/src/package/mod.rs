//! Packages: a directory (or embedded files) with a model in ONNX form and what belongs to it.

mod map;
mod source;

pub use source::{DataFiles, DirSource, EmbeddedSource, PackageSource, SourceError};
