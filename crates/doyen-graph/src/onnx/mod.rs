//! ONNX files: protobuf bytes to [`crate::ir::Graph`] and back.
//!
//! [`encode`] writes a graph whose large constants lie in an external file that somebody else fills. The messages in
//! [`proto`] are generated; nobody outside this module sees them.

mod encode;
#[rustfmt::skip]
mod proto;
mod tensor;

pub use encode::{EncodeError, ExternalPlan, ExternalRef, encode};
