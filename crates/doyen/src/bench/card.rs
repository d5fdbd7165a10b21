//! A whole model on a card: loading, prefill and decode of random prompts. What a card could do at best is not measured here;
//! the log of `docs/performance-cuda.md` has it.

use super::{
    model::{Options, context, repetition},
    spread,
};
use crate::{
    device::Opened,
    model::{context_length, kernels, lowered, open},
};
use anyhow::Result;
use doyen_cpu::bench::{Rng, Spread};
use doyen_runtime::{Engine, Plan, PlanOptions};
use doyen_tensor::ByteCount;
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc, time::Instant};

/// New prompt tokens of a step beside the generating sequences' own: enough that experts have rows to share.
const CHUNK: usize = 4096;

/// What was measured.
#[derive(Debug)]
pub struct Report {
    package: String,
    device: String,
    batch: usize,
    prompt: usize,
    generate: usize,
    /// Seconds until the package was ready.
    load: f64,
    prefill_rate: Spread,
    first_token: Spread,
    decode_rate: Spread,
    weights: ByteCount,
    allocated: ByteCount,
    kv_types: String,
    kernels: BTreeMap<String, usize>,
}

/// Measures a model on an opened device. `tick` is called after every repetition.
///
/// # Errors
/// When the package cannot be loaded, prompt and generation do not fit its context, or its logits are NaN.
pub fn measure(options: &Options, opened: &Opened, mut tick: impl FnMut()) -> Result<Report> {
    let start = Instant::now();
    let package = open(options.package.as_deref())?;
    let graph = Arc::new(lowered(&package)?);
    let plan_options = PlanOptions {
        context: context(options, context_length(&package, &graph), CHUNK)?,
        sequences: options.batch,
        step_tokens: CHUNK.saturating_add(options.batch),
        step_rows: options.batch.max(PlanOptions::default().step_rows),
        numerics: options.numerics,
        memory: opened.memory,
        ..PlanOptions::default()
    };
    let device = opened.device.as_ref();
    let plan = Plan::new(graph, device, &plan_options)?;
    let mut engine = Engine::new(&plan, device)?;
    let load = start.elapsed().as_secs_f64();
    let mut rng = Rng::default();
    repetition(&mut engine, &mut rng, options)?;
    tick();
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..options.repetitions {
        let r = repetition(&mut engine, &mut rng, options)?;
        let prefill = (options.prompt * options.batch) as f64 / r.prefill.as_secs_f64();
        let figures = [prefill, r.first_token.as_secs_f64(), r.decoded as f64 / r.decode.as_secs_f64()];
        samples.iter_mut().zip(figures).for_each(|(s, v)| s.push(v));
        tick();
    }
    let [prefill_rate, first_token, decode_rate] = samples.map(Spread::of);
    Ok(Report {
        package: package.source.describe(),
        device: device.describe(),
        batch: options.batch,
        prompt: options.prompt,
        generate: options.generate,
        load,
        prefill_rate,
        first_token,
        decode_rate,
        weights: plan.ledger().mapped(),
        allocated: plan.ledger().allocated(),
        kv_types: plan.ledger().kv_types().join(" and "),
        kernels: kernels(&plan).into_iter().map(|(k, n)| (k.to_owned(), n)).collect(),
    })
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let rate = |s: &Spread, unit: f64| {
            format!("{:.1} ({:.1} to {:.1})", s.median * unit, s.min * unit, s.max * unit)
        };
        let kernels: Vec<String> = self.kernels.iter().map(|(k, n)| format!("  {n:>5} x {k}")).collect();
        format!(
            "{}\n{}\n{} sequence{} of {} prompt tokens, {} decoding steps; median (min to max)\n\n\
             load            {:.0} ms\n\
             first token     {} ms\n\
             prefill         {} tok/s\n\
             decode          {} tok/s\n\
             memory          weights {}, planned beside them {}\n\nkernels\n{}\n",
            self.package,
            self.device,
            self.batch,
            if self.batch == 1 { "" } else { "s" },
            self.prompt,
            self.generate,
            1e3 * self.load,
            rate(&self.first_token, 1e3),
            rate(&self.prefill_rate, 1.0),
            rate(&self.decode_rate, 1.0),
            self.weights,
            self.allocated,
            kernels.join("\n"),
        )
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        json!({
            "package": self.package, "device": self.device, "kv_dtype": self.kv_types,
            "prompt": self.prompt, "gen": self.generate, "batch": self.batch,
            "load_ms": 1e3 * self.load,
            "first_token_ms": spread(&self.first_token, 1e3),
            "prefill_tok_s": spread(&self.prefill_rate, 1.0), "decode_tok_s": spread(&self.decode_rate, 1.0),
            "memory": { "weights_bytes": self.weights.0, "allocated_bytes": self.allocated.0 },
            "kernels": self.kernels,
        })
    }
}
