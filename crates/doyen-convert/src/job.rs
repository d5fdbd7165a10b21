//! Making the bytes of weights: rows of f32 in, packed or narrowed bytes with their place in the file out.
//!
//! A job covers one source tensor (or a gate and up pair); `write` runs it in chunks of rows, so that memory is bounded
//! by a chunk and not by a tensor. Jobs know nothing of files or graphs.

use crate::{
    ConvertError,
    quant::{CodeRows, Deviation, Layout, Packed, QuantSpec, ScaleOverflow, ZeroPointKind, narrow},
    report::{Form, Origin, Part},
    source::Weight,
};
use doyen_tensor::FloatType;
use std::{ops::Range, sync::Arc};

/// Where rows come from.
#[derive(Debug, Clone)]
pub(crate) enum Rows {
    /// A tensor of the checkpoint.
    Tensor(Weight),
    /// A tensor of the checkpoint, this added to every value.
    Shifted(Weight, f32),
    /// Rows of two tensors in turn: row `2i` is row `i` of the first, row `2i + 1` row `i` of the second (fused SwiGLU).
    Interleaved(Weight, Weight),
    /// Cosines or sines of rotary angles, one position a row.
    Rotary { frequencies: Arc<[f32]>, factor: f32, positions: usize, sine: bool },
}

/// What becomes of the rows, and where the results go in the data file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sink {
    Float {
        ty: FloatType,
        at: u64,
    },
    Quantized {
        spec: QuantSpec,
        made: Made,
        layout: Layout,
        codes: u64,
        scales: u64,
        zero_points: Option<u64>,
    },
    /// Codes and scales of 4-bit floats, byte for byte.
    Mxfp4 {
        codes: u64,
        scales: u64,
    },
}

/// Where codes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    /// Values are rounded to the nearest code.
    Rounded,
    /// The source's codes are kept.
    Carried,
}

#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub rows: Rows,
    pub sink: Sink,
    /// The part of the model, where the report says what became of its tensors.
    pub reported: Option<Part>,
}

/// Bytes and the file offset they belong at.
pub(crate) type Placed = (u64, Vec<u8>);

/// A chunk's results.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    pub placed: Vec<Placed>,
    pub deviation: Deviation,
}

/// Chunks start at multiples of this many rows: eight 2-bit zero points packed across rows fill two whole bytes, and
/// interleaved rows stay in pairs.
const ROW_STEP: usize = 8;

/// Values of a chunk: 1 MiB of f32, a few times the cache that one core works in.
const CHUNK_VALUES: usize = 1 << 18;

impl Rows {
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Tensor(w) | Self::Shifted(w, _) => w.rows(),
            Self::Interleaved(a, b) => a.rows() + b.rows(),
            Self::Rotary { positions, .. } => *positions,
        }
    }

    pub(crate) fn cols(&self) -> usize {
        match self {
            Self::Tensor(w) | Self::Shifted(w, _) | Self::Interleaved(w, _) => w.cols(),
            Self::Rotary { frequencies, .. } => frequencies.len(),
        }
    }

    /// What is being read, for progress.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Tensor(w) | Self::Shifted(w, _) | Self::Interleaved(w, _) => w.name(),
            Self::Rotary { .. } => "rotary caches",
        }
    }

    /// Bytes read from the checkpoint.
    pub(crate) fn source_bytes(&self) -> u64 {
        match self {
            Self::Tensor(w) | Self::Shifted(w, _) => w.source_bytes(),
            Self::Interleaved(a, b) => a.source_bytes() + b.source_bytes(),
            Self::Rotary { .. } => 0,
        }
    }

    fn read(&self, rows: Range<usize>) -> Result<Vec<f32>, ConvertError> {
        let mut out = Vec::with_capacity(rows.len() * self.cols());
        match self {
            Self::Tensor(w) => w.read_rows(rows, &mut out)?,
            Self::Shifted(w, by) => {
                w.read_rows(rows, &mut out)?;
                for v in &mut out {
                    *v += by;
                }
            }
            Self::Interleaved(a, b) => {
                // Chunks start at even rows and a matrix of pairs ends at one.
                let pairs = rows.start / 2..rows.end / 2;
                let (mut first, mut second) = (Vec::new(), Vec::new());
                a.read_rows(pairs.clone(), &mut first)?;
                b.read_rows(pairs, &mut second)?;
                for (x, y) in first.chunks_exact(a.cols()).zip(second.chunks_exact(a.cols())) {
                    out.extend_from_slice(x);
                    out.extend_from_slice(y);
                }
            }
            Self::Rotary { frequencies, factor, sine, .. } => {
                for position in rows {
                    out.extend(frequencies.iter().map(|&f| {
                        let angle = f64::from(position as f32 * f);
                        let value = if *sine { angle.sin() } else { angle.cos() };
                        value as f32 * factor
                    }));
                }
            }
        }
        Ok(out)
    }

    /// The source's codes, in the order of the rows.
    fn read_codes(&self, rows: Range<usize>) -> Result<Option<CodeRows>, ConvertError> {
        let Some(kind) = self.weights().find_map(|w| w.dtype().codes()) else { return Ok(None) };
        let cols = self.cols();
        let unpacked = match self {
            Self::Tensor(w) => w.read_codes(rows)?,
            Self::Interleaved(a, b) => {
                let pairs = rows.start / 2..rows.end / 2;
                a.read_codes(pairs.clone())?.interleaved(&b.read_codes(pairs)?, (cols, cols / kind.group))
            }
            Self::Shifted(..) | Self::Rotary { .. } => return Ok(None),
        };
        Ok(Some(CodeRows { kind, cols, unpacked }))
    }

    /// The bytes of a matrix of 4-bit floats: its codes, then its scales.
    fn read_stored(&self, rows: Range<usize>) -> Result<Vec<Vec<u8>>, ConvertError> {
        match self {
            Self::Tensor(w) => w.read_stored(rows),
            Self::Interleaved(..) | Self::Shifted(..) | Self::Rotary { .. } => Ok(Vec::new()),
        }
    }

    /// The tensors of the checkpoint that are read.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &Weight> {
        let (a, b) = match self {
            Self::Tensor(w) | Self::Shifted(w, _) => (Some(w), None),
            Self::Interleaved(a, b) => (Some(a), Some(b)),
            Self::Rotary { .. } => (None, None),
        };
        a.into_iter().chain(b)
    }

    /// The tensor that row `row` came from, and the row's number there.
    fn origin(&self, row: usize) -> (&str, usize) {
        match self {
            Self::Interleaved(a, b) => (if row.is_multiple_of(2) { a.name() } else { b.name() }, row / 2),
            Self::Tensor(_) | Self::Shifted(..) | Self::Rotary { .. } => (self.name(), row),
        }
    }
}

impl Job {
    /// The row ranges to run, in order.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.rows.rows();
        let step = (CHUNK_VALUES / self.rows.cols().max(1)).next_multiple_of(ROW_STEP).max(ROW_STEP);
        (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
    }

    /// What the report says of the rows: the types they come in, and what they become.
    pub(crate) fn origin(&self) -> Option<Origin> {
        let part = self.reported?;
        let mut types: Vec<String> = self.rows.weights().map(|w| w.dtype().to_string()).collect();
        types.dedup();
        let form = match self.sink {
            Sink::Float { ty, .. } => Form::Float(ty),
            Sink::Mxfp4 { .. } => Form::Mxfp4,
            Sink::Quantized { spec, made, .. } => Form::Codes {
                carried: made == Made::Carried,
                bits: spec.bits,
                block: spec.block,
                zero_points: spec.zero_points,
            },
        };
        (!types.is_empty()).then(|| Origin { part, from: types.join(" and "), form })
    }

    /// Reads and converts a chunk.
    pub(crate) fn run(&self, rows: Range<usize>) -> Result<Chunk, ConvertError> {
        let cols = self.rows.cols();
        let start = rows.start;
        let mut deviation = Deviation::default();
        let placed = match self.sink {
            Sink::Float { ty, at } => {
                let values = self.rows.read(rows)?;
                let mut out = Vec::with_capacity(values.len() * ty.size());
                narrow(ty, &values, &mut out).map_err(|i| {
                    let (name, row) = self.rows.origin(start + i / cols);
                    let (value, col) = (values[i], i % cols);
                    overflow(name, &format!("{value} at [{row},{col}]"), ty)
                })?;
                if self.reported.is_some() {
                    for &v in &values {
                        deviation.add(f64::from(v), f64::from(ty.round(v)));
                    }
                }
                vec![(at + (start * cols * ty.size()) as u64, out)]
            }
            Sink::Mxfp4 { codes, scales } => {
                let at = |base: u64, bytes: &[u8]| base + (start * (bytes.len() / rows.len().max(1))) as u64;
                let stored = self.rows.read_stored(rows.clone())?;
                stored.into_iter().zip([codes, scales]).map(|(b, base)| (at(base, &b), b)).collect()
            }
            Sink::Quantized { spec, made, layout, codes, scales, zero_points } => {
                let packed = self.codes(rows, &spec, made, layout, &mut deviation)?.map_err(|e| {
                    let (name, row) = self.rows.origin(start + e.row);
                    overflow(name, &format!("the scale {} of row {row}", e.scale), spec.scale_type)
                })?;
                let row_scales = spec.blocks(cols) * spec.scale_type.size();
                let mut out = vec![
                    (codes + (start * spec.code_row_bytes(cols, layout)) as u64, packed.codes),
                    (scales + (start * row_scales) as u64, packed.scales),
                ];
                if let Some(at) = zero_points.filter(|_| spec.zero_points != ZeroPointKind::Implied) {
                    let before = spec.zero_point_bytes(start, cols, layout) as u64;
                    out.push((at + before, packed.zero_points));
                }
                out
            }
        };
        Ok(Chunk { placed, deviation })
    }

    fn codes(
        &self,
        rows: Range<usize>,
        spec: &QuantSpec,
        made: Made,
        layout: Layout,
        deviation: &mut Deviation,
    ) -> Result<Result<Packed, ScaleOverflow>, ConvertError> {
        if made == Made::Carried
            && let Some(codes) = self.rows.read_codes(rows.clone())?
        {
            return Ok(spec.carry(&codes, layout, deviation));
        }
        let values = self.rows.read(rows)?;
        let measured = self.reported.is_some().then_some(deviation);
        Ok(spec.pack(&values, self.rows.cols(), layout, measured))
    }
}

fn overflow(name: &str, what: &str, ty: FloatType) -> ConvertError {
    let wider = match ty {
        FloatType::F16 => "--dtype bf16 or f32",
        FloatType::BF16 | FloatType::F32 => "--dtype f32",
    };
    ConvertError::tensor(name, format!("{what} does not fit {}; convert with {wider}", ty.dtype()))
}
