//! The step values of a node: slices of the arena, handed to its kernel.

use super::memory::{Plain, cast, cast_mut};
use doyen_graph::{
    device::{DeviceError, Program},
    lowered::{Extent, LNode, LValueId, Operand},
};
use doyen_tensor::{DType, Shape, Tensor};
use std::marker::PhantomData;

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
        // At the limits, so that no smaller step overflows either: everything below multiplies unchecked.
        let limits = &program.limits;
        let extent = |d: &Extent| match *d {
            Extent::Fixed(n) => Some(n),
            Extent::Tokens(n) => n.checked_mul(limits.tokens.max(1)),
            Extent::Rows(n) => n.checked_mul(limits.rows.max(1)),
        };
        let numel = value.dims.iter().try_fold(1usize, |n, d| n.checked_mul(extent(d)?.max(1)));
        if numel.and_then(|n| n.checked_mul(value.dtype.bits())).is_none() {
            return Err(DeviceError::Step(format!("value {:?} overflows the address space", value.name)));
        }
        Ok(Self { offset: slot.offset, dtype: value.dtype, dims: value.dims.clone() })
    }

    fn numel(&self, tokens: usize, rows: usize) -> usize {
        self.dims.iter().map(|d| d.at(tokens, rows)).product()
    }

    fn bytes(&self, tokens: usize, rows: usize) -> usize {
        (self.numel(tokens, rows) * self.dtype.bits()).div_ceil(8)
    }

    /// Whether the value lies inside the arena at the program's limits.
    pub(crate) fn fits(&self, program: &Program) -> bool {
        let len = self.bytes(program.limits.tokens, program.limits.rows);
        self.offset.checked_add(len).is_some_and(|end| end <= program.arena) && self.offset.is_multiple_of(64)
    }

    /// The value's bytes in the arena.
    pub(crate) fn slice<'a>(&self, arena: &'a [u8], tokens: usize, rows: usize) -> &'a [u8] {
        &arena[self.offset..self.offset + self.bytes(tokens, rows)]
    }

    /// The value's bytes in the arena, to write.
    pub(crate) fn slice_mut<'a>(&self, arena: &'a mut [u8], tokens: usize, rows: usize) -> &'a mut [u8] {
        &mut arena[self.offset..self.offset + self.bytes(tokens, rows)]
    }

    pub(crate) fn shape(&self, tokens: usize, rows: usize) -> Shape {
        self.dims.iter().map(|d| d.at(tokens, rows)).collect::<Vec<_>>().into()
    }
}

/// The inputs and outputs of one node that are step values, in order; constants are the kernel's own.
#[derive(Debug)]
pub(crate) struct NodeIo {
    /// By input index; `None` for constants and absent inputs.
    inputs: Vec<Option<ValueRef>>,
    /// By output index; `None` for outputs nobody wants.
    outputs: Vec<Option<ValueRef>>,
}

impl NodeIo {
    /// Resolves a node's values, and checks that its outputs share no byte with each other or with its inputs at the
    /// program's limits: what makes [`Io`] sound.
    pub(crate) fn new(program: &Program, node: &LNode) -> Result<Self, DeviceError> {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for operand in &node.inputs {
            inputs.push(match operand {
                Some(Operand::Value(v)) => Some(ValueRef::new(program, *v)?),
                _ => None,
            });
        }
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for v in &node.outputs {
            outputs.push(match v {
                Some(v) => Some(ValueRef::new(program, *v)?),
                None => None,
            });
        }
        let io = Self { inputs, outputs };
        io.check(program).map_err(|reason| DeviceError::Node { node: node.name.clone(), reason })?;
        Ok(io)
    }

    fn check(&self, program: &Program) -> Result<(), String> {
        let limits = &program.limits;
        let range = |v: &ValueRef| (v.offset, v.offset.saturating_add(v.bytes(limits.tokens, limits.rows)));
        let all: Vec<_> = self.inputs.iter().flatten().map(|v| (false, range(v))).collect();
        let all: Vec<_> =
            all.into_iter().chain(self.outputs.iter().flatten().map(|v| (true, range(v)))).collect();
        for (i, (_, a)) in all.iter().enumerate() {
            if a.1 > program.arena || a.0 % 64 != 0 {
                return Err(format!(
                    "a value lies at {}..{} of an arena of {} bytes",
                    a.0, a.1, program.arena
                ));
            }
            for (b_is_output, b) in &all[i + 1..] {
                if *b_is_output && a.0 < b.1 && b.0 < a.1 {
                    return Err("an output shares bytes with another value of the node".into());
                }
            }
        }
        Ok(())
    }

    /// The values of nodes that are run as one: the input they share, and an output each.
    ///
    /// # Errors
    /// When they do not have one and the same input and one output, or outputs share bytes.
    pub(crate) fn joined(program: &Program, nodes: &[&Self]) -> Result<Self, String> {
        let shared = |n: &&Self| match (&n.inputs[..], &n.outputs[..]) {
            ([Some(x), rest @ ..], [Some(y)]) if rest.iter().all(Option::is_none) => {
                Some((x.offset, x.clone(), y.clone()))
            }
            _ => None,
        };
        let all: Vec<_> =
            nodes.iter().map(shared).collect::<Option<_>>().ok_or("not one input and one output")?;
        let Some((offset, x, _)) = all.first().cloned() else { return Err("no nodes".into()) };
        if all.iter().any(|(o, v, _)| *o != offset || v.dims != x.dims || v.dtype != x.dtype) {
            return Err("different inputs".into());
        }
        let io = Self { inputs: vec![Some(x)], outputs: all.into_iter().map(|(.., y)| Some(y)).collect() };
        io.check(program)?;
        Ok(io)
    }

    /// The slices of a step.
    ///
    /// # Safety
    /// `arena` must point to the arena the program was checked for, with nobody else reading or writing it while the
    /// result lives; `tokens` and `rows` must be within the program's limits.
    pub(crate) unsafe fn at(&self, arena: *mut u8, tokens: usize, rows: usize) -> Io<'_> {
        Io { node: self, arena, tokens, rows, _arena: PhantomData }
    }
}

/// A node's slices in one step.
#[derive(Debug)]
pub(crate) struct Io<'a> {
    node: &'a NodeIo,
    arena: *mut u8,
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    _arena: PhantomData<&'a mut [u8]>,
}

impl<'a> Io<'a> {
    fn input_ref(&self, i: usize) -> Option<&'a ValueRef> {
        self.node.inputs.get(i)?.as_ref()
    }

    /// Whether input `i` is a step value.
    pub(crate) fn has_input(&self, i: usize) -> bool {
        self.input_ref(i).is_some()
    }

    /// Number of outputs the node has, wanted or not.
    pub(crate) fn outputs(&self) -> usize {
        self.node.outputs.len()
    }

    /// Whether output `i` is wanted.
    pub(crate) fn has_output(&self, i: usize) -> bool {
        matches!(self.node.outputs.get(i), Some(Some(_)))
    }

    fn input_bytes(&self, i: usize) -> &'a [u8] {
        let v = self.input_ref(i).unwrap_or_else(|| panic!("input {i} is not a step value"));
        let len = v.bytes(self.tokens, self.rows);
        // `at` promises that nobody else writes the arena.
        // SAFETY: `NodeIo::check` placed the value inside the arena and apart from every output.
        unsafe { std::slice::from_raw_parts(self.arena.add(v.offset), len) }
    }

    /// Input `i` as numbers.
    ///
    /// # Panics
    /// When it is no step value (a kernel bound wrongly).
    pub(crate) fn input<T: Plain>(&self, i: usize) -> &'a [T] {
        cast(self.input_bytes(i))
    }

    /// The bytes of input `i`, whose tokens lie one after the other.
    ///
    /// # Errors
    /// When they do not divide among the step's tokens.
    pub(crate) fn input_tokens(&self, i: usize) -> Result<&'a [u8], String> {
        let bytes = self.input_bytes(i);
        if self.tokens > 0 && !bytes.len().is_multiple_of(self.tokens) {
            return Err(format!("{} bytes do not divide among {} tokens", bytes.len(), self.tokens));
        }
        Ok(bytes)
    }

    /// Extents of input `i` in this step, put into `dims`.
    ///
    /// # Panics
    /// When it is no step value, or has more than `N` extents (a kernel bound wrongly).
    pub(crate) fn input_dims<'d, const N: usize>(&self, i: usize, dims: &'d mut [usize; N]) -> &'d [usize] {
        let v = self.input_ref(i).unwrap_or_else(|| panic!("input {i} is not a step value"));
        let dims = &mut dims[..v.dims.len()];
        dims.iter_mut().zip(&v.dims).for_each(|(d, e)| *d = e.at(self.tokens, self.rows));
        dims
    }

    /// Input `i` as a tensor of its own, by copy.
    ///
    /// # Errors
    /// When its bytes are not those of its shape.
    pub(crate) fn input_tensor(&self, i: usize) -> Result<Option<Tensor>, String> {
        let Some(v) = self.input_ref(i) else { return Ok(None) };
        let bytes = bytes::Bytes::copy_from_slice(self.input_bytes(i));
        let tensor = Tensor::from_bytes(v.dtype, v.shape(self.tokens, self.rows), bytes);
        tensor.map(Some).map_err(|e| format!("input {i}: {e}"))
    }

    /// Output `i` as bytes.
    ///
    /// # Panics
    /// When it is not wanted.
    pub(crate) fn output_bytes(&mut self, i: usize) -> &mut [u8] {
        let v = self.node.outputs[i].as_ref().unwrap_or_else(|| panic!("output {i} is not wanted"));
        let len = v.bytes(self.tokens, self.rows);
        // The borrow of self keeps other outputs from being taken meanwhile.
        // SAFETY: as in `input_bytes`; the output shares no byte with an input.
        unsafe { std::slice::from_raw_parts_mut(self.arena.add(v.offset), len) }
    }

    /// Output `i` as numbers.
    ///
    /// # Panics
    /// When it is not wanted.
    pub(crate) fn output<T: Plain>(&mut self, i: usize) -> &mut [T] {
        cast_mut(self.output_bytes(i))
    }

    /// The first `N` outputs at once; `None` for those not wanted.
    pub(crate) fn all_outputs<T: Plain, const N: usize>(&mut self) -> [Option<&mut [T]>; N] {
        let mut all = [const { None }; N];
        for (slot, v) in all.iter_mut().zip(&self.node.outputs) {
            let Some(v) = v else { continue };
            let len = v.bytes(self.tokens, self.rows);
            // SAFETY: as in `output_bytes`; no two outputs share a byte.
            *slot = Some(cast_mut(unsafe { std::slice::from_raw_parts_mut(self.arena.add(v.offset), len) }));
        }
        all
    }

    /// Outputs `i` and `j` at once; the second only if it is wanted.
    ///
    /// # Panics
    /// When `i` is not wanted or `i == j`.
    pub(crate) fn output_pair<T: Plain, U: Plain>(
        &mut self,
        i: usize,
        j: usize,
    ) -> (&mut [T], Option<&mut [U]>) {
        assert_ne!(i, j, "two different outputs");
        let second = match self.node.outputs.get(j) {
            Some(Some(v)) => {
                let len = v.bytes(self.tokens, self.rows);
                // SAFETY: as in `output_bytes`; outputs i and j share no byte.
                Some(cast_mut(unsafe { std::slice::from_raw_parts_mut(self.arena.add(v.offset), len) }))
            }
            _ => None,
        };
        (self.output(i), second)
    }
}
