//! LinearAttention and CausalConvWithState in a case: each batch row is a sequence of all its tokens, its state before the
//! step is the past given.

use super::{
    Case, CaseOutput, CaseRefusal, CaseSequence, CaseSource,
    attention::{Batch, step_value},
};
use crate::{
    ir::{Node, ValueId},
    lowered::{CausalConv, Extent, LOp, LValueId, Operand, State, StateId},
    ops::{
        causal_conv::{self, input as conv},
        linear_attention::{self, input as at},
    },
    pass::lower::recurrent::{Widths, attention, emit_convolution},
};
use doyen_tensor::{DType, Tensor, TensorError};

fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

fn refuse(node: &Node, why: &str) -> CaseRefusal {
    CaseRefusal::Inexpressible(format!("node {:?}: {why}", node.name))
}

/// Lowers a LinearAttention.
pub(super) fn linear_attention(
    case: &mut Case<'_>,
    node: &Node,
    op: &linear_attention::LinearAttention,
) -> Result<(), CaseRefusal> {
    let width = |case: &Case<'_>, i: usize| -> Result<Option<usize>, CaseRefusal> {
        input(node, i).map(|id| case.tensor(id).map(|t| t.shape()[2])).transpose()
    };
    let required = |w: Option<usize>| w.ok_or_else(|| refuse(node, "an input is missing"));
    let widths = Widths {
        query: required(width(case, at::QUERY)?)?,
        key: required(width(case, at::KEY)?)?,
        value: required(width(case, at::VALUE)?)?,
        decay: width(case, at::DECAY)?.filter(|_| op.rule.decays()),
        beta: width(case, at::BETA)?.filter(|_| op.rule.corrects()),
    };
    let mut value =
        |i: usize, read: bool| input(node, i).filter(|_| read).map(|id| step_value(case, id)).transpose();
    let operands = vec![
        value(at::QUERY, true)?,
        value(at::KEY, true)?,
        value(at::VALUE, true)?,
        value(at::DECAY, op.rule.decays())?,
        value(at::BETA, op.rule.corrects())?,
    ];
    let lowered = attention(op, &widths, StateId(case.emit.out.states.len() as u32));
    let dims = vec![lowered.kv_heads, lowered.key_size, lowered.value_size];
    let y = begin(case, node, (at::PAST_STATE, dims), 1, false)?;
    let out = tokens(case, node, y)?;
    case.emit.push(&node.name, LOp::LinearAttention(lowered), operands, vec![Some(out)]);
    whole(case, node, y, out)
}

/// Lowers a CausalConvWithState.
pub(super) fn causal_conv(
    case: &mut Case<'_>,
    node: &Node,
    op: &causal_conv::CausalConv,
) -> Result<(), CaseRefusal> {
    let mut parameter = |i: usize| {
        input(node, i)
            .map(|id| case.emit.constant(id).ok_or_else(|| refuse(node, "a parameter is not constant")))
            .transpose()
    };
    let (weight, bias) = (parameter(conv::WEIGHT)?, parameter(conv::BIAS)?);
    let (Some(weight), Some(w), Some(x)) = (weight, input(node, conv::WEIGHT), input(node, conv::INPUT))
    else {
        return Err(refuse(node, "an input is missing"));
    };
    let shape = case.tensor(w)?.shape().clone();
    let lowered = CausalConv {
        state: StateId(case.emit.out.states.len() as u32),
        channels: shape[0],
        taps: shape[2],
        dilation: op.dilation,
        silu: op.silu,
    };
    let x = step_value(case, x)?;
    let dims = vec![lowered.held(), lowered.channels];
    let length_axis = if op.channels_last { 1 } else { 2 };
    let y = begin(case, node, (conv::PAST_STATE, dims), length_axis, !op.channels_last)?;
    let out = case.fixed(y)?;
    emit_convolution(&mut case.emit, node, (lowered, op.channels_last), [x, weight], bias, out);
    Ok(())
}

/// Makes the state and the sequences; the node's first output.
fn begin(
    case: &mut Case<'_>,
    node: &Node,
    (past, dims): (usize, Vec<usize>),
    length_axis: usize,
    swapped: bool,
) -> Result<ValueId, CaseRefusal> {
    let output = |i: usize| node.outputs.get(i).copied().flatten();
    let y = output(0).ok_or_else(|| refuse(node, "has no output"))?;
    let shape = case.tensor(y)?.shape().clone();
    let (rows, new) = (shape[0], shape[length_axis]);
    let id = StateId(case.emit.out.states.len() as u32);
    let given = input(node, past).map(|p| case.tensor(p).cloned()).transpose()?;
    let mut batch = case.batch.take().unwrap_or_else(|| {
        let sequence = CaseSequence { new, past: 0, caches: Vec::new(), states: Vec::new() };
        Batch { sequences: vec![sequence; rows], ..Batch::default() }
    });
    let alike = batch.sequences.len() == rows && batch.sequences.iter().all(|s| s.new == new);
    if !alike {
        return Err(refuse(node, "its batch is not that of another node with state"));
    }
    if let Some(given) = given {
        let values = given.to_f32()?;
        let size = values.len() / rows.max(1);
        for (s, own) in batch.sequences.iter_mut().zip(values.chunks(size.max(1))) {
            s.states.push((id, Tensor::from_slice(dims.clone(), &swap(own, &dims, swapped))?));
        }
    }
    if let Some(present) = output(1) {
        batch.sources.insert(present, CaseSource::State { state: id, swapped });
    }
    case.batch = Some(batch);
    case.emit.out.states.push(State { dims, past: String::new(), present: String::new() });
    Ok(y)
}

/// A state of extents `dims` from its exported order, which for `swapped` has the two axes the other way round.
fn swap(values: &[f32], dims: &[usize], swapped: bool) -> Vec<f32> {
    match (swapped, dims) {
        (true, &[rows, cols]) => (0..rows * cols).map(|i| values[i % cols * rows + i / cols]).collect(),
        _ => values.to_vec(),
    }
}

/// A value `[1, tokens, size]` for the node's result `[batch, tokens, size]`.
fn tokens(case: &mut Case<'_>, node: &Node, y: ValueId) -> Result<LValueId, CaseRefusal> {
    let size = case.tensor(y)?.shape()[2];
    let dims = vec![Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(size)];
    Ok(case.emit.fresh(format!("{}/tokens", node.name), DType::F32, dims))
}

/// The exported result as a view of the tokens, which lie as it does.
fn whole(case: &mut Case<'_>, node: &Node, y: ValueId, tokens: LValueId) -> Result<(), CaseRefusal> {
    let out = case.fixed(y)?;
    case.emit.push(&node.name, LOp::View, vec![Some(Operand::Value(tokens))], vec![Some(out)]);
    Ok(())
}

/// The present of all sequences.
pub(super) fn present(
    o: &CaseOutput,
    states: &[Vec<Tensor>],
    id: StateId,
    swapped: bool,
) -> Result<Tensor, TensorError> {
    let mut all = Vec::new();
    for own in states {
        let state = own.get(id.index()).ok_or_else(|| TensorError::Format("a state is missing".into()))?;
        let (values, dims) = (state.to_f32()?, state.shape().dims());
        let back: Vec<usize> = dims.iter().rev().copied().collect();
        all.extend(swap(&values, if swapped { &back } else { dims }, swapped));
    }
    Tensor::from_f32(o.dtype, o.shape.clone(), &all)
}
