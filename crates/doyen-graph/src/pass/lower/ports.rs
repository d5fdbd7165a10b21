//! The ports of the spec, found in the graph and checked to account for every graph input.

use super::{LowerError, LowerSpec, StatePorts, attention};
use crate::ir::{Dim, Fact, Graph, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A state pair of keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvPort {
    /// Index into the spec's states.
    pub(super) state: usize,
    /// Values rather than keys.
    pub(super) is_value: bool,
}

/// What each graph input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Tokens,
    Mask,
    Positions,
    Past(KvPort),
    /// A state of fixed size: index into the spec's states.
    State(usize),
}

/// The resolved ports.
#[derive(Debug, Clone)]
pub(super) struct Ports {
    pub(super) roles: BTreeMap<ValueId, Role>,
    pub(super) presents: BTreeMap<ValueId, KvPort>,
    /// Outputs that are states of fixed size: index into the spec's states.
    pub(super) present_states: BTreeMap<ValueId, usize>,
    /// Caches whose rows slide, and have a length of their own.
    pub(super) sliding: BTreeSet<ValueId>,
    pub(super) logits: ValueId,
}

impl Ports {
    pub(super) fn resolve(graph: &Graph, spec: &LowerSpec) -> Result<Self, LowerError> {
        let mut roles = BTreeMap::new();
        let mut take = |name: &str, role: Role| -> Result<(), LowerError> {
            let id = graph
                .find(name)
                .filter(|id| graph.inputs.contains(id))
                .ok_or_else(|| LowerError::port(name, "is not an input of the graph"))?;
            match roles.insert(id, role) {
                None => Ok(()),
                Some(other) => {
                    Err(LowerError::port(name, format!("is named as both {other:?} and {role:?}")))
                }
            }
        };
        take(&spec.input_ids, Role::Tokens)?;
        if let Some(name) = &spec.attention_mask {
            take(name, Role::Mask)?;
        }
        if let Some(name) = &spec.position_ids {
            take(name, Role::Positions)?;
        }
        let (mut presents, mut present_states) = (BTreeMap::new(), BTreeMap::new());
        for (state, pair) in spec.states.iter().enumerate() {
            let ports = match &pair.ports {
                StatePorts::KeyValue(ports) => ports,
                StatePorts::Fixed { past, present } => {
                    take(past, Role::State(state))?;
                    present_states.insert(output(graph, present)?, state);
                    continue;
                }
            };
            for (past, present, is_value) in [
                (&ports.past_key, &ports.present_key, false),
                (&ports.past_value, &ports.present_value, true),
            ] {
                take(past, Role::Past(KvPort { state, is_value }))?;
                presents.insert(output(graph, present)?, KvPort { state, is_value });
            }
        }
        if let Some(&stray) = graph.inputs.iter().find(|id| !roles.contains_key(id)) {
            let name = graph.value(stray).name.clone();
            return Err(LowerError::port(name, "is neither tokens, mask, positions nor a state"));
        }
        let sliding = graph.nodes.iter().flat_map(attention::sliding_caches).collect();
        Ok(Self { roles, presents, present_states, sliding, logits: output(graph, &spec.logits)? })
    }
}

fn output(graph: &Graph, name: &str) -> Result<ValueId, LowerError> {
    graph
        .find(name)
        .filter(|id| graph.outputs.contains(id))
        .ok_or_else(|| LowerError::port(name, "is not an output of the graph"))
}

/// What is known of a past input at batch 1 with `past` cached rows: its declared extents, batch and rows filled in.
/// A cache of its own length (`own_length`) keeps its symbol.
pub(super) fn past_fact(declared: &Fact, past: usize, own_length: bool) -> Option<Fact> {
    let mut shape = declared.shape.clone()?;
    let [batch, _, rows, _] = shape.as_mut_slice() else { return None };
    *batch = Dim::Known(1);
    if !own_length {
        *rows = Dim::Known(past);
    }
    Some(Fact { dtype: declared.dtype, shape: Some(shape), constant: None })
}

/// What is known of a state of fixed size at batch 1: its declared extents that are numbers. Names say nothing here:
/// exporters give them to states as if they were caches.
pub(super) fn state_fact(declared: &Fact) -> Fact {
    let number = |(axis, d): (usize, &Dim)| match (axis, d) {
        (0, _) => Dim::Known(1),
        (_, Dim::Known(n)) => Dim::Known(*n),
        _ => Dim::Unknown,
    };
    let shape = declared.shape.as_ref().map(|s| s.iter().enumerate().map(number).collect());
    Fact { dtype: declared.dtype, shape, constant: None }
}
