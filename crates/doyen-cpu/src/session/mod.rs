//! The CPU as a device: a pool and an instruction set; and a loaded program with its memory.
//!
//! * `memory`: aligned zeroed buffers
//! * `io`: a node's slices of the arena
//! * `caches`: KV pages
//! * `states`: states of fixed size
//!
//! Nodes are bound by [`crate::bind`]; running a step is a walk over the bound nodes.

pub(crate) mod caches;
pub(crate) mod io;
mod memory;
pub(crate) mod states;

pub(crate) use memory::{Memory, cast, cast_mut};

use crate::{
    bind::{
        Binder, Context, Kernel,
        linear::{self, Products},
    },
    detect::Isa,
    pool::{Pool, PoolError},
};
use caches::Caches;
use doyen_graph::{
    device::{Device, DeviceError, Limits, NodePlan, Numerics, Program, RaggedBatch, Session, StateSlot},
    lowered::{CacheSlot, LNode, LValueId, Lowered, StateId},
};
use doyen_tensor::{ByteCount, DType, FloatType, PageId, Tensor};
use io::{NodeIo, ValueRef};
use states::States;
use std::{num::NonZeroUsize, sync::Arc};

/// The CPU.
#[derive(Debug, Clone)]
pub struct CpuDevice {
    pool: Arc<Pool>,
    isa: Isa,
    kv: FloatType,
}

impl CpuDevice {
    /// A device of `threads` threads with the best instruction set of this machine and caches in float32.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn new(threads: NonZeroUsize) -> Result<Self, PoolError> {
        Self::with_isa(threads, Isa::detect())
    }

    /// A device with a given instruction set and caches in float32.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn with_isa(threads: NonZeroUsize, isa: Isa) -> Result<Self, PoolError> {
        Ok(Self { pool: Arc::new(Pool::new(threads, true)?), isa, kv: FloatType::F32 })
    }

    /// The same device with keys and values in `kv`, where the graph does not quantize them.
    pub fn with_kv(self, kv: FloatType) -> Self {
        Self { kv, ..self }
    }

    /// Its threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Its instruction set.
    pub const fn isa(&self) -> Isa {
        self.isa
    }
}

fn node_error(node: &LNode) -> impl FnOnce(String) -> DeviceError {
    let node = node.name.clone();
    move |reason| DeviceError::Node { node, reason }
}

impl Device for CpuDevice {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn describe(&self) -> String {
        let n = self.pool.threads();
        format!("cpu, {n} thread{}, {}", if n == 1 { "" } else { "s" }, self.isa)
    }

    fn plan(
        &self,
        graph: &Lowered,
        node: &LNode,
        limits: &Limits,
        numerics: Numerics,
    ) -> Result<NodePlan, DeviceError> {
        let bound = Binder::new(graph, node, numerics, (self.isa, self.pool.threads()))
            .bind()
            .map_err(node_error(node))?;
        Ok(match bound {
            None => NodePlan { kernel: "view".into(), scratch: 0, resident: ByteCount(0) },
            Some(b) => NodePlan {
                kernel: b.kernel.name(),
                scratch: b.kernel.scratch(limits),
                resident: ByteCount(b.resident as u64),
            },
        })
    }

    fn kv_type(&self) -> &'static str {
        match self.kv {
            FloatType::F32 => "f32",
            FloatType::F16 => "f16",
            FloatType::BF16 => "bf16",
        }
    }

    fn page_bytes(&self, graph: &Lowered, page_size: usize) -> Vec<ByteCount> {
        graph.groups.iter().map(|g| ByteCount(caches::page_bytes(g, self.kv, page_size) as u64)).collect()
    }

    fn load(&self, program: Program) -> Result<Box<dyn Session>, DeviceError> {
        Ok(Box::new(CpuSession::new(self, program)?))
    }
}

/// A node with its kernel and slices.
struct Step {
    node: usize,
    kernel: Box<dyn Kernel>,
    io: NodeIo,
}

/// Where the step's own inputs go.
struct Inputs {
    tokens: Option<ValueRef>,
    positions: Option<ValueRef>,
    others: Vec<ValueRef>,
}

struct CpuSession {
    pool: Arc<Pool>,
    program: Program,
    steps: Vec<Step>,
    inputs: Inputs,
    outputs: Vec<ValueRef>,
    arena: Memory,
    scratch: Memory,
    caches: Caches,
    states: States,
    /// Tokens and rows of the last step.
    last: (usize, usize),
}

/// Takes neighbouring products of the same input together.
fn joined(program: &Program, steps: Vec<Step>) -> Vec<Step> {
    let mut out: Vec<Step> = Vec::with_capacity(steps.len());
    let mut run: Vec<Step> = Vec::new();
    for step in steps {
        let with_it: Vec<&NodeIo> = run.iter().map(|s| &s.io).chain([&step.io]).collect();
        let fits = run.len() < linear::MOST
            && Products::fit(run.iter().map(|s| &*s.kernel).chain([&*step.kernel]))
            && NodeIo::joined(program, &with_it).is_ok();
        if !fits {
            flush(program, &mut run, &mut out);
        }
        if step.kernel.product().is_some() {
            run.push(step);
        } else {
            out.push(step);
        }
    }
    flush(program, &mut run, &mut out);
    out
}

/// Appends a run of products, as one step if there are several.
fn flush(program: &Program, run: &mut Vec<Step>, out: &mut Vec<Step>) {
    let ios: Vec<&NodeIo> = run.iter().map(|s| &s.io).collect();
    if run.len() > 1
        && let Ok(io) = NodeIo::joined(program, &ios)
    {
        let node = run[0].node;
        let kernel = Box::new(Products::new(run.drain(..).map(|s| s.kernel).collect()));
        out.push(Step { node, kernel, io });
    }
    out.append(run);
}

impl CpuSession {
    fn new(device: &CpuDevice, program: Program) -> Result<Self, DeviceError> {
        let graph = &program.graph;
        let mut steps = Vec::with_capacity(graph.nodes.len());
        for (n, node) in graph.nodes.iter().enumerate() {
            let binder = Binder::new(graph, node, program.numerics, (device.isa, device.pool.threads()));
            let Some(bound) = binder.bind().map_err(node_error(node))? else { continue };
            if bound.kernel.scratch(&program.limits) > program.scratch {
                return Err(node_error(node)("it takes more scratch than the program has".into()));
            }
            steps.push(Step { node: n, kernel: bound.kernel, io: NodeIo::new(&program, node)? });
        }
        let steps = joined(&program, steps);
        let one = |v: Option<LValueId>| v.map(|v| ValueRef::new(&program, v)).transpose();
        let all =
            |vs: &[LValueId]| vs.iter().map(|&v| ValueRef::new(&program, v)).collect::<Result<Vec<_>, _>>();
        let inputs = Inputs {
            tokens: one(graph.tokens)?,
            positions: one(graph.positions)?,
            others: all(&graph.inputs)?,
        };
        let outputs = all(&graph.outputs)?;
        for v in inputs.tokens.iter().chain(&inputs.positions).chain(&inputs.others).chain(&outputs) {
            if !v.fits(&program) {
                return Err(DeviceError::Step("an input or output lies outside the arena".into()));
            }
        }
        let arena = Memory::new(program.arena, "activations")?;
        let scratch = Memory::new(program.scratch, "scratch")?;
        let caches = Caches::new(&program, device.kv)?;
        let states = States::new(&program)?;
        let pool = Arc::clone(&device.pool);
        Ok(Self { pool, steps, inputs, outputs, arena, scratch, caches, states, program, last: (0, 0) })
    }

    fn write_inputs(&mut self, batch: &RaggedBatch<'_>) -> Result<(), DeviceError> {
        let (tokens, rows) = self.last;
        if let Some(v) = &self.inputs.tokens {
            let ids: &mut [i64] = cast_mut(v.slice_mut(&mut self.arena, tokens, rows));
            ids.iter_mut().zip(batch.tokens).for_each(|(o, &t)| *o = i64::from(t));
        }
        if let Some(v) = &self.inputs.positions {
            let out: &mut [i64] = cast_mut(v.slice_mut(&mut self.arena, tokens, rows));
            for s in batch.sequences {
                out[s.first..s.first + s.len]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, o)| *o = (s.past + i) as i64);
            }
        }
        if batch.inputs.len() != self.inputs.others.len() {
            let (found, expected) = (batch.inputs.len(), self.inputs.others.len());
            return Err(DeviceError::Step(format!("{found} inputs given, the program has {expected}")));
        }
        for (v, t) in self.inputs.others.iter().zip(batch.inputs) {
            let t = compute_type(t, v.dtype)?;
            let out = v.slice_mut(&mut self.arena, tokens, rows);
            if out.len() != t.bytes().len() {
                return Err(DeviceError::Step(format!(
                    "an input is {t:?}, {} bytes were planned",
                    out.len()
                )));
            }
            out.copy_from_slice(t.bytes());
        }
        Ok(())
    }
}

/// A tensor in a value's compute type.
fn compute_type(t: &Tensor, dtype: DType) -> Result<Tensor, DeviceError> {
    if t.dtype() == dtype {
        return Ok(t.clone());
    }
    let widened = t.to_f32().and_then(|v| Tensor::from_f32(dtype, t.shape().clone(), &v));
    widened.map_err(|e| DeviceError::Step(e.to_string()))
}

impl Session for CpuSession {
    fn step(&mut self, batch: &RaggedBatch<'_>) -> Result<(), DeviceError> {
        batch.check(&self.program)?;
        self.last = (batch.tokens.len(), batch.rows.len());
        self.write_inputs(batch)?;
        let (tokens, rows) = self.last;
        let arena = self.arena.as_mut_ptr();
        let mut cx = Context {
            pool: &self.pool,
            batch,
            scratch: &mut self.scratch,
            caches: &mut self.caches,
            states: &mut self.states,
        };
        for step in &self.steps {
            // The check above keeps tokens and rows within the limits `NodeIo::new` checked the slots for.
            // SAFETY: the arena is borrowed exclusively and touched through this node's slices alone until `run` returns.
            let mut io = unsafe { step.io.at(arena, tokens, rows) };
            step.kernel
                .run(&mut io, &mut cx)
                .map_err(|reason| node_error(&self.program.graph.nodes[step.node])(reason))?;
        }
        Ok(())
    }

    fn output(&self, index: usize) -> &[f32] {
        let (tokens, rows) = self.last;
        self.outputs.get(index).map_or(&[], |v| cast(v.slice(&self.arena, tokens, rows)))
    }

    fn value(&self, id: LValueId) -> Result<Tensor, DeviceError> {
        let v = ValueRef::new(&self.program, id)?;
        let (tokens, rows) = self.last;
        let bytes = bytes::Bytes::copy_from_slice(v.slice(&self.arena, tokens, rows));
        Tensor::from_bytes(v.dtype, v.shape(tokens, rows), bytes)
            .map_err(|e| DeviceError::Step(e.to_string()))
    }

    fn read_cache(
        &self,
        slot: CacheSlot,
        table: &[PageId],
        len: usize,
    ) -> Result<(Tensor, Tensor), DeviceError> {
        self.caches.read(slot, table, len)
    }

    fn write_cache(
        &mut self,
        slot: CacheSlot,
        table: &[PageId],
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(), DeviceError> {
        self.caches.write(slot, table, keys, values)
    }

    fn read_state(&self, id: StateId, slot: StateSlot) -> Result<Tensor, DeviceError> {
        self.states.read(id, slot)
    }

    fn write_state(&mut self, id: StateId, slot: StateSlot, state: &Tensor) -> Result<(), DeviceError> {
        self.states.write(id, slot, state)
    }
}
