//! `doyen verify`: is the fast path right on this package?

use super::{
    Outcome,
    options::{NumericsArg, at_least_one},
};
use crate::{
    console,
    device::{DeviceArgs, DeviceName, KvName},
    model::{lowered, open, tokenizer},
    verify::{
        Difference, golden,
        reference::{self, Recorded},
    },
};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use doyen_graph::{
    device::{Device, Numerics},
    lowered::{LOp, Lowered},
};
use doyen_runtime::{Engine, Plan, PlanOptions};
use doyen_tensor::{DType, TokenId};
use serde_json::json;
use std::{fmt::Write, num::NonZeroUsize, path::PathBuf, sync::Arc};

/// Compare a package's fast path with the reference, or with recorded logits
///
/// Against the reference interpreter, which runs the exported graph scalar and exact: layer by layer and at the logits, in
/// exact and in fast mode; on a card with experts also densely, without their packed kernels. Against a file of recorded prompts: largest difference of the logits, top-1 agreement, and
/// whether the greedy tokens are equal. The exit code is 1 when a difference is larger than the tolerance.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen verify qwen3-4bit
  doyen verify qwen3-4bit --numerics exact --tolerance 0.01 --json
  doyen verify llama-plain --golden golden.safetensors")]
pub struct Args {
    /// Package directory; the built-in model when left out
    package: Option<PathBuf>,

    /// What to compare with
    #[arg(long, value_enum, default_value_t)]
    against: Against,

    /// Compare with recorded prompts: safetensors with prompt_k, logits_k, greedy_k (or ort_logits_k, ort_greedy_k)
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,

    /// Text the reference is run on
    #[arg(short, long, value_name = "TEXT", default_value = DEFAULT_PROMPT)]
    prompt: String,

    /// Tokens of the text that are used at most; the reference is slow
    #[arg(value_parser = at_least_one, long, value_name = "N", default_value = "24", allow_negative_numbers = true)]
    tokens: NonZeroUsize,

    /// Only this mode [default: exact, then fast]
    #[arg(long, value_enum)]
    numerics: Option<NumericsArg>,

    /// Largest absolute difference of a logit that is accepted [default: by mode and float type of the package]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    tolerance: Option<f64>,

    #[command(flatten)]
    device: DeviceArgs,

    /// Threads to compute with [default: the CPUs this process may use]
    #[arg(value_parser = at_least_one, long, value_name = "N", allow_negative_numbers = true)]
    threads: Option<NonZeroUsize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const DEFAULT_PROMPT: &str = "The function returns the number of elements in the list, or raises an error if the \
    list is empty. For example:";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Against {
    /// The reference interpreter
    #[default]
    Reference,
}

impl Args {
    /// The type of caches that a mode is compared with, where it is not the one that the mode runs with: the reference rounds keys and
    /// values, as all else, to the type that the package declares.
    fn caches(&self, mode: Numerics, dtype: DType) -> Option<KvName> {
        match dtype {
            _ if mode != Numerics::Exact || self.golden.is_some() => None,
            DType::F16 => Some(KvName::F16),
            DType::BF16 => Some(KvName::Bf16),
            _ => None,
        }
    }

    pub(super) fn run(self) -> Result<Outcome> {
        ensure!(
            self.tolerance.is_none_or(|t| t >= 0.0),
            "--tolerance: expected 0 or more, found {}",
            self.tolerance.unwrap_or_default()
        );
        let progress = console::spinner("reading the package");
        let package = open(self.package.as_deref())?;
        let graph = Arc::new(lowered(&package)?);
        let dtype = activation_type(&graph);
        let modes = match self.numerics {
            Some(n) => vec![n.into()],
            None => vec![Numerics::Exact, Numerics::Fast],
        };
        let experts = graph.nodes.iter().any(|n| matches!(n.op, LOp::Experts(_)));
        let both_ways = self.device.device != DeviceName::Cpu && experts;
        let mut devices = Vec::new();
        for (how, all_dense) in [("", false), (", dense experts", true)] {
            for &mode in modes.iter().filter(|_| both_ways || !all_dense) {
                let kv_dtype = self.device.kv_dtype.or_else(|| self.caches(mode, dtype));
                let args = DeviceArgs { kv_dtype, all_dense, ..self.device.clone() };
                devices.push((mode, how, args.open(self.threads, mode)?.device));
            }
        }
        let limit = |mode| self.tolerance.unwrap_or_else(|| tolerance(mode, dtype));
        let runs = || devices.iter().map(|(mode, how, device)| (*mode, *how, device.as_ref()));
        let checks = if let Some(path) = &self.golden {
            progress.set_message("running the recorded prompts");
            let goldens = golden::read(path)?;
            runs()
                .map(|(m, how, device)| against_golden(&goldens, &graph, device, (m, how), limit(m)))
                .collect::<Result<Vec<_>>>()?
        } else {
            let Against::Reference = self.against;
            progress.set_message("running the reference interpreter");
            let mut prompt: Vec<TokenId> = tokenizer(&package)?.encode(&self.prompt)?;
            ensure!(!prompt.is_empty(), "the prompt is empty: give some text with --prompt");
            prompt.truncate(self.tokens.get());
            let recorded = reference::record(&package, &prompt)?;
            progress.set_message("running the device");
            runs()
                .map(|(m, how, device)| {
                    let flipped = if self.tolerance.is_some() { 1.0 } else { FLIPPED };
                    against_reference(&recorded, &graph, device, (m, how), (limit(m), flipped))
                })
                .collect::<Result<Vec<_>>>()?
        };
        progress.finish_and_clear();
        if self.json {
            let all: Vec<_> = checks.iter().map(|c| &c.json).collect();
            console::print(&format!("{:#}\n", json!({"device": devices[0].2.describe(), "checks": all})))?;
        } else {
            console::print(&checks.iter().map(|c| c.text.as_str()).collect::<String>())?;
        }
        Ok(if checks.iter().all(|c| c.ok) { Outcome::Done } else { Outcome::Different })
    }
}

/// One mode's verdict.
struct Check {
    ok: bool,
    text: String,
    json: serde_json::Value,
}

/// The float type the package declares for its activations.
fn activation_type(graph: &Lowered) -> DType {
    graph.outputs.first().map_or(DType::F32, |&v| graph.value(v).declared)
}

/// Default bounds on a logit's difference. Exact mode computes in f32: a float32 package agrees to rounding; the
/// reference rounds every value of a float16 or bfloat16 package to that type, the CPU does not. Fast mode quantizes
/// activations to int8, half a percent of a block's largest value each.
fn tolerance(mode: Numerics, dtype: DType) -> f64 {
    match (mode, dtype) {
        (Numerics::Exact, DType::F32) => 2e-4,
        (Numerics::Exact, DType::F16) => 0.1,
        (Numerics::Exact, _) => 0.5,
        (Numerics::Fast | Numerics::Int8, _) => 1.0,
    }
}

/// What the default bound is multiplied with when some token went to another expert than the reference's.
const FLIPPED: f64 = 2.0;

fn against_reference(
    recorded: &Recorded,
    graph: &Arc<Lowered>,
    device: &dyn Device,
    (mode, how): (Numerics, &str),
    (limit, flipped): (f64, f64),
) -> Result<Check> {
    let outcome = reference::compare(recorded, graph, device, mode)?;
    let d = outcome.logits;
    let limit = if outcome.flipped > 0 { limit * flipped } else { limit };
    let ok = d.max_abs <= limit;
    let mut text = format!("{mode:?} mode{how} against the reference, {} tokens\n", d.rows);
    for n in outcome.nodes.iter().filter(|n| ["attention", "experts"].contains(&n.kind)) {
        let _ = writeln!(
            text,
            "  {:<48} {:<10} max {:.3e}  relative {:.3e}",
            n.node, n.kind, n.max_abs, n.relative
        );
    }
    if outcome.routed > 0 {
        let _ = writeln!(text, "  {} of {} routes lead to other experts", outcome.flipped, outcome.routed);
    }
    let _ = writeln!(text, "  {:<48} {:<10} {}  {}", "logits", "", line(&d), verdict(ok, limit));
    if let Some(n) = outcome.nodes.iter().find(|n| !ok && n.max_abs > limit) {
        let _ = writeln!(
            text,
            "  first node further off than that: {} ({}), max {:.3e}",
            n.node, n.kind, n.max_abs
        );
    }
    let nodes: Vec<_> = outcome
        .nodes
        .iter()
        .map(|n| json!({"node": n.node, "kind": n.kind, "max_abs": finite(n.max_abs), "relative": finite(n.relative)}))
        .collect();
    let json = json!({"against": "reference", "numerics": mode.name(), "dense_experts": !how.is_empty(), "tolerance": limit, "ok": ok,
                      "logits": difference_json(&d), "routes": outcome.routed, "routes_flipped": outcome.flipped, "nodes": nodes});
    Ok(Check { ok, text, json })
}

fn against_golden(
    goldens: &[golden::Golden],
    graph: &Arc<Lowered>,
    device: &dyn Device,
    (mode, how): (Numerics, &str),
    limit: f64,
) -> Result<Check> {
    let longest =
        goldens.iter().map(|g| g.prompt.len() + g.greedy.as_ref().map_or(0, Vec::len)).max().unwrap_or(0);
    let options = PlanOptions { context: longest + 1, numerics: mode, ..PlanOptions::default() };
    let mut engine = Engine::new(&Plan::new(Arc::clone(graph), device, &options)?, device)?;
    let (mut ok, mut text, mut prompts) =
        (true, format!("{mode:?} mode{how} against recorded prompts\n"), Vec::new());
    for (k, g) in goldens.iter().enumerate() {
        let o = golden::compare(&mut engine, g)?;
        let fits = o.logits.is_none_or(|d| d.max_abs <= limit);
        // A greedy token may flip only where the two candidates are closer than the accepted difference allows.
        let fits = fits && o.greedy.is_none_or(|g| f64::from(g.margin) <= 2.0 * limit);
        ok &= fits;
        let logits = o.logits.map_or_else(|| "no logits recorded".into(), |d| line(&d));
        let greedy = match o.greedy {
            None => format!("{} greedy tokens equal", o.greedy_tokens),
            Some(g) => format!(
                "greedy differs at {} of {}: {} for {}, margin {:.3e}",
                g.at, o.greedy_tokens, g.got, g.want, g.margin
            ),
        };
        let _ = writeln!(
            text,
            "  prompt {k} ({:>3} tokens)  {logits}  {greedy}  {}",
            o.prompt,
            verdict(fits, limit)
        );
        prompts.push(json!({
            "prompt_tokens": o.prompt, "ok": fits, "logits": o.logits.as_ref().map(difference_json),
            "greedy_tokens": o.greedy_tokens,
            "greedy_difference": o.greedy.map(|g| json!({"at": g.at, "want": g.want.0, "got": g.got.0, "margin": g.margin})),
        }));
    }
    let json = json!({"against": "golden", "numerics": mode.name(), "dense_experts": !how.is_empty(), "tolerance": limit, "ok": ok, "prompts": prompts});
    Ok(Check { ok, text, json })
}

fn line(d: &Difference) -> String {
    format!("max {:.3e}  relative {:.3e}  top-1 {}/{}", d.max_abs, d.relative, d.top1, d.rows)
}

fn verdict(ok: bool, limit: f64) -> String {
    if ok { format!("ok (tolerance {limit})") } else { format!("OUTSIDE the tolerance {limit}") }
}

fn difference_json(d: &Difference) -> serde_json::Value {
    json!({"max_abs": finite(d.max_abs), "relative": finite(d.relative), "rows": d.rows, "top1": d.top1})
}

/// JSON has no infinity; the largest number stands for it.
fn finite(x: f64) -> f64 {
    x.min(f64::MAX)
}
