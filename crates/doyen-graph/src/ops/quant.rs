//! Parameters that the operators over block-quantized weights share.

use super::OpError;
use super::args::{Want, dim_of};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, format::Bits};

/// Which columns of a weight row share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// All of them: one scale a row.
    RowWise,
    /// This many, a power of two and at least 16; the last block of a row may be shorter.
    Blocks(usize),
}

impl Block {
    /// Blocks of a row of `cols` columns.
    pub const fn count(self, cols: usize) -> usize {
        match self {
            Self::RowWise => 1,
            Self::Blocks(n) => cols.div_ceil(n),
        }
    }

    /// Columns of a block in a row of `cols` columns, as [`doyen_tensor::format::QuantMatrix`] counts them.
    pub const fn size(self, cols: usize) -> usize {
        match self {
            Self::RowWise => cols,
            Self::Blocks(n) => n,
        }
    }
}

/// The precision a node asks of its activations: a permission, not a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum AccuracyLevel {
    Unset,
    F32,
    F16,
    Bf16,
    I8,
}

impl AccuracyLevel {
    pub(super) fn parse(attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(match attrs.int("accuracy_level")?.unwrap_or(0) {
            0 => Self::Unset,
            1 => Self::F32,
            2 => Self::F16,
            3 => Self::Bf16,
            4 => Self::I8,
            v => return Err(OpError::attribute("accuracy_level", "0 to 4", v)),
        })
    }

    /// Whether int8 activations are permitted.
    pub const fn permits_int8(self) -> bool {
        matches!(self, Self::Unset | Self::I8)
    }
}

/// A block size from an attribute's value.
///
/// # Errors
/// When it is not a power of two of at least 16.
pub(super) fn block_size(value: i64) -> Result<usize, OpError> {
    match usize::try_from(value) {
        Ok(n) if n >= 16 && n.is_power_of_two() => Ok(n),
        _ => Err(OpError::attribute("block_size", "a power of two, at least 16", value)),
    }
}

/// A code width from an attribute.
///
/// # Errors
/// When it is not 2, 4 or 8.
pub(super) fn bits(attrs: &mut Attrs, name: &'static str) -> Result<Option<Bits>, OpError> {
    let Some(v) = attrs.int(name)? else { return Ok(None) };
    Bits::new(v).map(Some).ok_or_else(|| OpError::attribute(name, "2, 4 or 8", v))
}

/// Refuses an input of packed codes that is not uint8.
pub(super) fn packed(name: &str, fact: &Fact) -> Result<(), OpError> {
    super::util::check_type(name, fact, &[DType::U8]).map(|_| ())
}

/// Columns that `axis` of a packed tensor holds, if known.
///
/// # Errors
/// When the number overflows.
pub(super) fn columns(name: &str, fact: Option<&Fact>, axis: usize, bits: Bits) -> Result<Want, OpError> {
    super::args::product(name, &[dim_of(fact, axis), Some(bits.per_byte())])
}
