//! Lowering: from a decoder exported for `[batch, sequence]` to the stateful graph over ragged tokens.
//!
//! The graph is run in thought at batch 1 with `T` new tokens after `past` cached ones, for several pairs of lengths.
//!
//! | file | what it does |
//! |---|---|
//! | `spec`, `ports` | what the graph's inputs and outputs are |
//! | `class` | which values depend on nothing, on lengths, on tokens |
//! | `probe`, `meaning` | what values that depend on lengths mean, found by trying many lengths |
//! | `decoder` | walks the nodes with the token axis of every value; `attention`, `sdpa`, `written`, `recurrent` and `emit` make the lowered nodes |
//! | `sight` | which keys the queries see, from masks that a graph computes |
//! | `rewrite` | fusions and the row selection, on the lowered graph |
//! | `case` | the same for operator cases, each batch row a sequence |
//!
//! What cannot be proven to treat each token alike is refused, with the node's name.

mod attention;
mod case;
mod class;
mod decoder;
mod emit;
mod error;
mod meaning;
mod ports;
mod probe;
mod recurrent;
mod rewrite;
mod sdpa;
mod sight;
mod spec;
#[cfg(test)]
mod tests;
mod written;

pub use case::{CaseOutput, CaseRefusal, CaseSequence, CaseSource, LoweredCase, lower_case};
pub use error::LowerError;
pub use spec::{LowerSpec, StatePair, StatePorts};

use crate::{ir::Graph, lowered::Lowered};

/// Lowers a checked and folded decoder.
///
/// # Errors
/// Names the node or port that does not fit ragged tokens, and what was found there.
pub fn lower(graph: &Graph, spec: &LowerSpec) -> Result<Lowered, LowerError> {
    let mut lowered = decoder::lower(graph, spec)?;
    rewrite::decoder(&mut lowered);
    Ok(lowered)
}
