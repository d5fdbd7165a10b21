//! The vocabulary in which operators declare how they treat the token axis.
//!
//! Lowering runs the graph at batch 1 with `S = T` new tokens. Every value then either carries the token axis in
//! one of its axes or does not depend on it. An operator that computes each token's slice from the same token's
//! slices (and from values without the axis) keeps it; anything else mixes tokens and must be a state-owning
//! operator or is refused.

use crate::ir::Constant;
use doyen_tensor::Shape;

/// Where the tokens are: extent `axis` is `T * inner`, token-major (index = token * inner + j).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenAxis {
    /// The axis.
    pub axis: usize,
    /// Elements of that axis per token; 1 unless a reshape merged the next axis into it.
    pub inner: usize,
}

/// Whether and where a value carries tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trace {
    /// The value is the same whatever the tokens are.
    Absent,
    /// The value has a slice per token.
    Tokens(TokenAxis),
}

/// An input as the token-axis rule sees it: its concrete shape at a probe of `T` tokens.
#[derive(Debug, Clone, Copy)]
pub struct Traced<'a> {
    /// Where its tokens are.
    pub trace: Trace,
    /// Its shape at the probe.
    pub shape: &'a Shape,
    /// Its data, if constant.
    pub constant: Option<&'a Constant>,
}
