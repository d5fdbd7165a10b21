//! Symbolic dimensions and what is known of a value before it exists.

use super::Constant;
use doyen_tensor::{DType, Shape};
use std::{fmt, sync::Arc};

/// One extent of a declared or inferred shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Dim {
    /// A number.
    Known(usize),
    /// A name of the model's ("batch_size"); equal names are equal extents.
    Named(Arc<str>),
    /// Nothing is known.
    Unknown,
}

impl Dim {
    /// The number, if it is one.
    pub const fn known(&self) -> Option<usize> {
        match self {
            Self::Known(n) => Some(*n),
            _ => None,
        }
    }

    /// Whether both could be the same extent.
    pub fn compatible(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Known(a), Self::Known(b)) => a == b,
            _ => true,
        }
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        Self::Known(n)
    }
}

impl From<&str> for Dim {
    fn from(name: &str) -> Self {
        Self::Named(name.into())
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(n) => write!(f, "{n}"),
            Self::Named(n) => f.write_str(n),
            Self::Unknown => f.write_str("?"),
        }
    }
}

/// What is known of a value before a run: type, shape, and its data when it is constant.
#[derive(Debug, Clone, Default)]
pub struct Fact {
    /// Element type.
    pub dtype: Option<DType>,
    /// Extents; `None` when not even the rank is known.
    pub shape: Option<Vec<Dim>>,
    /// The data, when it is known at load.
    pub constant: Option<Arc<Constant>>,
}

impl Fact {
    /// A fact of type and shape.
    pub fn new(dtype: DType, shape: impl Into<Vec<Dim>>) -> Self {
        Self { dtype: Some(dtype), shape: Some(shape.into()), constant: None }
    }

    /// A fact of a type whose shape is not known.
    pub const fn of_type(dtype: Option<DType>) -> Self {
        Self { dtype, shape: None, constant: None }
    }

    /// The rank, if known.
    pub fn rank(&self) -> Option<usize> {
        self.shape.as_ref().map(Vec::len)
    }

    /// Extent `axis`, `Dim::Unknown` when the shape is not known.
    pub fn dim(&self, axis: usize) -> Dim {
        self.shape.as_ref().and_then(|s| s.get(axis).cloned()).unwrap_or(Dim::Unknown)
    }

    /// The shape as numbers, when every extent is known.
    pub fn concrete_shape(&self) -> Option<Shape> {
        self.shape.as_ref()?.iter().map(Dim::known).collect::<Option<Vec<_>>>().map(Shape::from)
    }

    /// The shape for messages: `[batch,?,32]`, or `unknown`.
    pub fn shape_text(&self) -> String {
        match &self.shape {
            None => "unknown".into(),
            Some(s) => format!("[{}]", s.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
        }
    }
}

impl From<Arc<Constant>> for Fact {
    fn from(c: Arc<Constant>) -> Self {
        Self {
            dtype: Some(c.dtype()),
            shape: Some(c.shape().iter().map(|&d| Dim::Known(d)).collect()),
            constant: Some(c),
        }
    }
}
