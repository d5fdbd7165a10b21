//! Nodes whose past is a state of fixed size, and what such a state is.
//!
//! A step reads the state of a sequence in one slot and writes it to another: what went in stays as it was until
//! nobody wants it, so that a step can be tried again and a sequence can fork.

use crate::ops::linear_attention::UpdateRule;
use doyen_tensor::ByteCount;

/// A state of a lowered graph, by its place in [`Lowered::states`](super::Lowered::states).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(pub u32);

impl StateId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a sequence keeps for one node, in float32; zeros before its first token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Extents, as the node that owns it documents them.
    pub dims: Vec<usize>,
    /// The exported input port; empty where the graph has none.
    pub past: String,
    /// The exported output port; empty where the graph has none.
    pub present: String,
}

impl State {
    /// Elements; saturated, so that what does not fit an address space is seen not to fit.
    pub fn numel(&self) -> usize {
        self.dims.iter().fold(1, |n, &d| n.saturating_mul(d))
    }

    /// Bytes of one slot.
    pub fn bytes(&self) -> ByteCount {
        ByteCount((self.numel() as u64).saturating_mul(4))
    }
}

/// Linear attention over a state (operator contract, section 3.6).
#[derive(Debug, Clone, PartialEq)]
pub struct LinearAttention {
    /// Its state, `[kv_heads, key_size, value_size]`.
    pub state: StateId,
    /// Query heads: a multiple or a divisor of `kv_heads`.
    pub q_heads: usize,
    /// Heads that keys are given for: `kv_heads`, or fewer query heads.
    pub key_heads: usize,
    /// State and value heads.
    pub kv_heads: usize,
    /// Channels of a query or key head.
    pub key_size: usize,
    /// Channels of a value head.
    pub value_size: usize,
    /// How a token changes the state.
    pub rule: UpdateRule,
    /// Factor on the output.
    pub scale: f32,
    /// Whether every key channel decays by itself (decay is `[1,T,Hkv*dk]`) rather than a head as a whole.
    pub decay_per_key: bool,
    /// Whether all heads have one update rate (beta is `[1,T,1]`).
    pub shared_beta: bool,
}

impl LinearAttention {
    /// Output heads.
    pub const fn heads(&self) -> usize {
        if self.q_heads > self.kv_heads { self.q_heads } else { self.kv_heads }
    }

    /// Width of a token of decay.
    pub const fn decay_width(&self) -> usize {
        if self.decay_per_key { self.kv_heads * self.key_size } else { self.kv_heads }
    }
}

/// Causal convolution, each channel by itself, over a state of the last inputs (operator contract, section 3.6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CausalConv {
    /// Its state, `[(taps - 1) * dilation, channels]`, oldest first.
    pub state: StateId,
    /// Channels.
    pub channels: usize,
    /// Inputs that an output sees.
    pub taps: usize,
    /// Tokens between two of them.
    pub dilation: usize,
    /// Whether the sum goes through `x * sigmoid(x)`.
    pub silu: bool,
}

impl CausalConv {
    /// Tokens of its state.
    pub const fn held(&self) -> usize {
        (self.taps - 1) * self.dilation
    }
}
