//! The lowered program against the reference interpreter on the exported graph, value by value.

use super::{Difference, difference, distance};
use anyhow::{Context, Result, anyhow, ensure};
use doyen_graph::{
    device::{Device, GroupTables, Numerics, RaggedBatch, SeqSpan},
    interp::Interpreter,
    ir::{Dim, Fact, Graph},
    lowered::{LOp, LValueId, Lowered, Operand},
    package::Package,
    pass::lower::{LowerSpec, StatePorts},
};
use doyen_runtime::{
    Plan, PlanOptions,
    kv::{BlockTables, PagePool},
};
use doyen_tensor::{ByteCount, DType, Tensor, TokenId};
use std::{collections::HashMap, sync::Arc};

/// What the reference computed for a prompt.
pub struct Recorded {
    prompt: Vec<TokenId>,
    logits: Vec<f32>,
    /// Float values by name.
    values: HashMap<String, Vec<f32>>,
}

/// How a node's result differs.
#[derive(Debug, Clone)]
pub struct NodeDifference {
    /// Node name.
    pub node: String,
    /// What the node does.
    pub kind: &'static str,
    /// Largest absolute difference.
    pub max_abs: f64,
    /// `|got - want| / |want|`.
    pub relative: f64,
}

/// How a program differs from the reference.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Nodes whose result the reference has too, in order.
    pub nodes: Vec<NodeDifference>,
    /// At the logits, all positions.
    pub logits: Difference,
    /// Tokens times layers whose experts are not those of the reference.
    pub flipped: usize,
    /// Tokens times layers that were looked at.
    pub routed: usize,
}

/// Runs the exported graph on the reference for `prompt` as a first prompt, recording every float value.
///
/// # Errors
/// When an input of the graph has no meaning here, or an operator refuses.
pub fn record(package: &Package, prompt: &[TokenId]) -> Result<Recorded> {
    let graph = &package.graph;
    let feeds = feeds(package, prompt)?;
    let named: Vec<(&str, Tensor)> = feeds.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let mut values = HashMap::new();
    let outputs = Interpreter::new(graph)
        .with_memory_limit(ByteCount(64 << 30))
        .run_with(&named, |id, tensor| {
            if let Ok(v) = tensor.to_f32() {
                values.insert(graph.value(id).name.clone(), v);
            }
        })
        .context("the reference cannot run the graph")?;
    let logits = graph.find(&package.ports.logits).and_then(|id| graph.outputs.iter().position(|&o| o == id));
    let logits =
        logits.and_then(|i| outputs.get(i)).ok_or_else(|| anyhow!("the graph has no logits"))?.to_f32()?;
    Ok(Recorded { prompt: prompt.to_vec(), logits, values })
}

/// The graph's inputs for a first prompt at batch 1.
fn feeds(package: &Package, prompt: &[TokenId]) -> Result<Vec<(String, Tensor)>> {
    let (graph, ports) = (&package.graph, &package.ports);
    let n = prompt.len();
    let ids: Vec<i64> = prompt.iter().map(|t| i64::from(t.0)).collect();
    let positions: Vec<i64> = (0..n as i64).collect();
    let mut out = Vec::new();
    for &id in &graph.inputs {
        let value = graph.value(id);
        let name = &value.name;
        let dtype = value.fact.dtype.unwrap_or(DType::I64);
        let tensor = if *name == ports.input_ids {
            integers(dtype, vec![1, n], &ids)?
        } else if ports.attention_mask.as_ref() == Some(name) {
            integers(dtype, vec![1, n], &vec![1; n])?
        } else if ports.position_ids.as_ref() == Some(name) {
            let streams = if value.fact.rank() == Some(3) { 3 } else { 1 };
            let shape = if streams == 3 { vec![3, 1, n] } else { vec![1, n] };
            integers(dtype, shape, &positions.repeat(streams))?
        } else if let Some(capacity) = state_capacity(graph, ports, name) {
            empty_state(&value.fact, capacity, package.manifest.decoder.head_size, name)?
        } else {
            return Err(anyhow!("graph input {name:?}: nothing is known that could be given to it"));
        };
        out.push((name.clone(), tensor));
    }
    Ok(out)
}

/// Rows the state input of this name has before the first prompt: none, or the whole window of a sliding cache.
fn state_capacity(graph: &Graph, ports: &LowerSpec, name: &str) -> Option<usize> {
    let pair = ports.states.iter().find_map(|s| match &s.ports {
        StatePorts::KeyValue(p) if p.past_key == name || p.past_value == name => Some(()),
        StatePorts::Fixed { past, .. } if past == name => Some(()),
        _ => None,
    });
    pair?;
    let id = graph.find(name)?;
    let sliding = graph.nodes.iter().find_map(|node| match &node.op {
        doyen_graph::ops::Op::GroupQueryAttention(op)
            if op.window_cache && node.inputs.iter().flatten().any(|&v| v == id) =>
        {
            op.window
        }
        _ => None,
    });
    Some(sliding.unwrap_or(0))
}

/// A zero state at batch 1: the first extent is the batch; of the others that are not numbers, the last is the head size
/// (some exporters give it a name) and those between are `rows`.
fn empty_state(fact: &Fact, rows: usize, head_size: Option<usize>, name: &str) -> Result<Tensor> {
    let dims = fact.shape.as_ref().ok_or_else(|| anyhow!("state {name:?} has no declared shape"))?;
    let size = |(i, d): (usize, &Dim)| match d.known() {
        Some(n) => Ok(n),
        None if i == 0 => Ok(1),
        None if i + 1 < dims.len() => Ok(rows),
        None => head_size.ok_or_else(|| {
            anyhow!(
                "state {name:?}: its last axis is {d}, and genai_config.json has no model.decoder.head_size"
            )
        }),
    };
    let shape = dims.iter().enumerate().map(size).collect::<Result<Vec<usize>>>()?;
    let dtype = fact.dtype.ok_or_else(|| anyhow!("state {name:?} has no declared type"))?;
    let bytes = doyen_tensor::Shape::from(shape.clone()).bytes(dtype)?;
    ensure!(
        bytes <= MAX_STATE,
        "state {name:?}: its declared shape {} takes {}, at most {} is given to the reference",
        fact.shape_text(),
        ByteCount(bytes as u64),
        ByteCount(MAX_STATE as u64)
    );
    Ok(Tensor::from_bytes(dtype, shape, vec![0u8; bytes].into())?)
}

/// Bytes of an empty state that the reference is given at most; honest ones hold one window.
const MAX_STATE: usize = 1 << 30;

fn integers(dtype: DType, shape: Vec<usize>, values: &[i64]) -> Result<Tensor> {
    Ok(match dtype {
        DType::I64 => Tensor::from_slice(shape, values)?,
        DType::I32 => Tensor::from_slice(shape, &values.iter().map(|&v| v as i32).collect::<Vec<_>>())?,
        other => return Err(anyhow!("token input of type {other}; int32 or int64 was expected")),
    })
}

/// Runs the lowered graph on a device in one step, all logit rows wanted, and compares every value that the reference
/// has under the same name.
///
/// # Errors
/// When the program cannot be planned or run.
pub fn compare(
    recorded: &Recorded,
    graph: &Arc<Lowered>,
    device: &dyn Device,
    numerics: Numerics,
) -> Result<Outcome> {
    let n = recorded.prompt.len();
    let options = PlanOptions {
        context: n,
        step_tokens: n,
        step_rows: n,
        numerics,
        taps: true,
        ..PlanOptions::default()
    };
    let plan = Plan::new(Arc::clone(graph), device, &options)?;
    let mut session = device.load(plan.program().clone())?;
    let tokens: Vec<u32> = recorded.prompt.iter().map(|t| t.0).collect();
    let mut pool = PagePool::new(plan.program());
    let mut pages = BlockTables::default();
    pool.grow(&mut pages, n)?;
    let table = |g: usize| {
        let mut table = GroupTables::default();
        table.push(pages.group(g));
        table
    };
    let tables: Vec<GroupTables> = (0..graph.groups.len()).map(table).collect();
    session.step(&RaggedBatch {
        tokens: &tokens,
        sequences: &[SeqSpan { first: 0, len: n, past: 0 }],
        tables: &tables,
        states: &pages.states().into_iter().collect::<Vec<_>>(),
        rows: &(0..n as u32).collect::<Vec<_>>(),
        inputs: &[],
    })?;
    let mut nodes = Vec::new();
    let (mut flipped, mut routed) = (0, 0);
    for node in &graph.nodes {
        if let (LOp::Route(r), Some(Some(Operand::Value(logits)))) = (&node.op, node.inputs.first())
            && let Some(want) = recorded.values.get(&graph.value(*logits).name)
            && let Some(got) = value(session.as_ref(), graph, *logits)?
        {
            routed += want.len() / r.experts;
            flipped += flips(&got, want, r.experts, r.k);
        }
        let Some(&Some(output)) = node.outputs.first() else { continue };
        let Some(want) = recorded.values.get(&graph.value(output).name) else { continue };
        let Some(got) = value(session.as_ref(), graph, output)? else { continue };
        if got.len() == want.len() {
            let (max_abs, relative) = distance(&got, want);
            nodes.push(NodeDifference { node: node.name.clone(), kind: kind(&node.op), max_abs, relative });
        }
    }
    let got = session.output(0);
    ensure!(
        got.len() == recorded.logits.len(),
        "{} logits, the reference has {}",
        got.len(),
        recorded.logits.len()
    );
    let logits = difference(got, &recorded.logits, recorded.logits.len() / n);
    Ok(Outcome { nodes, logits, flipped, routed })
}

/// Rows of router logits whose `k` largest are other experts.
fn flips(got: &[f32], want: &[f32], experts: usize, k: usize) -> usize {
    let chosen = |row: &[f32]| {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        order.truncate(k);
        order.sort_unstable();
        order
    };
    got.chunks(experts).zip(want.chunks(experts)).filter(|(g, w)| chosen(g) != chosen(w)).count()
}

fn value(
    session: &dyn doyen_graph::device::Session,
    graph: &Lowered,
    id: LValueId,
) -> Result<Option<Vec<f32>>> {
    if graph.value(id).dtype != DType::F32 {
        return Ok(None);
    }
    Ok(Some(session.value(id)?.to_f32()?))
}

const fn kind(op: &LOp) -> &'static str {
    match op {
        LOp::Op(_) => "operator",
        LOp::View => "view",
        LOp::SelectRows { .. } => "select rows",
        LOp::Attention(_) => "attention",
        LOp::LinearAttention(_) => "linear attention",
        LOp::CausalConv(_) => "causal convolution",
        LOp::LatentAttention(_) => "latent attention",
        LOp::Route(_) => "route",
        LOp::Experts(_) => "experts",
        LOp::SiluMul => "silu * up",
    }
}
