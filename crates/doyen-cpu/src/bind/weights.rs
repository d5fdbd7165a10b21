//! Weights a bound node owns: shared bytes of the package, seen as borrowed views when a step runs.

use crate::kernel::linear::{FloatMatrix, Orientation, Weights};
use bytes::Bytes;
use doyen_graph::ir::Constant;
use doyen_tensor::{
    FloatType, FloatView, Tensor, TensorError,
    format::{Bits, Element, MiniMatrix, MiniScales, QuantMatrix, ZeroPoints},
};

/// Float numbers that a node owns.
#[derive(Debug, Clone)]
pub(super) struct Floats {
    ty: FloatType,
    bytes: Bytes,
}

impl Floats {
    /// The numbers of `view`, which looks into `of`.
    pub(super) fn of_view(view: FloatView<'_>, of: &Tensor) -> Self {
        Self { ty: view.float_type(), bytes: of.shared_bytes().slice_ref(view.bytes()) }
    }

    /// All numbers of a float tensor.
    pub(super) fn of(tensor: &Tensor) -> Result<Self, TensorError> {
        Ok(Self::of_view(tensor.float_view()?, tensor))
    }

    pub(super) fn view(&self) -> FloatView<'_> {
        FloatView::new(self.ty, &self.bytes)
            .unwrap_or_else(|_| unreachable!("whole elements by construction"))
    }
}

/// A weight that a node owns.
#[derive(Debug, Clone)]
pub(super) enum OwnedWeights {
    Int(OwnedQuant),
    Mini(OwnedMini),
    Float { rows: usize, cols: usize, orientation: Orientation, stride: usize, values: Floats },
}

/// A quantized matrix that a node owns.
#[derive(Debug, Clone)]
pub(super) struct OwnedQuant {
    rows: usize,
    cols: usize,
    bits: Bits,
    block: usize,
    codes: Bytes,
    row_bytes: usize,
    scales: Floats,
    zero_points: OwnedZeroPoints,
}

#[derive(Debug, Clone)]
enum OwnedZeroPoints {
    Default,
    PerBlock { packed: Bytes, row_bytes: usize },
    AcrossRows(Bytes),
    Float(Floats),
}

impl OwnedQuant {
    /// Owns what `m` looks at; the slices must lie in the given tensors.
    pub(super) fn new(
        m: &QuantMatrix<'_>,
        codes: &Tensor,
        scales: &Tensor,
        zero_points: Option<&Tensor>,
    ) -> Self {
        let zp = |s: &[u8]| zero_points.map_or_else(Bytes::new, |t| t.shared_bytes().slice_ref(s));
        Self {
            rows: m.rows,
            cols: m.cols,
            bits: m.bits,
            block: m.block,
            codes: codes.shared_bytes().slice_ref(m.codes),
            row_bytes: m.row_bytes,
            scales: Floats::of_view(m.scales, scales),
            zero_points: match (m.zero_points, zero_points) {
                (ZeroPoints::PerBlock { packed, row_bytes }, _) => {
                    OwnedZeroPoints::PerBlock { packed: zp(packed), row_bytes }
                }
                (ZeroPoints::AcrossRows(packed), _) => OwnedZeroPoints::AcrossRows(zp(packed)),
                (ZeroPoints::Float(v), Some(t)) => OwnedZeroPoints::Float(Floats::of_view(v, t)),
                (ZeroPoints::Default | ZeroPoints::Float(_), _) => OwnedZeroPoints::Default,
            },
        }
    }

    pub(super) fn view(&self) -> QuantMatrix<'_> {
        QuantMatrix {
            rows: self.rows,
            cols: self.cols,
            bits: self.bits,
            block: self.block,
            codes: &self.codes,
            row_bytes: self.row_bytes,
            scales: self.scales.view(),
            zero_points: match &self.zero_points {
                OwnedZeroPoints::Default => ZeroPoints::Default,
                OwnedZeroPoints::PerBlock { packed, row_bytes } => {
                    ZeroPoints::PerBlock { packed, row_bytes: *row_bytes }
                }
                OwnedZeroPoints::AcrossRows(packed) => ZeroPoints::AcrossRows(packed),
                OwnedZeroPoints::Float(v) => ZeroPoints::Float(v.view()),
            },
        }
    }
}

/// A matrix of small floats that a node owns.
#[derive(Debug, Clone)]
pub(super) struct OwnedMini {
    rows: usize,
    cols: usize,
    element: Element,
    codes: Bytes,
    transposed: bool,
    scales: OwnedMiniScales,
    global: f32,
}

#[derive(Debug, Clone)]
enum OwnedMiniScales {
    None,
    E8M0(Bytes),
    E4M3(Bytes),
    Tiles { values: Floats, tile: usize },
}

impl OwnedMini {
    /// Owns what `m` looks at; the slices must lie in the given tensors.
    pub(super) fn new(m: &MiniMatrix<'_>, codes: &Tensor, scales: Option<&Tensor>) -> Self {
        let own = |s: &[u8]| scales.map_or_else(Bytes::new, |t| t.shared_bytes().slice_ref(s));
        Self {
            rows: m.rows,
            cols: m.cols,
            element: m.element,
            codes: codes.shared_bytes().slice_ref(m.codes),
            transposed: m.transposed,
            scales: match (m.scales, scales) {
                (MiniScales::E8M0(s), _) => OwnedMiniScales::E8M0(own(s)),
                (MiniScales::E4M3(s), _) => OwnedMiniScales::E4M3(own(s)),
                (MiniScales::Tiles { values, tile }, Some(t)) => {
                    OwnedMiniScales::Tiles { values: Floats::of_view(values, t), tile }
                }
                (MiniScales::None | MiniScales::Tiles { .. }, _) => OwnedMiniScales::None,
            },
            global: m.global,
        }
    }

    pub(super) fn view(&self) -> MiniMatrix<'_> {
        MiniMatrix {
            rows: self.rows,
            cols: self.cols,
            element: self.element,
            codes: &self.codes,
            transposed: self.transposed,
            scales: match &self.scales {
                OwnedMiniScales::None => MiniScales::None,
                OwnedMiniScales::E8M0(s) => MiniScales::E8M0(s),
                OwnedMiniScales::E4M3(s) => MiniScales::E4M3(s),
                OwnedMiniScales::Tiles { values, tile } => {
                    MiniScales::Tiles { values: values.view(), tile: *tile }
                }
            },
            global: self.global,
        }
    }
}

impl OwnedWeights {
    /// A float matrix `[1,rows,cols]`, read where it lies when its rows or its columns are contiguous there; with the bytes
    /// that had to be made otherwise.
    pub(super) fn float(c: &Constant) -> Result<(Self, usize), TensorError> {
        let &[1, rows, cols] = c.shape().dims() else {
            return Err(TensorError::Format(format!("expected [1, rows, columns], found {}", c.shape())));
        };
        let lying = match c.parts() {
            [part] => match part.strides[..] {
                [_, row, 1] if row >= cols => Some((part, Orientation::RowMajor, row, rows, cols)),
                [_, 1, col] if col >= rows => Some((part, Orientation::ColumnMajor, col, cols, rows)),
                _ => None,
            },
            _ => None,
        };
        let Some((part, orientation, stride, lines, line)) = lying.filter(|_| rows > 0 && cols > 0) else {
            let t = c.to_tensor()?;
            let (values, made) = (Floats::of(&t)?, t.bytes().len());
            return Ok((
                Self::Float { rows, cols, orientation: Orientation::RowMajor, stride: cols, values },
                made,
            ));
        };
        let size = c.dtype().bits() / 8;
        let elements = (lines - 1) * stride + line;
        let bytes = part.bytes.slice(part.offset * size..(part.offset + elements) * size);
        let values = Floats::of(&Tensor::from_bytes(c.dtype(), [elements], bytes)?)?;
        Ok((Self::Float { rows, cols, orientation, stride, values }, 0))
    }

    pub(super) fn view(&self) -> Weights<'_> {
        match self {
            Self::Int(q) => Weights::Int(q.view()),
            Self::Mini(m) => Weights::Mini(m.view()),
            Self::Float { rows, cols, orientation, stride, values } => Weights::Float(FloatMatrix {
                rows: *rows,
                cols: *cols,
                orientation: *orientation,
                stride: *stride,
                values: values.view(),
            }),
        }
    }
}
