//! What a conversion says about itself, while it runs and at the end. Nothing here prints.

use crate::quant::{Deviation, ZeroPointKind};
use doyen_tensor::{ByteCount, FloatType, format::Bits};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

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
    /// Experts that see every token.
    SharedExperts,
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
            Self::SharedExperts => "shared experts",
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

/// Is told how a conversion goes, and may end it. Called between chunks, from the calling thread.
pub trait Progress {
    /// Chunks were written.
    fn step(&mut self, step: Step<'_>);

    /// Whether to stop here and leave nothing. Asked after every step, and before the package gets its name.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn step(&mut self, _: Step<'_>) {}
}

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Architecture of the checkpoint.
    pub architecture: String,
    /// Bytes of each part, gaps for alignment excluded.
    pub parts: BTreeMap<Part, ByteCount>,
    /// Size of the data file.
    pub data_file: ByteCount,
    /// What became of the tensors of a quantized source; nothing for others.
    pub fates: Vec<Fate>,
    /// Things a user should know: what was left out, what could not be shared, what other runtimes will refuse.
    pub notices: Vec<String>,
}

/// What became of all tensors of one part and type.
#[derive(Debug, Clone, PartialEq)]
pub struct Fate {
    /// Which tensors, and what they became.
    pub origin: Origin,
    /// How many there are.
    pub tensors: usize,
    /// How far their values are from the source's.
    pub deviation: Deviation,
}

/// The tensors of one part and type that became the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// The part of the model.
    pub part: Part,
    /// The source's type.
    pub from: String,
    /// What they became.
    pub form: Form,
}

/// What weights are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// Float numbers.
    Float(FloatType),
    /// Codes.
    Codes {
        /// Whether they are the source's codes, not rounded ones.
        carried: bool,
        /// Width.
        bits: Bits,
        /// Columns that share a scale.
        block: usize,
        /// Zero points.
        zero_points: ZeroPointKind,
    },
    /// 4-bit floats with a power of two for 32 columns, as the source has them.
    Mxfp4,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(ty) => write!(f, "{}", ty.dtype()),
            Self::Mxfp4 => f.write_str("kept as fp4, block 32"),
            Self::Codes { carried, bits, block, zero_points } => {
                let zero_points = match zero_points {
                    ZeroPointKind::Implied => "",
                    ZeroPointKind::Packed => ", zero points",
                    ZeroPointKind::Float => ", float zero points",
                };
                let how = if *carried { "carried as" } else { "requantized to" };
                write!(f, "{how} {} bits, block {block}{zero_points}", bits.get())
            }
        }
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin { part, from, form } = &self.origin;
        write!(f, "{part:<14} {:>5} {from:<7} {form}: ", self.tensors)?;
        match self.deviation.relative() {
            0.0 => f.write_str("exact"),
            r => write!(f, "relative RMS error {r:.1e}"),
        }
    }
}

/// Fates while they are collected.
#[derive(Debug, Default)]
pub(crate) struct Fates(BTreeMap<Origin, (BTreeSet<String>, Deviation)>);

impl Fates {
    /// Counts a piece of the tensors of these names.
    pub(crate) fn add<'a>(
        &mut self,
        origin: Origin,
        names: impl Iterator<Item = &'a str>,
        deviation: Deviation,
    ) {
        let (known, sum) = self.0.entry(origin).or_default();
        for name in names {
            if !known.contains(name) {
                known.insert(name.to_owned());
            }
        }
        sum.merge(deviation);
    }

    pub(crate) fn finish(self) -> Vec<Fate> {
        let fate = |(origin, (names, deviation)): (Origin, (BTreeSet<String>, Deviation))| Fate {
            origin,
            tensors: names.len(),
            deviation,
        };
        self.0.into_iter().map(fate).collect()
    }
}
