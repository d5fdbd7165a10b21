//! `doyen convert`: a checkpoint to a quantized ONNX package.

use super::Outcome;
use crate::console;
use anyhow::{Context, Result};
use doyen_convert::{
    Input, Options, Progress, Step, Target, convert_input,
    options::{Block, LayerOverride, Mxfp4, Setting, Width},
    report::{Fate, Form, Origin},
};
use doyen_tensor::FloatType;
use doyen_text::{Tokenizer, TokenizerFiles};
use indicatif::ProgressBar;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::{
    fmt::Write,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Convert a Hugging Face checkpoint or a GGUF file to an ONNX package
///
/// Reads config.json, safetensors (single file or sharded) and the tokenizer's files of a checkpoint of any family in
/// docs/families.md, or a GGUF file (of several: any, the others are found beside it). Weights are rounded to nearest,
/// each kind to its own width W: 2, 4 or 8 bits, or `float` (the --dtype). Weights that the source holds quantized keep
/// their codes and scales, unless a width is given for their kind; what became of them is printed. The package appears
/// only when it is complete; Ctrl-C or SIGTERM takes back what was written, a second one ends at once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen convert Qwen3-30B-A3B -o qwen3-4bit
  doyen convert Qwen3-30B-A3B -o qwen3-mixed --experts fc1=2,fc2=4 --block 64
  doyen convert Qwen3-30B-A3B -o qwen3-edges --experts 4 --layers '0-1:experts=8;46-:experts=8,attention=float'
  doyen convert Llama-3.2-1B -o llama-plain --float --dtype f32
  doyen convert SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2
  doyen convert Qwen3-8B-Q6_K.gguf -o qwen3-8b --mlp 4 --attention 8")]
#[allow(clippy::struct_excessive_bools, reason = "they are independent flags")]
pub struct Args {
    /// Folder of the checkpoint, or a GGUF file
    #[arg(value_name = "CHECKPOINT")]
    source: PathBuf,

    /// Folder of the package to write
    #[arg(short, long, value_name = "PACKAGE_DIR")]
    output: PathBuf,

    /// Routed experts: W, or fc1=W,fc2=W for gate/up and down projections [default: 4]
    #[arg(long, value_name = "W|fc1=W,fc2=W", value_parser = experts)]
    experts: Option<Settings>,

    /// Dense feed-forward [default: 4]
    #[arg(long, value_name = "W")]
    mlp: Option<Width>,

    /// Shared experts [default: 8]
    #[arg(long, value_name = "W")]
    shared_experts: Option<Width>,

    /// Routers [default: float]
    #[arg(long, value_name = "W")]
    router: Option<Width>,

    /// Attention projections [default: 8]
    #[arg(long, value_name = "W")]
    attention: Option<Width>,

    /// Token embedding [default: 8]
    #[arg(long, value_name = "W")]
    embed: Option<Width>,

    /// Output projection [default: 8]
    #[arg(long, value_name = "W")]
    lm_head: Option<Width>,

    /// Columns that share a scale: 16, 32, 64, 128, 256, or row [default: 32]
    #[arg(long, value_name = "N|row")]
    block: Option<Block>,

    /// Asymmetric quantization [default: on]
    #[arg(long, value_name = "on|off", value_parser = Setting::parse_zero_points)]
    zero_points: Option<Setting>,

    /// Experts that the source holds in MXFP4 and that nobody chose a width for: as they are, which decodes faster, or as 8-bit codes
    /// of the same values, twice as large, which read long prompts faster and which other runtimes read [default: int8]
    #[arg(long, value_name = "fp4|int8")]
    mxfp4: Option<Mxfp4>,

    /// Float type of activations, scales, norms and float weights: f32, f16 or bf16 [default: f16; f32 where a GGUF file's
    /// scales and minimums need it]
    #[arg(long, value_name = "TYPE", value_parser = Options::parse_dtype)]
    dtype: Option<FloatType>,

    /// For LongRoPE (Phi-3, Phi-4-mini, Phi-3.5-MoE): the long factors and the whole context, for sequences of every length,
    /// instead of the short factors and the context before stretching
    #[arg(long)]
    long_context: bool,

    /// Every weight in the --dtype; the options above replace parts of it
    #[arg(long)]
    float: bool,

    /// Settings of layer ranges (3, 2-5, 40-, *), later ones win: RANGE:key=value,...;RANGE:...
    #[arg(long, value_name = "RANGE:KEY=VALUE,..", value_parser = layers)]
    layers: Option<Overrides>,

    /// Replace a package that is already there
    #[arg(long)]
    force: bool,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

// clap treats a Vec as several values; these are one value each.
#[derive(Debug, Clone)]
struct Settings(Vec<Setting>);
#[derive(Debug, Clone)]
struct Overrides(Vec<LayerOverride>);

type OptionError = doyen_convert::options::OptionError;

fn experts(s: &str) -> Result<Settings, OptionError> {
    Setting::parse_experts(s).map(Settings)
}

fn layers(s: &str) -> Result<Overrides, OptionError> {
    LayerOverride::parse_list(s).map(Overrides)
}

impl Args {
    fn options(&self, input: &Input) -> Options {
        let dtype = self.dtype.unwrap_or(input.default_dtype());
        let mut options =
            if self.float { Options::float(dtype) } else { Options { dtype, ..Options::default() } };
        let s = &mut options.settings;
        s.extend(self.experts.iter().flat_map(|e| &e.0).copied());
        s.extend(self.mlp.map(Setting::Mlp));
        s.extend(self.shared_experts.map(Setting::SharedExperts));
        s.extend(self.router.map(Setting::Router));
        s.extend(self.attention.map(Setting::Attention));
        s.extend(self.block.map(Setting::Block));
        s.extend(self.zero_points);
        options.embed = self.embed.or(options.embed);
        options.lm_head = self.lm_head.or(options.lm_head);
        options.mxfp4 = self.mxfp4.unwrap_or_default();
        options.long_context = self.long_context;
        options.layers = self.layers.clone().map_or_else(Vec::new, |l| l.0);
        options
    }

    pub(super) fn run(self) -> Result<Outcome> {
        let input = Input::open(&self.source)?;
        check_tokenizer(&input)?;
        let options = self.options(&input);
        let target = Target::new(&self.output).replace(self.force);
        let mut progress = Bar::new()?;
        let report = convert_input(input, &target, &options, &mut progress);
        progress.bar.finish_and_clear();
        let report = report?;
        for notice in &report.notices {
            console::say(format_args!("note: {notice}"));
        }
        if self.json {
            let parts: serde_json::Map<_, _> =
                report.parts.iter().map(|(p, b)| (p.to_string(), b.0.into())).collect();
            let fates: Vec<_> = report.fates.iter().map(fate).collect();
            let report = serde_json::json!({
                "architecture": report.architecture, "package": self.output, "parts": parts,
                "data_file_bytes": report.data_file.0, "weights": fates, "notices": report.notices,
            });
            console::print(&format!("{report}\n"))?;
        } else {
            let mut text = String::new();
            for (part, bytes) in &report.parts {
                writeln!(text, "{part:<14} {:>12}", bytes.to_string())?;
            }
            for fate in &report.fates {
                writeln!(text, "{fate}")?;
            }
            let place = self.output.display();
            writeln!(text, "{} written to {place} ({})", report.architecture, report.data_file)?;
            console::print(&text)?;
        }
        Ok(Outcome::Done)
    }
}

/// Refuses a tokenizer that no package could use.
fn check_tokenizer(input: &Input) -> Result<()> {
    let Some(tokenizer) = input.file("tokenizer.json") else { return Ok(()) };
    Tokenizer::from_files(&TokenizerFiles {
        tokenizer,
        config: input.file("tokenizer_config.json"),
        special_tokens_map: input.file("special_tokens_map.json"),
    })
    .with_context(|| format!("cannot use the tokenizer of {}", input.path().display()))?;
    Ok(())
}

/// What became of one kind of weights.
fn fate(fate: &Fate) -> serde_json::Value {
    let Origin { part, from, form } = &fate.origin;
    let carried = matches!(form, Form::Codes { carried: true, .. } | Form::Mxfp4);
    serde_json::json!({
        "part": part.to_string(), "from": from, "form": form.to_string(), "carried": carried,
        "tensors": fate.tensors, "relative_rms_error": fate.deviation.relative(),
    })
}

/// Bytes done, rate, time left, and the tensor at hand; and whether a signal asked to end.
struct Bar {
    bar: ProgressBar,
    interrupted: Arc<AtomicBool>,
}

impl Bar {
    fn new() -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for (signal, name) in [(SIGINT, "Ctrl-C"), (SIGTERM, "SIGTERM")] {
            // In this order: the first signal finds the flag down and raises it, the second finds it up.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&interrupted))
                .and_then(|_| flag::register(signal, Arc::clone(&interrupted)))
                .with_context(|| format!("cannot handle {name}"))?;
        }
        let template = "{bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left  {wide_msg}";
        Ok(Self { bar: console::bar(0, template), interrupted })
    }
}

impl Progress for Bar {
    fn step(&mut self, step: Step<'_>) {
        self.bar.set_length(step.total);
        self.bar.set_position(step.done);
        self.bar.set_message(step.tensor.to_owned());
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
