//! Rewrites of a lowered graph, one file each. They change what is computed by no more than rounding.
//!
//! A rewrite replaces the last node of its pattern and leaves the others without a reader; [`sweep`] removes them.

mod bank;
mod dense_experts;
mod expert;
mod gelu;
mod latent;
mod pattern;
mod qk_norm;
mod rms_norm;
mod route;
mod select_rows;
mod silu_mul;
mod sweep;
mod transpose;

use crate::lowered::{LNode, LOp, LValueId, Lowered, Operand};

/// All rewrites of a decoder.
pub(super) fn decoder(graph: &mut Lowered) {
    fuse(graph);
    latent::rewrite(graph);
    dense_experts::rewrite(graph);
    sweep::sweep(graph);
    route::rewrite(graph);
    sweep::sweep(graph);
    select_rows::rewrite(graph);
    sweep::sweep(graph);
}

/// The rewrites that hold in any lowered graph.
pub(super) fn fuse(graph: &mut Lowered) {
    transpose::rewrite(graph);
    sweep::sweep(graph);
    rms_norm::rewrite(graph);
    gelu::rewrite(graph);
    silu_mul::rewrite(graph);
    sweep::sweep(graph);
    qk_norm::rewrite(graph);
    sweep::sweep(graph);
}

/// Who makes each value and how often it is read.
struct Index {
    producers: Vec<Option<usize>>,
    uses: Vec<usize>,
}

impl Index {
    fn new(graph: &Lowered) -> Self {
        let mut index = Self { producers: vec![None; graph.values.len()], uses: vec![0; graph.values.len()] };
        for (n, node) in graph.nodes.iter().enumerate() {
            for v in node.outputs.iter().flatten() {
                index.producers[v.index()] = Some(n);
            }
            for v in values(node) {
                index.uses[v.index()] += 1;
            }
        }
        for v in &graph.outputs {
            index.uses[v.index()] += 1;
        }
        index
    }

    /// The node that makes the value, if nobody but one reader reads it.
    fn sole<'g>(&self, graph: &'g Lowered, id: LValueId) -> Option<&'g LNode> {
        if self.uses[id.index()] != 1 {
            return None;
        }
        self.producers[id.index()].map(|n| &graph.nodes[n])
    }

    /// The value itself, or what it is a view of, as far as the views have one reader.
    fn unviewed(&self, graph: &Lowered, mut id: LValueId) -> LValueId {
        while let Some(node) = self.sole(graph, id) {
            match (&node.op, input(node, 0)) {
                (LOp::View, Some(x)) => id = x,
                _ => break,
            }
        }
        id
    }
}

/// Operand `i`, if it is a value.
fn input(node: &LNode, i: usize) -> Option<LValueId> {
    match node.inputs.get(i) {
        Some(Some(Operand::Value(v))) => Some(*v),
        _ => None,
    }
}

/// The values a node reads.
fn values(node: &LNode) -> impl Iterator<Item = LValueId> + '_ {
    node.inputs.iter().flatten().filter_map(|o| match o {
        Operand::Value(v) => Some(*v),
        Operand::Const(_) => None,
    })
}
