//! A norm and the products that read what it leaves, in fewer launches than they are: nodes that follow each other and whose
//! values share no bytes, which the device asks the planner for.

use super::{Bound, Context, stream, wide};
use crate::{
    driver::{Addr, Buffer},
    error::CudaError,
    params,
    weights::{Bank, Floats, optional},
};
use doyen_graph::{
    lowered::{LNode, LOp, Lowered, Operand as Input},
    ops::Op,
};
use std::ops::Range;

/// Tokens that are routed together with the norm before at most: every block normalises a token again.
pub(crate) const ROUTED: usize = 8;

/// Runs of nodes that are tried together: a norm and products of its output, or a norm, the router and the routes.
pub(crate) fn groups(graph: &Lowered) -> Vec<Range<usize>> {
    let nodes = &graph.nodes;
    let mut found = Vec::new();
    let mut at = 0;
    while at < nodes.len() {
        let products =
            nodes[at + 1..].iter().take(params::PARTS).take_while(|n| reads(n, &nodes[at])).count();
        let mut end = at + 1 + products;
        if products == 1 {
            let views = nodes[end..].iter().take_while(|n| matches!(n.op, LOp::View)).count();
            if nodes.get(end + views).is_some_and(|n| matches!(n.op, LOp::Route(_))) {
                end += views + 1;
            }
        }
        if end > at + 1 {
            found.push(at..end);
        }
        at = end;
    }
    found
}

/// Whether `node` is a product of the first output of `norm`, which is a norm.
fn reads(node: &LNode, norm: &LNode) -> bool {
    let is_norm = matches!(norm.op, LOp::Op(Op::Norm(_) | Op::SkipNorm(_)));
    let is_product = matches!(node.op, LOp::Op(Op::MatMulNBits(_) | Op::MatMul(_)));
    let input = node.inputs.first().copied().flatten();
    let output = norm.outputs.first().copied().flatten();
    is_norm && is_product && output.is_some_and(|v| input == Some(Input::Value(v)))
}

/// A product of several: its bank, its bias, where it goes.
pub(super) type Job<'a> = (&'a Bank, Option<&'a Floats>, Addr);

/// Products as kernels take them, in pieces of `rows` rows, and how many; `None` where there are too many or their formats
/// differ.
pub(super) fn parts(
    jobs: &[Job<'_>],
    rows: usize,
) -> Result<Option<([params::Part; params::PARTS], usize)>, CudaError> {
    let Some((first, ..)) = jobs.first() else { return Ok(None) };
    let format = |bank: &Bank| -> Result<_, CudaError> {
        let w = bank.params()?;
        Ok((bank.stream(), w.cols, w.zero_kind, w.zero_float, w.scale_float, w.block_shift))
    };
    let mut end = 0;
    let mut found = Vec::with_capacity(params::PARTS);
    for (bank, bias, y) in jobs {
        if format(bank)? != format(first)? {
            return Ok(None);
        }
        end += bank.rows().div_ceil(rows) as u32;
        let (bias, bias_float) = optional(*bias);
        found.push(params::Part { w: bank.params()?, y: *y, bias, bias_float, end });
    }
    let count = found.len();
    // Places that nobody reads.
    found.resize(count.max(params::PARTS), found[0]);
    Ok(found.try_into().ok().map(|parts| (parts, count)))
}

/// Runs a group; false where its nodes are to run one by one.
///
/// # Errors
/// When a launch fails.
pub(crate) fn run(
    group: &[Bound],
    arena: &mut Buffer,
    (tokens, rows): (usize, usize),
    cx: &Context<'_>,
) -> Result<bool, CudaError> {
    let [first, others @ ..] = group else { return Ok(false) };
    let (Some(norm), false) = (first.kernel.norm(), others.is_empty()) else { return Ok(false) };
    if let [linear, route] = others
        && let (Some(linear_kernel), Some(route_kernel)) = (linear.kernel.linear(), route.kernel.route())
    {
        let io = first.io.at(arena, tokens, rows);
        let (m, normed) = (norm.rows(&io), norm.params(&io)?);
        if m > ROUTED || !norm.by_fours() {
            return Ok(false);
        }
        let logits = linear.io.at(arena, tokens, rows).output(0)?;
        let io = route.io.at(arena, tokens, rows);
        return route_kernel.router(cx, (normed, m), (linear_kernel, logits), &io);
    }
    let mut linears = Vec::with_capacity(others.len());
    let mut jobs: Vec<Job<'_>> = Vec::with_capacity(others.len());
    for bound in others {
        let Some(linear) = bound.kernel.linear() else { return Ok(false) };
        let y = bound.io.at(arena, tokens, rows).output(0)?;
        linears.push(linear);
        jobs.push((&linear.bank, linear.bias.as_ref(), y));
    }
    let mut io = first.io.at(arena, tokens, rows);
    let m = norm.rows(&io);
    let Some(linear) = linears.first() else { return Ok(false) };
    let (Some(tile), Some(kernels)) = (linear.tile(m), &linear.kernels) else { return Ok(false) };
    if let (Some(stream), true) = (kernels.stream(), linears.iter().all(|l| stream::takes(&l.bank, m))) {
        let parts = parts(&jobs, 16)?.filter(|_| norm.by_fours());
        return parts
            .map_or(Ok(false), |parts| stream.normed(cx, (norm.params(&io)?, m), parts, &linear.bank));
    }
    let Some(wide) = kernels.wide().filter(|_| tile == wide::SPLIT) else { return Ok(false) };
    let Some(split) = wide.split(cx, &jobs, m)? else { return Ok(false) };
    first.kernel.run(&mut io, cx, first.node + 1)?;
    let narrowed = cx.scratch.at(0, linear.narrow(m))?;
    wide.narrow(cx, (norm.params(&io)?.y, narrowed), (m, linear.bank.cols()))?;
    split.launch(cx, narrowed)?;
    Ok(true)
}
