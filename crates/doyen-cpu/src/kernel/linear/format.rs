//! What a kernel has to know of a weight before it sees one, and the borrowed weight itself.

use doyen_tensor::{
    FloatType, FloatView, TensorError,
    format::{Bits, Element, MiniMatrix, QuantMatrix, ZeroPoints},
};
use std::fmt;

/// The format of a weight, as far as the choice of a kernel and the layout of activations depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Integer blocks. Scale type and kind of zero points do not matter here: kernels read all of them.
    Int {
        /// Code width.
        bits: Bits,
        /// Columns that share a scale, at most `cols`.
        block: usize,
        /// Columns K.
        cols: usize,
    },
    /// Floats of 4 and 8 bits with scales.
    Mini {
        /// What a code is.
        element: Element,
        /// Columns that share a scale, at most `cols`.
        block: usize,
        /// Columns K.
        cols: usize,
    },
    /// Float numbers.
    Float {
        /// Stored type.
        ty: FloatType,
        /// Which axis is contiguous.
        orientation: Orientation,
        /// Columns K.
        cols: usize,
    },
}

impl Format {
    /// Columns K.
    pub const fn cols(self) -> usize {
        match self {
            Self::Int { cols, .. } | Self::Mini { cols, .. } | Self::Float { cols, .. } => cols,
        }
    }

    /// Rows that are read together: of a matrix stored by columns, fewer are runs too short for a core's prefetchers.
    pub(crate) const fn rows_together(self) -> usize {
        match self {
            Self::Float { orientation: Orientation::ColumnMajor, .. } => 512,
            _ => 1,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int { bits, block, cols } if block == cols => {
                write!(f, "int{} row-wise over {cols} columns", bits.get())
            }
            Self::Int { bits, block, cols } => {
                write!(f, "int{} block {block} over {cols} columns", bits.get())
            }
            Self::Mini { element, block, cols } => {
                let name = match element {
                    Element::E2M1 => "e2m1",
                    Element::E4M3 => "e4m3",
                };
                write!(f, "{name} block {block} over {cols} columns")
            }
            Self::Float { ty, orientation, cols } => {
                write!(f, "{} {orientation:?} over {cols} columns", ty.dtype())
            }
        }
    }
}

/// Which axis of a float weight is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// `[N, K]`: an output row's weights are contiguous (a folded Transpose, expert weights).
    RowMajor,
    /// `[K, N]`: as ONNX MatMul stores its right operand.
    ColumnMajor,
}

/// A float weight of `rows` outputs N and `cols` inputs K, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct FloatMatrix<'a> {
    /// Output rows N.
    pub rows: usize,
    /// Input columns K.
    pub cols: usize,
    /// Which axis is contiguous.
    pub orientation: Orientation,
    /// Elements from one row (`RowMajor`) or column (`ColumnMajor`) to the next.
    pub stride: usize,
    /// The numbers.
    pub values: FloatView<'a>,
}

impl FloatMatrix<'_> {
    /// Checks that the numbers reach as far as the described matrix. Kernels rely on this.
    ///
    /// # Errors
    /// Gives the expected and the found length.
    pub fn validate(&self) -> Result<(), TensorError> {
        let (outer, inner) = match self.orientation {
            Orientation::RowMajor => (self.rows, self.cols),
            Orientation::ColumnMajor => (self.cols, self.rows),
        };
        if self.stride < inner {
            return Err(TensorError::Format(format!("stride {} of lines of {inner}", self.stride)));
        }
        let need = match outer.checked_sub(1) {
            None => Some(0),
            Some(before) => before.checked_mul(self.stride).and_then(|n| n.checked_add(inner)),
        };
        match need {
            Some(need) if need <= self.values.len() => Ok(()),
            Some(need) => {
                let found = self.values.len();
                Err(TensorError::Format(format!("weights: expected at least {need} numbers, found {found}")))
            }
            None => Err(TensorError::Overflow(vec![self.rows, self.cols])),
        }
    }

    /// Weight of output `n` and input `k` as f32.
    ///
    /// # Panics
    /// When out of range.
    #[inline]
    pub fn get(&self, n: usize, k: usize) -> f32 {
        match self.orientation {
            Orientation::RowMajor => self.values.get(n * self.stride + k),
            Orientation::ColumnMajor => self.values.get(k * self.stride + n),
        }
    }
}

/// A weight of either kind.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// Integer blocks.
    Int(QuantMatrix<'a>),
    /// Floats of 4 and 8 bits.
    Mini(MiniMatrix<'a>),
    /// Float numbers.
    Float(FloatMatrix<'a>),
}

impl Weights<'_> {
    /// Output rows N.
    pub const fn rows(&self) -> usize {
        match self {
            Self::Int(w) => w.rows,
            Self::Mini(w) => w.rows,
            Self::Float(w) => w.rows,
        }
    }

    /// Input columns K.
    pub const fn cols(&self) -> usize {
        match self {
            Self::Int(w) => w.cols,
            Self::Mini(w) => w.cols,
            Self::Float(w) => w.cols,
        }
    }

    /// The format to bind a kernel for.
    pub fn format(&self) -> Format {
        match self {
            Self::Int(w) => Format::Int { bits: w.bits, block: w.block.min(w.cols), cols: w.cols },
            Self::Mini(w) => {
                Format::Mini { element: w.element, block: w.scales.block(w.cols).min(w.cols), cols: w.cols }
            }
            Self::Float(w) => {
                Format::Float { ty: w.values.float_type(), orientation: w.orientation, cols: w.cols }
            }
        }
    }

    /// Checks that the slices reach as far as the described matrix.
    ///
    /// # Errors
    /// Names the part that is too short.
    pub fn validate(&self) -> Result<(), TensorError> {
        match self {
            Self::Int(w) => w.validate(),
            Self::Mini(w) => w.validate(),
            Self::Float(w) => w.validate(),
        }
    }

    /// Bytes that a pass over the weight reads: codes, scales and zero points, or the numbers.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Int(w) => {
                let zero = match w.zero_points {
                    ZeroPoints::Default => 0,
                    ZeroPoints::PerBlock { row_bytes, .. } => w.rows * row_bytes,
                    ZeroPoints::AcrossRows(_) => w.bits.packed_len(w.rows),
                    ZeroPoints::Float(v) => w.rows * w.blocks() * v.float_type().size(),
                };
                w.rows * (w.row_bytes + w.blocks() * w.scales.float_type().size()) + zero
            }
            Self::Mini(w) => (w.rows * w.cols).div_ceil(w.element.per_byte()) + w.scale_bytes(),
            Self::Float(w) => w.rows * w.cols * w.values.float_type().size(),
        }
    }
}
