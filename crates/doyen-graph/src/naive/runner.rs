//! Operator cases on lowered graphs: the conformance kit's backend for lowering itself.

use super::{Naive, NewTokens};
use crate::{
    lowered::{State, StateId},
    pass::lower::{CaseRefusal, LoweredCase, lower_case},
    testkit::{CaseError, Model, Runner},
};
use doyen_tensor::{Tensor, TensorError};

/// Lowers each case and runs it on [`Naive`].
#[derive(Debug, Clone, Copy, Default)]
pub struct NaiveRunner;

impl Runner for NaiveRunner {
    fn name(&self) -> &'static str {
        "lowered"
    }

    fn run(&self, model: &Model, inputs: &[Tensor]) -> Result<Vec<Tensor>, CaseError> {
        let case = lower_case(&model.graph, inputs).map_err(|e| match e {
            CaseRefusal::Invalid(e) => CaseError::Run(e),
            e @ CaseRefusal::Inexpressible(_) => CaseError::Run(e.to_string()),
        })?;
        step(&case).map_err(CaseError::Run)
    }
}

fn step(case: &LoweredCase) -> Result<Vec<Tensor>, String> {
    let mut run = Naive::new(case.graph.clone())?;
    let groups = case.graph.groups.clone();
    for (i, s) in case.sequences.iter().enumerate() {
        for (id, state) in &s.states {
            *run.state_mut(i, *id) = Some(state.to_f32().map_err(|e| e.to_string())?);
        }
        for (slot, keys, values) in &s.caches {
            *run.cache_mut(i, *slot) = super::Cache::from_tensors(groups[slot.group].format, keys, values)
                .map_err(|e| e.to_string())?;
        }
    }
    let ids: Vec<Vec<u32>> = case.sequences.iter().map(|s| vec![0; s.new]).collect();
    let batch: Vec<NewTokens<'_>> =
        ids.iter().enumerate().map(|(sequence, tokens)| NewTokens { sequence, tokens }).collect();
    let results = run.step(&batch, &[], &case.inputs)?;
    let mut states = Vec::with_capacity(ids.len());
    for i in 0..ids.len() {
        let of = |(n, state): (usize, &State)| {
            let values =
                run.state_mut(i, StateId(n as u32)).clone().unwrap_or_else(|| vec![0.0; state.numel()]);
            Tensor::from_slice(state.dims.clone(), &values).map_err(|e| e.to_string())
        };
        states.push(case.graph.states.iter().enumerate().map(of).collect::<Result<Vec<_>, _>>()?);
    }
    case.assemble(&results, &states, |i, slot, _| {
        let group = &groups[slot.group];
        run.cache_mut(i, slot).to_tensors(group.format, group.kv_heads)
    })
    .map_err(|e: TensorError| e.to_string())
}
