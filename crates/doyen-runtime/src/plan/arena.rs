//! Arena layout: an offset for every value of a step, bytes shared between values that never live together.

#[cfg(test)]
mod tests;

use doyen_graph::{
    device::{Limits, Slot},
    lowered::{LOp, LValueId, Lowered, Operand},
};
use std::ops::Range;

/// Kernels read whole cache lines.
const ALIGN: usize = 64;

/// The layout.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) slots: Vec<Option<Slot>>,
    pub(super) bytes: usize,
}

/// A run of nodes during which bytes are taken.
#[derive(Debug, Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
}

/// Lays the values out greedily, largest first, at the lowest offset free during their whole life. With `keep`,
/// nothing shares bytes, nor do values of a run of `together`. `None` when a size overflows.
pub(super) fn layout(
    graph: &Lowered,
    limits: &Limits,
    together: &[Range<usize>],
    keep: bool,
) -> Option<Layout> {
    let roots = roots(graph);
    let mut lives = lives(graph, &roots);
    for life in lives.iter_mut().flatten() {
        let own = *life;
        for run in together.iter().filter(|r| own.first < r.end && r.start <= own.last) {
            *life = Life { first: life.first.min(run.start), last: life.last.max(run.end - 1) };
        }
    }
    if keep {
        for life in lives.iter_mut().flatten() {
            *life = Life { first: 0, last: usize::MAX };
        }
    }
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (v, life) in lives.iter().enumerate() {
        if life.is_some() {
            order.push((value_bytes(graph, LValueId(v as u32), limits)?, v));
        }
    }
    order.sort_by_key(|&(bytes, v)| (std::cmp::Reverse(bytes), v));

    let mut slots: Vec<Option<Slot>> = vec![None; graph.values.len()];
    let mut placed: Vec<(Slot, Life)> = Vec::new();
    let mut total = 0usize;
    for (len, v) in order {
        let life = lives[v]?;
        let mut busy: Vec<Slot> = placed
            .iter()
            .filter(|(_, l)| l.first <= life.last && life.first <= l.last)
            .map(|(s, _)| *s)
            .collect();
        busy.sort_by_key(|s| s.offset);
        let mut offset = 0usize;
        for s in busy {
            if offset.checked_add(len)? <= s.offset {
                break;
            }
            offset = offset.max((s.offset + s.len).next_multiple_of(ALIGN));
        }
        let slot = Slot { offset, len };
        total = total.max(offset.checked_add(len)?);
        placed.push((slot, life));
        slots[v] = Some(slot);
    }
    for v in 0..slots.len() {
        if slots[v].is_none() {
            slots[v] = slots[roots[v].index()];
        }
    }
    Some(Layout { slots, bytes: total.next_multiple_of(ALIGN) })
}

/// The value whose bytes each value has: itself, or the source of a chain of views.
fn roots(graph: &Lowered) -> Vec<LValueId> {
    let mut roots: Vec<LValueId> = (0..graph.values.len() as u32).map(LValueId).collect();
    for node in &graph.nodes {
        if let (LOp::View, Some(Some(Operand::Value(x))), Some(Some(y))) =
            (&node.op, node.inputs.first(), node.outputs.first())
        {
            roots[y.index()] = roots[x.index()];
        }
    }
    roots
}

/// From the node that writes a root (0 for inputs) to the last that reads it or a view of it.
fn lives(graph: &Lowered, roots: &[LValueId]) -> Vec<Option<Life>> {
    let mut lives: Vec<Option<Life>> = vec![None; graph.values.len()];
    let mut touch = |v: LValueId, at: usize| {
        let life = lives[roots[v.index()].index()].get_or_insert(Life { first: at, last: at });
        life.last = life.last.max(at);
    };
    // Inputs are written before node 0 and must not share bytes with what node 0 writes.
    for v in graph.tokens.iter().chain(&graph.positions).chain(&graph.inputs) {
        touch(*v, 0);
    }
    for (n, node) in graph.nodes.iter().enumerate() {
        for operand in node.inputs.iter().flatten() {
            if let Operand::Value(v) = operand {
                touch(*v, n);
            }
        }
        for v in node.outputs.iter().flatten() {
            touch(*v, n);
        }
    }
    for v in &graph.outputs {
        touch(*v, graph.nodes.len());
    }
    lives
}

fn value_bytes(graph: &Lowered, v: LValueId, limits: &Limits) -> Option<usize> {
    let value = graph.value(v);
    let n = value.dims.iter().try_fold(1usize, |n, d| n.checked_mul(d.at(limits.tokens, limits.rows)))?;
    value.dtype.bytes_for(n)?.checked_next_multiple_of(ALIGN)
}
