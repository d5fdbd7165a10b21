//! What the recognisers of written-out layers share: numbers among the constants, products with constant weights, and
//! the place of the last axis.

use super::{Index, input};
use crate::{
    ir::{Attr, Attrs},
    lowered::{ConstId, Extent, LNode, LOp, LValueId, Lowered, Operand},
    ops::{
        Op,
        arith::{Binary, Variadic},
        axes::AxesSource,
        clip::Clip,
        matmul_nbits::MatMulNBits,
        quant::AccuracyLevel,
        reduce::{Reduce, Reduction},
        softmax::Softmax,
    },
};
use doyen_tensor::{DType, format::Bits};

/// Operand `i`, if it is a constant.
pub(super) fn constant(node: &LNode, i: usize) -> Option<ConstId> {
    match node.inputs.get(i) {
        Some(Some(Operand::Const(c))) => Some(*c),
        _ => None,
    }
}

/// The one number that operand `i` is, whatever its rank.
pub(super) fn number(graph: &Lowered, node: &LNode, i: usize) -> Option<f64> {
    let data = &graph.constant(constant(node, i)?).data;
    if data.shape().numel() != Ok(1) {
        return None;
    }
    let t = data.to_tensor().ok()?;
    let float = t.to_f64().ok().and_then(|v| v.first().copied());
    float.or_else(|| t.to_i64().ok()?.first().map(|&v| v as f64))
}

/// A value and a number that a commutative operator of two operands takes.
pub(super) fn with_number(graph: &Lowered, node: &LNode) -> Option<(LValueId, f64)> {
    [(0, 1), (1, 0)].into_iter().find_map(|(v, c)| Some((input(node, v)?, number(graph, node, c)?)))
}

/// The operator of a node that stands as exported.
pub(super) const fn op(node: &LNode) -> Option<&Op> {
    match &node.op {
        LOp::Op(op) => Some(op),
        _ => None,
    }
}

/// The operands of a binary operator, both values.
pub(super) fn pair(node: &LNode, wanted: Binary) -> Option<(LValueId, LValueId)> {
    match op(node) {
        Some(Op::Binary(b)) if *b == wanted => Some((input(node, 0)?, input(node, 1)?)),
        _ => None,
    }
}

/// Whether `axis`, as written, is the last one of a value.
pub(super) fn is_last(graph: &Lowered, id: LValueId, axis: i64) -> bool {
    axis == -1 || axis == graph.value(id).dims.len() as i64 - 1
}

/// What a reduction over the last axis alone reads.
pub(super) fn reduced_last(graph: &Lowered, node: &LNode, wanted: Reduction) -> Option<LValueId> {
    let Some(Op::Reduce(Reduce { reduction, axes, .. })) = op(node) else { return None };
    let x = input(node, 0)?;
    let axes = match axes {
        AxesSource::Attribute(axes) => axes.clone()?,
        AxesSource::Input => graph.constant(constant(node, 1)?).data.to_tensor().ok()?.to_i64().ok()?,
    };
    (*reduction == wanted && matches!(axes[..], [axis] if is_last(graph, x, axis))).then_some(x)
}

/// What a softmax over the last axis reads.
pub(super) fn softmax_last(graph: &Lowered, node: &LNode) -> Option<LValueId> {
    let Some(&Op::Softmax(Softmax { axis, log: false, .. })) = op(node) else { return None };
    input(node, 0).filter(|x| is_last(graph, *x, axis))
}

/// The last extent of a value, if it is a number.
pub(super) fn width(graph: &Lowered, id: LValueId) -> Option<usize> {
    match graph.value(id).dims.last() {
        Some(Extent::Fixed(n)) => Some(*n),
        _ => None,
    }
}

/// `x W`, or `x W + b`, with a constant `W` of N columns and `b [N]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Linear {
    pub(super) x: LValueId,
    pub(super) weight: Weight,
    pub(super) bias: Option<ConstId>,
}

/// How the constant of a product is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    /// Numbers `[K,N]`.
    Float(ConstId),
    /// Codes of whole blocks, `[N,K]`.
    Codes(Codes),
}

/// The constants of a MatMulNBits, with what says how to read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Codes {
    pub(super) packed: ConstId,
    pub(super) scales: ConstId,
    /// Packed along the blocks of a row.
    pub(super) zero_points: Option<ConstId>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) bits: Bits,
    pub(super) block: usize,
    pub(super) accuracy_level: AccuracyLevel,
}

impl Codes {
    /// Of a product that has whole blocks in their order and no zero points that are fractions.
    fn of(graph: &Lowered, node: &LNode, op: &MatMulNBits) -> Option<Self> {
        let absent = |i: usize| !matches!(node.inputs.get(i), Some(Some(_)));
        let zero_points = if absent(3) { None } else { Some(constant(node, 3)?) };
        let whole = zero_points.is_none_or(|z| graph.constant(z).data.dtype() == DType::U8);
        (whole && absent(4) && op.k.is_multiple_of(op.block_size)).then_some(Self {
            packed: constant(node, 1)?,
            scales: constant(node, 2)?,
            zero_points,
            rows: op.n,
            cols: op.k,
            bits: op.bits,
            block: op.block_size,
            accuracy_level: op.accuracy_level,
        })
    }
}

impl Linear {
    /// The product that a value with one reader is.
    pub(super) fn of(graph: &Lowered, index: &Index, id: LValueId) -> Option<Self> {
        let node = index.sole(graph, id)?;
        match op(node) {
            Some(Op::MatMul(_)) => {
                let (x, weight) = (input(node, 0)?, constant(node, 1)?);
                let flat = graph.constant(weight).data.shape().len() == 2;
                return flat.then_some(Self { x, weight: Weight::Float(weight), bias: None });
            }
            Some(Op::MatMulNBits(op)) => {
                let weight = Weight::Codes(Codes::of(graph, node, op)?);
                let bias = match node.inputs.get(5) {
                    Some(Some(_)) => Some(constant(node, 5)?),
                    _ => None,
                };
                return Some(Self { x: input(node, 0)?, weight, bias });
            }
            _ => {}
        }
        let Some(Op::Binary(Binary::Add)) = op(node) else { return None };
        let (product, bias) =
            [(0, 1), (1, 0)].into_iter().find_map(|(v, c)| Some((input(node, v)?, constant(node, c)?)))?;
        let own = Self::of(graph, index, product).filter(|l| l.bias.is_none())?;
        let rows = match own.weight {
            Weight::Float(w) => graph.constant(w).data.shape()[1],
            Weight::Codes(c) => c.rows,
        };
        (graph.constant(bias).data.shape().dims() == [rows]).then_some(Self { bias: Some(bias), ..own })
    }
}

/// What a node limits, with the limits: below (`-inf` where there is none) and above.
pub(super) fn limits(graph: &Lowered, node: &LNode) -> Option<(LValueId, f64, f64)> {
    match op(node)? {
        Op::Variadic(Variadic::Min) if node.inputs.len() == 2 => {
            with_number(graph, node).map(|(x, high)| (x, f64::NEG_INFINITY, high))
        }
        Op::Clip(Clip::Inputs) => {
            let bound = |i: usize, none: f64| match node.inputs.get(i) {
                Some(Some(_)) => number(graph, node, i),
                _ => Some(none),
            };
            Some((input(node, 0)?, bound(1, f64::NEG_INFINITY)?, bound(2, f64::INFINITY)?))
        }
        Op::Clip(Clip::Attributes { min, max }) => Some((input(node, 0)?, f64::from(*min), f64::from(*max))),
        _ => None,
    }
}

/// An operator made here, of the default domain.
pub(super) fn made(name: &str, attrs: &[(&str, Attr)]) -> Option<Op> {
    const OPSET: i64 = 23;
    let mut all = Attrs::default();
    for (key, value) in attrs {
        all.set(*key, value.clone());
    }
    Op::parse("", name, OPSET, &all).ok()
}
