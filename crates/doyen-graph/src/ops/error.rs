//! What an operator refuses. The graph adds the node's name; the operator names the attribute or input.

use std::fmt::Display;

/// Why an operator cannot be parsed, checked or run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// The operator is not known.
    #[error("operator {0} is not known")]
    UnknownOperator(String),
    /// An attribute outside the operator's schema.
    #[error("unknown attribute {0}")]
    UnknownAttribute(String),
    /// An attribute has a value that is not allowed.
    #[error("attribute {name}: expected {expected}, found {found}")]
    Attribute {
        /// Attribute name of the schema.
        name: String,
        /// What is allowed.
        expected: String,
        /// What was found.
        found: String,
    },
    /// An input has a type, shape or value that is not allowed.
    #[error("input {name}: expected {expected}, found {found}")]
    Input {
        /// Input name of the schema.
        name: String,
        /// What is allowed.
        expected: String,
        /// What was found.
        found: String,
    },
    /// Something that is no single attribute's or input's fault.
    #[error("{0}")]
    Other(String),
}

impl OpError {
    /// An unknown operator.
    pub fn unknown_operator(domain: &str, op_type: &str) -> Self {
        Self::UnknownOperator(if domain.is_empty() { op_type.into() } else { format!("{domain}::{op_type}") })
    }

    /// An attribute outside the schema.
    pub fn unknown_attribute(name: &str) -> Self {
        Self::UnknownAttribute(name.to_owned())
    }

    /// A bad attribute value.
    pub fn attribute(name: &str, expected: impl Display, found: impl Display) -> Self {
        Self::Attribute { name: name.to_owned(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A bad input.
    pub fn input(name: &str, expected: impl Display, found: impl Display) -> Self {
        Self::Input { name: name.to_owned(), expected: expected.to_string(), found: found.to_string() }
    }

    /// Anything else.
    pub fn other(message: impl Display) -> Self {
        Self::Other(message.to_string())
    }
}

impl From<doyen_tensor::TensorError> for OpError {
    fn from(e: doyen_tensor::TensorError) -> Self {
        Self::other(e)
    }
}
