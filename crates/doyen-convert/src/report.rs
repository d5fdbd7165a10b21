//! What a conversion says about itself, while it runs and at the end. Nothing here prints.

use doyen_tensor::ByteCount;
use std::{collections::BTreeMap, fmt};

/// A part of the model, for the byte table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Token embedding (and the head, when it reads the same bytes).
    Embedding,
    /// Attention projections.
    Attention,
    /// Dense feed-forward.
    Mlp,
    /// Gate and up projections of the experts.
    ExpertsFc1,
    /// Down projection of the experts.
    ExpertsFc2,
    /// Routers.
    Router,
    /// Norm weights.
    Norms,
    /// Rotary caches.
    Rotary,
    /// Output projection with bytes of its own.
    Head,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::ExpertsFc1 => "experts fc1",
            Self::ExpertsFc2 => "experts fc2",
            Self::Router => "router",
            Self::Norms => "norms",
            Self::Rotary => "rotary caches",
            Self::Head => "lm_head",
        })
    }
}

/// Where a conversion stands.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Checkpoint bytes converted.
    pub done: u64,
    /// Checkpoint bytes in all.
    pub total: u64,
    /// The tensor at hand.
    pub tensor: &'a str,
}

/// Is told how a conversion goes. Called between chunks, from the calling thread.
pub trait Progress {
    /// A chunk was written.
    fn step(&mut self, step: Step<'_>);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn step(&mut self, _: Step<'_>) {}
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Architecture of the checkpoint.
    pub architecture: String,
    /// Bytes of each part, gaps for alignment excluded.
    pub parts: BTreeMap<Part, ByteCount>,
    /// Size of the data file.
    pub data_file: ByteCount,
    /// Things a user should know: what was left out, what could not be shared, what other runtimes will refuse.
    pub notices: Vec<String>,
}
