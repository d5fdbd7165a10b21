//! `doyen bench`: how fast a model or an operator is here, beside what the machine could do.

mod ops;

use super::{
    Outcome,
    options::{NumericsArg, at_least_one},
};
use crate::{
    bench::{
        card,
        model::{Options, measure},
    },
    console,
    device::{DeviceArgs, DeviceName},
};
use anyhow::{Result, ensure};
use doyen_graph::device::Numerics;
use ops::{Op, OpArgs};
use std::{num::NonZeroUsize, path::PathBuf};

/// Measure a model or one operator
///
/// Without --op, a model: load time, time to first token, prefill and decode rates with their spread over repetitions, the
/// bytes a token moves, the bandwidth of a plain read loop of the same run and the share of it that decode reaches, peak
/// memory against the plan, the chosen kernels and the machine. Prompts are random tokens, and decoding is greedy.
///
/// With --op, one operator on random data of any shape: weights cold, routes new in every call, every call between two passes
/// of the read loop. --bits, --block, --tokens, --context and --kv take lists; every combination is measured, in turn.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen bench
  doyen bench qwen3-4bit --prompt 512 --gen 128 --json > figures.json
  doyen bench qwen3-4bit --batch 8 --repetitions 3
  doyen bench qwen3-4bit --device cuda --batch 64
  doyen bench --op qmoe --bits 4,2/4 --tokens 1,2,4,8,16,32,64,128,256,512
  doyen bench --op matmulnbits --n 4096 --k 4096 --bits 2,4,8 --scales f32
  doyen bench --op gqa --context 4096,32768 --kv f32,f16,int8")]
pub struct Args {
    /// Package directory; the built-in model when left out
    #[arg(conflicts_with = "op")]
    package: Option<PathBuf>,

    /// Tokens of a prompt
    #[arg(value_parser = at_least_one, long, value_name = "N", default_value = "512", conflicts_with = "op", allow_negative_numbers = true)]
    prompt: NonZeroUsize,

    /// Decoding steps
    #[arg(value_parser = at_least_one, long, value_name = "N", default_value = "128", conflicts_with = "op", allow_negative_numbers = true)]
    r#gen: NonZeroUsize,

    /// Sequences at once
    #[arg(value_parser = at_least_one, long, value_name = "N", default_value = "1", conflicts_with = "op", allow_negative_numbers = true)]
    batch: NonZeroUsize,

    /// Threads to compute with [default: the CPUs this process may use]
    #[arg(value_parser = at_least_one, long, value_name = "N", allow_negative_numbers = true)]
    threads: Option<NonZeroUsize>,

    #[command(flatten)]
    device: DeviceArgs,

    /// How quantized products are computed
    #[arg(long, value_enum, default_value_t)]
    numerics: NumericsArg,

    /// Samples; one that does not count goes first [default: 5 of a model, 50 of an operator]
    #[arg(value_parser = at_least_one, long, value_name = "R", allow_negative_numbers = true)]
    repetitions: Option<NonZeroUsize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Measure one operator instead of a model
    #[arg(long, value_enum, help_heading = "Operators")]
    op: Option<Op>,

    #[command(flatten)]
    shape: OpArgs,
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        match self.op {
            Some(op) => self.operator(op),
            None => self.model(),
        }
    }

    fn model(self) -> Result<Outcome> {
        let repetitions = self.repetitions.map_or(5, NonZeroUsize::get);
        let options = Options {
            package: self.package,
            numerics: Numerics::from(self.numerics),
            prompt: self.prompt.get(),
            generate: self.r#gen.get(),
            batch: self.batch.get(),
            repetitions,
        };
        let bar = console::bar(
            (repetitions as u64).saturating_add(1),
            "{bar:30} {pos}/{len} repetitions  {eta} left",
        );
        let (json, text) = if self.device.device == DeviceName::Cpu {
            let report = measure(&options, &self.device.cpu(self.threads, options.numerics)?, || bar.inc(1))?;
            (report.json(), report.text())
        } else {
            let report =
                card::measure(&options, &self.device.open(self.threads, options.numerics)?, || bar.inc(1))?;
            (report.json(), report.text())
        };
        bar.finish_and_clear();
        let text = if self.json { format!("{json:#}\n") } else { text };
        console::print(&text)?;
        Ok(Outcome::Done)
    }

    fn operator(self, op: Op) -> Result<Outcome> {
        ensure!(
            self.device.device == DeviceName::Cpu,
            "operators alone are measured on the CPU: leave out --device"
        );
        ensure!(
            self.device.kv_dtype.is_none() && self.device.compute_dtype.is_none(),
            "--kv-dtype and --compute-dtype belong to models: --op gqa has --kv"
        );
        let samples = self.repetitions.map_or(50, NonZeroUsize::get);
        let report = ops::measure(op, &self.shape, self.threads, self.numerics, samples)?;
        let text = if self.json { format!("{:#}\n", report.json()) } else { report.text() };
        console::print(&text)?;
        Ok(Outcome::Done)
    }
}
