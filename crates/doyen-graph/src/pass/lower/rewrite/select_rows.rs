//! Moves the choice of logit rows as far up as it can go.
//!
//! A node whose results reach no attention or other node with a state computes what only the wanted rows need: it runs
//! on rows. That is all after the last attention: its output projection, its feed-forward or experts, the final norm and the head. Values
//! that enter this part are selected once each.

use super::values;
use crate::lowered::{Extent, LNode, LOp, LValueId, Lowered, Operand};
use std::collections::HashMap;

pub(super) fn rewrite(graph: &mut Lowered) {
    let below = below_attention(graph);
    let nodes = std::mem::take(&mut graph.nodes);
    let (below, mut above): (Vec<_>, Vec<_>) = nodes.into_iter().zip(below).partition(|(_, b)| *b);
    for v in below.iter().flat_map(|(n, _)| n.outputs.iter().flatten()) {
        for d in &mut graph.values[v.index()].dims {
            if let Extent::Tokens(n) = *d {
                *d = Extent::Rows(n);
            }
        }
    }
    let mut selected: HashMap<LValueId, LValueId> = HashMap::new();
    let mut rows: Vec<LNode> = below.into_iter().map(|(n, _)| n).collect();
    for v in rows.iter_mut().flat_map(|n| n.inputs.iter_mut().flatten()) {
        let Operand::Value(id) = *v else { continue };
        if let Some(axis) = token_axis(graph, id) {
            let chosen = *selected.entry(id).or_insert_with(|| {
                let node = select(graph, id, axis);
                let out = LValueId(graph.values.len() as u32 - 1);
                above.push((node, false));
                out
            });
            *v = Operand::Value(chosen);
        }
    }
    graph.nodes = above.into_iter().map(|(n, _)| n).chain(rows).collect();
}

/// Which nodes reach an output without passing an attention, and nothing else.
fn below_attention(graph: &Lowered) -> Vec<bool> {
    let mut read_above = vec![false; graph.values.len()];
    let mut below = vec![false; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate().rev() {
        below[n] = !node.op.owns_state() && node.outputs.iter().flatten().all(|v| !read_above[v.index()]);
        if !below[n] {
            for v in values(node) {
                read_above[v.index()] = true;
            }
        }
    }
    below
}

fn token_axis(graph: &Lowered, id: LValueId) -> Option<usize> {
    graph.value(id).dims.iter().position(|d| matches!(d, Extent::Tokens(_)))
}

/// A selection of a value's rows; its result is the last value of the graph.
fn select(graph: &mut Lowered, id: LValueId, axis: usize) -> LNode {
    let mut value = graph.value(id).clone();
    if let Extent::Tokens(n) = value.dims[axis] {
        value.dims[axis] = Extent::Rows(n);
    }
    let name = format!("{}/rows", value.name);
    let out = LValueId(graph.values.len() as u32);
    graph.values.push(value);
    LNode {
        name,
        op: LOp::SelectRows { axis },
        inputs: vec![Some(Operand::Value(id))],
        outputs: vec![Some(out)],
    }
}
