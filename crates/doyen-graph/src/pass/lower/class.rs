//! What each value can depend on: nothing, lengths alone, or the tokens.

use super::ports::{Ports, Role};
use crate::{
    ir::{Graph, Node, ValueId},
    ops::Op,
};

/// What a value can depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// Known at load.
    Constant,
    /// The lengths of a run: dims of inputs, the attention mask, the positions.
    Length,
    /// Token ids or cached state.
    Data,
}

/// Whether the operator reads no more of its input than extents.
pub(super) fn reads_extents(node: &Node) -> bool {
    matches!(node.op, Op::Shape(_) | Op::Size(_))
}

/// The class of every value, by index.
pub(super) fn classify(graph: &Graph, ports: &Ports) -> Vec<Class> {
    let mut class: Vec<Class> = graph
        .values()
        .iter()
        .map(|v| if v.fact.constant.is_some() { Class::Constant } else { Class::Data })
        .collect();
    for (id, role) in &ports.roles {
        class[id.index()] = match role {
            Role::Mask | Role::Positions => Class::Length,
            Role::Tokens | Role::Past(_) | Role::State(_) => Class::Data,
        };
    }
    for node in &graph.nodes {
        let of_inputs = node.inputs.iter().flatten().map(|v| class[v.index()]).max();
        let result = match of_inputs {
            _ if reads_extents(node) => Class::Length,
            Some(Class::Data) => Class::Data,
            _ => Class::Length,
        };
        for v in node.outputs.iter().flatten() {
            class[v.index()] = result;
        }
    }
    class
}

/// The nodes that values of class `Length` read by nodes of class `Data` come from, by node index.
pub(super) fn length_nodes(graph: &Graph, class: &[Class]) -> Vec<bool> {
    let is = |v: &ValueId, c: Class| class[v.index()] == c;
    let mut wanted = vec![false; class.len()];
    for node in &graph.nodes {
        if node.outputs.iter().flatten().any(|v| is(v, Class::Data)) {
            for v in node.inputs.iter().flatten().filter(|v| is(v, Class::Length)) {
                wanted[v.index()] = true;
            }
        }
    }
    let mut nodes = vec![false; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate().rev() {
        if node.outputs.iter().flatten().any(|v| wanted[v.index()]) {
            nodes[n] = true;
            for v in node.inputs.iter().flatten() {
                wanted[v.index()] = true;
            }
        }
    }
    nodes
}
