//! Why a model file cannot be read.

use crate::ir::GraphError;

/// What is wrong with a model file.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DecodeError {
    /// The bytes are not the protobuf message they should be.
    #[error("not a readable ONNX protobuf: {0}")]
    Protobuf(String),
    /// A version this release does not know.
    #[error("{what} version {found} is newer than {newest}, the newest this release knows")]
    Version {
        /// "ONNX IR", or the opset with its domain.
        what: String,
        /// Version in the file.
        found: i64,
        /// Newest version known.
        newest: i64,
    },
    /// A tensor that cannot be used.
    #[error("tensor {name:?}: {reason}")]
    Tensor {
        /// Tensor name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A graph input, graph output or declared value that cannot be used.
    #[error("{port} {name:?}: {reason}")]
    Value {
        /// "graph input", "graph output" or "value".
        port: &'static str,
        /// Value name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Something about the model as a whole.
    #[error("{0}")]
    Model(String),
    /// Operators that refuse their attributes: all of them.
    #[error("{}", join(.0))]
    Nodes(Vec<GraphError>),
}

fn join(errors: &[GraphError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
