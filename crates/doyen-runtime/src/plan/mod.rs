//! Planning: what a model will take and where each value of a step lies, before anything large is allocated.
//!
//! [`Plan::new`] asks the device about every node, lays the arena out (`arena`), adds up the bytes (`ledger`) and
//! refuses what does not fit, with the shortfall and the option that would help. [`Plan::program`] is what the device
//! is loaded with.

mod arena;
mod ledger;
mod pages;

pub use ledger::{Ledger, LedgerEntry};
pub(crate) use pages::pages;

use doyen_graph::{
    device::{Device, DeviceError, Limits, NodePlan, Numerics, Program},
    lowered::{LOp, Lowered},
};
use doyen_tensor::ByteCount;
use std::sync::Arc;

/// What to plan for.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// Positions of one sequence.
    pub context: usize,
    /// Sequences that run at once.
    pub sequences: usize,
    /// New tokens of one step; prompts are fed in chunks of this size.
    pub step_tokens: usize,
    /// Logit rows of one step.
    pub step_rows: usize,
    /// Positions of a KV page.
    pub page_size: usize,
    /// How quantized products are computed.
    pub numerics: Numerics,
    /// Bytes that the plan may take beside mapped weights; `None` asks the system what is available.
    pub memory: Option<ByteCount>,
    /// Keep every value of a step and every position of the caches readable (verification): no two values share bytes
    /// then, and windows give no pages back.
    pub taps: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            context: 2048,
            sequences: 1,
            step_tokens: 256,
            step_rows: 32,
            page_size: 32,
            numerics: Numerics::Fast,
            memory: None,
            taps: false,
        }
    }
}

/// Why a model cannot be planned.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PlanError {
    /// The device lacks kernels; every such node is listed.
    #[error("{} cannot run on {device}:\n{}", counted(.nodes.len(), "node"), .nodes.iter().map(|n| format!("  {n}")).collect::<Vec<_>>().join("\n"))]
    Unsupported {
        /// The device.
        device: String,
        /// What it said of each node.
        nodes: Vec<DeviceError>,
    },
    /// It does not fit.
    #[error("the plan takes {needed} beside the mapped weights ({parts}), {available} are available: {} short; {hint}", ByteCount(.needed.0.saturating_sub(.available.0)))]
    Memory {
        /// What the plan takes.
        needed: ByteCount,
        /// The parts of that.
        parts: String,
        /// What there is.
        available: ByteCount,
        /// What would help.
        hint: String,
    },
    /// Options that make no sense together.
    #[error("{0}")]
    Options(String),
}

fn counted(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// A planned model.
#[derive(Debug, Clone)]
pub struct Plan {
    program: Program,
    nodes: Vec<NodePlan>,
    ledger: Ledger,
}

impl Plan {
    /// Plans a lowered graph for a device.
    ///
    /// # Errors
    /// When the device lacks kernels, the options are impossible, or the memory is not there.
    pub fn new(graph: Arc<Lowered>, device: &dyn Device, options: &PlanOptions) -> Result<Self, PlanError> {
        let limits = limits(options)?;
        if let Some(rows) = graph.rotary_positions().filter(|&rows| rows < limits.context) {
            return Err(PlanError::Options(format!(
                "a context of {} positions, but the model's rotary caches (cos_cache) have rows for {rows}: plan at most \
                 {rows} (--context)",
                limits.context
            )));
        }
        let pages = graph.groups.iter().map(|g| pages(g, &limits, options.taps)).collect::<Option<_>>();
        let pages = pages.ok_or_else(|| {
            let Limits { sequences, context, .. } = limits;
            PlanError::Options(format!(
                "{sequences} x {context} positions are more than can be planned; give a smaller context (--context)"
            ))
        })?;
        let nodes = plan_nodes(&graph, device, &limits, options.numerics)?;
        let layout =
            arena::layout(&graph, &limits, &device.together(&graph), options.taps).ok_or_else(|| {
                PlanError::Options("the activations of one step overflow the address space".into())
            })?;
        let program = Program {
            slots: layout.slots,
            arena: layout.bytes,
            scratch: nodes.iter().map(|n| n.scratch).max().unwrap_or(0),
            limits,
            pages,
            state_slots: if graph.states.is_empty() { 0 } else { limits.sequences.saturating_mul(2) },
            numerics: options.numerics,
            graph,
        };
        let page_bytes = device.page_bytes(&program.graph, limits.page_size);
        let ledger = Ledger::new(&program, &nodes, &page_bytes, device.kv_type());
        let available = options.memory.or_else(ledger::available_memory).unwrap_or(ByteCount(u64::MAX));
        if ledger.allocated() > available {
            let (needed, parts, hint) = (ledger.allocated(), ledger.parts(), ledger.hint());
            return Err(PlanError::Memory { needed, parts, available, hint });
        }
        Ok(Self { program, nodes, ledger })
    }

    /// What the device is loaded with.
    pub const fn program(&self) -> &Program {
        &self.program
    }

    /// The kernel of every node, in node order.
    pub fn nodes(&self) -> &[NodePlan] {
        &self.nodes
    }

    /// Where the bytes go.
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

fn limits(options: &PlanOptions) -> Result<Limits, PlanError> {
    let PlanOptions { context, sequences, step_tokens, step_rows, page_size, .. } = *options;
    if [context, sequences, step_tokens, step_rows].contains(&0) {
        return Err(PlanError::Options(
            "context, sequences, step tokens and step rows must be at least 1".into(),
        ));
    }
    if !page_size.is_power_of_two() {
        return Err(PlanError::Options(format!("page size {page_size} is not a power of two")));
    }
    let tokens = step_tokens.max(sequences);
    Ok(Limits { tokens, rows: step_rows.max(sequences), sequences, context, page_size })
}

fn plan_nodes(
    graph: &Lowered,
    device: &dyn Device,
    limits: &Limits,
    numerics: Numerics,
) -> Result<Vec<NodePlan>, PlanError> {
    let mut plans = Vec::with_capacity(graph.nodes.len());
    let mut refused = Vec::new();
    for node in &graph.nodes {
        if node.op == LOp::View {
            plans.push(NodePlan { kernel: "view".into(), scratch: 0, resident: ByteCount(0) });
            continue;
        }
        match device.plan(graph, node, limits, numerics) {
            Ok(p) => plans.push(p),
            Err(e) => refused.push(e),
        }
    }
    if refused.is_empty() {
        Ok(plans)
    } else {
        Err(PlanError::Unsupported { device: device.name().to_owned(), nodes: refused })
    }
}
