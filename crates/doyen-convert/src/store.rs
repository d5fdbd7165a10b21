//! Where every weight of the package will lie, and the job that makes its bytes.
//!
//! Recipes place tensors before a single weight is read: shapes and formats fix all sizes. `write` runs the jobs and
//! puts their results where this file said they go. Tensors start at multiples of 4096 bytes, so that they can be
//! mapped and read in place.

use crate::{
    job::{Job, Made, Rows, Sink},
    quant::{Layout, QuantSpec, ZeroPointKind},
    report::Part,
};
use doyen_graph::{
    ir::{Dim, Fact, Graph, ValueId},
    onnx::{ExternalPlan, ExternalRef},
};
use doyen_tensor::{ByteCount, DType, FloatType, Shape};
use std::collections::BTreeMap;

/// Name of the data file beside `model.onnx`.
pub(crate) const DATA_FILE: &str = "model.onnx.data";

/// Alignment of tensors: the page size of the systems that map them.
const ALIGN: u64 = 4096;

/// Placed tensors and pending jobs.
#[derive(Debug, Default)]
pub(crate) struct Store {
    pub externals: ExternalPlan,
    pub jobs: Vec<Job>,
    /// Bytes per part, without the gaps between tensors.
    pub parts: BTreeMap<Part, ByteCount>,
    /// Values of all placed tensors.
    pub placed: Vec<ValueId>,
    /// Whether the report says what became of each kind of tensor.
    reports: bool,
    pub(crate) end: u64,
}

/// Which operator reads a quantized matrix; it decides shapes and row layout.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Consumer {
    /// `MatMulNBits`.
    MatMul,
    /// `GatherBlockQuantized` over the first axis.
    Gather,
    /// `QMoE`: one source an expert.
    Experts {
        /// One scale a row instead of one a block.
        row_wise: bool,
    },
}

/// The tensors of a quantized matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantized {
    pub codes: ValueId,
    pub scales: ValueId,
    pub zero_points: Option<ValueId>,
}

impl Store {
    /// An empty store; `reports` says whether what becomes of each kind of tensor is told.
    pub(crate) fn reporting(reports: bool) -> Self {
        Self { reports, ..Self::default() }
    }

    /// Bytes of the data file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.end
    }

    fn place(
        &mut self,
        graph: &mut Graph,
        name: &str,
        dtype: DType,
        shape: &[usize],
        part: Part,
    ) -> (ValueId, u64) {
        let offset = self.end.next_multiple_of(ALIGN);
        // Extents are bounded by `config` far below overflow of their product with 8 bytes.
        let length = (shape.iter().product::<usize>() * dtype.bits()).div_ceil(8) as u64;
        self.end = offset + length;
        *self.parts.entry(part).or_default() += ByteCount(length);
        let value = graph.intern(name);
        self.placed.push(value);
        graph.value_mut(value).fact =
            Fact::new(dtype, shape.iter().map(|&d| Dim::Known(d)).collect::<Vec<_>>());
        let location = DATA_FILE.to_owned();
        let place = ExternalRef { location, offset, length, dtype, shape: Shape::from(shape) };
        self.externals.insert(name, place);
        (value, offset)
    }

    /// A float tensor made of the sources' rows one after the other.
    pub(crate) fn float(
        &mut self,
        graph: &mut Graph,
        name: &str,
        ty: FloatType,
        shape: &[usize],
        sources: Vec<Rows>,
        part: Part,
    ) -> ValueId {
        let (value, mut at) = self.place(graph, name, ty.dtype(), shape, part);
        for rows in sources {
            let bytes = (rows.rows() * rows.cols() * ty.size()) as u64;
            self.jobs.push(Job {
                rows,
                sink: Sink::Float { ty, at },
                reported: self.reports.then_some(part),
            });
            at += bytes;
        }
        value
    }

    /// Matrices `[rows, cols]` of 4-bit floats, one a source, for QMoE.
    pub(crate) fn mxfp4(
        &mut self,
        graph: &mut Graph,
        name: &str,
        sources: Vec<Rows>,
        part: Part,
    ) -> Quantized {
        let [rows, cols] = sources.first().map_or([0; 2], |s| [s.rows(), s.cols()]);
        let mut place = |name: &str, dtype, width: usize| {
            self.place(graph, name, dtype, &[sources.len(), rows, width], part)
        };
        let (codes, codes_at) = place(&format!("{name}.weight"), DType::U8, cols / 2);
        let (scales, scales_at) = place(&format!("{name}.scales"), DType::F8E8M0, cols / 32);
        for (e, source) in sources.into_iter().enumerate() {
            let (codes, scales) =
                (codes_at + (e * rows * cols / 2) as u64, scales_at + (e * rows * cols / 32) as u64);
            let sink = Sink::Mxfp4 { codes, scales };
            self.jobs.push(Job { rows: source, sink, reported: self.reports.then_some(part) });
        }
        Quantized { codes, scales, zero_points: None }
    }

    /// A quantized matrix made of the sources' rows one after the other; all sources have equal columns.
    pub(crate) fn quantized(
        &mut self,
        graph: &mut Graph,
        name: &str,
        (spec, made): (QuantSpec, Made),
        consumer: Consumer,
        sources: Vec<Rows>,
        part: Part,
    ) -> Quantized {
        let cols = sources.first().map_or(0, Rows::cols);
        let rows: usize = sources.iter().map(Rows::rows).sum();
        let per_source = sources.first().map_or(0, Rows::rows);
        let layout = consumer.layout();
        let spec = if layout == Layout::RowWise { QuantSpec { block: cols.max(1), ..spec } } else { spec };
        let (blocks, row_bytes) = (spec.blocks(cols), spec.code_row_bytes(cols, layout));
        let zp_bytes = spec.zero_point_bytes(per_source, cols, layout);
        let lead: Vec<usize> = match consumer {
            Consumer::MatMul | Consumer::Gather => vec![rows],
            Consumer::Experts { .. } => vec![sources.len(), per_source],
        };
        let with = |tail: &[usize]| [lead.as_slice(), tail].concat();
        let row_zero_points = match spec.zero_points {
            ZeroPointKind::Float => blocks,
            ZeroPointKind::Implied | ZeroPointKind::Packed => spec.bits.packed_len(blocks),
        };
        let (code_shape, scale_shape, zp_shape) = match consumer {
            Consumer::MatMul => {
                (with(&[blocks, row_bytes / blocks]), with(&[blocks]), with(&[row_zero_points]))
            }
            Consumer::Experts { row_wise: true } => {
                (with(&[row_bytes]), lead.clone(), vec![lead[0], zp_bytes])
            }
            Consumer::Gather | Consumer::Experts { row_wise: false } => {
                (with(&[row_bytes]), with(&[blocks]), with(&[row_zero_points]))
            }
        };
        let (codes, mut codes_at) =
            self.place(graph, &format!("{name}.weight"), DType::U8, &code_shape, part);
        let (scales, mut scales_at) =
            self.place(graph, &format!("{name}.scales"), spec.scale_type.dtype(), &scale_shape, part);
        let zero_points = match spec.zero_points {
            ZeroPointKind::Implied => None,
            ZeroPointKind::Packed => Some(DType::U8),
            ZeroPointKind::Float => Some(spec.scale_type.dtype()),
        }
        .map(|ty| self.place(graph, &format!("{name}.zero_points"), ty, &zp_shape, part));
        let mut zero_points_at = zero_points.map(|(_, at)| at);
        for source in sources {
            let n = source.rows();
            let sink = Sink::Quantized {
                spec,
                made,
                layout,
                codes: codes_at,
                scales: scales_at,
                zero_points: zero_points_at,
            };
            self.jobs.push(Job { rows: source, sink, reported: self.reports.then_some(part) });
            codes_at += (n * row_bytes) as u64;
            scales_at += (n * blocks * spec.scale_type.size()) as u64;
            zero_points_at = zero_points_at.map(|at| at + spec.zero_point_bytes(n, cols, layout) as u64);
        }
        Quantized { codes, scales, zero_points: zero_points.map(|(v, _)| v) }
    }
}

impl Consumer {
    /// Whether the operator takes zero points of this kind beside uint8 codes.
    pub(crate) fn takes(self, zero_points: ZeroPointKind) -> bool {
        zero_points != ZeroPointKind::Float || matches!(self, Self::MatMul)
    }

    const fn layout(self) -> Layout {
        match self {
            Self::MatMul => Layout::PaddedBlocks,
            Self::Gather | Self::Experts { row_wise: false } => Layout::TightRows,
            Self::Experts { row_wise: true } => Layout::RowWise,
        }
    }
}
