//! Routing written out with TopK, as one `Route`, where its ids go to experts alone.
//!
//! ```text
//! TopK(Softmax(l))            weights: the values, or the values over their sum
//! TopK(l)                     weights: Softmax of the values
//! TopK(s)                     weights: the values, or the values over their sum (the scores s weigh as well)
//! ```
//!
//! Conditions: the largest along the last axis, with one token a row; the indices are read by the casts of banks of experts
//! and nothing else. Where scores are a Softmax, the logits before it decide: they keep apart what its rounding makes equal.

use super::{
    Index, input,
    pattern::{is_last, op, pair, reduced_last, softmax_last, width},
};
use crate::{
    lowered::{Extent, LNode, LOp, LValue, LValueId, Lowered, Operand, Route},
    ops::{Op, arith::Binary, reduce::Reduction},
};
use doyen_tensor::DType;
use std::collections::HashMap;

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    let readers = readers(graph);
    let found: Vec<(usize, Written)> = (0..graph.nodes.len())
        .filter_map(|n| Some((n, Written::of(graph, &index, &readers, &graph.nodes[n])?)))
        .collect();
    let mut nodes: HashMap<usize, Vec<LNode>> =
        found.into_iter().map(|(n, written)| (n, written.replace(graph, n))).collect();
    let old = std::mem::take(&mut graph.nodes);
    for (n, node) in old.into_iter().enumerate() {
        match nodes.remove(&n) {
            Some(made) => graph.nodes.extend(made),
            None => graph.nodes.push(node),
        }
    }
}

/// The nodes that read each value.
fn readers(graph: &Lowered) -> Vec<Vec<usize>> {
    let mut out = vec![Vec::new(); graph.values.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        for v in super::values(node) {
            out[v.index()].push(n);
        }
    }
    out
}

/// A routing found at its TopK.
struct Written {
    logits: LValueId,
    /// Whether the logits weigh as they are, instead of by a softmax.
    given: bool,
    normalize: bool,
    experts: usize,
    k: usize,
    tokens: Extent,
    /// The mixing weights, and the node that makes them.
    weights: (LValueId, usize),
    /// Casts of the ids, and what they make.
    casts: Vec<(usize, LValueId)>,
}

impl Written {
    fn of(graph: &Lowered, index: &Index, readers: &[Vec<usize>], node: &LNode) -> Option<Self> {
        let Some(Op::TopK(top)) = op(node) else { return None };
        let scores = input(node, 0)?;
        let (values, ids) = (node.outputs.first().copied()??, node.outputs.get(1).copied()??);
        if !top.largest || !is_last(graph, scores, top.axis) {
            return None;
        }
        let casts = casts(graph, index, readers, ids)?;
        let at = index.producers[values.index()]?;
        let (weights, normalize, of_chosen) = weights(graph, index, readers, (values, at));
        let before = index.sole(graph, scores).and_then(|n| softmax_last(graph, n));
        let (logits, given) = match (of_chosen, before) {
            (true, _) => (scores, false),
            (false, Some(logits)) => (logits, false),
            (false, None) => (scores, true),
        };
        let float = graph.value(logits).dtype == DType::F32 && graph.value(weights.0).dtype == DType::F32;
        let tokens = one_row_a_token(&graph.value(logits).dims).filter(|_| float)?;
        let (experts, k) = (width(graph, scores)?, width(graph, ids)?);
        Some(Self { logits, given, normalize, experts, k, tokens, weights, casts })
    }

    /// The nodes in place of TopK; those that make weights and ids of its results stop doing so.
    fn replace(self, graph: &mut Lowered, at: usize) -> Vec<LNode> {
        let name = graph.nodes[at].name.clone();
        let Self { experts, k, normalize, tokens, .. } = self;
        let mut out = Vec::new();
        let flat = view(graph, &name, "logits", self.logits, vec![tokens, Extent::Fixed(experts)]);
        let logits = flat.map_or(self.logits, |(node, v)| {
            out.push(node);
            v
        });
        let dims = vec![tokens, Extent::Fixed(k)];
        let ids = fresh(graph, format!("{name}/experts"), DType::I32, dims.clone());
        let mix = fresh(graph, format!("{name}/weights"), DType::F32, dims);
        for (_, cast) in &self.casts {
            replace_reads(graph, *cast, ids);
        }
        for n in self.casts.iter().map(|(n, _)| *n).chain([self.weights.1]) {
            graph.nodes[n].outputs.fill(None);
        }
        let logits = Some(Operand::Value(logits));
        out.push(LNode {
            name: name.clone(),
            op: LOp::Route(Route { experts, k, normalize, sparse_mixer: false }),
            inputs: vec![logits, logits.filter(|_| self.given)],
            outputs: vec![Some(ids), Some(mix)],
        });
        out.push(LNode {
            name: format!("{name}/weights"),
            op: LOp::View,
            inputs: vec![Some(Operand::Value(mix))],
            outputs: vec![Some(self.weights.0)],
        });
        out
    }
}

/// The casts that read the ids, when nothing else does and experts alone read their results.
fn casts(
    graph: &Lowered,
    index: &Index,
    readers: &[Vec<usize>],
    ids: LValueId,
) -> Option<Vec<(usize, LValueId)>> {
    const IDS: usize = 1;
    if readers[ids.index()].is_empty() || index.uses[ids.index()] != readers[ids.index()].len() {
        return None;
    }
    let one = |&n: &usize| {
        let node = &graph.nodes[n];
        let made = node.outputs.first().copied()??;
        let to_experts = readers[made.index()].iter().all(|&r| {
            let reader = &graph.nodes[r];
            matches!(reader.op, LOp::Experts(_)) && input(reader, IDS) == Some(made)
        });
        let ours = index.uses[made.index()] == readers[made.index()].len();
        (matches!(op(node), Some(Op::Cast(_))) && to_experts && ours).then_some((n, made))
    };
    readers[ids.index()].iter().map(one).collect()
}

/// What the values of TopK become before they weigh: the value and its node, whether it is divided by its sum, and
/// whether it is the softmax of the chosen.
fn weights(
    graph: &Lowered,
    index: &Index,
    readers: &[Vec<usize>],
    (values, at): (LValueId, usize),
) -> ((LValueId, usize), bool, bool) {
    let result = |n: usize| graph.nodes[n].outputs.first().copied().flatten().map(|v| (v, n));
    let own = &readers[values.index()];
    let plain = ((values, at), false, false);
    if index.uses[values.index()] != own.len() {
        return plain;
    }
    let found = match own[..] {
        [n] if softmax_last(graph, &graph.nodes[n]).is_some() => result(n).map(|w| (w, true, true)),
        [a, b] => [(a, b), (b, a)].into_iter().find_map(|(sum, ratio)| {
            let (dividend, divisor) = pair(&graph.nodes[ratio], Binary::Div)?;
            let total = index.sole(graph, divisor).and_then(|n| reduced_last(graph, n, Reduction::Sum))?;
            let summed = graph.nodes[sum].outputs.first().copied()?? == divisor;
            let kept = width(graph, divisor) == Some(1)
                && graph.value(divisor).dims.len() == graph.value(dividend).dims.len();
            (dividend == values && total == values && summed && kept)
                .then(|| result(ratio))?
                .map(|w| (w, true, false))
        }),
        _ => None,
    };
    found.unwrap_or(plain)
}

/// The extent that counts tokens, when all axes before the last but one are 1.
fn one_row_a_token(dims: &[Extent]) -> Option<Extent> {
    let (_, lead) = dims.split_last()?;
    let mut counted = lead.iter().filter(|d| **d != Extent::Fixed(1));
    let one = counted.next().copied()?;
    (counted.next().is_none() && !matches!(one, Extent::Fixed(_))).then_some(one)
}

fn fresh(graph: &mut Lowered, name: String, dtype: DType, dims: Vec<Extent>) -> LValueId {
    let id = LValueId(graph.values.len() as u32);
    graph.values.push(LValue { name, dtype, declared: dtype, dims });
    id
}

/// A view of a value under other extents, unless it has them.
fn view(
    graph: &mut Lowered,
    name: &str,
    what: &str,
    of: LValueId,
    dims: Vec<Extent>,
) -> Option<(LNode, LValueId)> {
    if graph.value(of).dims == dims {
        return None;
    }
    // The same numbers under the same name: what compares values by name finds the router's logits.
    let (own, dtype) = (graph.value(of).name.clone(), graph.value(of).dtype);
    let id = fresh(graph, own, dtype, dims);
    let (inputs, outputs) = (vec![Some(Operand::Value(of))], vec![Some(id)]);
    Some((LNode { name: format!("{name}/{what}"), op: LOp::View, inputs, outputs }, id))
}

fn replace_reads(graph: &mut Lowered, from: LValueId, to: LValueId) {
    for operand in graph.nodes.iter_mut().flat_map(|n| n.inputs.iter_mut().flatten()) {
        if *operand == Operand::Value(from) {
            *operand = Operand::Value(to);
        }
    }
}
