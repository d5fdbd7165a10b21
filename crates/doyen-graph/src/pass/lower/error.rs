//! Why a graph cannot be lowered.

use crate::ir::{GraphError, Node};
use std::fmt::Display;

/// Why a graph cannot be lowered, with the node or port at fault.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LowerError {
    /// A node that does not fit ragged tokens.
    #[error("node {node:?} ({op}): {reason}")]
    Node {
        /// Node name.
        node: String,
        /// Operator, with its domain if it is not the default.
        op: String,
        /// What is in the way.
        reason: String,
    },
    /// A graph input or output.
    #[error("port {port:?}: {reason}")]
    Port {
        /// Port name.
        port: String,
        /// What is wrong.
        reason: String,
    },
    /// An operator refuses its inputs at a probe.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

impl LowerError {
    /// Blames a node.
    pub(super) fn node(node: &Node, reason: impl Display) -> Self {
        Self::Node { node: node.name.clone(), op: node.op_name(), reason: reason.to_string() }
    }

    /// Blames a port.
    pub(super) fn port(port: impl Into<String>, reason: impl Display) -> Self {
        Self::Port { port: port.into(), reason: reason.to_string() }
    }
}
