//! ONNX files: protobuf bytes to [`crate::ir::Graph`] and back.
//!
//! [`decode`] reads a model file whose tensors stay where they are mapped; what it returns has its names resolved and
//! its operators parsed, and still has to pass [`crate::check`]. [`encode`] writes a graph whose large constants lie
//! in an external file that somebody else fills. The messages in `proto` are generated; nobody outside this module
//! sees them.

mod attr;
mod decode;
mod encode;
mod error;
mod external;
mod guard;
#[rustfmt::skip]
mod proto;
mod tensor;
#[cfg(test)]
mod tests;

pub use decode::{NEWEST_IR, NEWEST_OPSET, decode};
pub use encode::{EncodeError, ExternalPlan, ExternalRef, encode};
pub use error::DecodeError;
pub use external::{ExternalFiles, NoExternalFiles};
pub use tensor::{decode_tensor, encode_tensor};
