//! GroupQueryAttention in a case: each batch row is a sequence with its own new and cached positions.

use super::{Case, CaseOutput, CaseRefusal, CaseSequence, CaseSource, widened};
use crate::{
    ir::{Node, ValueId},
    lowered::{CacheGroup, CachePorts, CacheSlot, Extent, LOp, Operand},
    ops::gqa::{GroupQueryAttention, QkOutput, input as at, window_rows},
    pass::lower::attention::{Sizes, build, format, push_slot},
};
use doyen_tensor::{DType, Tensor, TensorError};
use std::collections::HashMap;

/// What the attention of a case fixes for the whole step.
#[derive(Debug, Clone, Default)]
pub(super) struct Batch {
    pub(super) sequences: Vec<CaseSequence>,
    pub(super) sources: HashMap<ValueId, CaseSource>,
}

impl Batch {
    /// Whether the value is a result of attention, and not what its extents say.
    pub(super) fn covers(&self, id: ValueId) -> bool {
        self.sources.contains_key(&id)
    }

    pub(super) fn source(&self, id: ValueId) -> Option<CaseSource> {
        self.sources.get(&id).cloned()
    }
}

fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

/// Lowers the node.
pub(super) fn lower(case: &mut Case<'_>, node: &Node, op: &GroupQueryAttention) -> Result<(), CaseRefusal> {
    let refuse = |why: &str| CaseRefusal::Inexpressible(format!("node {:?}: {why}", node.name));
    if case.batch.is_some() {
        return Err(refuse("a second attention in one case"));
    }
    if op.qk_output != QkOutput::None && node.outputs.get(3).copied().flatten().is_some() {
        return Err(refuse("output_qk: a lowered attention does not give its scores"));
    }
    let required = |i: usize| input(node, i).ok_or_else(|| refuse("an input is missing"));
    let query = case.tensor(required(at::QUERY)?)?.shape().clone();
    let new = query[1];
    let totals: Vec<usize> =
        case.tensor(required(at::SEQLENS_K)?)?.to_i64()?.iter().map(|&v| (v + 1).max(0) as usize).collect();
    let longest =
        case.tensor(required(at::TOTAL_SEQUENCE_LENGTH)?)?.to_i64()?.first().copied().unwrap_or(0) as usize;
    let mut sequences: Vec<CaseSequence> = totals
        .iter()
        .map(|&total| {
            let first = longest == new;
            let past = if first { 0 } else { total.saturating_sub(new) };
            CaseSequence { new: total - past, past, caches: Vec::new(), states: Vec::new() }
        })
        .collect();
    let packed = input(node, at::KEY).is_none();
    let mut operands = Vec::with_capacity(12);
    for i in [at::QUERY, at::KEY, at::VALUE] {
        operands.push(input(node, i).map(|id| rows(case, id, &sequences)).transpose()?);
    }
    for i in [
        at::COS_CACHE,
        at::SIN_CACHE,
        at::Q_NORM_WEIGHT,
        at::K_NORM_WEIGHT,
        at::HEAD_SINK,
        at::K_SCALE,
        at::V_SCALE,
    ] {
        let unused = op.rotary.is_none() && (i == at::COS_CACHE || i == at::SIN_CACHE);
        operands.push(match input(node, i).filter(|_| !unused) {
            None => None,
            Some(id) => Some(case.emit.constant(id).ok_or_else(|| refuse("a parameter is not constant"))?),
        });
    }
    let ids = input(node, at::POSITION_IDS).filter(|_| op.rotary.is_some());
    operands.push(ids.map(|id| positions(case, id, &sequences, longest == new)).transpose()?);
    operands.push(input(node, at::ATTENTION_BIAS).map(|id| step_value(case, id)).transpose()?);
    let v_size = input(node, at::VALUE).map(|id| case.tensor(id).map(|t| t.shape()[2])).transpose()?;
    let sizes = Sizes::new(op, query[2], v_size, packed);
    let format = format(op).map_err(|why| refuse(&why))?;
    let slot = push_slot(
        &mut case.emit.out.groups,
        CacheGroup {
            kv_heads: op.kv_num_heads,
            k_head_size: sizes.head,
            v_head_size: sizes.v_head,
            format,
            window: op.window,
            layers: vec![CachePorts::default()],
        },
    );
    let sliding = sliding(case, node, op)?;
    fill(case, node, slot, sliding, &mut sequences)?;
    let half = input(node, at::COS_CACHE).map(|id| case.tensor(id).map(|t| t.shape()[1])).transpose()?;
    let rotary_dim = 2 * half.unwrap_or(0);
    let attention = build(op, slot, packed, sizes, rotary_dim, operands[5].is_some());
    finish(case, node, (attention, operands), sequences, sliding)
}

/// Whether every batch row fills its tokens: then `[batch, sequence, size]` is `[1, tokens, size]` as it lies.
fn is_full(sequences: &[CaseSequence], per_row: usize) -> bool {
    sequences.iter().all(|s| s.new == per_row)
}

/// Query, key or value as rows of the tokens that there are.
fn rows(case: &mut Case<'_>, id: ValueId, sequences: &[CaseSequence]) -> Result<Operand, CaseRefusal> {
    let t = case.tensor(id)?;
    let (per_row, size, dtype) = (t.shape()[1], t.shape()[2], t.dtype());
    let dims = vec![Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(size)];
    let name = case.graph.value(id).name.clone();
    if case.graph.producers()[id.index()].is_some() {
        if !is_full(sequences, per_row) {
            let why = format!("{name:?} is computed with padding by a node before the attention");
            return Err(CaseRefusal::Inexpressible(why));
        }
        let whole = case.operand(id)?;
        let v = case.emit.fresh(name.clone(), dtype, dims);
        case.emit.push(&name, LOp::View, vec![Some(whole)], vec![Some(v)]);
        return Ok(Operand::Value(v));
    }
    let values = t.to_f32()?;
    let mut out = Vec::new();
    for (b, s) in sequences.iter().enumerate() {
        let start = b * per_row * size;
        out.extend_from_slice(&values[start..start + s.new * size]);
    }
    let v = case.emit.fresh(name, dtype, dims);
    case.emit.out.inputs.push(v);
    case.inputs.push(Tensor::from_slice([1, out.len() / size.max(1), size], &out)?);
    Ok(Operand::Value(v))
}

/// The rotary positions of the tokens that there are: a first prompt counts up from the first id of its row, a
/// continuation has its ids as they are.
fn positions(
    case: &mut Case<'_>,
    id: ValueId,
    sequences: &[CaseSequence],
    first: bool,
) -> Result<Operand, CaseRefusal> {
    let t = case.tensor(id)?;
    let ids = t.to_i64()?;
    let mut out = Vec::new();
    for (own, s) in ids.chunks(t.shape()[1].max(1)).zip(sequences) {
        match own {
            [start, ..] if first => out.extend((0..s.new).map(|i| start.saturating_add(i as i64))),
            _ => out.extend_from_slice(&own[..s.new]),
        }
    }
    let dims = vec![Extent::Fixed(1), Extent::Tokens(1)];
    let v = case.emit.fresh(case.graph.value(id).name.clone(), DType::I64, dims);
    case.emit.out.inputs.push(v);
    case.inputs.push(Tensor::from_slice([1, out.len()], &out)?);
    Ok(Operand::Value(v))
}

/// An operand as a value of the step, constant or not.
pub(super) fn step_value(case: &mut Case<'_>, id: ValueId) -> Result<Operand, CaseRefusal> {
    if case.graph.value(id).fact.constant.is_none() {
        return case.operand(id);
    }
    let t = widened(case.tensor(id)?)?;
    let v = case.fixed(id)?;
    case.emit.out.inputs.push(v);
    case.inputs.push(t);
    Ok(Operand::Value(v))
}

/// Capacity and window of a sliding cache.
fn sliding(
    case: &Case<'_>,
    node: &Node,
    op: &GroupQueryAttention,
) -> Result<Option<(usize, usize)>, CaseRefusal> {
    match (op.window_cache, op.window, input(node, at::PAST_KEY)) {
        (true, Some(window), Some(past)) => Ok(Some((case.tensor(past)?.shape()[2], window))),
        _ => Ok(None),
    }
}

/// Rows a cache keeps of `total` positions.
fn kept(total: usize, sliding: Option<(usize, usize)>) -> usize {
    sliding.map_or(total, |(capacity, window)| window_rows(total, capacity, window))
}

/// Loads the past rows of each sequence; positions a sliding cache has dropped are zero, and out of sight.
fn fill(
    case: &Case<'_>,
    node: &Node,
    slot: CacheSlot,
    sliding: Option<(usize, usize)>,
    sequences: &mut [CaseSequence],
) -> Result<(), CaseRefusal> {
    let (Some(keys), Some(values)) = (input(node, at::PAST_KEY), input(node, at::PAST_VALUE)) else {
        return Ok(());
    };
    let (keys, values) = (case.tensor(keys)?, case.tensor(values)?);
    for (b, s) in sequences.iter_mut().enumerate().filter(|(_, s)| s.past > 0) {
        let have = kept(s.past, sliding);
        s.caches.push((slot, past(keys, b, have, s.past)?, past(values, b, have, s.past)?));
    }
    Ok(())
}

/// Rows `0..have` of batch row `b`, as the last of `total` rows.
fn past(t: &Tensor, b: usize, have: usize, total: usize) -> Result<Tensor, TensorError> {
    let &[_, heads, capacity, width] = t.shape().dims() else {
        return Err(TensorError::Format(format!("a past of shape {}", t.shape())));
    };
    let row = width * t.dtype().bits() / 8;
    let mut out = vec![0u8; heads * total * row];
    for h in 0..heads {
        let from = ((b * heads + h) * capacity) * row;
        let to = (h * total + total - have) * row;
        out[to..to + have * row].copy_from_slice(&t.bytes()[from..from + have * row]);
    }
    Tensor::from_bytes(t.dtype(), [heads, total, width], out.into())
}

/// The present of all sequences; rows past a sequence's length are not specified and left zero.
pub(super) fn present(
    o: &CaseOutput,
    caches: &[Tensor],
    sliding: Option<(usize, usize)>,
) -> Result<Tensor, TensorError> {
    let &[_, heads, capacity, width] = o.shape.dims() else {
        return Err(TensorError::Format(format!("a present of shape {}", o.shape)));
    };
    let row = width * o.dtype.bits() / 8;
    let mut out = o.zeros()?;
    for (b, cache) in caches.iter().enumerate() {
        let cache = if o.dtype.is_float() {
            Tensor::from_f32(o.dtype, cache.shape().clone(), &cache.to_f32()?)?
        } else {
            cache.clone()
        };
        let total = cache.shape()[1];
        let keep = kept(total, sliding).min(capacity);
        for h in 0..heads {
            let from = (h * total + total - keep) * row;
            let to = ((b * heads + h) * capacity) * row;
            out[to..to + keep * row].copy_from_slice(&cache.bytes()[from..from + keep * row]);
        }
    }
    o.of_bytes(out)
}

fn finish(
    case: &mut Case<'_>,
    node: &Node,
    (attention, operands): (crate::lowered::Attention, Vec<Option<Operand>>),
    sequences: Vec<CaseSequence>,
    sliding: Option<(usize, usize)>,
) -> Result<(), CaseRefusal> {
    let slot = attention.slot;
    let mut batch = Batch { sequences, sources: HashMap::new() };
    let output = |i: usize| node.outputs.get(i).copied().flatten();
    let Some(y) = output(0) else {
        return Err(CaseRefusal::Inexpressible(format!("node {:?} has no output", node.name)));
    };
    let t = case.tensor(y)?;
    let (per_row, size, dtype) = (t.shape()[1], t.shape()[2], t.dtype());
    let dims = vec![Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(size)];
    if is_full(&batch.sequences, per_row) {
        let tokens = case.emit.fresh(format!("{}/tokens", node.name), dtype, dims);
        case.emit.push(&node.name, LOp::Attention(attention), operands, vec![Some(tokens)]);
        let whole = case.fixed(y)?;
        case.emit.push(&node.name, LOp::View, vec![Some(Operand::Value(tokens))], vec![Some(whole)]);
    } else {
        let value = case.emit.value(y, dtype, dims);
        case.emit.push(&node.name, LOp::Attention(attention), operands, vec![Some(value)]);
        batch.sources.insert(y, CaseSource::Tokens(0));
    }
    for (i, is_value) in [(1, false), (2, true)] {
        if let Some(id) = output(i) {
            batch.sources.insert(id, CaseSource::Cache { slot, is_value, sliding });
        }
    }
    case.batch = Some(batch);
    Ok(())
}
