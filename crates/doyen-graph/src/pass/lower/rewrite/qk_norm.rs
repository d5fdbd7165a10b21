//! RMS norms of every query and key head that feed an attention alone, as the attention's own.

use super::{Index, input};
use crate::{
    lowered::{Attention, Extent, LNode, LOp, LValueId, Lowered, Operand},
    ops::{Op, norm::Statistics},
};

/// Places of the attention's operands.
const Q: usize = 0;
const K: usize = 1;
const Q_NORM: usize = 5;
const K_NORM: usize = 6;

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    for n in 0..graph.nodes.len() {
        let Some((q, k)) = pattern(graph, &index, &graph.nodes[n]) else { continue };
        let node = &mut graph.nodes[n];
        if let LOp::Attention(a) = &mut node.op {
            a.qk_norm = Some(q.epsilon);
            node.inputs[Q] = Some(Operand::Value(q.source));
            node.inputs[K] = Some(Operand::Value(k.source));
            node.inputs[Q_NORM] = Some(q.gamma);
            node.inputs[K_NORM] = Some(k.gamma);
        }
    }
}

/// A norm over heads: what it reads as `[1, T, heads * head_size]`, and its parameters.
#[derive(Clone, Copy)]
struct HeadNorm {
    source: LValueId,
    gamma: Operand,
    epsilon: f32,
}

fn pattern(graph: &Lowered, index: &Index, node: &LNode) -> Option<(HeadNorm, HeadNorm)> {
    let LOp::Attention(a) = &node.op else { return None };
    if a.packed_qkv || a.qk_norm.is_some() {
        return None;
    }
    let q = head_norm(graph, index, a, input(node, Q)?)?;
    let k = head_norm(graph, index, a, input(node, K)?)?;
    (q.epsilon.to_bits() == k.epsilon.to_bits()).then_some((q, k))
}

fn head_norm(graph: &Lowered, index: &Index, a: &Attention, operand: LValueId) -> Option<HeadNorm> {
    let normed = index.unviewed(graph, operand);
    let node = index.sole(graph, normed)?;
    let epsilon = rms_epsilon(graph, node)?;
    let (heads, gamma) = (input(node, 0)?, node.inputs.get(1).copied().flatten()?);
    let Operand::Const(c) = gamma else { return None };
    let size = Extent::Fixed(a.head_size);
    let per_head = graph.value(heads).dims.last() == Some(&size)
        && graph.constant(c).data.shape().dims() == [a.head_size];
    let source = index.unviewed(graph, heads);
    let same_rows = graph.value(source).dims == graph.value(operand).dims;
    (per_head && same_rows).then_some(HeadNorm { source, gamma, epsilon })
}

/// The epsilon of an RMS norm over the last axis whose only result is the normed value.
fn rms_epsilon(graph: &Lowered, node: &LNode) -> Option<f32> {
    let LOp::Op(Op::Norm(norm)) = &node.op else { return None };
    if norm.statistics != Statistics::Rms {
        return None;
    }
    let rank = graph.value(input(node, 0)?).dims.len() as i64;
    let last = norm.axis == -1 || norm.axis == rank - 1;
    (last && node.outputs.iter().skip(1).all(Option::is_none)).then_some(norm.epsilon)
}
