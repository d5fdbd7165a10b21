//! A card as a device, and a loaded program with its memory.
//!
//! * `io`: a node's addresses in the arena
//! * `step`: what a step brings
//! * `caches`: KV pages
//! * `states`: states of fixed size
//! * `planner`: plans without a card

pub(crate) mod caches;
pub(crate) mod io;
mod planner;
pub(crate) mod states;
pub(crate) mod step;

use crate::{
    bind::{Binder, Bound, Context, Setting},
    compile::Packaged,
    driver::{Buffer, Capture, Function, Gpu, Grid, Pinned, Uploads},
    error::CudaError,
    module::{Module, Operand},
    params,
};
pub use caches::KvType;
pub use planner::CudaPlanner;

use caches::Caches;
use doyen_graph::{
    device::{
        Choice, Device, DeviceError, Draw, Limits, NodePlan, Numerics, Program, RaggedBatch, Session,
        StateSlot,
    },
    lowered::{CacheSlot, Extent, LNode, LOp, LValueId, Lowered, StateId},
};
use doyen_tensor::{ByteCount, DType, PageId, Tensor};
use io::{NodeIo, ValueRef};
use states::States;
use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
    path::PathBuf,
    sync::Arc,
};
use step::Step;

/// Which card, and what it computes in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// Index of the card.
    pub ordinal: usize,
    /// What the tensor cores multiply; nothing where all products are to be in float32.
    pub operand: Option<Operand>,
    /// What caches of floats are kept in.
    pub kv: KvType,
    /// Folder of compiled kernels; nothing is kept where there is none.
    pub cache: Option<PathBuf>,
    /// Kernels that were compiled before, if there are some.
    pub packaged: Option<Packaged>,
    /// How experts are multiplied densely.
    pub dense: Dense,
}

/// How experts are multiplied densely: written out as floats, some at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    /// Bytes that they may take at a time.
    pub scratch: ByteCount,
    /// Whether all are, rather than those that no packed kernel takes.
    pub all: bool,
}

impl Default for Dense {
    fn default() -> Self {
        Self { scratch: ByteCount(1 << 30), all: false }
    }
}

/// An NVIDIA card.
#[derive(Clone)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    operand: Option<Operand>,
    kv: KvType,
    dense: Dense,
}

impl CudaDevice {
    /// Opens a card.
    ///
    /// # Errors
    /// Says what is missing: the driver, the card, its compute capability, NVRTC.
    pub fn new(options: &CudaOptions) -> Result<Self, CudaError> {
        let gpu = Gpu::open(options.ordinal, options.cache.clone(), options.packaged.clone())?;
        // Before a model is read: without kernels nothing will run.
        if gpu.compiles() {
            crate::compile::Compiler::load()?;
        }
        Ok(Self { gpu: Arc::new(gpu), operand: options.operand, kv: options.kv, dense: options.dense })
    }

    /// Bytes free on the card.
    ///
    /// # Errors
    /// When the driver does not tell.
    pub fn free_memory(&self) -> Result<ByteCount, CudaError> {
        Ok(ByteCount(self.gpu.free()? as u64))
    }

    fn setting(&self, numerics: Numerics) -> Setting {
        Setting {
            operand: self.operand.filter(|_| numerics != Numerics::Exact),
            kv: self.kv,
            shared: self.gpu.shared(),
            dense: usize::try_from(self.dense.scratch.0).unwrap_or(usize::MAX),
            all_dense: self.dense.all,
        }
    }
}

/// What a node will take and how it will run.
fn plan(graph: &Lowered, node: &LNode, limits: &Limits, setting: Setting) -> Result<NodePlan, DeviceError> {
    let bound = Binder::new(graph, node, setting).bind().map_err(node_error(node))?;
    Ok(match bound {
        None => NodePlan { kernel: "view".into(), scratch: 0, resident: ByteCount(0) },
        Some(kernel) => NodePlan {
            kernel: kernel.name(),
            scratch: kernel.scratch(limits),
            resident: ByteCount(kernel.resident() as u64),
        },
    })
}

fn node_error(node: &LNode) -> impl FnOnce(String) -> DeviceError {
    let node = node.name.clone();
    move |reason| DeviceError::Node { node, reason }
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn describe(&self) -> String {
        let operand = self.operand.map_or_else(|| "f32".into(), |o| o.to_string());
        format!("{}, {operand} products, {} kv cache", self.gpu.describe(), self.kv)
    }

    fn kv_type(&self) -> &'static str {
        self.kv.name()
    }

    fn plan(
        &self,
        graph: &Lowered,
        node: &LNode,
        limits: &Limits,
        numerics: Numerics,
    ) -> Result<NodePlan, DeviceError> {
        plan(graph, node, limits, self.setting(numerics))
    }

    fn page_bytes(&self, graph: &Lowered, page_size: usize) -> Vec<ByteCount> {
        caches::all_page_bytes(graph, page_size, self.kv)
    }

    fn together(&self, graph: &Lowered) -> Vec<Range<usize>> {
        crate::bind::groups(graph)
    }

    fn load(&self, program: Program) -> Result<Box<dyn Session>, DeviceError> {
        match CudaSession::new(self, program.clone()) {
            Ok(session) => Ok(Box::new(session)),
            Err(DeviceError::Memory { what, bytes }) => Err(self.no_room(&program, what, bytes)?),
            Err(e) => Err(e),
        }
    }
}

impl CudaDevice {
    /// Why a program could not be loaded, once all that was is freed.
    fn no_room(&self, program: &Program, what: String, bytes: ByteCount) -> Result<DeviceError, DeviceError> {
        self.gpu.wait()?;
        let graph = &program.graph;
        let setting = self.setting(program.numerics);
        let mut weights = ByteCount(0);
        for node in &graph.nodes {
            weights += plan(graph, node, &program.limits, setting)?.resident;
        }
        let pages = self.page_bytes(graph, program.limits.page_size);
        let caches = pages.iter().zip(&program.pages).map(|(b, p)| b.0.saturating_mul(p.pages as u64));
        let parts = [
            ("weights", weights),
            ("kv cache", ByteCount(caches.sum())),
            ("recurrent states", ByteCount(graph.state_bytes().0.saturating_mul(program.state_slots as u64))),
            ("activations", ByteCount(program.arena as u64)),
            ("scratch", ByteCount(program.scratch as u64)),
        ];
        let taken = parts.iter().filter(|(_, bytes)| bytes.0 > 0);
        let named: Vec<String> = taken.map(|(name, bytes)| format!("{name} {bytes}")).collect();
        Ok(DeviceError::NoRoom {
            what,
            bytes,
            needed: parts.iter().map(|(_, bytes)| *bytes).sum(),
            parts: named.join(", "),
            free: ByteCount(self.gpu.free()? as u64),
        })
    }
}

/// Where the step's own inputs go.
struct Inputs {
    tokens: Option<ValueRef>,
    positions: Option<ValueRef>,
    others: Vec<ValueRef>,
}

struct CudaSession {
    gpu: Arc<Gpu>,
    program: Program,
    nodes: Vec<Bound>,
    /// Runs of `nodes` that are tried together; they hold all.
    groups: Vec<Range<usize>>,
    inputs: Inputs,
    outputs: Vec<ValueRef>,
    /// Float outputs of the last step.
    results: Vec<Pinned<f32>>,
    arena: Buffer,
    scratch: Buffer,
    arrived: Buffer,
    caches: Caches,
    states: States,
    step: Step,
    /// Whether every node launches kernels alone, so that a step can be recorded.
    launches: bool,
    captures: HashMap<Shape, Recorded>,
    /// Chooses tokens from the first output, where that is rows of float32.
    sample: Option<Function>,
    /// Tokens and rows of the last step.
    last: (usize, usize),
    _constants: Uploads,
}

/// What decides the launches of a step of one token a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    tokens: usize,
    rows: usize,
    splits: crate::bind::Splits,
    choose: bool,
}

/// A shape that was met: it is recorded when it comes again, if the card has memory for that.
enum Recorded {
    Once,
    Capture(Capture),
    NoMemory,
}

/// Shapes that are kept; a recorded step takes host and card memory.
const MOST_CAPTURES: usize = 64;

impl CudaSession {
    fn new(device: &CudaDevice, program: Program) -> Result<Self, DeviceError> {
        let gpu = Arc::clone(&device.gpu);
        let graph = &program.graph;
        let setting = device.setting(program.numerics);
        let mut constants = Uploads::default();
        let mut nodes = Vec::with_capacity(graph.nodes.len());
        for (n, node) in graph.nodes.iter().enumerate() {
            let Some(mut kernel) = Binder::new(graph, node, setting).bind().map_err(node_error(node))? else {
                continue;
            };
            if kernel.scratch(&program.limits) > program.scratch {
                return Err(node_error(node)("it takes more scratch than the program has".into()));
            }
            kernel.load(&gpu, &mut constants)?;
            nodes.push(Bound { node: n, kernel, io: NodeIo::new(&program, node)? });
        }
        let groups = groups(graph, &nodes);
        let one = |v: Option<LValueId>| v.map(|v| ValueRef::new(&program, v)).transpose();
        let all =
            |vs: &[LValueId]| vs.iter().map(|&v| ValueRef::new(&program, v)).collect::<Result<Vec<_>, _>>();
        let inputs = Inputs {
            tokens: one(graph.tokens)?,
            positions: one(graph.positions)?,
            others: all(&graph.inputs)?,
        };
        let outputs = all(&graph.outputs)?;
        let arena = Buffer::new(&gpu, program.arena, "activations")?;
        let scratch = Buffer::new(&gpu, program.scratch, "scratch")?;
        let arrived = Buffer::new(&gpu, 4 * crate::bind::ARRIVALS, "counts of blocks")?;
        let caches = Caches::new(&gpu, &program, device.kv)?;
        let states = States::new(&gpu, &program)?;
        let step = Step::new(&gpu, &program, tile_queries(graph))?;
        let rows_of_logits = |v: &ValueRef| v.dtype == DType::F32 && v.dims.contains(&Extent::Rows(1));
        let sample = outputs.first().filter(|v| rows_of_logits(v));
        let sample = sample.map(|_| gpu.function(Module::Sample, "sample", 0)).transpose()?;
        let results = outputs.iter().map(|_| Pinned::new(&gpu)).collect();
        gpu.wait()?;
        Ok(Self {
            gpu,
            inputs,
            outputs,
            results,
            arena,
            scratch,
            arrived,
            caches,
            states,
            step,
            launches: program.graph.tokens.is_some() && nodes.iter().all(|n: &Bound| n.kernel.launches()),
            captures: HashMap::new(),
            sample,
            program,
            nodes,
            groups,
            last: (0, 0),
            _constants: constants,
        })
    }

    fn write_inputs(&mut self, batch: &RaggedBatch<'_>, draws: &[Option<Draw>]) -> Result<(), DeviceError> {
        let (tokens, rows) = self.last;
        if let Some(v) = &self.inputs.tokens {
            let ids: Vec<u8> = batch.tokens.iter().flat_map(|&t| i64::from(t).to_le_bytes()).collect();
            self.arena.write(&self.gpu, v.offset, &ids)?;
        }
        if let Some(v) = &self.inputs.positions {
            let positions = batch.sequences.iter().flat_map(|s| s.past..s.past + s.len);
            let bytes: Vec<u8> = positions.flat_map(|p| (p as i64).to_le_bytes()).collect();
            self.arena.write(&self.gpu, v.offset, &bytes)?;
        }
        if batch.inputs.len() != self.inputs.others.len() {
            let (found, expected) = (batch.inputs.len(), self.inputs.others.len());
            return Err(DeviceError::Step(format!("{found} inputs given, the program has {expected}")));
        }
        for (v, t) in self.inputs.others.iter().zip(batch.inputs) {
            let t = compute_type(t, v.dtype)?;
            if v.bytes(tokens, rows) != t.bytes().len() {
                let planned = v.bytes(tokens, rows);
                return Err(DeviceError::Step(format!("an input is {t:?}, {planned} bytes were planned")));
            }
            self.arena.write(&self.gpu, v.offset, t.bytes())?;
        }
        Ok(self.step.fill(&self.gpu, batch, draws, self.program.limits.page_size)?)
    }

    /// Launches the nodes: a step of one token a sequence from its record, once its shape was met before.
    fn run(&mut self, batch: &RaggedBatch<'_>, choose: bool) -> Result<(), DeviceError> {
        let (tokens, rows) = self.last;
        let shape = Shape { tokens, rows, splits: crate::bind::splits(&self.step), choose };
        if !(self.launches && self.step.decode) {
            return self.launch(batch, choose);
        }
        if matches!(self.captures.get(&shape), Some(Recorded::Once)) {
            let gpu = Arc::clone(&self.gpu);
            let capture = Capture::record(&gpu, || self.launch(batch, choose))?;
            self.captures.insert(shape, capture.map_or(Recorded::NoMemory, Recorded::Capture));
        }
        let replayed = match self.captures.get(&shape) {
            Some(Recorded::Capture(capture)) => Some(capture.replay()?),
            _ => None,
        };
        match replayed {
            Some(true) => return Ok(()),
            // Records are a convenience: without memory for them, steps are launched one by one.
            Some(false) => {
                self.captures.retain(|_, r| !matches!(r, Recorded::Capture(_)));
                self.captures.insert(shape, Recorded::NoMemory);
            }
            None if self.captures.contains_key(&shape) => {}
            None => {
                if self.captures.len() >= MOST_CAPTURES {
                    self.captures.clear();
                }
                self.captures.insert(shape, Recorded::Once);
            }
        }
        self.launch(batch, choose)
    }

    fn launch(&mut self, batch: &RaggedBatch<'_>, choose: bool) -> Result<(), DeviceError> {
        let (tokens, rows) = self.last;
        let cx = Context {
            gpu: &self.gpu,
            batch,
            step: &self.step,
            scratch: &self.scratch,
            caches: &self.caches,
            states: &self.states,
            fault: self.step.fault,
            arrived: self.arrived.start(),
        };
        for group in &self.groups {
            let bounds = &self.nodes[group.clone()];
            let failed =
                |b: &Bound, e: CudaError| node_error(&self.program.graph.nodes[b.node])(e.to_string());
            let done = crate::bind::run_together(bounds, &mut self.arena, (tokens, rows), &cx);
            if done.map_err(|e| failed(&bounds[0], e))? {
                continue;
            }
            for bound in bounds {
                let mut io = bound.io.at(&mut self.arena, tokens, rows);
                bound.kernel.run(&mut io, &cx, bound.node + 1).map_err(|e| failed(bound, e))?;
            }
        }
        match &self.sample {
            Some(sample) if choose => Ok(self.choose(sample)?),
            _ => Ok(()),
        }
    }

    /// Launches the choice of a token from every row of the first output.
    fn choose(&self, sample: &Function) -> Result<(), CudaError> {
        let (tokens, rows) = self.last;
        let Some(logits) = self.outputs.first() else { return Ok(()) };
        let params = params::Sample {
            logits: self.arena.at(logits.offset, logits.bytes(tokens, rows))?,
            draws: self.step.draws,
            tokens: self.step.chosen,
            vocab: (logits.numel(tokens, rows) / rows.max(1)) as u32,
        };
        self.gpu.launch(sample, Grid::new([rows, 1, 1], 1024), params)
    }

    /// Runs a checked step up to its outputs, which stay on the card.
    fn compute(&mut self, batch: &RaggedBatch<'_>, draws: &[Option<Draw>]) -> Result<(), DeviceError> {
        batch.check(&self.program)?;
        self.last = (batch.tokens.len(), batch.rows.len());
        self.write_inputs(batch, draws)?;
        self.run(batch, !draws.is_empty())
    }

    /// What an index out of range is called by the node that found it.
    fn refuse(&self, fault: u32) -> Result<(), DeviceError> {
        match self.nodes.iter().find(|b| b.node + 1 == fault as usize) {
            Some(b) => Err(node_error(&self.program.graph.nodes[b.node])(b.kernel.fault())),
            None => Ok(()),
        }
    }

    /// Brings the rows of the first output that have no draw to where [`Session::output`] finds them.
    fn read_rows(&mut self, draws: &[Option<Draw>]) -> Result<(), DeviceError> {
        let (tokens, rows) = self.last;
        let (Some(v), Some(result)) = (self.outputs.first(), self.results.first_mut()) else { return Ok(()) };
        if draws.iter().all(Option::is_some) {
            return Ok(());
        }
        let row = v.numel(tokens, rows) / rows.max(1);
        let all = result.resize(row * rows)?;
        for (i, (out, _)) in
            all.chunks_exact_mut(row.max(1)).zip(draws).enumerate().filter(|(_, (_, d))| d.is_none())
        {
            self.arena.read_f32(&self.gpu, v.offset + i * row * size_of::<f32>(), out)?;
        }
        Ok(())
    }
}

/// Runs of bound nodes that are tried together, and every other node by itself.
fn groups(graph: &Lowered, nodes: &[Bound]) -> Vec<Range<usize>> {
    let together = crate::bind::groups(graph);
    let of = |b: &Bound| together.iter().find(|g| g.contains(&b.node)).map_or(b.node, |g| g.start);
    let mut found = Vec::new();
    for (i, chunk) in nodes.chunk_by(|a, b| of(a) == of(b)).scan(0, |at, c| {
        let start = *at;
        *at += c.len();
        Some((start, c))
    }) {
        found.push(i..i + chunk.len());
    }
    found
}

/// The tile sizes that the attention nodes want.
fn tile_queries(graph: &Lowered) -> Vec<usize> {
    let mut wanted = BTreeSet::new();
    for node in &graph.nodes {
        if let LOp::Attention(a) = &node.op {
            wanted.insert(crate::bind::tile_queries(a.heads, a.kv_heads));
            wanted.extend(crate::bind::prefill_queries(a));
        }
    }
    wanted.into_iter().collect()
}

/// A tensor in a value's compute type.
fn compute_type(t: &Tensor, dtype: DType) -> Result<Tensor, DeviceError> {
    if t.dtype() == dtype {
        return Ok(t.clone());
    }
    let widened = t.to_f32().and_then(|v| Tensor::from_f32(dtype, t.shape().clone(), &v));
    widened.map_err(|e| DeviceError::Step(e.to_string()))
}

impl Session for CudaSession {
    fn step(&mut self, batch: &RaggedBatch<'_>) -> Result<(), DeviceError> {
        self.compute(batch, &[])?;
        let (tokens, rows) = self.last;
        for (v, out) in self.outputs.iter().zip(&mut self.results) {
            if v.dtype == DType::F32 {
                self.arena.read_f32(&self.gpu, v.offset, out.resize(v.numel(tokens, rows))?)?;
            }
        }
        let (fault, _) = self.step.left(&self.gpu, 0)?;
        self.refuse(fault)
    }

    fn step_choosing(
        &mut self,
        batch: &RaggedBatch<'_>,
        draws: &[Option<Draw>],
        choices: &mut Vec<Option<Choice>>,
    ) -> Result<(), DeviceError> {
        choices.clear();
        if self.sample.is_none() || draws.len() != batch.rows.len() || draws.iter().all(Option::is_none) {
            return self.step(batch);
        }
        self.compute(batch, draws)?;
        self.read_rows(draws)?;
        let (fault, chosen) = self.step.left(&self.gpu, draws.len())?;
        choices.extend(draws.iter().zip(chosen).map(|(draw, choice)| draw.map(|_| choice)));
        self.refuse(fault)
    }

    fn output(&self, index: usize) -> &[f32] {
        self.results.get(index).map_or(&[], Pinned::get)
    }

    fn value(&self, id: LValueId) -> Result<Tensor, DeviceError> {
        let v = ValueRef::new(&self.program, id)?;
        let (tokens, rows) = self.last;
        let mut bytes = vec![0; v.bytes(tokens, rows)];
        self.arena.read(&self.gpu, v.offset, &mut bytes)?;
        Tensor::from_bytes(v.dtype, v.dims(tokens, rows), bytes.into())
            .map_err(|e| DeviceError::Step(e.to_string()))
    }

    fn read_cache(
        &self,
        slot: CacheSlot,
        table: &[PageId],
        len: usize,
    ) -> Result<(Tensor, Tensor), DeviceError> {
        self.caches.read(&self.gpu, slot, table, len)
    }

    fn write_cache(
        &mut self,
        slot: CacheSlot,
        table: &[PageId],
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(), DeviceError> {
        self.caches.write(&self.gpu, slot, table, (keys, values))
    }

    fn read_state(&self, id: StateId, slot: StateSlot) -> Result<Tensor, DeviceError> {
        self.states.read(&self.gpu, id, slot)
    }

    fn write_state(&mut self, id: StateId, slot: StateSlot, state: &Tensor) -> Result<(), DeviceError> {
        self.states.write(&self.gpu, id, slot, state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::FloatType;

    /// Holds on machines with and without a card.
    #[test]
    fn a_card_that_is_not_there_is_an_error_that_says_what_is_missing() {
        let options = CudaOptions {
            ordinal: 4096,
            operand: None,
            kv: KvType::Float(FloatType::F32),
            cache: None,
            packaged: None,
            dense: Dense::default(),
        };
        match CudaDevice::new(&options).map(|_| ()) {
            Err(e @ CudaError::NoDriver) => assert!(e.to_string().contains("libcuda.so.1"), "{e}"),
            Err(e @ CudaError::NoDevice { .. }) => assert!(e.to_string().contains("no card 4096"), "{e}"),
            Err(e @ CudaError::Driver { .. }) => assert!(e.to_string().contains("cannot"), "{e}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn errors_name_the_range_of_cards() {
        let e = CudaError::NoDevice { ordinal: 5, found: 2 };
        assert_eq!(e.to_string(), "no card 5: the driver sees 2 (--device cuda:0 to cuda:1)");
        assert_eq!(CudaError::NoDevice { ordinal: 0, found: 0 }.to_string(), "no card 0: the driver sees 0");
    }
}
