//! GroupQueryAttention as attention over a paged cache: its operands must be what every producer feeds it.

use super::{
    LowerError,
    class::Class,
    decoder::Decoder,
    meaning::Meaning,
    ports::{KvPort, Role},
    spec::StatePorts,
};
use crate::{
    ir::{Node, ValueId},
    lowered::{Attention, CacheGroup, CachePorts, CacheSlot, Extent, KvFormat, LOp, Operand, Rotary},
    ops::{
        Op, TokenAxis, Trace,
        gqa::{Granularity, GroupQueryAttention, KvCache, QkOutput, input as at},
    },
};

/// The caches of a node whose rows slide.
pub(super) fn sliding_caches(node: &Node) -> impl Iterator<Item = ValueId> + '_ {
    let slides = matches!(&node.op, Op::GroupQueryAttention(op) if op.window_cache);
    [at::PAST_KEY, at::PAST_VALUE].into_iter().filter(move |_| slides).filter_map(|i| input(node, i))
}

/// An optional input of a node.
fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

/// Lowers one node.
pub(super) fn lower(d: &mut Decoder<'_>, node: &Node, op: &GroupQueryAttention) -> Result<(), LowerError> {
    if input(node, at::ATTENTION_BIAS).is_some() {
        return Err(LowerError::node(node, "input attention_bias: masks given as values are not supported"));
    }
    if op.qk_output != QkOutput::None && node.outputs.get(3).copied().flatten().is_some() {
        return Err(LowerError::node(node, "output output_qk: a lowered attention does not give its scores"));
    }
    lengths_are_standard(d, node)?;
    let state = state(d, node, [at::PAST_KEY, at::PAST_VALUE])?;
    let packed = input(node, at::KEY).is_none();
    let q = tokens(d, node, at::QUERY, "query")?;
    let k = tokens(d, node, at::KEY, "key")?;
    let v = tokens(d, node, at::VALUE, "value")?;
    let (Some((q, q_size)), Some(y)) = (q, node.outputs.first().copied().flatten()) else {
        return Err(LowerError::node(node, "needs a query and an output"));
    };
    let sizes = Sizes::new(op, q_size, v.map(|(_, size)| size), packed);
    let constants = [
        at::COS_CACHE,
        at::SIN_CACHE,
        at::Q_NORM_WEIGHT,
        at::K_NORM_WEIGHT,
        at::HEAD_SINK,
        at::K_SCALE,
        at::V_SCALE,
    ];
    let mut operands = vec![Some(q), k.map(|(k, _)| k), v.map(|(v, _)| v)];
    for i in constants {
        let unused = op.rotary.is_none() && (i == at::COS_CACHE || i == at::SIN_CACHE);
        operands.push(if unused { None } else { constant(d, node, i)? });
    }
    let format = format(op).map_err(|why| LowerError::node(node, why))?;
    let slot = slot(d, op, state, sizes, format);
    let half = input(node, at::COS_CACHE).and_then(|id| d.graph.value(id).fact.dim(1).known()).unwrap_or(0);
    let rotary_dim = 2 * half;
    let attention = build(op, slot, packed, sizes, rotary_dim, operands[5].is_some());
    let out = d.output(node, y, Trace::Tokens(TokenAxis { axis: 1, inner: 1 }))?;
    d.emit.push(&node.name, LOp::Attention(attention), operands, vec![Some(out)]);
    Ok(())
}

/// Query, key or value `[1, T, size]`: the operand and its size per token.
pub(super) fn tokens(
    d: &mut Decoder<'_>,
    node: &Node,
    index: usize,
    name: &str,
) -> Result<Option<(Operand, usize)>, LowerError> {
    let Some(id) = input(node, index) else { return Ok(None) };
    let Some(Operand::Value(v)) = d.operand(node, index, id)? else {
        return Err(LowerError::node(node, format!("input {name}: expected a value of the run")));
    };
    let dims = &d.emit.out.value(v).dims;
    if let [Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(size)] = dims[..] {
        return Ok(Some((Operand::Value(v), size)));
    }
    Err(LowerError::node(node, format!("input {name}: expected [1, tokens, size], found {dims:?}")))
}

/// An operand that must be constant where it is given.
pub(super) fn constant(
    d: &mut Decoder<'_>,
    node: &Node,
    index: usize,
) -> Result<Option<Operand>, LowerError> {
    let Some(id) = input(node, index) else { return Ok(None) };
    let operand = d.operand(node, index, id)?;
    if matches!(operand, Some(Operand::Const(_))) {
        return Ok(operand);
    }
    let name = &d.graph.value(id).name;
    Err(LowerError::node(node, format!("input {index} ({name:?}): expected a constant")))
}

/// Sequence lengths and positions must be those that a ragged batch has anyway.
fn lengths_are_standard(d: &mut Decoder<'_>, node: &Node) -> Result<(), LowerError> {
    let expected = [
        (at::SEQLENS_K, "seqlens_k", Meaning::LastPosition, "the last position, past + new - 1"),
        (at::TOTAL_SEQUENCE_LENGTH, "total_sequence_length", Meaning::Total, "past + new"),
        (at::POSITION_IDS, "position_ids", Meaning::Positions, "running positions"),
    ];
    for (index, name, meaning, words) in expected {
        let Some(id) = input(node, index) else {
            if index == at::POSITION_IDS {
                continue;
            }
            return Err(LowerError::node(node, format!("input {name} is missing")));
        };
        let found = match d.class(id) {
            Class::Data => "a value that depends on the tokens".to_owned(),
            Class::Constant => "a constant".to_owned(),
            Class::Length => match d.meaning(id) {
                m if m == meaning => continue,
                Meaning::Other(text) => text,
                m => format!("{m:?}"),
            },
        };
        let value = &d.graph.value(id).name;
        return Err(LowerError::node(
            node,
            format!("input {name} ({value:?}): expected {words}, found {found}"),
        ));
    }
    Ok(())
}

/// The state whose cache the node reads at the inputs `past` and writes as outputs 1 and 2, directly.
pub(super) fn state(d: &mut Decoder<'_>, node: &Node, past: [usize; 2]) -> Result<usize, LowerError> {
    let mut state = None;
    let ends = [(past[0], 1, "key", false), (past[1], 2, "value", true)];
    for (index, output, what, is_value) in ends {
        let refuse = |reason: &str| LowerError::node(node, format!("past {what}: {reason}"));
        let past = input(node, index).ok_or_else(|| refuse("is missing: the node keeps no cache"))?;
        let Some(Role::Past(port)) = d.ports.roles.get(&past).copied() else {
            return Err(refuse(&format!("{:?} is not a cache input of the graph", d.graph.value(past).name)));
        };
        let present = node.outputs.get(output).copied().flatten();
        let returned = present.and_then(|p| d.ports.presents.get(&p).copied());
        if returned != Some(port) || port.is_value != is_value || state.is_some_and(|s| s != port.state) {
            return Err(refuse("does not go to the cache output that belongs to it"));
        }
        state = Some(port.state);
    }
    let state = state.ok_or_else(|| LowerError::node(node, "keeps no cache"))?;
    if d.caches.insert(state) {
        return Ok(state);
    }
    Err(LowerError::node(node, "its cache already belongs to another node"))
}

/// How the cache is stored.
///
/// # Errors
/// When keys and values have scales of different granularity.
pub(super) fn format(op: &GroupQueryAttention) -> Result<KvFormat, String> {
    let Some(scales) = op.kv.scales() else { return Ok(KvFormat::Float) };
    if scales.key != scales.value {
        return Err("k_quant_type and v_quant_type differ; a cache has one granularity of scales".into());
    }
    let per_channel = scales.key == Granularity::Channel;
    Ok(match op.kv {
        KvCache::Float => KvFormat::Float,
        KvCache::Int8(_) => KvFormat::Int8 { per_channel },
        KvCache::Int4(_) => KvFormat::Int4 { per_channel },
    })
}

/// Channels of a query or key head, and of a value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) head: usize,
    pub(super) v_head: usize,
}

impl Sizes {
    /// From the sizes per token of the query (or of packed Q, K and V) and of the value.
    pub(super) fn new(op: &GroupQueryAttention, query: usize, value: Option<usize>, packed: bool) -> Self {
        let heads = if packed { op.num_heads + 2 * op.kv_num_heads } else { op.num_heads };
        let head = query / heads.max(1);
        Self { head, v_head: value.map_or(head, |v| v / op.kv_num_heads.max(1)) }
    }
}

/// The lowered operator. `rotary_dim` is the number of channels that the rotary caches rotate.
pub(super) fn build(
    op: &GroupQueryAttention,
    slot: CacheSlot,
    packed_qkv: bool,
    sizes: Sizes,
    rotary_dim: usize,
    normed: bool,
) -> Attention {
    Attention {
        slot,
        heads: op.num_heads,
        kv_heads: op.kv_num_heads,
        head_size: sizes.head,
        v_head_size: sizes.v_head,
        scale: op.scale.unwrap_or_else(|| 1.0 / (sizes.head as f32).sqrt()),
        softcap: op.softcap,
        window: op.window,
        causal: op.causal,
        smooth_softmax: op.smooth_softmax,
        packed_qkv,
        rotary: op.rotary.map(|r| Rotary { interleaved: r.interleaved, dim: rotary_dim }),
        qk_norm: normed.then_some(op.qk_norm_epsilon),
    }
}

/// The layer's place in the group of its row layout and lifetime.
fn slot(
    d: &mut Decoder<'_>,
    op: &GroupQueryAttention,
    state: usize,
    sizes: Sizes,
    format: KvFormat,
) -> CacheSlot {
    let ports = match &d.spec.states[state].ports {
        StatePorts::KeyValue(ports) => ports.clone(),
        StatePorts::Fixed { .. } => CachePorts::default(),
    };
    let group = CacheGroup {
        kv_heads: op.kv_num_heads,
        k_head_size: sizes.head,
        v_head_size: sizes.v_head,
        format,
        window: op.window,
        layers: vec![ports],
    };
    push_slot(&mut d.emit.out.groups, group)
}

/// Adds the one layer of `group` to the group like it.
pub(super) fn push_slot(groups: &mut Vec<CacheGroup>, mut group: CacheGroup) -> CacheSlot {
    let layers = std::mem::take(&mut group.layers);
    let like = groups.iter().position(|g| {
        let key = |g: &CacheGroup| (g.kv_heads, g.k_head_size, g.v_head_size, g.format, g.window);
        key(g) == key(&group)
    });
    let at = like.unwrap_or_else(|| {
        groups.push(group);
        groups.len() - 1
    });
    let layer = groups[at].layers.len();
    groups[at].layers.extend(layers);
    CacheSlot { group: at, layer }
}

/// Every state of the spec must belong to a node.
pub(super) fn check_caches(d: &Decoder<'_>) -> Result<(), LowerError> {
    let unused = d.ports.roles.iter().find_map(|(id, role)| match role {
        Role::Past(KvPort { state, .. }) if !d.caches.contains(state) => {
            Some((id, "no attention reads this cache"))
        }
        Role::State(state) if !d.caches.contains(state) => {
            Some((id, "no recurrent operator reads this state"))
        }
        _ => None,
    });
    match unused {
        None => Ok(()),
        Some((id, reason)) => Err(LowerError::port(&d.graph.value(*id).name, reason)),
    }
}
