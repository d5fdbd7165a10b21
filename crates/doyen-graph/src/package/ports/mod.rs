//! Which graph inputs and outputs are what: token ids, mask, positions, logits, state.
//!
//! The manifest's names come first. What it leaves open is read off the graph: names, types and shapes of the ports,
//! and the operators that read and write them. Where that leaves a choice it is an error that says what is ambiguous;
//! nothing is guessed.

mod name;
mod state;

use super::manifest::Manifest;
use crate::{
    ir::{Dim, Graph, ValueId},
    pass::lower::LowerSpec,
};
use doyen_tensor::DType;
use std::collections::BTreeSet;

/// Why the ports of a graph cannot be told apart.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// The manifest names a port the graph does not have.
    #[error("the manifest names {key} {name:?}; the graph has no such {kind}, it has {ports}")]
    NotInGraph {
        /// Manifest key.
        key: String,
        /// Name it gives.
        name: String,
        /// "input" or "output".
        kind: &'static str,
        /// The ports there are.
        ports: String,
    },
    /// Nothing looks like what is needed.
    #[error("no graph {kind} can be the {what}; there are {ports}")]
    Absent {
        /// What is needed.
        what: &'static str,
        /// "input" or "output".
        kind: &'static str,
        /// The ports there are.
        ports: String,
    },
    /// Several ports look like what is needed.
    #[error("several graph {kind}s could be the {what}: {ports}; name one as {key} in the manifest")]
    Ambiguous {
        /// What is needed.
        what: &'static str,
        /// "input" or "output".
        kind: &'static str,
        /// The candidates.
        ports: String,
        /// Manifest key that would decide.
        key: &'static str,
    },
    /// State ports that cannot be paired or told apart.
    #[error("{0}")]
    State(String),
}

/// Finds the ports of a decoder graph.
///
/// # Errors
/// When a port that is needed is absent, ambiguous or contradicts the manifest.
pub fn derive(graph: &Graph, manifest: &Manifest) -> Result<LowerSpec, PortError> {
    let finder = Finder { graph, manifest };
    let input_ids = finder.token_ids()?;
    let attention_mask =
        finder.named_or(&INPUT_MASK, |v| finder.is_index(v, 2..=2) && finder.says(v, "mask"))?;
    let position_ids =
        finder.named_or(&INPUT_POSITIONS, |v| finder.is_index(v, 2..=3) && finder.says(v, "position"))?;
    let taken: BTreeSet<ValueId> =
        [Some(input_ids), attention_mask, position_ids].into_iter().flatten().collect();
    let past: Vec<ValueId> = graph.inputs.iter().copied().filter(|v| !taken.contains(v)).collect();
    let logits = finder.named(&OUTPUT_LOGITS)?;
    let open: Vec<ValueId> = graph.outputs.iter().copied().filter(|&v| Some(v) != logits).collect();
    let states = state::pair(graph, manifest, &past, &open)?;
    let logits = match logits {
        Some(v) => v,
        None => finder.logits(&states.presents)?,
    };
    let name = |v: ValueId| graph.value(v).name.clone();
    Ok(LowerSpec {
        input_ids: name(input_ids),
        attention_mask: attention_mask.map(name),
        position_ids: position_ids.map(name),
        logits: name(logits),
        states: states.pairs,
    })
}

/// A port a manifest can name.
struct Port {
    what: &'static str,
    kind: &'static str,
    /// Key within `model.decoder.inputs` or `.outputs`; also the default name.
    key: &'static str,
    path: &'static str,
}

const INPUT_IDS: Port =
    Port { what: "token ids", kind: "input", key: "input_ids", path: "model.decoder.inputs.input_ids" };
const INPUT_MASK: Port = Port {
    what: "attention mask",
    kind: "input",
    key: "attention_mask",
    path: "model.decoder.inputs.attention_mask",
};
const INPUT_POSITIONS: Port =
    Port { what: "positions", kind: "input", key: "position_ids", path: "model.decoder.inputs.position_ids" };
const OUTPUT_LOGITS: Port =
    Port { what: "logits", kind: "output", key: "logits", path: "model.decoder.outputs.logits" };

struct Finder<'a> {
    graph: &'a Graph,
    manifest: &'a Manifest,
}

impl Finder<'_> {
    /// The port the manifest names, or the one of the default name.
    fn named(&self, port: &Port) -> Result<Option<ValueId>, PortError> {
        let (names, ports) = if port.kind == "input" {
            (&self.manifest.decoder.inputs, &self.graph.inputs)
        } else {
            (&self.manifest.decoder.outputs, &self.graph.outputs)
        };
        let find = |name: &str| ports.iter().copied().find(|&v| self.graph.value(v).name == name);
        match names.get(port.key) {
            None => Ok(find(port.key)),
            Some(name) => find(name).map(Some).ok_or_else(|| PortError::NotInGraph {
                key: port.path.to_owned(),
                name: name.clone(),
                kind: port.kind,
                ports: list(self.graph, ports),
            }),
        }
    }

    /// The named port, or the only input that satisfies `fits`, or none.
    fn named_or(&self, port: &Port, fits: impl Fn(ValueId) -> bool) -> Result<Option<ValueId>, PortError> {
        if let Some(v) = self.named(port)? {
            return Ok(Some(v));
        }
        let found: Vec<ValueId> = self.graph.inputs.iter().copied().filter(|&v| fits(v)).collect();
        one_of(self.graph, port, &found)
    }

    /// The named input, or the only integer matrix that selects rows of a constant table.
    fn token_ids(&self) -> Result<ValueId, PortError> {
        let fits = |v: ValueId| {
            self.is_index(v, 2..=2)
                && !self.says(v, "mask")
                && !self.says(v, "position")
                && self.graph.nodes.iter().any(|n| {
                    matches!(n.op_type.as_str(), "Gather" | "GatherBlockQuantized")
                        && n.inputs.get(1).copied().flatten() == Some(v)
                        && n.inputs[0].is_some_and(|t| self.graph.value(t).fact.constant.is_some())
                })
        };
        self.named_or(&INPUT_IDS, fits)?.ok_or_else(|| PortError::Absent {
            what: INPUT_IDS.what,
            kind: INPUT_IDS.kind,
            ports: list(self.graph, &self.graph.inputs),
        })
    }

    /// The only float output of rank 3 that is no state.
    fn logits(&self, presents: &BTreeSet<ValueId>) -> Result<ValueId, PortError> {
        let found: Vec<ValueId> = self
            .graph
            .outputs
            .iter()
            .copied()
            .filter(|v| {
                let fact = &self.graph.value(*v).fact;
                !presents.contains(v)
                    && fact.dtype.is_none_or(DType::is_float)
                    && fact.rank().is_none_or(|r| r == 3)
            })
            .collect();
        one_of(self.graph, &OUTPUT_LOGITS, &found)?.ok_or_else(|| PortError::Absent {
            what: OUTPUT_LOGITS.what,
            kind: OUTPUT_LOGITS.kind,
            ports: list(self.graph, &self.graph.outputs),
        })
    }

    /// Whether a port is an integer tensor of one of these ranks.
    fn is_index(&self, v: ValueId, ranks: std::ops::RangeInclusive<usize>) -> bool {
        let fact = &self.graph.value(v).fact;
        matches!(fact.dtype, Some(DType::I64 | DType::I32)) && fact.rank().is_none_or(|r| ranks.contains(&r))
    }

    fn says(&self, v: ValueId, word: &str) -> bool {
        self.graph.value(v).name.to_ascii_lowercase().contains(word)
    }
}

fn one_of(graph: &Graph, port: &Port, found: &[ValueId]) -> Result<Option<ValueId>, PortError> {
    match found {
        [] => Ok(None),
        [one] => Ok(Some(*one)),
        _ => Err(PortError::Ambiguous {
            what: port.what,
            kind: port.kind,
            ports: list(graph, found),
            key: port.path,
        }),
    }
}

/// Ports for messages: name, type and shape of the first few.
fn list(graph: &Graph, ports: &[ValueId]) -> String {
    const SHOWN: usize = 8;
    let one = |&v: &ValueId| {
        let value = graph.value(v);
        let dtype = value.fact.dtype.map_or_else(String::new, |d| format!(" {d}"));
        format!("{:?}{dtype}{}", value.name, value.fact.shape_text())
    };
    if ports.is_empty() {
        return "none".into();
    }
    let mut shown: Vec<String> = ports.iter().take(SHOWN).map(one).collect();
    if ports.len() > SHOWN {
        shown.push(format!("and {} more", ports.len() - SHOWN));
    }
    shown.join(", ")
}

/// Whether two ports can hold the same state: equal types, equal known extents.
fn same_layout(graph: &Graph, a: ValueId, b: ValueId) -> bool {
    let (a, b) = (&graph.value(a).fact, &graph.value(b).fact);
    let dtype = a.dtype.is_none() || b.dtype.is_none() || a.dtype == b.dtype;
    let shape = match (&a.shape, &b.shape) {
        (Some(a), Some(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b): (&Dim, &Dim)| a.compatible(b))
        }
        _ => true,
    };
    dtype && shape
}

#[cfg(test)]
mod tests;
