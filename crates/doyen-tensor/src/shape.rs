//! Concrete tensor extents with checked arithmetic.

use crate::{DType, TensorError};
use std::{fmt, ops::Deref};

/// Extents of a tensor, outermost first; row-major when laid out. An empty shape is a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// A shape from its extents.
    pub fn new(dims: impl Into<Vec<usize>>) -> Self {
        Self(dims.into())
    }

    /// The extents.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// Number of elements.
    ///
    /// # Errors
    /// When the product overflows, zeros aside: `[0, 2^40, 2^40]` has no elements, and strides that overflow.
    pub fn numel(&self) -> Result<usize, TensorError> {
        // Room for the bits of the widest type, so that byte arithmetic on a shape that passed cannot overflow.
        const MAX: usize = usize::MAX / 64;
        self.0
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)).filter(|&n| n <= MAX))
            .map(|n| if self.0.contains(&0) { 0 } else { n })
            .ok_or_else(|| TensorError::Overflow(self.0.clone()))
    }

    /// Number of bytes of a contiguous tensor of this type.
    ///
    /// # Errors
    /// When the product overflows.
    pub fn bytes(&self, dtype: DType) -> Result<usize, TensorError> {
        dtype.bytes_for(self.numel()?).ok_or_else(|| TensorError::Overflow(self.0.clone()))
    }

    /// Row-major strides in elements; they saturate where [`Shape::numel`] would be an error.
    pub fn strides(&self) -> Vec<usize> {
        let mut s = vec![1usize; self.0.len()];
        for i in (0..self.0.len().saturating_sub(1)).rev() {
            s[i] = s[i + 1].saturating_mul(self.0[i + 1].max(1));
        }
        s
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(d: [usize; N]) -> Self {
        Self(d.to_vec())
    }
}

impl From<&[usize]> for Shape {
    fn from(d: &[usize]) -> Self {
        Self(d.to_vec())
    }
}

impl From<Vec<usize>> for Shape {
    fn from(d: Vec<usize>) -> Self {
        Self(d)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}
