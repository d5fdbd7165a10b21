//! What it saves that experts written out densely are recognised as a bank: decoding with and without, in one process.
//!
//! `cargo run --release -p doyen --example dense-experts PACKAGE [THREADS]`, with a package by `scripts/mobius-moe.py`. Without: two
//! negations behind every comparison change nothing but that the pattern is not seen.

use anyhow::{Context, Result, ensure};
use doyen::{model, verify::difference};
use doyen_cpu::CpuDevice;
use doyen_graph::{
    device::Numerics,
    ir::{Attrs, Graph},
    lowered::{LOp, Lowered},
    package::Package,
    pass::{dead, fold, lower},
};
use doyen_runtime::{Engine, Plan, PlanOptions, Request, SamplingParams};
use doyen_tensor::TokenId;
use std::{num::NonZeroUsize, path::Path, sync::Arc, time::Instant};

const ROUNDS: usize = 7;
const PROMPT: usize = 8;
const TOKENS: usize = 24;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let package = args.next().context("usage: dense-experts PACKAGE [THREADS]")?;
    let threads = args.next().map_or(Ok(1), |t| t.parse())?;
    let package = model::open(Some(Path::new(&package)))?;
    let device = CpuDevice::new(NonZeroUsize::new(threads).context("threads: 1 or more")?)?;
    let mut engines = Vec::new();
    for recognised in [true, false] {
        let graph = lowered(&package, recognised)?;
        let banks = graph.nodes.iter().filter(|n| matches!(n.op, LOp::Experts(_))).count();
        ensure!((banks > 0) == recognised, "{banks} banks of experts in the graph, recognised: {recognised}");
        let options = PlanOptions { context: 64, numerics: Numerics::Exact, ..PlanOptions::default() };
        engines.push(Engine::new(&Plan::new(Arc::new(graph), &device, &options)?, &device)?);
    }
    let vocab = engines[0].vocab();
    let prompt: Vec<TokenId> = (0..PROMPT).map(|i| TokenId((i * 7919 % vocab) as u32)).collect();
    let mut logits = [Vec::new(), Vec::new()];
    for (engine, out) in engines.iter_mut().zip(&mut logits) {
        engine.logits(&prompt, |_, row| out.extend_from_slice(row))?;
    }
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (engine, rates) in engines.iter_mut().zip(&mut rates) {
            let rate = decode(engine, &prompt)?;
            // The first round reads the file.
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    let [bank, dense] = rates.map(median);
    println!("largest difference of logits {:.1e}", difference(&logits[0], &logits[1], vocab).max_abs);
    println!("decoding, {threads} threads, medians of {ROUNDS} rounds in turn");
    println!("  as a bank          {bank:8.2} tok/s");
    println!("  every expert       {dense:8.2} tok/s");
    println!("  {:.1} times as fast", bank / dense);
    Ok(())
}

/// Tokens a second after the first.
fn decode(engine: &mut Engine, prompt: &[TokenId]) -> Result<f64> {
    let mut request = Request::new(prompt.to_vec(), SamplingParams::default());
    request.max_new_tokens = Some(TOKENS + 1);
    let mut first = None;
    engine.generate(request, |_| {
        first.get_or_insert_with(Instant::now);
        true
    })?;
    Ok(TOKENS as f64 / first.context("no token was made")?.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn lowered(package: &Package, recognised: bool) -> Result<Lowered> {
    let mut graph = package.graph.clone();
    if !recognised {
        negate_twice(&mut graph)?;
    }
    fold::fold(&mut graph, fold::FoldLimits::default())?;
    dead::dead(&mut graph);
    Ok(lower::lower(&graph, &package.ports)?)
}

/// Puts two negations behind every comparison.
fn negate_twice(graph: &mut Graph) -> Result<()> {
    let old = std::mem::take(&mut graph.nodes);
    for mut node in old {
        let compared = node.outputs.first().copied().flatten().filter(|_| node.op_type == "Equal");
        let Some(compared) = compared else {
            graph.nodes.push(node);
            continue;
        };
        let (name, after) = (node.name.clone(), graph.value(compared).name.clone());
        let apart = graph.intern(&format!("{name}/apart"));
        node.outputs[0] = Some(apart);
        graph.nodes.push(node);
        let negated = format!("{name}/negated");
        let once = graph.add_node(
            &format!("{name}/Not"),
            ("", "Not"),
            Attrs::default(),
            &[Some(apart)],
            &[&negated],
        )?;
        graph.add_node(
            &format!("{name}/Not2"),
            ("", "Not"),
            Attrs::default(),
            &[Some(once[0])],
            &[&after],
        )?;
    }
    Ok(())
}
