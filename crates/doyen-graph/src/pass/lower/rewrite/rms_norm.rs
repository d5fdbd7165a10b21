//! `x * rsqrt(mean(x^2) + eps) * gamma`, written out, as one RMS normalisation.
//!
//! Conditions: the mean is over the last axis alone and keeps it; square and product read the same `x`; gamma is a constant
//! `[n]`, n the last extent; every value in between has one reader. The inverse root may be Reciprocal or Div of Sqrt, or
//! Pow to -0.5, and multiply, or Sqrt divide.

use super::{
    Index, input,
    pattern::{constant, made, number, op, pair, reduced_last, width, with_number},
};
use crate::{
    ir::Attr,
    lowered::{ConstId, LNode, LOp, LValueId, Lowered, Operand},
    ops::{Op, arith::Binary, reduce::Reduction, unary::Unary},
};

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    for n in 0..graph.nodes.len() {
        let Some((x, gamma, epsilon)) = pattern(graph, &index, &graph.nodes[n]) else { continue };
        let attrs = [("epsilon", Attr::Float(epsilon)), ("axis", Attr::Int(-1))];
        let Some(norm) = made("RMSNormalization", &attrs) else { continue };
        let node = &mut graph.nodes[n];
        node.op = LOp::Op(norm);
        node.inputs = vec![Some(Operand::Value(x)), Some(Operand::Const(gamma))];
    }
}

fn pattern(graph: &Lowered, index: &Index, node: &LNode) -> Option<(LValueId, ConstId, f32)> {
    let Some(Op::Binary(Binary::Mul)) = op(node) else { return None };
    let (scaled, gamma) =
        [(0, 1), (1, 0)].into_iter().find_map(|(v, c)| Some((input(node, v)?, constant(node, c)?)))?;
    let product = index.sole(graph, index.unviewed(graph, scaled))?;
    let (x, epsilon) = unit(graph, index, product)?;
    let n = width(graph, x)?;
    let dims = |v: LValueId| &graph.value(v).dims;
    let shaped = graph.constant(gamma).data.shape().dims() == [n] && dims(node.outputs[0]?) == dims(x);
    shaped.then_some((x, gamma, epsilon))
}

/// `x` and epsilon of `x * rsqrt(mean(x^2) + eps)`.
fn unit(graph: &Lowered, index: &Index, node: &LNode) -> Option<(LValueId, f32)> {
    if let Some((x, root)) = pair(node, Binary::Div) {
        return mean_square(graph, index, of(graph, index, root, Unary::Sqrt)?, x).map(|e| (x, e));
    }
    let (a, b) = pair(node, Binary::Mul)?;
    [(a, b), (b, a)].into_iter().find_map(|(x, inverse)| {
        let node = index.sole(graph, inverse)?;
        let inside = match op(node)? {
            Op::Unary(Unary::Reciprocal) => of(graph, index, input(node, 0)?, Unary::Sqrt)?,
            Op::Binary(Binary::Div) if number(graph, node, 0)? == 1.0 => {
                of(graph, index, input(node, 1)?, Unary::Sqrt)?
            }
            Op::Binary(Binary::Pow) if number(graph, node, 1)? == -0.5 => input(node, 0)?,
            _ => return None,
        };
        mean_square(graph, index, inside, x).map(|e| (x, e))
    })
}

/// What a function is applied to.
fn of(graph: &Lowered, index: &Index, id: LValueId, wanted: Unary) -> Option<LValueId> {
    let node = index.sole(graph, id)?;
    matches!(op(node), Some(Op::Unary(u)) if *u == wanted).then(|| input(node, 0))?
}

/// The epsilon of `mean(x^2) + eps`.
fn mean_square(graph: &Lowered, index: &Index, id: LValueId, x: LValueId) -> Option<f32> {
    let sum = index.sole(graph, id)?;
    let Some(Op::Binary(Binary::Add)) = op(sum) else { return None };
    let (mean, epsilon) = with_number(graph, sum)?;
    let square = reduced_last(graph, index.sole(graph, mean)?, Reduction::Mean)?;
    let kept = graph.value(mean).dims.len() == graph.value(x).dims.len() && width(graph, mean) == Some(1);
    let square = index.sole(graph, square)?;
    let squared = match op(square)? {
        Op::Binary(Binary::Mul) => input(square, 0) == Some(x) && input(square, 1) == Some(x),
        Op::Binary(Binary::Pow) => input(square, 0) == Some(x) && number(graph, square, 1) == Some(2.0),
        _ => false,
    };
    (kept && squared && epsilon >= 0.0).then_some(epsilon as f32)
}
