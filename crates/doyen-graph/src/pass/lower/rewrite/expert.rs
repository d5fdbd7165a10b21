//! One expert's feed-forward, written out: which products it has and what stands between them.
//!
//! ```text
//! down(act(gate(x)) * up(x))      down(act(gate(x)))      down((clip(up(x)) + beta) * g * sigmoid(alpha * g)), g = min(gate(x))
//! ```
//!
//! Every value in between has one reader. Used by `dense_experts`.

use super::{
    Index, input,
    pattern::{Linear, Weight, limits, op, pair, with_number},
};
use crate::{
    lowered::{ConstId, LNode, LOp, LValueId, Lowered},
    ops::{
        Op,
        activation::{Activation, Fusion, Swiglu},
        arith::Binary,
        unary::Unary,
    },
};

/// A feed-forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Expert {
    /// Gate, or the only projection up.
    pub(super) fc1: Linear,
    /// Down.
    pub(super) fc2: Linear,
    /// The linear rows, where there is a gate.
    pub(super) fc3: Option<Linear>,
    /// Between them.
    pub(super) activation: Activation,
}

impl Expert {
    /// The feed-forward that a value is the result of.
    pub(super) fn of(graph: &Lowered, index: &Index, y: LValueId) -> Option<Self> {
        let fc2 = Linear::of(graph, index, y)?;
        let middle = index.sole(graph, fc2.x)?;
        let (activation, gate, up) = gated(graph, index, middle)
            .or_else(|| plain(middle).map(|(activation, x)| (activation, x, None)))?;
        let fc1 = Linear::of(graph, index, gate)?;
        let fc3 = match up {
            Some(up) => Some(Linear::of(graph, index, up)?),
            None => None,
        };
        let one_input = fc3.is_none_or(|l| l.x == fc1.x);
        one_input.then_some(Self { fc1, fc2, fc3, activation })
    }

    /// What it reads.
    pub(super) const fn x(&self) -> LValueId {
        self.fc1.x
    }

    /// Whether both can be rows of one bank: the same input and activation, weights of the same shape and type. Of codes, a
    /// bank has one block size and one set of types; widths may differ from projection to projection.
    pub(super) fn is_like(&self, graph: &Lowered, other: &Self) -> bool {
        let same = |a: ConstId, b: ConstId| {
            let (a, b) = (&graph.constant(a).data, &graph.constant(b).data);
            (a.dtype(), a.shape()) == (b.dtype(), b.shape())
        };
        let both = |a: Option<ConstId>, b: Option<ConstId>| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => same(a, b),
            _ => false,
        };
        let linear = |a: Linear, b: Linear| {
            let weights = match (a.weight, b.weight) {
                (Weight::Float(a), Weight::Float(b)) => same(a, b),
                (Weight::Codes(a), Weight::Codes(b)) => {
                    (a.rows, a.cols, a.bits) == (b.rows, b.cols, b.bits)
                        && same(a.packed, b.packed)
                        && same(a.scales, b.scales)
                        && both(a.zero_points, b.zero_points)
                }
                _ => false,
            };
            weights && both(a.bias, b.bias)
        };
        let kind = |l: Linear| match l.weight {
            Weight::Float(w) => (graph.constant(w).data.dtype(), None),
            Weight::Codes(c) => (graph.constant(c.scales).data.dtype(), Some((c.block, c.accuracy_level))),
        };
        let up = match (self.fc3, other.fc3) {
            (None, None) => true,
            (Some(a), Some(b)) => linear(a, b) && kind(a) == kind(self.fc1),
            _ => false,
        };
        up && self.x() == other.x()
            && self.activation == other.activation
            && kind(self.fc1) == kind(self.fc2)
            && kind(self.fc1) == kind(other.fc1)
            && linear(self.fc1, other.fc1)
            && linear(self.fc2, other.fc2)
    }
}

type Gated = (Activation, LValueId, Option<LValueId>);

/// `act(gate) * up`: the activation, gate and up.
fn gated(graph: &Lowered, index: &Index, node: &LNode) -> Option<Gated> {
    if node.op == LOp::SiluMul {
        return Some((Activation::Silu, input(node, 0)?, Some(input(node, 1)?)));
    }
    let (a, b) = pair(node, Binary::Mul)?;
    [(a, b), (b, a)].into_iter().find_map(|(activated, up)| {
        if let Some(swiglu) = clipped(graph, index, activated, up) {
            return Some(swiglu);
        }
        let (activation, gate) = plain(index.sole(graph, activated)?)?;
        let dims = |v: LValueId| &graph.value(v).dims;
        (dims(gate) == dims(up)).then_some((activation, gate, Some(up)))
    })
}

/// An activation of its own.
fn plain(node: &LNode) -> Option<(Activation, LValueId)> {
    let activation = match op(node)? {
        Op::Unary(Unary::Relu) => Activation::Relu,
        Op::Unary(Unary::GeluTanh) => Activation::Gelu,
        Op::Unary(Unary::Swish { alpha: 1.0 }) => Activation::Silu,
        _ => return None,
    };
    Some((activation, input(node, 0)?))
}

/// GPT-OSS's gate: both sides limited by one number, the sigmoid steeper, the linear side shifted.
fn clipped(graph: &Lowered, index: &Index, activated: LValueId, up: LValueId) -> Option<Gated> {
    let (g, alpha) = swish(graph, index, activated)?;
    // Read by the product and by the sigmoid.
    let (gate, low, high) = limits(graph, &graph.nodes[index.producers[g.index()]?])?;
    let shift = index.sole(graph, up)?;
    let (clipped_up, beta) = match op(shift) {
        Some(Op::Binary(Binary::Add)) => with_number(graph, shift)?,
        _ => (up, 0.0),
    };
    let (linear, from, to) = limits(graph, index.sole(graph, clipped_up)?)?;
    let dims = |v: LValueId| &graph.value(v).dims;
    let fits = low == f64::NEG_INFINITY && from == -to && to == high && high >= 0.0 && high.is_finite();
    if !fits || dims(gate) != dims(linear) || dims(activated) != dims(gate) {
        return None;
    }
    let (alpha, beta, limit) = (alpha as f32, beta as f32, high as f32);
    let swiglu = Swiglu { fusion: Fusion::Separate, alpha, beta, limit };
    Some((Activation::Swiglu(swiglu), gate, Some(linear)))
}

/// `g` and `alpha` of `g * sigmoid(alpha * g)`.
fn swish(graph: &Lowered, index: &Index, id: LValueId) -> Option<(LValueId, f64)> {
    let node = index.sole(graph, id)?;
    if let Some(Op::Unary(Unary::Swish { alpha })) = op(node) {
        return Some((input(node, 0)?, f64::from(*alpha)));
    }
    let (a, b) = pair(node, Binary::Mul)?;
    [(a, b), (b, a)].into_iter().find_map(|(g, sigmoid)| {
        let node = index.sole(graph, sigmoid)?;
        let Some(Op::Unary(Unary::Sigmoid)) = op(node) else { return None };
        let steep = input(node, 0)?;
        if steep == g {
            return Some((g, 1.0));
        }
        let node = index.sole(graph, steep)?;
        let Some(Op::Binary(Binary::Mul)) = op(node) else { return None };
        with_number(graph, node).filter(|(x, _)| *x == g)
    })
}
