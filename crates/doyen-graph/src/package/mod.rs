//! Packages: a directory (or embedded files) with a model in ONNX form and what belongs to it.
//!
//! [`Package::open`] reads the manifest, decodes and checks the graph over mapped files, and finds out which of its
//! inputs and outputs are what. [`Draft`] stops before judging, for commands that show a package. Nothing is copied:
//! constants are slices of the mapped files.

mod inference;
mod manifest;
mod map;
mod open;
mod ports;
mod source;
mod yaml;

pub use inference::INFERENCE_METADATA;
pub use manifest::{Decoder, MANIFEST, Manifest, ManifestError, Search, SlidingWindow};
pub use map::{explain_truncated_files, map_range};
pub use open::{Draft, Package, PackageError, TextFiles};
pub use ports::{PortError, derive as derive_ports};
pub use source::{DataFiles, DirSource, EmbeddedSource, PackageSource, SourceError};
