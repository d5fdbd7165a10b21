//! `x/2 (1 + erf(x / sqrt(2)))` and `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, factors in any order, as one
//! activation.
//!
//! Conditions: the product has these factors and no other; every value in between has one reader; numbers are those of the
//! formula to half precision.

use super::{
    Index, input,
    pattern::{number, op, pair, with_number},
};
use crate::{
    lowered::{LNode, LOp, LValueId, Lowered, Operand},
    ops::{Op, arith::Binary, unary::Unary},
};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

pub(super) fn rewrite(graph: &mut Lowered) {
    let index = Index::new(graph);
    for n in 0..graph.nodes.len() {
        if let Some((x, function)) = pattern(graph, &index, &graph.nodes[n]) {
            let node = &mut graph.nodes[n];
            node.op = LOp::Op(Op::Unary(function));
            node.inputs = vec![Some(Operand::Value(x))];
        }
    }
}

/// Whether a number is another, to the rounding of half precision.
fn is(found: f64, wanted: f64) -> bool {
    (found - wanted).abs() <= wanted.abs() / 2048.0
}

fn pattern(graph: &Lowered, index: &Index, node: &LNode) -> Option<(LValueId, Unary)> {
    let mut product = Product { values: Vec::new(), factor: 1.0 };
    product.collect(graph, index, node)?;
    let &[a, b] = product.values.as_slice() else { return None };
    if !is(product.factor, 0.5) {
        return None;
    }
    let y = node.outputs.first().copied().flatten()?;
    [(a, b), (b, a)].into_iter().find_map(|(x, gate)| {
        let sum = index.sole(graph, gate)?;
        let Some(Op::Binary(Binary::Add)) = op(sum) else { return None };
        let (inner, one) = with_number(graph, sum)?;
        let function = index.sole(graph, inner)?;
        let argument = input(function, 0)?;
        let found = match op(function)? {
            Op::Unary(Unary::Erf) if by_root_two(graph, index, argument, x) => Unary::Gelu,
            Op::Unary(Unary::Tanh) if cubic(graph, index, argument, x)? => Unary::GeluTanh,
            _ => return None,
        };
        (one == 1.0 && graph.value(x).dims == graph.value(y).dims).then_some((x, found))
    })
}

/// The factors of a product of products and quotients by numbers.
struct Product {
    values: Vec<LValueId>,
    factor: f64,
}

impl Product {
    fn collect(&mut self, graph: &Lowered, index: &Index, node: &LNode) -> Option<()> {
        match op(node)? {
            Op::Binary(Binary::Mul) => {
                if let Some((x, factor)) = with_number(graph, node) {
                    self.factor *= factor;
                    return self.operand(graph, index, x);
                }
                let (a, b) = pair(node, Binary::Mul)?;
                self.operand(graph, index, a)?;
                self.operand(graph, index, b)
            }
            Op::Binary(Binary::Div) => {
                self.factor /= number(graph, node, 1)?;
                self.operand(graph, index, input(node, 0)?)
            }
            _ => None,
        }
    }

    fn operand(&mut self, graph: &Lowered, index: &Index, id: LValueId) -> Option<()> {
        const MOST: usize = 2;
        let inner = index.sole(graph, id).filter(|n| {
            matches!(op(n), Some(Op::Binary(Binary::Mul)))
                || (matches!(op(n), Some(Op::Binary(Binary::Div))) && number(graph, n, 1).is_some())
        });
        match inner {
            Some(node) => self.collect(graph, index, node),
            None if self.values.len() < MOST => {
                self.values.push(id);
                Some(())
            }
            None => None,
        }
    }
}

/// `x / sqrt(2)`.
fn by_root_two(graph: &Lowered, index: &Index, id: LValueId, x: LValueId) -> bool {
    let Some(node) = index.sole(graph, id) else { return false };
    match op(node) {
        Some(Op::Binary(Binary::Div)) => {
            input(node, 0) == Some(x) && number(graph, node, 1).is_some_and(|n| is(n, SQRT_2))
        }
        Some(Op::Binary(Binary::Mul)) => {
            with_number(graph, node).is_some_and(|(v, n)| v == x && is(n, FRAC_1_SQRT_2))
        }
        _ => false,
    }
}

/// `sqrt(2/pi) (x + 0.044715 x^3)`.
fn cubic(graph: &Lowered, index: &Index, id: LValueId, x: LValueId) -> Option<bool> {
    let outer = index.sole(graph, id)?;
    let Some(Op::Binary(Binary::Mul)) = op(outer) else { return None };
    let (sum, slope) = with_number(graph, outer)?;
    let (a, b) = pair(index.sole(graph, sum)?, Binary::Add)?;
    let term = index.sole(graph, if a == x { b } else { a })?;
    let Some(Op::Binary(Binary::Mul)) = op(term) else { return None };
    let (power, factor) = with_number(graph, term)?;
    let cube = index.sole(graph, power)?;
    let cubed = match op(cube)? {
        Op::Binary(Binary::Pow) => input(cube, 0) == Some(x) && number(graph, cube, 1) == Some(3.0),
        Op::Binary(Binary::Mul) => {
            let (c, d) = pair(cube, Binary::Mul)?;
            let square = index.sole(graph, if c == x { d } else { c })?;
            (c == x || d == x) && pair(square, Binary::Mul) == Some((x, x))
        }
        _ => false,
    };
    let root = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
    Some((a == x || b == x) && cubed && is(slope, root) && is(factor, 0.044_715))
}
