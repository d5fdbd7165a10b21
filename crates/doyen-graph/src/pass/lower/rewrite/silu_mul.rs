//! `g * sigmoid(g) * up` in any order of the factors, or `swish(g) * up`, as one `SiluMul`.

use super::{Index, input};
use crate::{
    lowered::{LNode, LOp, LValueId, Lowered, Operand},
    ops::{Op, arith::Binary, unary::Unary},
};

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    for n in 0..graph.nodes.len() {
        if let Some((gate, up)) = pattern(graph, &index, &graph.nodes[n]) {
            let node = &mut graph.nodes[n];
            node.op = LOp::SiluMul;
            node.inputs = vec![Some(Operand::Value(gate)), Some(Operand::Value(up))];
        }
    }
}

fn pattern(graph: &Lowered, index: &Index, node: &LNode) -> Option<(LValueId, LValueId)> {
    let (a, b) = factors(node)?;
    let product = node.outputs[0]?;
    [(a, b), (b, a)].into_iter().find_map(|(silu, up)| {
        let gate = gate_of(graph, index, silu)?;
        let dims = |v: LValueId| &graph.value(v).dims;
        (dims(gate) == dims(up) && dims(up) == dims(product)).then_some((gate, up))
    })
}

/// `g`, when the value is `silu(g)` and has no other reader.
fn gate_of(graph: &Lowered, index: &Index, silu: LValueId) -> Option<LValueId> {
    let node = index.sole(graph, silu)?;
    if let LOp::Op(Op::Unary(Unary::Swish { alpha: 1.0 })) = node.op {
        return input(node, 0);
    }
    let (a, b) = factors(node)?;
    [(a, b), (b, a)].into_iter().find_map(|(gate, sigmoid)| {
        let node = index.sole(graph, sigmoid)?;
        let of_gate = matches!(node.op, LOp::Op(Op::Unary(Unary::Sigmoid))) && input(node, 0) == Some(gate);
        of_gate.then_some(gate)
    })
}

fn factors(node: &LNode) -> Option<(LValueId, LValueId)> {
    match node.op {
        LOp::Op(Op::Binary(Binary::Mul)) => Some((input(node, 0)?, input(node, 1)?)),
        _ => None,
    }
}
