//! A Transpose that undoes another one, as a view of what went into the first.
//!
//! Exporters wrap operators on channels-first values in such pairs; between their lowered forms nothing has to move.

use super::{Index, input};
use crate::{
    lowered::{LNode, LOp, LValueId, Lowered, Operand},
    ops::Op,
};

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    for n in 0..graph.nodes.len() {
        if let Some(x) = undone(graph, &index, &graph.nodes[n]) {
            let node = &mut graph.nodes[n];
            node.op = LOp::View;
            node.inputs = vec![Some(Operand::Value(x))];
        }
    }
}

/// What the node gives back as it was.
fn undone(graph: &Lowered, index: &Index, node: &LNode) -> Option<LValueId> {
    let second = permutation(graph, node)?;
    let before = &graph.nodes[index.producers[input(node, 0)?.index()]?];
    let first = permutation(graph, before)?;
    let back = second.iter().enumerate().all(|(i, &p)| first.get(p) == Some(&i));
    (back && first.len() == second.len()).then(|| input(before, 0))?
}

fn permutation(graph: &Lowered, node: &LNode) -> Option<Vec<usize>> {
    let LOp::Op(Op::Transpose(t)) = &node.op else { return None };
    t.permutation(graph.value(input(node, 0)?).dims.len()).ok()
}
