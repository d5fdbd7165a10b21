//! `doyen show`: what is in a package and what it takes to run.

use super::Outcome;
use crate::{
    console,
    device::DeviceArgs,
    inventory::{Inventory, Weight},
    model::{DEFAULT_CONTEXT, context_length, lowered, source},
};
use anyhow::Result;
use doyen_graph::{
    ir::Graph,
    lowered::Lowered,
    package::{Draft, Package},
};
use doyen_runtime::{Plan, PlanOptions};
use doyen_tensor::ByteCount;
use serde_json::json;
use std::{fmt::Write, path::PathBuf, sync::Arc};

/// Show a package: architecture, weights, bytes, what runs
///
/// Lists every weight's format and bytes (experts per projection and width), totals, KV bytes per token, context length,
/// and what cannot run and why.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen show
  doyen show qwen3-4bit --graph
  doyen show qwen3-4bit --json | jq .totals")]
pub struct Args {
    /// Package directory; the built-in model when left out
    package: Option<PathBuf>,

    /// List the nodes of the graph too
    #[arg(long)]
    graph: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What running the package would take, or why it cannot run.
enum Runs {
    Yes(Box<Plan>),
    No(String),
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        let draft = Draft::read(source(self.package.as_deref())?)?;
        let inventory = Inventory::new(&draft.graph);
        let runs = match draft.clone().check() {
            Ok(package) => plan(&package),
            Err(e) => Runs::No(describe(&e)),
        };
        if self.json {
            console::print(&format!("{:#}\n", to_json(&draft, &inventory, &runs, self.graph)))?;
        } else {
            console::print(&text(&draft, &inventory, &runs, self.graph)?)?;
        }
        Ok(Outcome::Done)
    }
}

fn describe(e: &(dyn std::error::Error + 'static)) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(s) = source {
        let next = s.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = s.source();
    }
    text
}

fn plan(package: &Package) -> Runs {
    let try_plan = || -> Result<Plan> {
        let graph: Arc<Lowered> = Arc::new(lowered(package)?);
        let context = context_length(package, &graph).unwrap_or(DEFAULT_CONTEXT);
        let options = PlanOptions { context, memory: Some(ByteCount(u64::MAX)), ..PlanOptions::default() };
        Ok(Plan::new(graph, &DeviceArgs::default().cpu(None, options.numerics)?, &options)?)
    };
    match try_plan() {
        Ok(plan) => Runs::Yes(Box::new(plan)),
        Err(e) => Runs::No(format!("{e:#}")),
    }
}

fn text(draft: &Draft, inventory: &Inventory, runs: &Runs, nodes: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let m = &draft.manifest;
    let known = |v: Option<usize>| v.map_or_else(|| "?".to_owned(), |v| v.to_string());
    writeln!(out, "{}", draft.source.describe())?;
    writeln!(out, "model type      {}", m.model_type.as_deref().unwrap_or("? (no manifest says)"))?;
    for (key, value) in draft.graph.metadata.iter().filter(|(k, _)| k.starts_with("doyen.")) {
        writeln!(out, "{:<15} {value}", key.trim_start_matches("doyen."))?;
    }
    writeln!(out, "layers          {}", known(m.decoder.num_hidden_layers))?;
    writeln!(out, "hidden size     {}", known(m.decoder.hidden_size))?;
    writeln!(out, "vocabulary      {}", known(m.vocab_size))?;
    writeln!(out, "context length  {}", known(m.context_length))?;
    writeln!(out, "\nweights")?;
    for w in &inventory.weights {
        writeln!(out, "  {:<44} {:<28} {:>12}", w.name, w.format, w.bytes.to_string())?;
    }
    writeln!(out, "\ntotals")?;
    for (kind, t) in &inventory.totals {
        writeln!(out, "  {:<44} {:<28} {:>12}", kind, t.format_text(), t.bytes.to_string())?;
    }
    writeln!(out, "  {:<73} {:>12}", "all constants", inventory.bytes.to_string())?;
    match runs {
        Runs::Yes(plan) => {
            writeln!(out, "\nKV bytes per token  {}", plan.ledger().kv_per_token())?;
            writeln!(out, "\nto run on the CPU with the whole context\n{}", plan.ledger())?;
        }
        Runs::No(why) => writeln!(out, "\ncannot run: {why}")?,
    }
    if nodes {
        writeln!(out, "\ngraph")?;
        for node in &draft.graph.nodes {
            writeln!(out, "  {}", node_line(&draft.graph, node))?;
        }
    }
    Ok(out)
}

fn node_line(graph: &Graph, node: &doyen_graph::ir::Node) -> String {
    let names = |ids: &[Option<doyen_graph::ir::ValueId>]| {
        ids.iter().map(|i| i.map_or("-", |i| graph.value(i).name.as_str())).collect::<Vec<_>>().join(", ")
    };
    format!("{} = {}({})  # {}", names(&node.outputs), node.op_name(), names(&node.inputs), node.name)
}

fn to_json(draft: &Draft, inventory: &Inventory, runs: &Runs, nodes: bool) -> serde_json::Value {
    let m = &draft.manifest;
    let weight = |w: &Weight| json!({"name": w.name, "kind": w.kind, "format": w.format, "bytes": w.bytes.0});
    let totals: serde_json::Map<_, _> = inventory
        .totals
        .iter()
        .map(|(kind, t)| (kind.clone(), json!({"bytes": t.bytes.0, "formats": t.formats})))
        .collect();
    let runs = match runs {
        Runs::Yes(plan) => {
            let ledger: Vec<_> = plan
                .ledger()
                .entries()
                .iter()
                .map(|e| json!({"what": e.what, "bytes": e.bytes.0, "mapped": e.mapped}))
                .collect();
            json!({"runs": true, "kv_bytes_per_token": plan.ledger().kv_per_token().0, "ledger": ledger})
        }
        Runs::No(why) => json!({"runs": false, "why": why}),
    };
    let mut out = json!({
        "package": draft.source.describe(), "model_type": m.model_type, "metadata": draft.graph.metadata,
        "layers": m.decoder.num_hidden_layers, "hidden_size": m.decoder.hidden_size, "vocab_size": m.vocab_size,
        "context_length": m.context_length, "weights": inventory.weights.iter().map(weight).collect::<Vec<_>>(),
        "totals": totals, "bytes": inventory.bytes.0, "cpu": runs,
    });
    if nodes {
        let lines: Vec<_> = draft.graph.nodes.iter().map(|n| node_line(&draft.graph, n)).collect();
        out["graph"] = json!(lines);
    }
    out
}
