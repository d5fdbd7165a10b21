//! LinearAttention and CausalConvWithState as nodes that own a state of fixed size.
//!
//! Lowered, both work token by token on `[1, T, channels]`; where the export has channels first, transposes stand around
//! the convolution, which the rewrites remove together with the export's own.

use super::{
    LowerError,
    attention::{constant, tokens},
    decoder::Decoder,
    emit::Emitter,
    ports::Role,
    spec::StatePorts,
};
use crate::{
    ir::{Node, ValueId},
    lowered::{CausalConv, Extent, LOp, LValueId, LinearAttention, Operand, State, StateId},
    ops::{
        Op, TokenAxis, Trace,
        causal_conv::{self, input as conv},
        linear_attention::{self, input as at},
        transpose::Transpose,
    },
};

/// An optional input of a node.
fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

/// Lowers a LinearAttention.
pub(super) fn linear_attention(
    d: &mut Decoder<'_>,
    node: &Node,
    op: &linear_attention::LinearAttention,
) -> Result<(), LowerError> {
    let mut operand = |index: usize, name: &str| tokens(d, node, index, name);
    let (query, key, value) =
        (operand(at::QUERY, "query")?, operand(at::KEY, "key")?, operand(at::VALUE, "value")?);
    let decay = if op.rule.decays() { operand(at::DECAY, "decay")? } else { None };
    let beta = if op.rule.corrects() { operand(at::BETA, "beta")? } else { None };
    let (Some(query), Some(key), Some(value)) = (query, key, value) else {
        return Err(LowerError::node(node, "needs a query, a key and a value"));
    };
    let width = |gate: Option<(Operand, usize)>| gate.map(|(_, width)| width);
    let widths =
        Widths { query: query.1, key: key.1, value: value.1, decay: width(decay), beta: width(beta) };
    let y = output(node)?;
    let lowered = attention(op, &widths, StateId(d.emit.out.states.len() as u32));
    let dims = vec![lowered.kv_heads, lowered.key_size, lowered.value_size];
    state(d, node, at::PAST_STATE, dims)?;
    let out = d.output(node, y, Trace::Tokens(TokenAxis { axis: 1, inner: 1 }))?;
    let first = |o: Option<(Operand, usize)>| o.map(|(o, _)| o);
    let operands = vec![Some(query.0), Some(key.0), Some(value.0), first(decay), first(beta)];
    d.emit.push(&node.name, LOp::LinearAttention(lowered), operands, vec![Some(out)]);
    Ok(())
}

/// Widths of a token of each operand.
pub(super) struct Widths {
    pub(super) query: usize,
    pub(super) key: usize,
    pub(super) value: usize,
    pub(super) decay: Option<usize>,
    pub(super) beta: Option<usize>,
}

/// The lowered operator on operands of these widths, which the operator has checked.
pub(super) fn attention(
    op: &linear_attention::LinearAttention,
    widths: &Widths,
    state: StateId,
) -> LinearAttention {
    let key_size = widths.query / op.q_heads;
    LinearAttention {
        state,
        q_heads: op.q_heads,
        key_heads: widths.key / key_size.max(1),
        kv_heads: op.kv_heads,
        key_size,
        value_size: widths.value / op.kv_heads,
        rule: op.rule,
        scale: op.scale_for(key_size),
        decay_per_key: widths.decay.is_some_and(|w| w != op.kv_heads),
        shared_beta: widths.beta.is_some_and(|w| w != op.kv_heads),
    }
}

/// Lowers a CausalConvWithState.
pub(super) fn causal_conv(
    d: &mut Decoder<'_>,
    node: &Node,
    op: &causal_conv::CausalConv,
) -> Result<(), LowerError> {
    let (Some(weight), bias) = (constant(d, node, conv::WEIGHT)?, constant(d, node, conv::BIAS)?) else {
        return Err(LowerError::node(node, "input weight is missing"));
    };
    let x = input(node, conv::INPUT).ok_or_else(|| LowerError::node(node, "input input is missing"))?;
    let Some(Operand::Value(x)) = d.operand(node, conv::INPUT, x)? else {
        return Err(LowerError::node(node, "input input: expected a value of the run"));
    };
    let lowered = convolution(d, op, weight, StateId(d.emit.out.states.len() as u32))
        .map_err(|why| LowerError::node(node, why))?;
    let axis = if op.channels_last { 1 } else { 2 };
    let dims = &d.emit.out.value(x).dims;
    if dims.get(axis) != Some(&Extent::Tokens(1)) || dims.first() != Some(&Extent::Fixed(1)) {
        return Err(LowerError::node(
            node,
            format!("input input: expected the tokens along axis {axis}, found {dims:?}"),
        ));
    }
    state(d, node, conv::PAST_STATE, vec![lowered.held(), lowered.channels])?;
    let out = d.output(node, output(node)?, Trace::Tokens(TokenAxis { axis, inner: 1 }))?;
    let operands = [Operand::Value(x), weight];
    emit_convolution(&mut d.emit, node, (lowered, op.channels_last), operands, bias, out);
    Ok(())
}

/// The lowered operator with this weight, whose extents the operator has checked.
fn convolution(
    d: &Decoder<'_>,
    op: &causal_conv::CausalConv,
    weight: Operand,
    state: StateId,
) -> Result<CausalConv, String> {
    let Operand::Const(c) = weight else { return Err("input weight: expected a constant".into()) };
    let shape = d.emit.out.constant(c).data.shape();
    match shape.dims() {
        &[channels, 1, taps] if taps > 0 => {
            Ok(CausalConv { state, channels, taps, dilation: op.dilation, silu: op.silu })
        }
        _ => Err(format!("input weight: expected [channels, 1, taps], found {shape}")),
    }
}

/// Pushes the convolution, between transposes where channels come first.
pub(super) fn emit_convolution(
    emit: &mut Emitter<'_>,
    node: &Node,
    (op, channels_last): (CausalConv, bool),
    [x, weight]: [Operand; 2],
    bias: Option<Operand>,
    out: LValueId,
) {
    let name = &node.name;
    if channels_last {
        emit.push(name, LOp::CausalConv(op), vec![Some(x), Some(weight), bias], vec![Some(out)]);
        return;
    }
    let swap = || LOp::Op(Op::Transpose(Transpose { perm: Some(vec![0, 2, 1]) }));
    let mut value = |what: &str| {
        let whole = emit.out.value(out);
        let (dtype, mut dims) = (whole.declared, whole.dims.clone());
        dims.swap(1, 2);
        emit.fresh(format!("{name}/{what}"), dtype, dims)
    };
    let (x_last, y_last) = (value("input"), value("output"));
    emit.push(&format!("{name}/input"), swap(), vec![Some(x)], vec![Some(x_last)]);
    let operands = vec![Some(Operand::Value(x_last)), Some(weight), bias];
    emit.push(name, LOp::CausalConv(op), operands, vec![Some(y_last)]);
    emit.push(&format!("{name}/output"), swap(), vec![Some(Operand::Value(y_last))], vec![Some(out)]);
}

fn output(node: &Node) -> Result<ValueId, LowerError> {
    node.outputs.first().copied().flatten().ok_or_else(|| LowerError::node(node, "has no output"))
}

/// Takes the state that the node reads as `past` and returns as its second output.
fn state(d: &mut Decoder<'_>, node: &Node, past: usize, dims: Vec<usize>) -> Result<(), LowerError> {
    let refuse = |reason: &str| LowerError::node(node, format!("past_state: {reason}"));
    let past = input(node, past).ok_or_else(|| refuse("is missing: the node keeps no state"))?;
    let Some(&Role::State(own)) = d.ports.roles.get(&past) else {
        return Err(refuse(&format!("{:?} is not a state input of the graph", d.graph.value(past).name)));
    };
    let present = node.outputs.get(1).copied().flatten();
    if present.and_then(|p| d.ports.present_states.get(&p)) != Some(&own) {
        return Err(refuse("does not go to the state output that belongs to it"));
    }
    if !d.caches.insert(own) {
        return Err(LowerError::node(node, "its state already belongs to another node"));
    }
    if let StatePorts::Fixed { past, present } = &d.spec.states[own].ports {
        d.emit.out.states.push(State { dims, past: past.clone(), present: present.clone() });
    }
    Ok(())
}
