//! Attention and MultiHeadAttention over an explicit past, as attention over a paged cache.
//!
//! Their masks are values of the graph; [`super::sight`] says what they mean.

use super::{
    LowerError,
    attention::{push_slot, state},
    class::Class,
    decoder::Decoder,
    meaning::Meaning,
    sight::Sight,
    spec::StatePorts,
};
use crate::{
    ir::{Constant, Node, ValueId},
    lowered::{Attention, CacheGroup, CachePorts, Extent, KvFormat, LOp, LValueId, Operand},
    ops::{Op, TokenAxis, Trace, arith::Binary, attention, join, mha, transpose::Transpose},
};
use doyen_tensor::{DType, Tensor};
use std::sync::Arc;

/// What both operators say.
pub(super) struct Heads {
    /// Heads of rank 3 inputs.
    pub(super) q: Option<usize>,
    pub(super) kv: Option<usize>,
    pub(super) scale: Option<f32>,
    pub(super) softcap: f32,
    pub(super) sight: Sight,
    /// Inputs of the past caches.
    pub(super) past: [usize; 2],
}

/// Queries, keys or values `[1,T,heads*size]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    value: LValueId,
    pub(super) heads: usize,
    size: usize,
}

fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

fn output(node: &Node, i: usize) -> Option<ValueId> {
    node.outputs.get(i).copied().flatten()
}

/// Lowers `ai.onnx::Attention`.
pub(super) fn attention(
    d: &mut Decoder<'_>,
    node: &Node,
    op: &attention::Attention,
) -> Result<(), LowerError> {
    const MASK: usize = 3;
    const NONPAD: usize = 6;
    let refuse = |why: &str| LowerError::node(node, why);
    if input(node, NONPAD).is_some() {
        return Err(refuse(
            "input nonpad_kv_seqlen: a cache that is written outside of the node is not supported",
        ));
    }
    if output(node, 3).is_some() {
        return Err(refuse("output qk_matmul_output: a lowered attention does not give its scores"));
    }
    let mut sight = Sight { causal: op.is_causal || op.right_window == Some(0), window: None };
    if op.right_window.is_some_and(|w| w > 0) && !sight.causal {
        return Err(refuse("right_window_size: queries that see a few later keys are not supported"));
    }
    sight.window = op.left_window.map(|w| w.saturating_add(1));
    if let Some(mask) = input(node, MASK) {
        sight = sight.and(d.sight(node, "attn_mask", mask, op.short_mask)?).map_err(|e| refuse(&e))?;
    }
    let sight = sight.and(Sight::FULL).map_err(|e| refuse(&e))?;
    let heads = Heads {
        q: op.q_num_heads,
        kv: op.kv_num_heads,
        scale: op.scale,
        softcap: op.softcap,
        sight,
        past: [4, 5],
    };
    let q = part(d, node, (0, "Q"), heads.q)?;
    let k = part(d, node, (1, "K"), heads.kv)?;
    let v = part(d, node, (2, "V"), heads.kv)?;
    lower(d, node, &heads, [q, k, v])
}

/// Lowers `com.microsoft::MultiHeadAttention`.
pub(super) fn multi_head(
    d: &mut Decoder<'_>,
    node: &Node,
    op: &mha::MultiHeadAttention,
) -> Result<(), LowerError> {
    use mha::input as at;
    let refuse = |why: String| LowerError::node(node, why);
    if output(node, 3).is_some() {
        return Err(refuse("output qk: a lowered attention does not give its scores".into()));
    }
    let mut sight = Sight { causal: op.unidirectional, window: None };
    for (i, name) in [(at::KEY_PADDING_MASK, "key_padding_mask"), (at::ATTENTION_BIAS, "attention_bias")] {
        if let Some(mask) = input(node, i) {
            sight = sight.and(d.sight(node, name, mask, false)?).map_err(refuse)?;
        }
    }
    let facts: Vec<_> = node.inputs.iter().map(|i| i.map(|i| &d.graph.value(i).fact)).collect();
    let form = op.form(&facts).map_err(|e| LowerError::node(node, e))?;
    let n = Some(op.num_heads);
    let [q, k, v] = match form {
        mha::Form::Separate => [
            part(d, node, (at::QUERY, "query"), n)?,
            part(d, node, (at::KEY, "key"), n)?,
            part(d, node, (at::VALUE, "value"), n)?,
        ],
        mha::Form::PackedQkv => {
            let all = unpack(d, node, (at::QUERY, "query"), 3)?;
            [all[0], all[1], all[2]]
        }
        mha::Form::PackedKv => {
            let kv = unpack(d, node, (at::KEY, "key"), 2)?;
            [part(d, node, (at::QUERY, "query"), n)?, kv[0], kv[1]]
        }
        mha::Form::HeadMajor => {
            return Err(refuse(
                "input key: keys of rank 4 belong to another sequence (cross attention)".into(),
            ));
        }
    };
    let parts = biased(d, node, [q, k, v])?;
    let past = [at::PAST_KEY, at::PAST_VALUE];
    let heads = Heads { q: n, kv: n, scale: op.scale, softcap: 0.0, sight, past };
    lower(d, node, &heads, parts)
}

fn lower(d: &mut Decoder<'_>, node: &Node, of: &Heads, parts: [Part; 3]) -> Result<(), LowerError> {
    let state = state(d, node, of.past)?;
    emit(d, node, (state, None), of, parts)
}

/// Attention over a state, with sinks `[heads]` or without, whose result is the first of a node.
pub(super) fn emit(
    d: &mut Decoder<'_>,
    node: &Node,
    (state, sinks): (usize, Option<Operand>),
    of: &Heads,
    [q, k, v]: [Part; 3],
) -> Result<(), LowerError> {
    const SINKS: usize = 7;
    let fits = k.heads == v.heads && k.size == q.size && k.heads > 0 && q.heads.is_multiple_of(k.heads);
    let Some(y) = output(node, 0).filter(|_| fits) else {
        let shape = |p: Part| format!("{} heads of {}", p.heads, p.size);
        let reason = format!("queries of {}, keys of {}, values of {}", shape(q), shape(k), shape(v));
        return Err(LowerError::node(node, reason));
    };
    let ports = match &d.spec.states[state].ports {
        StatePorts::KeyValue(ports) => ports.clone(),
        StatePorts::Fixed { .. } => CachePorts::default(),
    };
    let group = CacheGroup {
        kv_heads: k.heads,
        k_head_size: k.size,
        v_head_size: v.size,
        format: KvFormat::Float,
        window: of.sight.window,
        layers: vec![ports],
    };
    let slot = push_slot(&mut d.emit.out.groups, group);
    let attention = Attention {
        slot,
        heads: q.heads,
        kv_heads: k.heads,
        head_size: q.size,
        v_head_size: v.size,
        scale: of.scale.unwrap_or_else(|| 1.0 / (q.size as f32).sqrt()),
        softcap: of.softcap,
        window: of.sight.window,
        causal: of.sight.causal,
        smooth_softmax: false,
        packed_qkv: false,
        rotary: None,
        qk_norm: None,
    };
    let mut operands: Vec<Option<Operand>> = [q, k, v].map(|p| Some(Operand::Value(p.value))).to_vec();
    operands.resize(10, None);
    operands[SINKS] = sinks;
    let head_major = d.graph.value(y).fact.rank() == Some(4);
    let axis = TokenAxis { axis: if head_major { 2 } else { 1 }, inner: 1 };
    let out = d.output(node, y, Trace::Tokens(axis))?;
    if !head_major {
        d.emit.push(&node.name, LOp::Attention(attention), operands, vec![Some(out)]);
        return Ok(());
    }
    let dtype = d.emit.out.value(out).declared;
    let made = rows(d, format!("{}/tokens", node.name), dtype, &[q.heads * v.size]);
    let split = rows(d, format!("{}/heads", node.name), dtype, &[q.heads, v.size]);
    d.emit.push(&node.name, LOp::Attention(attention), operands, vec![Some(made)]);
    d.emit.push(&node.name, LOp::View, vec![Some(Operand::Value(made))], vec![Some(split)]);
    transpose(d, &node.name, split, out);
    Ok(())
}

/// A value `[1, T, ...]`.
fn rows(d: &mut Decoder<'_>, name: String, dtype: DType, dims: &[usize]) -> LValueId {
    let lead = [Extent::Fixed(1), Extent::Tokens(1)];
    d.emit.fresh(name, dtype, lead.into_iter().chain(dims.iter().map(|&n| Extent::Fixed(n))).collect())
}

/// Swaps tokens and heads.
fn transpose(d: &mut Decoder<'_>, name: &str, from: LValueId, to: LValueId) {
    let op = LOp::Op(Op::Transpose(Transpose { perm: Some(SWAP.to_vec()) }));
    d.emit.push(&format!("{name}/transpose"), op, vec![Some(Operand::Value(from))], vec![Some(to)]);
}

/// The permutation that swaps tokens and heads.
const SWAP: [usize; 4] = [0, 2, 1, 3];

/// The lowered value of an input.
fn value(d: &mut Decoder<'_>, node: &Node, (index, name): (usize, &str)) -> Result<LValueId, LowerError> {
    let id = input(node, index).ok_or_else(|| LowerError::node(node, format!("input {name} is missing")))?;
    match d.operand(node, index, id)? {
        Some(Operand::Value(v)) => Ok(v),
        _ => Err(LowerError::node(node, format!("input {name}: expected a value of the run"))),
    }
}

/// Queries, keys or values of rank 3 with `heads`, or of rank 4 with the tokens behind the heads.
pub(super) fn part(
    d: &mut Decoder<'_>,
    node: &Node,
    (index, name): (usize, &str),
    heads: Option<usize>,
) -> Result<Part, LowerError> {
    let from = value(d, node, (index, name))?;
    let found = d.emit.out.value(from).clone();
    match (found.dims.as_slice(), heads) {
        (&[Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(n)], Some(heads)) if heads > 0 => {
            Ok(Part { value: from, heads, size: n / heads })
        }
        (&[Extent::Fixed(1), Extent::Fixed(heads), Extent::Tokens(1), Extent::Fixed(size)], _) => {
            let split = untransposed(d, from).unwrap_or_else(|| {
                let split = rows(d, format!("{}/swapped", found.name), found.declared, &[heads, size]);
                transpose(d, &found.name, from, split);
                split
            });
            let merged = rows(d, format!("{}/rows", found.name), found.declared, &[heads * size]);
            d.emit.push(&found.name, LOp::View, vec![Some(Operand::Value(split))], vec![Some(merged)]);
            Ok(Part { value: merged, heads, size })
        }
        (dims, _) => Err(LowerError::node(
            node,
            format!("input {name}: expected [1, tokens, size] or [1, heads, tokens, size], found {dims:?}"),
        )),
    }
}

/// What a value is the swap of, where it is one.
fn untransposed(d: &Decoder<'_>, id: LValueId) -> Option<LValueId> {
    let node = d.emit.out.nodes.iter().rev().find(|n| n.outputs.contains(&Some(id)))?;
    match (&node.op, node.inputs.as_slice()) {
        (LOp::Op(Op::Transpose(t)), [Some(Operand::Value(from))]) if t.perm.as_deref() == Some(&SWAP[..]) => {
            Some(*from)
        }
        _ => None,
    }
}

/// The parts of `[1,T,heads,parts,size]`.
fn unpack(
    d: &mut Decoder<'_>,
    node: &Node,
    (index, name): (usize, &str),
    parts: usize,
) -> Result<Vec<Part>, LowerError> {
    let from = value(d, node, (index, name))?;
    let found = d.emit.out.value(from).clone();
    let (heads, size) = match found.dims[..] {
        [
            Extent::Fixed(1),
            Extent::Tokens(1),
            Extent::Fixed(heads),
            Extent::Fixed(n),
            Extent::Fixed(size),
        ] if n == parts => (heads, size),
        ref dims => {
            let reason = format!("input {name}: expected [1, tokens, heads, {parts}, size], found {dims:?}");
            return Err(LowerError::node(node, reason));
        }
    };
    let split: Vec<LValueId> = (0..parts)
        .map(|p| rows(d, format!("{}/{p}", found.name), found.declared, &[heads, 1, size]))
        .collect();
    let op = LOp::Op(Op::Split(join::Split { axis: 3, sizes: join::Sizes::Parts(parts) }));
    let outputs = split.iter().copied().map(Some).collect();
    d.emit.push(&format!("{}/unpack", node.name), op, vec![Some(Operand::Value(from))], outputs);
    let part = |(p, from): (usize, LValueId)| {
        let merged = rows(d, format!("{}/{p}/rows", found.name), found.declared, &[heads * size]);
        d.emit.push(&node.name, LOp::View, vec![Some(Operand::Value(from))], vec![Some(merged)]);
        Part { value: merged, heads, size }
    };
    Ok(split.into_iter().enumerate().map(part).collect())
}

/// Adds MultiHeadAttention's bias, where it has one.
fn biased(d: &mut Decoder<'_>, node: &Node, parts: [Part; 3]) -> Result<[Part; 3], LowerError> {
    let Some(id) = input(node, mha::input::BIAS) else { return Ok(parts) };
    let refuse = |why: String| LowerError::node(node, format!("input bias: {why}"));
    let constant = d.graph.value(id).fact.constant.as_ref();
    let t = constant.ok_or_else(|| refuse("expected a constant".into()))?.to_tensor();
    let values = t.and_then(|t| t.to_f32()).map_err(|e| refuse(e.to_string()))?;
    let name = d.graph.value(id).name.clone();
    let (mut out, mut start) = (parts, 0);
    for (part, p) in out.iter_mut().zip(0..) {
        let width = part.heads * part.size;
        let own = values.get(start..start + width).ok_or_else(|| {
            refuse(format!("expected {} numbers or more, found {}", start + width, values.len()))
        })?;
        start += width;
        let own = Tensor::from_slice([width], own).map_err(|e| refuse(e.to_string()))?;
        let bias = d.emit.constant_of(format!("{name}/{p}"), Arc::new(Constant::from(own)));
        let dtype = d.emit.out.value(part.value).declared;
        let sum = rows(d, format!("{}/biased{p}", node.name), dtype, &[width]);
        let inputs = vec![Some(Operand::Value(part.value)), Some(Operand::Const(bias))];
        d.emit.push(
            &format!("{}/bias{p}", node.name),
            LOp::Op(Op::Binary(Binary::Add)),
            inputs,
            vec![Some(sum)],
        );
        part.value = sum;
    }
    Ok(out)
}

impl Decoder<'_> {
    /// What a mask means.
    ///
    /// # Errors
    /// When it depends on token values, or means nothing that a ragged batch can express.
    pub(super) fn sight(
        &mut self,
        node: &Node,
        input: &str,
        id: ValueId,
        short: bool,
    ) -> Result<Sight, LowerError> {
        let name = self.graph.value(id).name.clone();
        let refuse = |why: &str| LowerError::node(node, format!("input {input} ({name:?}): {why}"));
        match self.class(id) {
            Class::Data => Err(refuse("a mask that depends on the tokens")),
            // `[batch]`: lengths.
            _ if input == "key_padding_mask" && self.graph.value(id).fact.rank() == Some(1) => {
                match self.meaning(id) {
                    Meaning::Total => Ok(Sight::FULL),
                    _ => Err(refuse("expected the length of the sequence")),
                }
            }
            Class::Constant | Class::Length => self.mask_sight(id, short).map_err(|e| refuse(&e)),
        }
    }
}
