//! Operator cases on a lowered backend: each becomes one step over sequences, its outputs are read back from the arena
//! and the caches.

use doyen_graph::{
    device::{Device, GroupTables, Numerics, RaggedBatch, SeqSpan},
    lowered::StateId,
    pass::lower::{CaseRefusal, LoweredCase, lower_case},
    testkit::{CaseError, Model, Runner},
};
use doyen_runtime::{
    Plan, PlanOptions,
    kv::{BlockTables, PagePool},
};
use doyen_tensor::{ByteCount, DType, Tensor, TensorError};
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// A device under test, in exact mode unless told otherwise.
pub struct DeviceRunner {
    device: Box<dyn Device>,
    numerics: Numerics,
}

impl DeviceRunner {
    /// A runner for a device.
    pub fn new(device: Box<dyn Device>) -> Self {
        Self { device, numerics: Numerics::Exact }
    }

    /// Runs quantized products in this mode.
    #[must_use]
    pub fn numerics(mut self, numerics: Numerics) -> Self {
        self.numerics = numerics;
        self
    }
}

impl Runner for DeviceRunner {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn run(&self, model: &Model, inputs: &[Tensor]) -> Result<Vec<Tensor>, CaseError> {
        let case = lower_case(&model.graph, inputs).map_err(|e| match e {
            CaseRefusal::Invalid(e) => CaseError::Run(e),
            CaseRefusal::Inexpressible(_) => CaseError::Load(e.to_string()),
        })?;
        self.step(&case).map_err(|e| CaseError::Run(e.to_string()))
    }
}

impl DeviceRunner {
    fn step(&self, case: &LoweredCase) -> anyhow::Result<Vec<Tensor>> {
        let graph = Arc::new(case.graph.clone());
        let spans = spans(case);
        let tokens: usize = spans.iter().map(|s| s.len).sum();
        let context = spans.iter().map(|s| s.past + s.len).max().unwrap_or(0).max(1);
        let options = PlanOptions {
            context,
            sequences: spans.len().max(1),
            step_tokens: tokens.max(1),
            step_rows: 1,
            page_size: 16,
            numerics: self.numerics,
            memory: Some(ByteCount(4 << 30)),
            taps: true,
        };
        let plan = Plan::new(Arc::clone(&graph), self.device.as_ref(), &options)?;
        let mut session = self.device.load(plan.program().clone())?;
        let mut pool = PagePool::new(plan.program());
        let mut tables = Vec::new();
        for (span, sequence) in spans.iter().zip(&case.sequences) {
            let mut table = BlockTables::default();
            pool.grow(&mut table, span.past + span.len)?;
            for (slot, keys, values) in &sequence.caches {
                session.write_cache(*slot, table.group(slot.group), &held(keys)?, &held(values)?)?;
            }
            // Given states stand where a step before this one would have left them.
            if let (Some(before), false) = (table.states(), sequence.states.is_empty()) {
                for (n, state) in graph.states.iter().enumerate() {
                    let id = StateId(n as u32);
                    let given = sequence.states.iter().find(|(own, _)| *own == id);
                    let zeros = || Tensor::from_slice(state.dims.clone(), &vec![0f32; state.numel()]);
                    let state = given.map_or_else(zeros, |(_, t)| Ok(t.clone()))?;
                    session.write_state(id, before.write, &state)?;
                }
                table.advance();
            }
            tables.push(table);
        }
        let group = |g: usize| {
            let mut all = GroupTables::default();
            for t in &tables {
                all.push(t.group(g));
            }
            all
        };
        session.step(&RaggedBatch {
            tokens: &vec![0; tokens],
            sequences: &spans,
            tables: &(0..graph.groups.len()).map(group).collect::<Vec<_>>(),
            states: &tables.iter().filter_map(BlockTables::states).collect::<Vec<_>>(),
            rows: &[],
            inputs: &case.inputs,
        })?;
        let results = graph.outputs.iter().map(|&o| session.value(o)).collect::<Result<Vec<_>, _>>()?;
        let states = tables
            .iter()
            .map(|t| {
                let slot = t.states().map(|s| s.write);
                let ids = slot
                    .into_iter()
                    .flat_map(|s| (0..graph.states.len() as u32).map(move |n| (StateId(n), s)));
                ids.map(|(id, slot)| session.read_state(id, slot)).collect::<Result<Vec<_>, _>>()
            })
            .collect::<Result<Vec<_>, _>>()?;
        case.assemble(&results, &states, |sequence, slot, len| {
            Ok(session.read_cache(slot, tables[sequence].group(slot.group), len)?)
        })
    }
}

fn spans(case: &LoweredCase) -> Vec<SeqSpan> {
    let mut first = 0;
    let mut spans = Vec::with_capacity(case.sequences.len());
    for s in &case.sequences {
        spans.push(SeqSpan { first, len: s.new, past: s.past });
        first += s.new;
    }
    spans
}

/// A cache's rows in the type they are held in.
fn held(rows: &Tensor) -> Result<Tensor, TensorError> {
    if rows.dtype().is_float() {
        Tensor::from_f32(DType::F32, rows.shape().clone(), &rows.to_f32()?)
    } else {
        Ok(rows.clone())
    }
}
