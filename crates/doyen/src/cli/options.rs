//! Options that several verbs share.

use crate::device::DeviceArgs;
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use doyen_graph::device::Numerics;
use doyen_runtime::SamplingParams;
use doyen_tensor::ByteCount;
use std::{
    io::{IsTerminal, Read},
    num::NonZeroUsize,
    path::PathBuf,
};

/// A number that may not be 0.
///
/// # Errors
/// Says what is expected.
pub fn at_least_one(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|e: std::num::ParseIntError| match e.kind() {
        std::num::IntErrorKind::PosOverflow => format!("expected a whole number up to {}", usize::MAX),
        _ => "expected a whole number of 1 or more".to_owned(),
    })
}

/// Which model, and how it runs.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Package directory; the built-in model when left out
    pub package: Option<PathBuf>,

    /// Threads to compute with [default: the CPUs this process may use]
    #[arg(value_parser = at_least_one, long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<NonZeroUsize>,

    /// Where to compute.
    #[command(flatten)]
    pub device: DeviceArgs,

    /// Positions a sequence can hold [default: the model's context length, at most 4096]
    #[arg(value_parser = at_least_one, long, value_name = "N", allow_negative_numbers = true)]
    pub context: Option<NonZeroUsize>,

    /// How quantized products are computed
    #[arg(long, value_enum, default_value_t)]
    pub numerics: NumericsArg,

    /// Print the plan (byte ledger and kernels) on stderr
    #[arg(short, long)]
    pub verbose: bool,
}

/// `--numerics`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum NumericsArg {
    /// int8 activations where the model allows them, in two terms where it matters most
    #[default]
    Fast,
    /// int8 activations in one term, to compare with runtimes that do so
    Int8,
    /// Float activations everywhere
    Exact,
}

impl From<NumericsArg> for Numerics {
    fn from(n: NumericsArg) -> Self {
        match n {
            NumericsArg::Fast => Self::Fast,
            NumericsArg::Int8 => Self::Int8,
            NumericsArg::Exact => Self::Exact,
        }
    }
}

/// How tokens are chosen. Left-out options take the package's search settings.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 takes the likeliest token; higher is more varied
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,

    /// Keep the K likeliest tokens (0: all)
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<usize>,

    /// Keep the likeliest tokens that together reach this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,

    /// Drop tokens less likely than this share of the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,

    /// Divide the logits of tokens already seen, prompt included (1: off)
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,

    /// Subtract this per occurrence among the generated tokens
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,

    /// Subtract this once from every token generated before
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,

    /// Seed of the random numbers; the same seed gives the same text
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

impl SamplingArgs {
    /// Refuses what no package could make right, before one is loaded.
    ///
    /// # Errors
    /// Names the option, its range and what was found.
    pub fn check(&self) -> Result<()> {
        self.over(&SamplingParams::default()).validate().map_err(anyhow::Error::msg)
    }

    /// The package's settings with the given ones in their place. Without a seed, a new one each time.
    pub fn over(&self, base: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            seed: self.seed.unwrap_or_else(fresh_seed),
        }
    }
}

fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}

/// Where the prompt comes from.
#[derive(Debug, Clone, Args)]
pub struct PromptArgs {
    /// The prompt
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    pub prompt: Option<String>,

    /// Read the prompt from a file
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

impl PromptArgs {
    /// The prompt: `-p`, `--file`, or what is piped into stdin.
    ///
    /// # Errors
    /// When the file cannot be read, is not UTF-8, or there is no prompt at all.
    pub fn text(&self) -> Result<String> {
        if let Some(p) = &self.prompt {
            return Ok(p.clone());
        }
        if let Some(path) = &self.file {
            let what = format!("cannot read the prompt {}", path.display());
            let file = std::fs::File::open(path).with_context(|| what.clone())?;
            return read_text(file, MAX_PROMPT).context(what);
        }
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            bail!("no prompt: give one with -p TEXT or --file FILE, or pipe it in");
        }
        read_text(stdin, MAX_PROMPT).context("cannot read the prompt from stdin")
    }
}

/// Bytes of a prompt; the longest contexts in use hold a few.
const MAX_PROMPT: u64 = 64 << 20;

/// Bytes of a text to evaluate.
pub const MAX_TEXT: u64 = 1 << 30;

/// All of a UTF-8 text of at most `limit` bytes.
///
/// # Errors
/// When it cannot be read, is longer, or is not UTF-8.
pub fn read_text(source: impl Read, limit: u64) -> Result<String> {
    let mut text = String::new();
    source.take(limit + 1).read_to_string(&mut text)?;
    ensure!(text.len() as u64 <= limit, "it is longer than {}", ByteCount(limit));
    Ok(text)
}
