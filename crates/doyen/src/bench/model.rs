//! A whole model: loading, prefill and decode of random prompts, beside a plain read loop, and the memory it took.

use super::{fingerprint, spread, traffic::Traffic};
use crate::model::{context_length, kernels, lowered, open, peak_memory, tokenizer};
use anyhow::{Context, Result, bail, ensure};
use doyen_cpu::{
    CpuDevice,
    bench::{ReadLoop, Rng, Spread},
    machine::{HugePages, Machine},
};
use doyen_graph::device::{Device, Numerics};
use doyen_runtime::{Engine, Event, FinishReason, Plan, PlanOptions, Request, SamplingParams};
use doyen_tensor::{ByteCount, TokenId};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// New prompt tokens of a step beside the generating sequences' own.
const CHUNK: usize = 256;

/// What the plan may take beside the package and the keys and values.
const ALLOWANCE: ByteCount = ByteCount(64 << 20);

/// Samples of the read loop before and after a measurement.
const READS: usize = 8;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// Package directory; the built-in model when absent.
    pub package: Option<PathBuf>,
    /// How quantized products are computed.
    pub numerics: Numerics,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Decoding steps.
    pub generate: usize,
    /// Sequences at once.
    pub batch: usize,
    /// Repetitions that count; one that does not goes first.
    pub repetitions: usize,
}

/// What was measured.
#[derive(Debug)]
pub struct Report {
    options: Options,
    package: String,
    device: String,
    machine: Machine,
    context: usize,
    load: Load,
    prefill_rate: Spread,
    first_token: Spread,
    decode_rate: Spread,
    read_rate: Spread,
    share: Spread,
    traffic: Traffic,
    memory: Memory,
    kv_types: String,
    kernels: BTreeMap<String, usize>,
}

/// Seconds from opening the package until it is ready, and until a prompt of one token has given a token.
#[derive(Debug, Clone, Copy)]
struct Load {
    ready: f64,
    first_token: f64,
}

/// Bytes planned and taken.
#[derive(Debug, Clone, Copy)]
struct Memory {
    peak: Option<ByteCount>,
    weights: ByteCount,
    kv: ByteCount,
    allocated: ByteCount,
    huge: Option<HugePages>,
}

impl Memory {
    fn budget(&self) -> ByteCount {
        self.weights + self.kv + ALLOWANCE
    }
}

/// One repetition.
pub(super) struct Repetition {
    pub(super) prefill: Duration,
    pub(super) first_token: Duration,
    pub(super) decode: Duration,
    pub(super) decoded: usize,
}

/// Measures a model on the CPU. `tick` is called after every repetition.
///
/// # Errors
/// When the package cannot be loaded, prompt and generation do not fit its context, or its logits are NaN.
pub fn measure(options: &Options, device: &CpuDevice, mut tick: impl FnMut()) -> Result<Report> {
    let start = Instant::now();
    let loaded = Loaded::new(options, device)?;
    let ready = start.elapsed().as_secs_f64();
    let Loaded { package, plan, mut engine, context } = loaded;
    let mut rng = Rng::default();
    repetition(&mut engine, &mut rng, &Options { prompt: 1, generate: 0, batch: 1, ..options.clone() })?;
    let load = Load { ready, first_token: start.elapsed().as_secs_f64() };
    repetition(&mut engine, &mut rng, options)?;
    tick();
    let memory = memory(&plan, device);

    let machine = Machine::read();
    let weights = plan.ledger().mapped().0 as usize;
    let mut floor = Floor::new(&machine, weights, device)?;
    let positions = options.prompt as f64 + f64::midpoint(options.generate as f64, 1.0);
    let traffic = Traffic::of(plan.program(), device, options.batch, positions);
    let mut samples = [const { Vec::new() }; 5];
    for _ in 0..options.repetitions {
        let before = floor.rate();
        let r = repetition(&mut engine, &mut rng, options)?;
        let read = f64::midpoint(before, floor.rate());
        let prefill = (options.prompt * options.batch) as f64 / r.prefill.as_secs_f64();
        let decode = r.decoded as f64 / r.decode.as_secs_f64();
        let moved = decode / options.batch as f64 * traffic.total();
        let figures = [prefill, r.first_token.as_secs_f64(), decode, read, moved / read];
        samples.iter_mut().zip(figures).for_each(|(s, v)| s.push(v));
        tick();
    }
    let [prefill_rate, first_token, decode_rate, read_rate, share] = samples.map(Spread::of);
    Ok(Report {
        options: options.clone(),
        package,
        device: device.describe(),
        machine,
        context,
        load,
        prefill_rate,
        first_token,
        decode_rate,
        read_rate,
        share,
        traffic,
        memory,
        kv_types: plan.ledger().kv_types().join(" and "),
        kernels: kernels(&plan).into_iter().map(|(k, n)| (k.to_owned(), n)).collect(),
    })
}

/// A package ready to run.
struct Loaded {
    package: String,
    plan: Plan,
    engine: Engine,
    context: usize,
}

impl Loaded {
    fn new(options: &Options, device: &CpuDevice) -> Result<Self> {
        let package = open(options.package.as_deref())?;
        // What a user waits for includes the tokenizer; packages of random weights have none.
        if package.text.tokenizer.is_some() {
            tokenizer(&package)?;
        }
        let graph = Arc::new(lowered(&package)?);
        let context = context(options, context_length(&package, &graph), CHUNK)?;
        let plan_options = PlanOptions {
            context,
            sequences: options.batch,
            step_tokens: if options.batch == 1 { CHUNK } else { CHUNK.saturating_add(options.batch) },
            numerics: options.numerics,
            ..PlanOptions::default()
        };
        let plan = Plan::new(graph, device, &plan_options)?;
        let engine = Engine::new(&plan, device)?;
        Ok(Self { package: package.source.describe(), plan, engine, context })
    }
}

/// Positions that a sequence takes: prompt, generation, and what it generates while others' prompts are still being read.
pub(super) fn context(options: &Options, model: Option<usize>, chunk: usize) -> Result<usize> {
    let Options { prompt, generate, batch, .. } = *options;
    let sum = || {
        let others =
            if batch == 1 { 0 } else { prompt.checked_mul(batch)?.div_ceil(chunk).checked_add(1)? };
        prompt.checked_add(generate)?.checked_add(others)?.checked_add(1)
    };
    let context = sum().context("--prompt, --gen and --batch are too large")?;
    if let Some(model) = model {
        ensure!(
            context <= model,
            "{batch} sequence{} of {prompt} prompt tokens and {generate} generated ones take {context} positions each, the \
             model's context length is {model}: give a smaller --prompt, --gen or --batch",
            if batch == 1 { "" } else { "s" }
        );
    }
    Ok(context)
}

fn memory(plan: &Plan, device: &dyn Device) -> Memory {
    let program = plan.program();
    let page_bytes = device.page_bytes(&program.graph, program.limits.page_size);
    let kv =
        page_bytes.iter().zip(&program.pages).map(|(b, p)| ByteCount(b.0.saturating_mul(p.pages as u64)));
    Memory {
        peak: peak_memory(),
        weights: plan.ledger().mapped(),
        kv: kv.sum(),
        allocated: plan.ledger().allocated(),
        huge: HugePages::of_this_process(),
    }
}

/// The read loop on the device's own threads, over about as many bytes as the weights have: what fits a cache is read from
/// there by both.
struct Floor {
    device: CpuDevice,
    read: ReadLoop,
}

impl Floor {
    fn new(machine: &Machine, weights: usize, device: &CpuDevice) -> Result<Self> {
        let most = machine.last_level_cache().saturating_mul(2).max(192 << 20);
        let spare = machine.memory.available.map_or(usize::MAX, |m| (m / 4) as usize);
        let read = ReadLoop::new(weights.min(most).min(spare), device.pool().threads())?;
        Ok(Self { device: device.clone(), read })
    }

    /// Bytes a second.
    fn rate(&mut self) -> f64 {
        let rates = (0..READS).map(|_| {
            let (bytes, seconds) = self.read.sample(self.device.pool());
            bytes as f64 / seconds
        });
        Spread::of(rates.collect()).median
    }
}

pub(super) fn repetition(engine: &mut Engine, rng: &mut Rng, options: &Options) -> Result<Repetition> {
    let Options { prompt, generate, batch, .. } = *options;
    let mut ids = Vec::with_capacity(batch);
    for _ in 0..batch {
        let tokens = (0..prompt).map(|_| TokenId(rng.below(engine.vocab()) as u32)).collect();
        ids.push(engine.submit(Request::new(tokens, SamplingParams::default()))?);
    }
    let result = run(engine, batch, generate);
    for id in ids {
        engine.cancel(id);
    }
    result
}

/// Until every sequence has its first token, then `generate` steps more.
fn run(engine: &mut Engine, batch: usize, generate: usize) -> Result<Repetition> {
    let mut started = std::collections::HashSet::with_capacity(batch);
    let (start, mut first_token) = (Instant::now(), None);
    while started.len() < batch {
        for event in engine.step()? {
            if let Event::Token { id, .. } = event {
                started.insert(*id);
                first_token.get_or_insert_with(|| start.elapsed());
            }
            refuse_nan(event)?;
        }
    }
    let prefill = start.elapsed();
    let (start, mut decoded) = (Instant::now(), 0);
    for _ in 0..generate {
        for event in engine.step()? {
            decoded += usize::from(matches!(event, Event::Token { .. }));
            refuse_nan(event)?;
        }
    }
    let decode = start.elapsed();
    ensure!(
        decoded == batch * generate,
        "{decoded} tokens came out of {generate} steps of {batch} sequences"
    );
    Ok(Repetition { prefill, first_token: first_token.unwrap_or(prefill), decode, decoded })
}

fn refuse_nan(event: &Event) -> Result<()> {
    if let Event::Finished { reason: FinishReason::NotANumber, .. } = event {
        bail!("the model computes NaN on random tokens: its weights or scales are damaged, or overflow");
    }
    Ok(())
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let o = &self.options;
        let rate = |s: &Spread, unit: f64, digits: usize| {
            format!("{:.digits$} ({:.digits$} to {:.digits$})", s.median * unit, s.min * unit, s.max * unit)
        };
        let t = &self.traffic;
        let per_token = |bytes: f64| ByteCount((bytes / o.batch as f64) as u64);
        let m = &self.memory;
        let peak = m.peak.map_or_else(
            || "unknown".to_owned(),
            |p| {
                let verdict = if p <= m.budget() { "within" } else { "ABOVE" };
                format!("{p}, {verdict} {} (weights {}, kv {}, {ALLOWANCE})", m.budget(), m.weights, m.kv)
            },
        );
        let huge = m.huge.map_or_else(
            || "unknown".to_owned(),
            |h| format!("{} of the mapped files, {} of other memory", h.files, h.anonymous),
        );
        let kernels: Vec<String> = self.kernels.iter().map(|(k, n)| format!("  {n:>5} x {k}")).collect();
        format!(
            "{}\n{}, {} numerics, kv cache in {}\n{} sequence{} of {} prompt tokens, {} decoding steps, {} repetitions; median (min to \
             max)\n\n\
             load            {:.0} ms, first token of a one-token prompt after {:.0} ms\n\
             first token     {} ms\n\
             prefill         {} tok/s\n\
             decode          {} tok/s\n\
             bytes a token   {} (dense {}, experts {}, kv {})\n\
             read loop       {} GB/s\n\
             share of it     {} %\n\
             peak memory     {peak}\n\
             huge pages      {huge}\n\n{}\n\nkernels\n{}\n",
            self.package,
            self.device,
            o.numerics.name(),
            self.kv_types,
            o.batch,
            if o.batch == 1 { "" } else { "s" },
            o.prompt,
            o.generate,
            o.repetitions,
            1e3 * self.load.ready,
            1e3 * self.load.first_token,
            rate(&self.first_token, 1e3, 1),
            rate(&self.prefill_rate, 1.0, 0),
            rate(&self.decode_rate, 1.0, 1),
            per_token(t.total()),
            per_token(t.dense),
            per_token(t.experts),
            per_token(t.kv),
            rate(&self.read_rate, 1e-9, 1),
            rate(&self.share, 100.0, 0),
            fingerprint::text(&self.machine),
            kernels.join("\n"),
        )
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        let o = &self.options;
        let (t, m) = (&self.traffic, &self.memory);
        let per_token = |bytes: f64| bytes / o.batch as f64;
        json!({
            "package": self.package, "device": self.device, "numerics": o.numerics.name(),
            "kv_dtype": self.kv_types,
            "prompt": o.prompt, "gen": o.generate, "batch": o.batch, "repetitions": o.repetitions,
            "context": self.context,
            "load_ms": 1e3 * self.load.ready, "load_to_first_token_ms": 1e3 * self.load.first_token,
            "first_token_ms": spread(&self.first_token, 1e3),
            "prefill_tok_s": spread(&self.prefill_rate, 1.0), "decode_tok_s": spread(&self.decode_rate, 1.0),
            "bytes_per_token": {
                "dense": per_token(t.dense), "experts": per_token(t.experts), "kv": per_token(t.kv),
                "total": per_token(t.total()),
            },
            "read_gb_s": spread(&self.read_rate, 1e-9), "share_of_read": spread(&self.share, 1.0),
            "memory": {
                "peak_bytes": m.peak.map(|p| p.0), "weights_bytes": m.weights.0, "kv_bytes": m.kv.0,
                "allocated_bytes": m.allocated.0, "budget_bytes": m.budget().0,
                "within_budget": m.peak.map(|p| p <= m.budget()),
                "huge_pages": m.huge.map(|h| json!({"files_bytes": h.files.0, "other_bytes": h.anonymous.0})),
            },
            "kernels": self.kernels, "machine": fingerprint::json(&self.machine),
        })
    }
}
