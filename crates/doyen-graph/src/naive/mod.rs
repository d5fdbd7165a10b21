//! A lowered graph run in the plainest way: operators by their scalar reference, attention by its definition.
//!
//! The judge of lowering (against the interpreter on the exported graph) and of the backends (against the same
//! lowered graph). Nothing is paged or planned here: a cache is a list of rows.

mod attention;
mod latent;
mod recurrent;
mod runner;

pub use attention::Cache;
pub use runner::NaiveRunner;

use crate::{
    lowered::{
        Attention, CacheSlot, Experts, Extent, KvFormat, LNode, LOp, LValueId, LatentAttention, Lowered,
        Operand, Route, StateId,
    },
    ops::{Op, route::Routing},
};
use attention::{Operands, attend};
use doyen_tensor::{DType, Shape, Tensor};
use std::fmt::Display;

/// New tokens of one sequence of a step.
#[derive(Debug, Clone, Copy)]
pub struct NewTokens<'a> {
    /// Index of the sequence; made when first used.
    pub sequence: usize,
    /// Its new token ids.
    pub tokens: &'a [u32],
}

/// A lowered graph with the caches of its sequences.
#[derive(Debug, Clone)]
pub struct Naive {
    graph: Lowered,
    constants: Vec<Tensor>,
    sequences: Vec<Sequence>,
}

/// What a sequence keeps.
#[derive(Debug, Clone)]
struct Sequence {
    /// Per group, per layer.
    caches: Vec<Vec<Cache>>,
    /// Per state of fixed size; `None` before the first token.
    states: Vec<Option<Vec<f32>>>,
    /// Tokens of its steps.
    tokens: usize,
}

/// One sequence of the step at hand.
#[derive(Debug, Clone, Copy)]
struct Span {
    sequence: usize,
    first: usize,
    len: usize,
    past: usize,
}

fn text(e: impl Display) -> String {
    e.to_string()
}

impl Naive {
    /// Copies the constants, floats widened to float32.
    ///
    /// # Errors
    /// When a constant cannot be read.
    pub fn new(graph: Lowered) -> Result<Self, String> {
        let constants = graph
            .constants
            .iter()
            .map(|c| {
                let t = c.data.to_tensor().map_err(text)?;
                if !t.dtype().is_float() {
                    return Ok(t);
                }
                Tensor::from_slice(t.shape().clone(), &t.to_f32().map_err(text)?).map_err(text)
            })
            .collect::<Result<_, String>>()?;
        Ok(Self { graph, constants, sequences: Vec::new() })
    }

    /// Positions a sequence has in its caches.
    pub fn len(&self, sequence: usize) -> usize {
        let rows = |s: &Sequence| s.caches.first().and_then(|g| g.first()).map_or(s.tokens, |c| c.rows);
        self.sequences.get(sequence).map_or(0, rows)
    }

    /// Whether no sequence has a position.
    pub fn is_empty(&self) -> bool {
        (0..self.sequences.len()).all(|s| self.len(s) == 0)
    }

    fn sequence_mut(&mut self, sequence: usize) -> &mut Sequence {
        let (groups, states) = (&self.graph.groups, self.graph.states.len());
        while self.sequences.len() <= sequence {
            let caches = groups.iter().map(|g| vec![Cache::default(); g.layers.len()]).collect();
            self.sequences.push(Sequence { caches, states: vec![None; states], tokens: 0 });
        }
        &mut self.sequences[sequence]
    }

    /// A layer's cache of a sequence, to read or to fill.
    pub fn cache_mut(&mut self, sequence: usize, slot: CacheSlot) -> &mut Cache {
        &mut self.sequence_mut(sequence).caches[slot.group][slot.layer]
    }

    /// A state of fixed size of a sequence, to read or to fill; `None` before its first token.
    pub fn state_mut(&mut self, sequence: usize, id: StateId) -> &mut Option<Vec<f32>> {
        &mut self.sequence_mut(sequence).states[id.index()]
    }

    /// Runs a step and appends to the caches. `rows` are the tokens whose logits are wanted, `inputs` the values of
    /// [`Lowered::inputs`]. Returns the outputs.
    ///
    /// # Errors
    /// Names the node that fails.
    pub fn step(
        &mut self,
        batch: &[NewTokens<'_>],
        rows: &[u32],
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, String> {
        let spans = self.spans(batch);
        let tokens: usize = spans.iter().map(|s| s.len).sum();
        let mut values: Vec<Option<Tensor>> = vec![None; self.graph.values.len()];
        let ids: Vec<i64> = batch.iter().flat_map(|b| b.tokens.iter().map(|&t| i64::from(t))).collect();
        let positions: Vec<i64> =
            spans.iter().flat_map(|s| (s.past..s.past + s.len).map(|p| p as i64)).collect();
        for (port, data) in [(self.graph.tokens, ids), (self.graph.positions, positions)] {
            if let Some(v) = port {
                values[v.index()] = Some(Tensor::from_slice([1, tokens], &data).map_err(text)?);
            }
        }
        for (v, t) in self.graph.inputs.iter().zip(inputs) {
            values[v.index()] = Some(widened(t)?);
        }
        let nodes = std::mem::take(&mut self.graph.nodes);
        let result = nodes.iter().try_for_each(|node| {
            self.node(node, &spans, (tokens, rows), &mut values).map_err(|e| format!("{}: {e}", node.name))
        });
        self.graph.nodes = nodes;
        result?;
        for b in batch {
            self.sequence_mut(b.sequence).tokens += b.tokens.len();
        }
        let read =
            |v: &LValueId| values[v.index()].clone().ok_or_else(|| "an output has no value".to_owned());
        self.graph.outputs.iter().map(read).collect()
    }

    fn spans(&mut self, batch: &[NewTokens<'_>]) -> Vec<Span> {
        let mut first = 0;
        batch
            .iter()
            .map(|b| {
                let past = self.len(b.sequence);
                let span = Span { sequence: b.sequence, first, len: b.tokens.len(), past };
                first += b.tokens.len();
                span
            })
            .collect()
    }

    fn node(
        &mut self,
        node: &LNode,
        spans: &[Span],
        (tokens, rows): (usize, &[u32]),
        values: &mut [Option<Tensor>],
    ) -> Result<(), String> {
        let inputs: Vec<Option<Tensor>> = node
            .inputs
            .iter()
            .map(|o| match o {
                None => Ok(None),
                Some(Operand::Const(c)) => Ok(Some(self.constants[c.index()].clone())),
                Some(Operand::Value(v)) => {
                    values[v.index()].clone().map(Some).ok_or_else(|| format!("value {} is not there", v.0))
                }
            })
            .collect::<Result<_, String>>()?;
        let shapes: Vec<Shape> = node
            .outputs
            .iter()
            .map(|o| o.map_or_else(Shape::default, |v| at(&self.graph.value(v).dims, tokens, rows.len())))
            .collect();
        let results = match &node.op {
            LOp::Op(op) => plain(op, inputs, &shapes)?,
            LOp::View => vec![first(&inputs)?.reshaped(shapes[0].clone()).map_err(text)?],
            LOp::SelectRows { axis } => vec![select_rows(first(&inputs)?, *axis, rows, tokens)?],
            LOp::Attention(a) => vec![self.attention(a, &inputs, spans, &shapes[0])?],
            LOp::LinearAttention(_) | LOp::CausalConv(_) => {
                vec![self.recurrent(&node.op, &inputs, spans, &shapes[0])?]
            }
            LOp::LatentAttention(a) => vec![self.latent_attention(a, &inputs, spans, &shapes[0])?],
            LOp::Route(r) => route(r, &inputs, &shapes)?,
            LOp::Experts(e) => vec![experts(e, &inputs)?],
            LOp::SiluMul => vec![silu_mul(&inputs)?],
        };
        for ((v, t), shape) in node.outputs.iter().zip(results).zip(&shapes) {
            if let Some(v) = v {
                if t.shape() != shape {
                    return Err(format!("expected a result of shape {shape}, found {}", t.shape()));
                }
                values[v.index()] = Some(t);
            }
        }
        Ok(())
    }

    fn attention(
        &mut self,
        a: &Attention,
        inputs: &[Option<Tensor>],
        spans: &[Span],
        out: &Shape,
    ) -> Result<Tensor, String> {
        let format = self.graph.groups[a.slot.group].format;
        let mut y = Vec::with_capacity(out.iter().product());
        let operands = Operands::new(a, inputs, spans)?;
        for (row, s) in spans.iter().enumerate() {
            let cache = self.cache_mut(s.sequence, a.slot);
            y.extend(attend(a, format, cache, &operands, (row, s.first..s.first + s.len))?);
        }
        Tensor::from_slice(out.clone(), &y).map_err(text)
    }
}

impl Naive {
    fn latent_attention(
        &mut self,
        a: &LatentAttention,
        inputs: &[Option<Tensor>],
        spans: &[Span],
        out: &Shape,
    ) -> Result<Tensor, String> {
        let operands = latent::Operands::new(a, inputs)?;
        let mut y = Vec::with_capacity(out.iter().product());
        for span in spans {
            y.extend(latent::attend(a, self.cache_mut(span.sequence, a.slot), &operands, span));
        }
        Tensor::from_slice(out.clone(), &y).map_err(text)
    }
}

fn at(dims: &[Extent], tokens: usize, rows: usize) -> Shape {
    Shape::from(dims.iter().map(|d| d.at(tokens, rows)).collect::<Vec<_>>())
}

fn first(inputs: &[Option<Tensor>]) -> Result<&Tensor, String> {
    inputs.first().and_then(Option::as_ref).ok_or_else(|| "no first input".to_owned())
}

/// Floats as float32: the compute type.
fn widened(t: &Tensor) -> Result<Tensor, String> {
    if !t.dtype().is_float() {
        return Ok(t.clone());
    }
    Tensor::from_slice(t.shape().clone(), &t.to_f32().map_err(text)?).map_err(text)
}

fn plain(op: &Op, mut inputs: Vec<Option<Tensor>>, shapes: &[Shape]) -> Result<Vec<Tensor>, String> {
    if matches!(op, Op::Expand(_)) && matches!(inputs.as_slice(), [Some(_), None]) {
        let dims: Vec<i64> = shapes[0].iter().map(|&d| d as i64).collect();
        inputs[1] = Some(Tensor::from_slice([dims.len()], &dims).map_err(text)?);
    }
    let refs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
    let results = op.eval(&refs, shapes.len()).map_err(text)?;
    results.iter().map(widened).collect()
}

fn select_rows(x: &Tensor, axis: usize, rows: &[u32], tokens: usize) -> Result<Tensor, String> {
    let shape = x.shape();
    let outer: usize = shape[..axis].iter().product();
    let size = x.dtype().bits() / 8;
    let per_token = shape[axis] / tokens.max(1) * shape[axis + 1..].iter().product::<usize>() * size;
    let mut bytes = Vec::new();
    for o in 0..outer {
        for &r in rows {
            let start = (o * tokens + r as usize) * per_token;
            bytes.extend_from_slice(&x.bytes()[start..start + per_token]);
        }
    }
    let mut dims = shape.to_vec();
    dims[axis] = shape[axis] / tokens.max(1) * rows.len();
    Tensor::from_bytes(x.dtype(), dims, bytes.into()).map_err(text)
}

fn route(r: &Route, inputs: &[Option<Tensor>], shapes: &[Shape]) -> Result<Vec<Tensor>, String> {
    let routing =
        Routing { k: r.k, normalize: r.normalize, sparse_mixer: r.sparse_mixer, topk_softmax_always: false };
    let logits = first(inputs)?.to_f32().map_err(text)?;
    let given = inputs.get(1).and_then(Option::as_ref).map(Tensor::to_f32).transpose().map_err(text)?;
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for (t, row) in logits.chunks(r.experts).enumerate() {
        let own = given.as_ref().map(|g| &g[t * r.experts..(t + 1) * r.experts]);
        for chosen in routing.route(row, own) {
            ids.push(chosen.expert as i32);
            weights.push(chosen.weight as f32);
        }
    }
    Ok(vec![
        Tensor::from_slice(shapes[0].clone(), &ids).map_err(text)?,
        Tensor::from_slice(shapes[1].clone(), &weights).map_err(text)?,
    ])
}

/// Runs the exported operator once per slot, with that slot's expert alone and weight 1.
fn experts(e: &Experts, inputs: &[Option<Tensor>]) -> Result<Tensor, String> {
    let mut op = e.op.clone();
    match &mut op {
        Op::QMoe(q) => (q.routing.k, q.routing.normalize) = (1, true),
        Op::Moe(m) => (m.routing.k, m.routing.normalize) = (1, true),
        other => return Err(format!("{other:?} is no bank of experts")),
    }
    let [Some(x), Some(ids), Some(weights), bank @ ..] = inputs else {
        return Err("needs x, ids and weights".into());
    };
    let (ids, weights) = (ids.to_i64().map_err(text)?, weights.to_f32().map_err(text)?);
    let tokens = ids.len() / e.k;
    let mut sum = vec![0f32; x.numel()];
    let hidden = sum.len() / tokens.max(1);
    for slot in 0..e.k {
        let mut logits = vec![0f32; tokens * e.experts];
        for t in 0..tokens {
            logits[t * e.experts + ids[t * e.k + slot] as usize] = 1.0;
        }
        let logits = Tensor::from_slice([tokens, e.experts], &logits).map_err(text)?;
        let mut operands = vec![Some(x), Some(&logits)];
        operands.extend(bank.iter().map(Option::as_ref));
        let y = op.eval(&operands, 1).map_err(text)?[0].to_f32().map_err(text)?;
        for (i, (s, y)) in sum.iter_mut().zip(y).enumerate() {
            *s += weights[i / hidden * e.k + slot] * y;
        }
    }
    Tensor::from_slice(x.shape().clone(), &sum).map_err(text)
}

fn silu_mul(inputs: &[Option<Tensor>]) -> Result<Tensor, String> {
    let [Some(gate), Some(up)] = inputs else { return Err("needs gate and up".into()) };
    let (g, u) = (gate.to_f32().map_err(text)?, up.to_f32().map_err(text)?);
    let y: Vec<f32> = g.iter().zip(&u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    Tensor::from_slice(gate.shape().clone(), &y).map_err(text)
}

/// The stored type of a cache.
pub(super) const fn stored(format: KvFormat) -> DType {
    match format {
        KvFormat::Float => DType::F32,
        KvFormat::Int8 { .. } => DType::I8,
        KvFormat::Int4 { .. } => DType::U8,
    }
}
