//! From a lowered node to a kernel: one file per kind of node.
//!
//! Binding happens once, at load: operands are checked, constants turned into views, kernels chosen by format, mode and
//! ISA. What runs per step is [`Kernel::run`] on slices.

mod attention;
mod elementwise;
mod embed;
mod experts;
mod gated;
mod latent;
pub(crate) mod linear;
mod norm;
mod recurrent;
mod reference;
mod rows;
mod weights;

use crate::{
    detect::Isa,
    kernel::linear::Mode,
    pool::Pool,
    session::{caches::Caches, io::Io, states::States},
};
use doyen_graph::{
    device::{Limits, Numerics, RaggedBatch},
    ir::Constant,
    lowered::{Extent, LNode, LOp, LValue, Lowered, Operand},
    ops::Op,
};
use doyen_tensor::Tensor;
use linear::Product;
use std::sync::Arc;

/// A node's work, bound to its constants.
pub(crate) trait Kernel: Send + Sync {
    /// Runs one step. An error is the input's fault, such as an index out of range.
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String>;

    /// Name printed in plans.
    fn name(&self) -> String;

    /// Scratch bytes at the limits.
    fn scratch(&self, _limits: &Limits) -> usize {
        0
    }

    /// The product that this is, if it is one: neighbours of one input are run together.
    fn product(&self) -> Option<&Product> {
        None
    }
}

/// What kernels share in a step.
pub(crate) struct Context<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) batch: &'a RaggedBatch<'a>,
    pub(crate) scratch: &'a mut [u8],
    pub(crate) caches: &'a mut Caches,
    pub(crate) states: &'a mut States,
}

/// A bound node with the bytes that binding made.
pub(crate) struct Bound {
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) resident: usize,
}

/// A node with what binding needs around it.
pub(crate) struct Binder<'a> {
    pub(crate) graph: &'a Lowered,
    pub(crate) node: &'a LNode,
    pub(crate) isa: Isa,
    pub(crate) numerics: Numerics,
    pub(crate) threads: usize,
    resident: usize,
}

impl<'a> Binder<'a> {
    pub(crate) const fn new(
        graph: &'a Lowered,
        node: &'a LNode,
        numerics: Numerics,
        (isa, threads): (Isa, usize),
    ) -> Self {
        Self { graph, node, isa, numerics, threads, resident: 0 }
    }

    /// Binds the node; `None` for views, which run nothing.
    ///
    /// # Errors
    /// Says what cannot be bound.
    pub(crate) fn bind(mut self) -> Result<Option<Bound>, String> {
        let kernel = match &self.node.op {
            LOp::View => return Ok(None),
            LOp::SelectRows { axis } => rows::select(&self, *axis)?,
            LOp::Attention(a) => attention::bind(&mut self, a)?,
            LOp::LinearAttention(a) => recurrent::attention(&self, a)?,
            LOp::CausalConv(c) => recurrent::convolution(&mut self, c)?,
            LOp::LatentAttention(a) => latent::bind(&mut self, a)?,
            LOp::Route(r) => experts::route(&self, r)?,
            LOp::Experts(e) => experts::bind(&mut self, e)?,
            LOp::SiluMul => elementwise::silu_mul(&self)?,
            LOp::Op(op) => self.operator(op)?,
        };
        Ok(Some(Bound { kernel, resident: self.resident }))
    }

    fn operator(&mut self, op: &Op) -> Result<Box<dyn Kernel>, String> {
        // Kernels write their first output; where nobody wants it (only a norm's residual sum, say), the reference runs.
        if self.output(0).is_none() {
            return reference::bind(self, op);
        }
        let native = match op {
            Op::MatMulNBits(m) => linear::nbits(self, m)?,
            Op::MatMul(_) => linear::matmul(self)?,
            Op::Gather(g) => embed::float(self, g.axis)?,
            Op::GatherBlockQuantized(g) => embed::quantized(self, g)?,
            Op::GatedRmsNorm(_) | Op::GatedAdd(_) | Op::LinearAttentionGate(_) => gated::bind(self, op)?,
            _ => match norm::bind(self, op)? {
                Some(k) => Some(k),
                None => elementwise::bind(self, op)?,
            },
        };
        match native {
            Some(kernel) => Ok(kernel),
            None => reference::bind(self, op),
        }
    }

    /// Operand `i`.
    pub(crate) fn operand(&self, i: usize) -> Option<Operand> {
        self.node.inputs.get(i).copied().flatten()
    }

    /// The step value that operand `i` is.
    pub(crate) fn value(&self, i: usize) -> Option<&'a LValue> {
        match self.operand(i)? {
            Operand::Value(v) => Some(self.graph.value(v)),
            Operand::Const(_) => None,
        }
    }

    /// The step value that output `i` is.
    pub(crate) fn output(&self, i: usize) -> Option<&'a LValue> {
        self.node.outputs.get(i).copied().flatten().map(|v| self.graph.value(v))
    }

    /// Operand `i` as a contiguous tensor if it is a constant, counting bytes that had to be made.
    ///
    /// # Errors
    /// When the constant cannot be made contiguous.
    pub(crate) fn constant(&mut self, i: usize) -> Result<Option<Tensor>, String> {
        let Some(Operand::Const(c)) = self.operand(i) else { return Ok(None) };
        let data = &self.graph.constant(c).data;
        if let Some(t) = data.as_tensor() {
            return Ok(Some(t));
        }
        let t = data.to_tensor().map_err(|e| format!("constant {:?}: {e}", self.graph.constant(c).name))?;
        self.resident += t.bytes().len();
        Ok(Some(t))
    }

    /// All operands from `first` on as tensors; every one of them must be a constant or absent.
    ///
    /// # Errors
    /// Names an operand that is computed in the step.
    pub(crate) fn constants(&mut self, first: usize) -> Result<Vec<Option<Tensor>>, String> {
        (first..self.node.inputs.len())
            .map(|i| match self.value(i) {
                Some(v) => {
                    Err(format!("input {i} ({:?}) is computed by the graph; it must be a constant", v.name))
                }
                None => self.constant(i),
            })
            .collect()
    }

    /// All operands from `first` on as constants that may be views; every one of them must be a constant or absent.
    ///
    /// # Errors
    /// Names an operand that is computed in the step.
    pub(crate) fn views(&self, first: usize) -> Result<Vec<Option<Arc<Constant>>>, String> {
        (first..self.node.inputs.len())
            .map(|i| match self.operand(i) {
                None => Ok(None),
                Some(Operand::Const(c)) => Ok(Some(Arc::clone(&self.graph.constant(c).data))),
                Some(Operand::Value(v)) => {
                    let name = &self.graph.value(v).name;
                    Err(format!("input {i} ({name:?}) is computed by the graph; it must be a constant"))
                }
            })
            .collect()
    }

    /// Counts bytes that binding made.
    pub(crate) const fn made(&mut self, bytes: usize) {
        self.resident += bytes;
    }

    /// The mode for a node that permits int8 activations or not.
    pub(crate) const fn mode(&self, permits_int8: bool) -> Mode {
        match self.numerics {
            Numerics::Fast | Numerics::Int8 if permits_int8 => Mode::Fast,
            _ => Mode::Exact,
        }
    }

    /// Whether the node's result goes into an attention, or is an output of the graph, as it is or through views.
    ///
    /// There the rounding of activations shows most: queries and keys are multiplied with each other and exponentiated, and logits are
    /// exponentiated as they are.
    pub(crate) fn feeds(&self) -> Option<Feeds> {
        // Nodes are in order, so that what a value leads to is met from the value on.
        let mut values = vec![self.node.outputs.first().copied().flatten()?];
        for node in &self.graph.nodes {
            let takes = |i: &Option<Operand>| matches!(i, Some(Operand::Value(v)) if values.contains(v));
            match node.op {
                LOp::Attention(_) if node.inputs.iter().take(3).any(takes) => return Some(Feeds::Attention),
                LOp::View if node.inputs.iter().any(takes) => values.extend(node.outputs.iter().flatten()),
                _ => {}
            }
        }
        values.iter().any(|v| self.graph.outputs.contains(v)).then_some(Feeds::Output)
    }
}

/// Where a node's result goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Feeds {
    /// The queries, keys or values of an attention.
    Attention,
    /// The caller: logits.
    Output,
}

/// Rows of `[.., cols]` at the limits: the product of all extents but the last.
pub(crate) fn rows_at(value: &LValue, limits: &Limits) -> usize {
    let outer = value.dims.len().saturating_sub(1);
    value.dims[..outer].iter().map(|d| d.at(limits.tokens, limits.rows)).product()
}

/// The last extent, if it is a number.
pub(crate) fn cols(value: &LValue) -> Option<usize> {
    match value.dims.last() {
        Some(Extent::Fixed(n)) => Some(*n),
        _ => None,
    }
}
