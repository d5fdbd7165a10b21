//! What lowering must be told about a decoder graph: which ports are what. Made by the package reader from manifests
//! and from the graph's own port inventory.

use crate::lowered::CachePorts;

/// The ports of a decoder graph, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LowerSpec {
    /// Token ids, int64 or int32 `[batch, sequence]`.
    pub input_ids: String,
    /// One per cached and new token, `[batch, past + sequence]`, if the graph has it.
    pub attention_mask: Option<String>,
    /// Positions of the new tokens, `[batch, sequence]` or `[3, batch, sequence]`, if the graph has them.
    pub position_ids: Option<String>,
    /// Logits, `[batch, sequence, vocabulary]`.
    pub logits: String,
    /// State that goes out of one run and into the next.
    pub states: Vec<StatePair>,
}

/// The state of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePair {
    /// Layer index of the port names.
    pub layer: usize,
    /// The ports.
    pub ports: StatePorts,
}

/// Ports of a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatePorts {
    /// Keys and values that grow with every token.
    KeyValue(CachePorts),
    /// A state of fixed size (convolution, recurrence).
    Fixed {
        /// Input port.
        past: String,
        /// Output port.
        present: String,
    },
}
