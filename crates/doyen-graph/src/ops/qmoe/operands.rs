//! QMoE's weight tensors as views of one expert's matrices. Sharing only: no byte is copied or changed.

use super::super::OpError;
use super::super::args::Want;
use super::super::experts::{Expert, Linear, Rows};
use super::super::quant::Block;
use super::super::util::{fact_of, optional, required};
use super::{Kind, QMoe, check, float};
use crate::ir::Fact;
use doyen_tensor::{
    ExpertId, FloatView, Tensor,
    format::{Bits, Element, MiniMatrix, MiniScales, QuantMatrix, ZeroPoints},
};

/// A projection of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// Gate (and, fused, linear) rows: `[F*I, H]`.
    Fc1,
    /// Down projection: `[H, I]`.
    Fc2,
    /// Linear rows where FC1 holds the gate alone: `[I, H]`.
    Fc3,
}

impl Projection {
    /// In the order of the inputs.
    pub const ALL: [Self; 3] = [Self::Fc1, Self::Fc2, Self::Fc3];
}

/// The checked weight operands of one node.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Experts E.
    pub experts: usize,
    /// Hidden size H.
    pub hidden: usize,
    /// Intermediate size I.
    pub inter: usize,
    banks: [Option<Bank<'a>>; 3],
}

/// All experts' matrices of one projection.
#[derive(Debug, Clone, Copy)]
struct Bank<'a> {
    rows: usize,
    cols: usize,
    codes: &'a [u8],
    bias: Option<FloatView<'a>>,
    stored: Stored<'a>,
}

/// What a bank's codes are, and what goes with them.
#[derive(Debug, Clone, Copy)]
enum Stored<'a> {
    Int { bits: Bits, block: Block, scales: FloatView<'a>, zero_points: Option<&'a [u8]> },
    Float { element: Element, transposed: bool, scales: MiniScales<'a>, globals: Option<FloatView<'a>> },
}

impl<'a> Operands<'a> {
    /// See [`QMoe::operands`].
    pub(super) fn new(op: &QMoe, inputs: &[Option<&'a Tensor>]) -> Result<Self, OpError> {
        let facts: Vec<Option<Fact>> =
            [None, None].into_iter().chain(inputs.iter().map(|t| t.map(fact_of))).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let sizes = check::weights(op, &facts, None, None)?;
        let known = |size: Want, what: &str| size.ok_or_else(|| OpError::other(format!("no {what}")));
        let experts = known(sizes.experts, "experts")?;
        let hidden = known(sizes.hidden, "hidden size")?;
        let inter = known(sizes.inter, "intermediate size")?;
        let mut banks = [None; 3];
        for (slot, p) in banks.iter_mut().zip(Projection::ALL) {
            let names = p.names();
            let get = |i: usize| optional(inputs, i - 2);
            let Some(weights) = get(names.weights.1) else { continue };
            let fused = op.activation.fusion(get(8).is_some()).rows_per_value();
            let (rows, cols) = match p {
                Projection::Fc1 => (inter * fused, hidden),
                Projection::Fc2 => (hidden, inter),
                Projection::Fc3 => (inter, hidden),
            };
            let scales = get(names.scales.1);
            let stored = match op.kind.element() {
                None => Stored::Int {
                    bits: op.bits(p),
                    block: op.block,
                    scales: required(&[scales], 0, names.scales.0)?.float_view()?,
                    zero_points: get(names.zero_points.1).map(Tensor::bytes),
                },
                Some(element) => Stored::Float {
                    element,
                    transposed: float::transposed(op, element, &facts, sizes)?,
                    scales: mini_scales(op, scales)?,
                    globals: float::global_scale(p)
                        .and_then(|(i, _)| get(i))
                        .map(Tensor::float_view)
                        .transpose()?,
                },
            };
            let bias = get(names.bias.1).map(Tensor::float_view).transpose()?;
            *slot = Some(Bank { rows, cols, codes: weights.bytes(), bias, stored });
        }
        let operands = Self { experts, hidden, inter, banks };
        for p in Projection::ALL {
            match operands.stored(p, ExpertId(0)) {
                Some(StoredMatrix::Int(m)) => m.validate()?,
                Some(StoredMatrix::Float(m)) => m.validate()?,
                None => {}
            }
        }
        Ok(operands)
    }

    /// The matrix of one expert; `None` without that projection or beyond the experts.
    pub fn stored(&self, projection: Projection, expert: ExpertId) -> Option<StoredMatrix<'a>> {
        let e = expert.index();
        self.bank(projection).filter(|_| e < self.experts).map(|b| b.matrix(e))
    }

    /// The integer matrix of one expert; `None` also where codes are floats.
    pub fn matrix(&self, projection: Projection, expert: ExpertId) -> Option<QuantMatrix<'a>> {
        match self.stored(projection, expert) {
            Some(StoredMatrix::Int(m)) => Some(m),
            _ => None,
        }
    }

    /// The bias of one expert, one value a row; `None` without it or beyond the experts.
    pub fn bias(&self, projection: Projection, expert: ExpertId) -> Option<FloatView<'a>> {
        let e = expert.index();
        let bank = self.bank(projection).filter(|_| e < self.experts)?;
        bank.bias.map(|b| b.slice(e * bank.rows, bank.rows))
    }

    fn bank(&self, projection: Projection) -> Option<&Bank<'a>> {
        self.banks[projection as usize].as_ref()
    }

    /// Whether FC3 is there.
    pub const fn has_fc3(&self) -> bool {
        self.banks[2].is_some()
    }

    pub(in super::super) fn expert(&self, e: usize) -> Result<Expert<'a>, OpError> {
        let linear = |p: Projection| {
            let id = ExpertId(e as u32);
            let rows = self.stored(p, id).map(|m| match m {
                StoredMatrix::Int(m) => Rows::Quant(m),
                StoredMatrix::Float(m) => Rows::Mini(m),
            });
            rows.map(|rows| Linear { rows, bias: self.bias(p, id) })
        };
        let missing = || OpError::other(format!("expert {e} has no weights"));
        Ok(Expert {
            fc1: linear(Projection::Fc1).ok_or_else(missing)?,
            fc2: linear(Projection::Fc2).ok_or_else(missing)?,
            fc3: linear(Projection::Fc3),
        })
    }
}

/// A matrix of one expert.
#[derive(Debug, Clone, Copy)]
pub enum StoredMatrix<'a> {
    /// Integer codes.
    Int(QuantMatrix<'a>),
    /// Float codes.
    Float(MiniMatrix<'a>),
}

/// The scales of a floating-point kind's projection, of all experts.
fn mini_scales<'a>(op: &QMoe, scales: Option<&'a Tensor>) -> Result<MiniScales<'a>, OpError> {
    Ok(match (op.kind, float::tiled(op), scales) {
        (Kind::Mxfp4 { .. }, _, Some(t)) => MiniScales::E8M0(t.bytes()),
        (Kind::Nvfp4, _, Some(t)) => MiniScales::E4M3(t.bytes()),
        (_, Some(tile), Some(t)) => MiniScales::Tiles { values: t.float_view()?, tile },
        _ => MiniScales::None,
    })
}

impl<'a> Bank<'a> {
    fn matrix(&self, e: usize) -> StoredMatrix<'a> {
        match self.stored {
            Stored::Int { bits, block, scales, zero_points } => {
                StoredMatrix::Int(self.int(e, (bits, block), scales, zero_points))
            }
            Stored::Float { element, transposed, scales, globals } => {
                StoredMatrix::Float(self.float(e, (element, transposed), scales, globals))
            }
        }
    }

    fn float(
        &self,
        e: usize,
        (element, transposed): (Element, bool),
        scales: MiniScales<'a>,
        globals: Option<FloatView<'a>>,
    ) -> MiniMatrix<'a> {
        let mut m = MiniMatrix {
            rows: self.rows,
            cols: self.cols,
            element,
            codes: self.codes,
            transposed,
            scales,
            global: globals.map_or(1.0, |g| g.get(e)),
        };
        let bytes = m.line_bytes() * if transposed { self.cols } else { self.rows };
        m.codes = &self.codes[e * bytes..(e + 1) * bytes];
        let own = |s: &'a [u8]| &s[e * self.rows * m.blocks()..(e + 1) * self.rows * m.blocks()];
        m.scales = match scales {
            MiniScales::None => MiniScales::None,
            MiniScales::E8M0(s) => MiniScales::E8M0(own(s)),
            MiniScales::E4M3(s) => MiniScales::E4M3(own(s)),
            MiniScales::Tiles { values, tile } => {
                let tiles = self.rows.div_ceil(tile) * m.blocks();
                MiniScales::Tiles { values: values.slice(e * tiles, tiles), tile }
            }
        };
        m
    }

    fn int(
        &self,
        e: usize,
        (bits, block): (Bits, Block),
        scales: FloatView<'a>,
        zero_points: Option<&'a [u8]>,
    ) -> QuantMatrix<'a> {
        let row_bytes = bits.packed_len(self.cols);
        let bytes = self.rows * row_bytes;
        let blocks = block.count(self.cols);
        let zero_points = match (zero_points, block) {
            (None, _) => ZeroPoints::Default,
            (Some(z), Block::RowWise) => {
                let len = bits.packed_len(self.rows);
                ZeroPoints::AcrossRows(&z[e * len..(e + 1) * len])
            }
            (Some(z), Block::Blocks(_)) => {
                let row_bytes = bits.packed_len(blocks);
                let len = self.rows * row_bytes;
                ZeroPoints::PerBlock { packed: &z[e * len..(e + 1) * len], row_bytes }
            }
        };
        QuantMatrix {
            rows: self.rows,
            cols: self.cols,
            bits,
            block: block.size(self.cols),
            codes: &self.codes[e * bytes..(e + 1) * bytes],
            row_bytes,
            scales: scales.slice(e * self.rows * blocks, self.rows * blocks),
            zero_points,
        }
    }
}
