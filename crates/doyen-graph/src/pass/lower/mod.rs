//! Lowering: from a decoder exported for `[batch, sequence]` to the stateful graph over ragged tokens.
//!
//! The graph is run in thought at batch 1 with `T` new tokens after `past` cached ones, for several pairs of lengths.

mod spec;

pub use spec::{LowerSpec, StatePair, StatePorts};
