//! Experts written out densely, every one computed for every token and weighted afterwards, as a bank that computes the
//! chosen ones alone.
//!
//! ```text
//! ids, _ = TopK(scores [.., E])        sum over e of  ffn_e(x) * ReduceSum(weights * (ids == e), last axis)
//! ```
//!
//! Conditions: the sum is a chain of Add or Sum whose terms have no other reader; its terms are exactly the experts 0 to
//! E - 1, once each, E the extent that TopK chooses from; ids and weights are the same values in all terms and of the same
//! extents `[.., k]`; all feed-forwards read one `x`, have one activation (`super::expert`) and constant weights of one
//! shape and type. The weights themselves may be anything: numbers make a bank of MoE, codes (MatMulNBits) one of QMoE. The bank
//! views the weights where they lie.
//!
//! Equal to the written sum but for the order of additions, and for an expert that overflows on a token that did not choose
//! it, which in the written form makes that token NaN.

use super::{
    Index, bank,
    expert::Expert,
    input,
    pattern::{constant, is_last, made, number, op, pair, reduced_last, width},
};
use crate::{
    ir::Attr,
    lowered::{ConstId, Experts, Extent, LConst, LNode, LOp, LValue, LValueId, Lowered, Operand},
    ops::{
        Op,
        arith::{Binary, Variadic},
        compare::Compare,
        reduce::Reduction,
    },
};
use doyen_tensor::DType;
use std::sync::Arc;

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    let found: Vec<(usize, Dense)> = (0..graph.nodes.len())
        .filter_map(|n| Some((n, Dense::of(graph, &index, &graph.nodes[n])?)))
        .collect();
    let mut casts = Vec::new();
    for (n, dense) in found {
        if let Some(cast) = dense.replace(graph, n) {
            casts.push((n, cast));
        }
    }
    for (n, cast) in casts.into_iter().rev() {
        graph.nodes.insert(n, cast);
    }
}

/// What all terms have in common, and each one's expert.
struct Dense {
    ids: LValueId,
    weights: LValueId,
    k: usize,
    experts: Vec<Expert>,
}

struct Term {
    number: usize,
    ids: LValueId,
    weights: LValueId,
    expert: Expert,
}

impl Dense {
    /// The experts whose weighted sum a node makes.
    fn of(graph: &Lowered, index: &Index, node: &LNode) -> Option<Self> {
        let terms = terms(graph, index, node)?;
        let Term { ids, weights, .. } = *terms.first()?;
        let mut slots: Vec<Option<Expert>> = vec![None; chosen_from(graph, index, ids)?];
        if slots.len() != terms.len() || graph.value(ids).dims != graph.value(weights).dims {
            return None;
        }
        for term in terms {
            if term.ids != ids || term.weights != weights {
                return None;
            }
            if slots.get_mut(term.number)?.replace(term.expert).is_some() {
                return None;
            }
        }
        let experts = slots.into_iter().collect::<Option<Vec<_>>>()?;
        let first = experts.first()?;
        let same = experts.iter().all(|e| e.is_like(graph, first));
        let y = node.outputs.first().copied().flatten()?;
        let shaped = graph.value(first.x()).dims == graph.value(y).dims;
        (same && shaped).then_some(Self { ids, weights, k: width(graph, ids)?, experts })
    }

    /// Replaces the last node of the sum; returns a cast of the ids to go before it.
    fn replace(self, graph: &mut Lowered, at: usize) -> Option<LNode> {
        let name = graph.nodes[at].name.clone();
        let first = self.experts.first()?;
        let (x, count) = (first.x(), self.experts.len());
        let (op, banks) = bank::of(graph, &self.experts, self.k)?;
        let cast = made("Cast", &[("to", Attr::Int(i64::from(INT32)))])?;
        let ids = LValueId(graph.values.len() as u32);
        let dims = graph.value(self.ids).dims.clone();
        let (dtype, declared) = (DType::I32, DType::I32);
        graph.values.push(LValue { name: format!("{name}/experts"), dtype, declared, dims });
        let mut inputs = [x, ids, self.weights].map(|v| Some(Operand::Value(v))).to_vec();
        for data in banks {
            inputs.push(data.map(|(what, data)| {
                graph.constants.push(LConst { name: format!("{name}/{what}"), data: Arc::new(data) });
                Operand::Const(ConstId(graph.constants.len() as u32 - 1))
            }));
        }
        let node = &mut graph.nodes[at];
        node.op = LOp::Experts(Experts { op, experts: count, k: self.k });
        node.inputs = inputs;
        Some(LNode {
            name: format!("{name}/experts"),
            op: LOp::Op(cast),
            inputs: vec![Some(Operand::Value(self.ids))],
            outputs: vec![Some(ids)],
        })
    }
}

/// ONNX's number of int32.
const INT32: u8 = 6;

/// The terms of a chain of sums. The chain's own values have one reader each.
fn terms(graph: &Lowered, index: &Index, node: &LNode) -> Option<Vec<Term>> {
    let mut open = summands(node)?;
    let mut out = Vec::new();
    while let Some(v) = open.pop() {
        match index.sole(graph, v).and_then(summands) {
            Some(more) => open.extend(more),
            None => out.push(term(graph, index, v)?),
        }
    }
    Some(out)
}

fn summands(node: &LNode) -> Option<Vec<LValueId>> {
    match op(node)? {
        Op::Binary(Binary::Add) | Op::Variadic(Variadic::Sum) => {
            (0..node.inputs.len()).map(|i| input(node, i)).collect()
        }
        _ => None,
    }
}

/// `ffn_e(x) * weight_e`.
fn term(graph: &Lowered, index: &Index, id: LValueId) -> Option<Term> {
    let (a, b) = pair(index.sole(graph, id)?, Binary::Mul)?;
    [(a, b), (b, a)].into_iter().find_map(|(y, weight)| {
        let (number, ids, weights) = share(graph, index, weight)?;
        let mut dims = graph.value(y).dims.clone();
        *dims.last_mut()? = Extent::Fixed(1);
        if graph.value(weight).dims != dims {
            return None;
        }
        Some(Term { number, ids, weights, expert: Expert::of(graph, index, y)? })
    })
}

/// The sum over the last axis of the weights whose id is a number: that number, the ids and the weights.
fn share(graph: &Lowered, index: &Index, weight: LValueId) -> Option<(usize, LValueId, LValueId)> {
    let sum = index.sole(graph, index.unviewed(graph, weight))?;
    let masked = index.sole(graph, reduced_last(graph, sum, Reduction::Sum)?)?;
    let (mask, weights) = if let Some(Op::Where(_)) = op(masked) {
        (number(graph, masked, 2)? == 0.0).then_some((input(masked, 0)?, input(masked, 1)?))?
    } else {
        let (a, b) = pair(masked, Binary::Mul)?;
        [(a, b), (b, a)].into_iter().find_map(|(cast, weights)| {
            let node = index.sole(graph, cast)?;
            let boolean = input(node, 0).filter(|v| graph.value(*v).dtype == DType::Bool)?;
            matches!(op(node), Some(Op::Cast(_))).then_some((boolean, weights))
        })?
    };
    let equal = index.sole(graph, mask)?;
    let Some(Op::Compare(Compare::Equal)) = op(equal) else { return None };
    let (ids, wanted) =
        [(0, 1), (1, 0)].into_iter().find_map(|(v, c)| Some((input(equal, v)?, whole(graph, equal, c)?)))?;
    let dims = |v: LValueId| &graph.value(v).dims;
    let same = dims(mask) == dims(ids) && masked.outputs[0].is_some_and(|m| dims(m) == dims(ids));
    same.then_some((wanted, ids, weights))
}

fn whole(graph: &Lowered, node: &LNode, i: usize) -> Option<usize> {
    constant(node, i)?;
    let n = number(graph, node, i).filter(|n| *n >= 0.0 && n.fract() == 0.0 && *n < f64::from(u32::MAX))?;
    Some(n as usize)
}

/// How many the ids are chosen from: they are TopK's along the last axis, so that all are below it.
fn chosen_from(graph: &Lowered, index: &Index, ids: LValueId) -> Option<usize> {
    let node = &graph.nodes[index.producers[ids.index()]?];
    let Some(Op::TopK(top)) = op(node) else { return None };
    let scores = input(node, 0)?;
    let of_indices = node.outputs.get(1) == Some(&Some(ids));
    (of_indices && is_last(graph, scores, top.axis)).then(|| width(graph, scores))?
}
