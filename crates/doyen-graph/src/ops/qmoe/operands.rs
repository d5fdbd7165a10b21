//! QMoE's weight tensors as views of one expert's matrices. Sharing only: no byte is copied or changed.

use super::super::OpError;
use super::super::args::Want;
use super::super::experts::{Expert, Linear, Rows};
use super::super::quant::Block;
use super::super::util::{fact_of, optional};
use super::{QMoe, check};
use crate::ir::Fact;
use doyen_tensor::{
    ExpertId, FloatView, Tensor,
    format::{Bits, QuantMatrix, ZeroPoints},
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
    bits: Bits,
    block: Block,
    codes: &'a [u8],
    scales: FloatView<'a>,
    bias: Option<FloatView<'a>>,
    zero_points: Option<&'a [u8]>,
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
            let (Some(weights), Some(scales)) = (get(names.weights.1), get(names.scales.1)) else {
                continue;
            };
            let fused = op.activation.fusion(get(8).is_some()).rows_per_value();
            let (rows, cols) = match p {
                Projection::Fc1 => (inter * fused, hidden),
                Projection::Fc2 => (hidden, inter),
                Projection::Fc3 => (inter, hidden),
            };
            *slot = Some(Bank {
                rows,
                cols,
                bits: op.bits(p),
                block: op.block,
                codes: weights.bytes(),
                scales: scales.float_view()?,
                bias: get(names.bias.1).map(Tensor::float_view).transpose()?,
                zero_points: get(names.zero_points.1).map(Tensor::bytes),
            });
        }
        let operands = Self { experts, hidden, inter, banks };
        for p in Projection::ALL {
            if let (true, Some(m)) = (experts > 0, operands.matrix(p, ExpertId(0))) {
                m.validate()?;
            }
        }
        Ok(operands)
    }

    /// The matrix of one expert; `None` without that projection or beyond the experts.
    pub fn matrix(&self, projection: Projection, expert: ExpertId) -> Option<QuantMatrix<'a>> {
        let e = expert.index();
        self.bank(projection).filter(|_| e < self.experts).map(|b| b.matrix(e))
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
            self.matrix(p, id).map(|m| Linear { rows: Rows::Quant(m), bias: self.bias(p, id) })
        };
        let missing = || OpError::other(format!("expert {e} has no weights"));
        Ok(Expert {
            fc1: linear(Projection::Fc1).ok_or_else(missing)?,
            fc2: linear(Projection::Fc2).ok_or_else(missing)?,
            fc3: linear(Projection::Fc3),
        })
    }
}

impl<'a> Bank<'a> {
    fn matrix(&self, e: usize) -> QuantMatrix<'a> {
        let row_bytes = self.bits.packed_len(self.cols);
        let bytes = self.rows * row_bytes;
        let blocks = self.block.count(self.cols);
        let zero_points = match (self.zero_points, self.block) {
            (None, _) => ZeroPoints::Default,
            (Some(z), Block::RowWise) => {
                let len = self.bits.packed_len(self.rows);
                ZeroPoints::AcrossRows(&z[e * len..(e + 1) * len])
            }
            (Some(z), Block::Blocks(_)) => {
                let row_bytes = self.bits.packed_len(blocks);
                let len = self.rows * row_bytes;
                ZeroPoints::PerBlock { packed: &z[e * len..(e + 1) * len], row_bytes }
            }
        };
        QuantMatrix {
            rows: self.rows,
            cols: self.cols,
            bits: self.bits,
            block: self.block.size(self.cols),
            codes: &self.codes[e * bytes..(e + 1) * bytes],
            row_bytes,
            scales: self.scales.slice(e * self.rows * blocks, self.rows * blocks),
            zero_points,
        }
    }
}
