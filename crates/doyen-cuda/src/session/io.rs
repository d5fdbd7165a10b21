//! The step values of a node: addresses in the arena.

use crate::{
    driver::{Addr, Buffer},
    error::CudaError,
};
use doyen_graph::{
    device::{DeviceError, Program},
    lowered::{Extent, LNode, LValueId, Operand},
};
use doyen_tensor::DType;

/// A step value as a bound node knows it.
#[derive(Debug, Clone)]
pub(crate) struct ValueRef {
    pub(crate) offset: usize,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<Extent>,
}

impl ValueRef {
    pub(crate) fn new(program: &Program, id: LValueId) -> Result<Self, DeviceError> {
        let value = program.graph.value(id);
        let slot = program.slots.get(id.index()).copied().flatten();
        let slot = slot
            .ok_or_else(|| DeviceError::Step(format!("value {:?} has no place in the arena", value.name)))?;
        let found = Self { offset: slot.offset, dtype: value.dtype, dims: value.dims.clone() };
        if found.fits(program) {
            Ok(found)
        } else {
            Err(DeviceError::Step(format!("value {:?} lies outside of the arena", value.name)))
        }
    }

    /// Whether the value lies inside the arena at the limits, so that no smaller step overflows either.
    fn fits(&self, program: &Program) -> bool {
        let limits = &program.limits;
        let extent = |d: &Extent| match *d {
            Extent::Fixed(n) => Some(n),
            Extent::Tokens(n) => n.checked_mul(limits.tokens.max(1)),
            Extent::Rows(n) => n.checked_mul(limits.rows.max(1)),
        };
        let numel = self.dims.iter().try_fold(1usize, |n, d| n.checked_mul(extent(d)?));
        let bits = numel.and_then(|n| n.checked_mul(self.dtype.bits()));
        let end = bits.and_then(|b| self.offset.checked_add(b.div_ceil(8)));
        end.is_some_and(|end| end <= program.arena) && self.offset.is_multiple_of(64)
    }

    pub(crate) fn numel(&self, tokens: usize, rows: usize) -> usize {
        self.dims.iter().map(|d| d.at(tokens, rows)).product()
    }

    pub(crate) fn bytes(&self, tokens: usize, rows: usize) -> usize {
        (self.numel(tokens, rows) * self.dtype.bits()).div_ceil(8)
    }

    pub(crate) fn dims(&self, tokens: usize, rows: usize) -> Vec<usize> {
        self.dims.iter().map(|d| d.at(tokens, rows)).collect()
    }
}

/// The inputs and outputs of one node that are step values, in order.
#[derive(Debug)]
pub(crate) struct NodeIo {
    /// By input index; `None` for constants and absent inputs.
    inputs: Vec<Option<ValueRef>>,
    /// By output index; `None` for outputs nobody wants.
    outputs: Vec<Option<ValueRef>>,
}

impl NodeIo {
    /// Resolves a node's values; none of its outputs may share a byte with another of its values.
    pub(crate) fn new(program: &Program, node: &LNode) -> Result<Self, DeviceError> {
        let inputs = node.inputs.iter().map(|operand| match operand {
            Some(Operand::Value(v)) => ValueRef::new(program, *v).map(Some),
            _ => Ok(None),
        });
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = node.outputs.iter().map(|v| v.map(|v| ValueRef::new(program, v)).transpose());
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let io = Self { inputs, outputs };
        if io.overlaps(program) {
            let reason = "an output shares bytes with another value of the node".into();
            return Err(DeviceError::Node { node: node.name.clone(), reason });
        }
        Ok(io)
    }

    fn overlaps(&self, program: &Program) -> bool {
        let limits = &program.limits;
        let range = |v: &ValueRef| (v.offset, v.offset + v.bytes(limits.tokens, limits.rows));
        let inputs: Vec<_> = self.inputs.iter().flatten().map(range).collect();
        let outputs: Vec<_> = self.outputs.iter().flatten().map(range).collect();
        let meet = |a: (usize, usize), b: (usize, usize)| a.0 < b.1 && b.0 < a.1;
        outputs
            .iter()
            .enumerate()
            .any(|(i, &o)| inputs.iter().chain(&outputs[..i]).any(|&other| meet(o, other)))
    }

    pub(crate) fn at<'a>(&'a self, arena: &'a mut Buffer, tokens: usize, rows: usize) -> Io<'a> {
        Io { node: self, arena, tokens, rows }
    }
}

/// A node's values in one step.
pub(crate) struct Io<'a> {
    node: &'a NodeIo,
    pub(crate) arena: &'a mut Buffer,
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
}

impl Io<'_> {
    /// Input `i`, if it is a step value.
    pub(crate) fn input_ref(&self, i: usize) -> Option<&ValueRef> {
        self.node.inputs.get(i)?.as_ref()
    }

    /// Output `i`, if it is wanted.
    pub(crate) fn output_ref(&self, i: usize) -> Option<&ValueRef> {
        self.node.outputs.get(i)?.as_ref()
    }

    /// Number of outputs, wanted or not.
    pub(crate) fn outputs(&self) -> usize {
        self.node.outputs.len()
    }

    fn addr(&self, v: &ValueRef) -> Result<Addr, CudaError> {
        self.arena.at(v.offset, v.bytes(self.tokens, self.rows))
    }

    /// Address of input `i`; none where it is no step value.
    pub(crate) fn input(&self, i: usize) -> Result<Addr, CudaError> {
        self.input_ref(i).map_or(Ok(Addr::NONE), |v| self.addr(v))
    }

    /// Address of the element `first` of float32 input `i`.
    pub(crate) fn input_at(&self, i: usize, first: usize) -> Result<Addr, CudaError> {
        let Some(v) = self.input_ref(i) else { return Ok(Addr::NONE) };
        let skipped = (first * size_of::<f32>()).min(v.bytes(self.tokens, self.rows));
        self.arena.at(v.offset + skipped, v.bytes(self.tokens, self.rows) - skipped)
    }

    /// Address of output `i`; none where nobody wants it.
    pub(crate) fn output(&self, i: usize) -> Result<Addr, CudaError> {
        self.output_ref(i).map_or(Ok(Addr::NONE), |v| self.addr(v))
    }

    /// Extents of input `i` in this step; none where it is no step value.
    pub(crate) fn input_dims(&self, i: usize) -> Vec<usize> {
        self.input_ref(i).map_or_else(Vec::new, |v| v.dims(self.tokens, self.rows))
    }

    /// Elements of input `i`.
    pub(crate) fn input_numel(&self, i: usize) -> usize {
        self.input_ref(i).map_or(0, |v| v.numel(self.tokens, self.rows))
    }

    /// Elements of output `i`.
    pub(crate) fn output_numel(&self, i: usize) -> usize {
        self.output_ref(i).map_or(0, |v| v.numel(self.tokens, self.rows))
    }
}
