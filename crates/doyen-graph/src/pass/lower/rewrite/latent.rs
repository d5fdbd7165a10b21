//! Attention whose keys and values are projections of one small row per token, as attention over these rows.
//!
//! Multi-head latent attention is exported with expanded caches: per head, a key of `nope` channels from the latent row
//! and `rope` channels that all heads share, and a value from the latent row. Keeping the latent row and the shared
//! channels instead is the same function, since `q . (U c) = (U^T q) . c`.

use super::{super::attention::push_slot, Index, input};
use crate::{
    lowered::{
        Attention, CacheGroup, CacheSlot, Extent, KvFormat, LNode, LOp, LValue, LValueId, LatentAttention,
        Lowered, Operand,
    },
    ops::Op,
};

/// Operands of the attention beside queries, keys and values, none of which may be there.
const EXTRAS: std::ops::Range<usize> = 3..12;

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    let mut nodes = Vec::with_capacity(graph.nodes.len());
    let mut left = Vec::new();
    for n in 0..graph.nodes.len() {
        let found = match &graph.nodes[n].op {
            LOp::Attention(a) => pattern(graph, &index, &graph.nodes[n], a),
            _ => None,
        };
        let Some(found) = found else { continue };
        let LOp::Attention(a) = graph.nodes[n].op.clone() else { continue };
        left.push(a.slot);
        nodes.push((n, replace(graph, n, &a, found)));
    }
    // From the last on, so that places stay what they were.
    for (n, view) in nodes.into_iter().rev() {
        graph.nodes.insert(n, view);
    }
    drop_layers(graph, &left);
}

/// What keys and values are made of.
struct Latent {
    /// `[1, T, rank]`.
    rows: LValueId,
    /// `[1, T, 1, rope]`.
    shared: LValueId,
    rank: usize,
    nope: usize,
    rope: usize,
    /// The up-projection's operator and weights.
    up: Op,
    weights: Vec<Option<Operand>>,
}

/// Turns the node into a latent attention over a cache of its own; returns the view that must stand before it.
fn replace(graph: &mut Lowered, n: usize, a: &Attention, of: Latent) -> LNode {
    let layer = graph.groups[a.slot.group].layers[a.slot.layer].clone();
    let group = CacheGroup {
        kv_heads: 1,
        k_head_size: of.rank + of.rope,
        v_head_size: 0,
        format: KvFormat::Float,
        window: a.window,
        layers: vec![layer],
    };
    let slot = push_slot(&mut graph.groups, group);
    let source = graph.value(of.shared).clone();
    let shared = LValueId(graph.values.len() as u32);
    graph.values.push(LValue {
        name: format!("{}/rows", source.name),
        dims: vec![Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(of.rope)],
        ..source
    });
    let node = &mut graph.nodes[n];
    let mut inputs = vec![node.inputs[0], Some(Operand::Value(of.rows)), Some(Operand::Value(shared))];
    inputs.extend(of.weights);
    node.inputs = inputs;
    node.op = LOp::LatentAttention(LatentAttention {
        slot,
        heads: a.heads,
        rank: of.rank,
        nope: of.nope,
        rope: of.rope,
        v_head_size: a.v_head_size,
        scale: a.scale,
        softcap: a.softcap,
        window: a.window,
        causal: a.causal,
        up: of.up,
    });
    LNode {
        name: format!("{}/shared", node.name),
        op: LOp::View,
        inputs: vec![Some(Operand::Value(of.shared))],
        outputs: vec![Some(shared)],
    }
}

fn pattern(graph: &Lowered, index: &Index, node: &LNode, a: &Attention) -> Option<Latent> {
    let bare = !a.packed_qkv && a.rotary.is_none() && a.qk_norm.is_none() && !a.smooth_softmax;
    let float = graph.groups[a.slot.group].format == KvFormat::Float;
    if !bare || !float || a.heads != a.kv_heads || node.inputs.iter().skip(EXTRAS.start).any(Option::is_some)
    {
        return None;
    }
    let keys = made_by(graph, index, unviewed(graph, index, input(node, 1)?))?;
    let (Some(own), Some(spread), 2) = (input(keys, 0), input(keys, 1), keys.inputs.len()) else {
        return None;
    };
    if !matches!(&keys.op, LOp::Op(Op::Concat(c)) if is_last(c.axis, 4)) {
        return None;
    }
    let shared = spread_over_heads(graph, index, spread, a.heads)?;
    let (own, values) = (unviewed(graph, index, own), unviewed(graph, index, input(node, 2)?));
    let parts = made_by(graph, index, own)?;
    let both = parts.outputs.as_slice() == [Some(own), Some(values)];
    if !both || !matches!(&parts.op, LOp::Op(Op::Split(s)) if is_last(s.axis, 4)) {
        return None;
    }
    let rope = last(graph, shared)?;
    let nope = last(graph, own)?;
    let split = per_head(graph, own, a.heads, nope)
        && per_head(graph, values, a.heads, a.v_head_size)
        && nope + rope == a.head_size;
    let up = made_by(graph, index, unviewed(graph, index, input(parts, 0)?))?;
    let rows = input(up, 0)?;
    let rank = last(graph, rows)?;
    let width = a.heads * (nope + a.v_head_size);
    let rank_3 = graph.value(rows).dims[..] == [Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(rank)];
    let (op, weights) = projection(graph, up, (rank, width))?;
    (split && rank_3).then_some(Latent { rows, shared, rank, nope, rope, up: op, weights })
}

/// The operator and the weights of a product with a constant `[rank, width]`, without a bias.
fn projection(
    graph: &Lowered,
    node: &LNode,
    (rank, width): (usize, usize),
) -> Option<(Op, Vec<Option<Operand>>)> {
    let constant = |i: usize| match node.inputs.get(i) {
        Some(Some(Operand::Const(c))) => Some(*c),
        _ => None,
    };
    let LOp::Op(op) = &node.op else { return None };
    let fits = match op {
        Op::MatMul(_) => graph.constant(constant(1)?).data.shape()[..] == [rank, width],
        Op::MatMulNBits(m) => {
            const GROUPS: usize = 4;
            let plain = node.inputs.iter().skip(GROUPS).all(Option::is_none);
            let weights = node.inputs.iter().skip(1).flatten().all(|o| matches!(o, Operand::Const(_)));
            (m.k, m.n) == (rank, width) && plain && weights
        }
        _ => false,
    };
    fits.then(|| (op.clone(), node.inputs[1..].to_vec()))
}

/// What is repeated for every head: `[1, T, 1, size]`.
fn spread_over_heads(graph: &Lowered, index: &Index, id: LValueId, heads: usize) -> Option<LValueId> {
    let node = made_by(graph, index, id)?;
    if !matches!(node.op, LOp::Op(Op::Expand(_) | Op::Tile(_))) {
        return None;
    }
    let from = input(node, 0)?;
    let size = last(graph, from)?;
    (per_head(graph, from, 1, size) && per_head(graph, id, heads, size)).then_some(from)
}

fn per_head(graph: &Lowered, id: LValueId, heads: usize, size: usize) -> bool {
    graph.value(id).dims[..]
        == [Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(heads), Extent::Fixed(size)]
}

fn last(graph: &Lowered, id: LValueId) -> Option<usize> {
    match graph.value(id).dims.last() {
        Some(Extent::Fixed(n)) => Some(*n),
        _ => None,
    }
}

const fn is_last(axis: i64, rank: i64) -> bool {
    axis == -1 || axis == rank - 1
}

fn made_by<'g>(graph: &'g Lowered, index: &Index, id: LValueId) -> Option<&'g LNode> {
    index.producers[id.index()].map(|n| &graph.nodes[n])
}

/// The value that this one is a view of, whoever else reads it.
fn unviewed(graph: &Lowered, index: &Index, mut id: LValueId) -> LValueId {
    while let Some(node) = made_by(graph, index, id) {
        match (&node.op, input(node, 0)) {
            (LOp::View, Some(x)) => id = x,
            _ => break,
        }
    }
    id
}

/// Removes layers from their groups, and groups without layers; renumbers the others.
fn drop_layers(graph: &mut Lowered, left: &[CacheSlot]) {
    if left.is_empty() {
        return;
    }
    let mut moved = Vec::with_capacity(graph.groups.len());
    let mut groups = 0;
    for (g, group) in graph.groups.iter_mut().enumerate() {
        let (mut layer, mut places) = (0, Vec::with_capacity(group.layers.len()));
        for l in 0..group.layers.len() {
            let stays = !left.contains(&CacheSlot { group: g, layer: l });
            places.push(stays.then_some(CacheSlot { group: groups, layer }));
            layer += usize::from(stays);
        }
        let mut l = 0;
        group.layers.retain(|_| {
            l += 1;
            places[l - 1].is_some()
        });
        groups += usize::from(!group.layers.is_empty());
        moved.push(places);
    }
    graph.groups.retain(|g| !g.layers.is_empty());
    for node in &mut graph.nodes {
        let slot = match &mut node.op {
            LOp::Attention(a) => &mut a.slot,
            LOp::LatentAttention(a) => &mut a.slot,
            _ => continue,
        };
        if let Some(place) = moved[slot.group][slot.layer] {
            *slot = place;
        }
    }
}
