//! From a lowered node to its launches: one file per kind of node.
//!
//! Binding checks operands and says what the node will take; loading brings its constants to the card and compiles its
//! kernels; running launches them.

mod attention;
mod dense;
mod eight;
mod elementwise;
mod embed;
mod experts;
mod flow;
mod gated;
mod indexed;
mod latent;
mod linear;
mod mini;
mod norm;
mod normed;
mod parts;
mod prefill;
mod products;
mod recurrent;
mod reduce;
mod reference;
mod rotate;
mod rows;
mod stream;
#[cfg(test)]
mod tests;
mod wide;

pub(crate) use attention::{Splits, splits, tile_queries};
pub(crate) use normed::{ROUTED as ARRIVALS, groups, run as run_together};
pub(crate) use prefill::prefill_queries;
pub use reference::HOST_REFERENCE;

use crate::{
    driver::{Addr, Buffer, Gpu, Uploads},
    error::CudaError,
    module::Operand,
    session::{
        KvType,
        caches::Caches,
        io::{Io, NodeIo},
        states::States,
        step::Step,
    },
};
use doyen_graph::{
    device::{DeviceError, Limits, RaggedBatch},
    lowered::{Extent, LNode, LOp, LValue, Lowered, Operand as Input},
    ops::Op,
};
use doyen_tensor::{DType, Tensor};

/// A node's work, bound to its constants.
pub(crate) trait Kernel: Send {
    /// Name printed in plans.
    fn name(&self) -> String;

    /// Scratch bytes at the limits.
    fn scratch(&self, _limits: &Limits) -> usize {
        0
    }

    /// Bytes of constants on the card.
    fn resident(&self) -> usize {
        0
    }

    /// Brings constants to the card and compiles kernels.
    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError>;

    /// Launches one step. `number` is what the fault becomes when an index is out of range.
    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError>;

    /// Whether it launches kernels and does nothing else, so that its launches can be recorded and replayed.
    fn launches(&self) -> bool {
        true
    }

    /// The norm it is, the product, the routing: what may run together with others.
    fn norm(&self) -> Option<&norm::NormKernel> {
        None
    }
    /// See [`Kernel::norm`].
    fn linear(&self) -> Option<&linear::Linear> {
        None
    }
    /// See [`Kernel::norm`].
    fn route(&self) -> Option<&experts::RouteKernel> {
        None
    }

    /// What its fault means.
    fn fault(&self) -> String {
        "an index is out of range".into()
    }
}

/// A node with its kernels and values.
pub(crate) struct Bound {
    /// Index in the graph.
    pub(crate) node: usize,
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) io: NodeIo,
}

/// What kernels share in a step.
pub(crate) struct Context<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) batch: &'a RaggedBatch<'a>,
    pub(crate) step: &'a Step,
    pub(crate) scratch: &'a Buffer,
    pub(crate) caches: &'a Caches,
    pub(crate) states: &'a States,
    pub(crate) fault: Addr,
    /// Zeros that kernels count their blocks with, and leave as zeros: [`ARRIVALS`] of them.
    pub(crate) arrived: Addr,
}

/// What the device decides for all nodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    /// What the tensor cores multiply; `None` keeps products in float32.
    pub(crate) operand: Option<Operand>,
    /// What caches of floats are kept in.
    pub(crate) kv: KvType,
    /// Dynamic shared memory that a block may have at most.
    pub(crate) shared: usize,
    /// Bytes that experts written out densely may take at a time.
    pub(crate) dense: usize,
    /// Whether all experts are multiplied densely, whatever packed kernels there are.
    pub(crate) all_dense: bool,
}

/// A loaded part of a kernel.
fn ready<T>(part: Option<&T>) -> Result<&T, CudaError> {
    part.ok_or_else(|| CudaError::Driver { what: "kernel".into(), reason: "it was not loaded".into() })
}

/// A node with what binding needs around it.
pub(crate) struct Binder<'a> {
    pub(crate) graph: &'a Lowered,
    pub(crate) node: &'a LNode,
    pub(crate) setting: Setting,
}

impl<'a> Binder<'a> {
    pub(crate) const fn new(graph: &'a Lowered, node: &'a LNode, setting: Setting) -> Self {
        Self { graph, node, setting }
    }

    /// Binds the node; `None` for views, which run nothing.
    ///
    /// # Errors
    /// Says what cannot be bound.
    pub(crate) fn bind(&self) -> Result<Option<Box<dyn Kernel>>, String> {
        Ok(Some(match &self.node.op {
            LOp::View => return Ok(None),
            LOp::SelectRows { axis } => rows::select(self, *axis)?,
            LOp::Attention(a) => attention::bind(self, a)?,
            LOp::LinearAttention(a) => recurrent::attention(self, a)?,
            LOp::CausalConv(c) => recurrent::convolution(self, c)?,
            LOp::LatentAttention(a) => latent::bind(self, a)?,
            LOp::Route(r) => experts::route(self, r)?,
            LOp::Experts(e) => experts::bind(self, e)?,
            LOp::SiluMul => elementwise::silu_mul(self)?,
            LOp::Op(op) => self.operator(op)?,
        }))
    }

    fn operator(&self, op: &Op) -> Result<Box<dyn Kernel>, String> {
        // Other kernels write their first output, in float32; everything else is the reference's.
        let native = match op {
            Op::Split(_) | Op::Concat(_) | Op::Cast(_) => parts::bind(self, op)?,
            Op::Reduce(_) | Op::TopK(_) => reduce::bind(self, op)?,
            Op::GatherElements(_) | Op::ScatterElements(_) => indexed::bind(self, op),
            Op::ContribRotary(_) | Op::OnnxRotary(_) => rotate::bind(self, op)?,
            Op::Compare(c) => elementwise::compare(self, *c)?,
            _ if self.output(0).is_none_or(|y| y.dtype != DType::F32) => None,
            Op::MatMulNBits(m) => linear::nbits(self, m)?,
            Op::MatMul(_) => linear::matmul(self)?,
            Op::Gather(g) => embed::float(self, g.axis)?,
            Op::GatherBlockQuantized(g) => embed::quantized(self, g)?,
            _ => match norm::bind(self, op)? {
                Some(k) => Some(k),
                None => match gated::bind(self, op)? {
                    Some(k) => Some(k),
                    None => elementwise::bind(self, op)?,
                },
            },
        };
        match native {
            Some(kernel) => Ok(kernel),
            None => reference::bind(self, op),
        }
    }

    /// Operand `i`.
    pub(crate) fn operand(&self, i: usize) -> Option<Input> {
        self.node.inputs.get(i).copied().flatten()
    }

    /// The step value that operand `i` is.
    pub(crate) fn value(&self, i: usize) -> Option<&'a LValue> {
        match self.operand(i)? {
            Input::Value(v) => Some(self.graph.value(v)),
            Input::Const(_) => None,
        }
    }

    /// The step value that operand `i` is, if it is of float32.
    pub(crate) fn float_value(&self, i: usize) -> Option<&'a LValue> {
        self.value(i).filter(|v| v.dtype == DType::F32)
    }

    /// The step value that output `i` is.
    pub(crate) fn output(&self, i: usize) -> Option<&'a LValue> {
        self.node.outputs.get(i).copied().flatten().map(|v| self.graph.value(v))
    }

    /// Operand `i` as a contiguous tensor if it is a constant.
    ///
    /// # Errors
    /// When the constant cannot be made contiguous.
    pub(crate) fn constant(&self, i: usize) -> Result<Option<Tensor>, String> {
        let Some(Input::Const(c)) = self.operand(i) else { return Ok(None) };
        let data = &self.graph.constant(c).data;
        let t = data.to_tensor().map_err(|e| format!("constant {:?}: {e}", self.graph.constant(c).name))?;
        Ok(Some(t))
    }

    /// All operands from `first` on as tensors; every one of them must be a constant or absent.
    ///
    /// # Errors
    /// Names an operand that is computed in the step.
    pub(crate) fn constants(&self, first: usize) -> Result<Vec<Option<Tensor>>, String> {
        (first..self.node.inputs.len())
            .map(|i| match self.value(i) {
                Some(v) => {
                    Err(format!("input {i} ({:?}) is computed by the graph; it must be a constant", v.name))
                }
                None => self.constant(i),
            })
            .collect()
    }
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

/// An axis counted from the front.
fn front(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis.checked_add(i64::try_from(rank).ok()?)? } else { axis };
    usize::try_from(axis).ok().filter(|&a| a < rank)
}

/// The number that an extent is, if it is one.
fn fixed(value: &LValue, axis: usize) -> Option<usize> {
    match value.dims.get(axis) {
        Some(Extent::Fixed(n)) => Some(*n),
        _ => None,
    }
}

/// Words of an element, where it is some.
const fn words(dtype: DType) -> Option<usize> {
    match dtype.bits() {
        32 => Some(1),
        64 => Some(2),
        _ => None,
    }
}
