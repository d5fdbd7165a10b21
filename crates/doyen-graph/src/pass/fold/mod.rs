//! Constant folding: a node whose inputs are all constant becomes constants.
//!
//! Operators that only move elements become views over the same bytes ([`view`], chosen by `rule`); everything else
//! runs on the scalar reference and is materialised, and [`Folded`] says how many bytes that made. Runs before
//! anything classifies a weight, so that nobody has to look through a Reshape or a Cast.

mod rule;
pub mod view;

use crate::{
    ir::{Constant, Fact, Graph, GraphError, Node},
    ops::{Op, OpError},
};
use doyen_tensor::{ByteCount, Tensor, TensorError};
use std::sync::Arc;

/// How many bytes folding may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoldLimits {
    /// For one node, its copied inputs included.
    pub node: ByteCount,
    /// For the whole graph.
    pub total: ByteCount,
}

impl Default for FoldLimits {
    /// The largest embedding in use, cast to float32, is near 5 GiB.
    fn default() -> Self {
        Self { node: ByteCount(8 << 30), total: ByteCount(64 << 30) }
    }
}

/// What folding did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Folded {
    /// Nodes that became views.
    pub views: usize,
    /// Nodes that were evaluated.
    pub evaluated: usize,
    /// Bytes that evaluation made and the graph holds beside the file's.
    pub made: ByteCount,
}

/// Folds constants, in one pass over the nodes (which must be in topological order).
///
/// # Errors
/// Names the node that cannot be evaluated, or whose result would exceed a limit.
pub fn fold(graph: &mut Graph, limits: FoldLimits) -> Result<Folded, GraphError> {
    let mut report = Folded::default();
    let mut kept = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes) {
        if !foldable(graph, &node) {
            kept.push(node);
            continue;
        }
        let results = fold_node(graph, &node, limits, &mut report).map_err(|e| node.error(e))?;
        for (value, constant) in node.outputs.iter().zip(results) {
            if let Some(id) = value {
                graph.value_mut(*id).fact = Fact::from(Arc::new(constant));
            }
        }
    }
    graph.nodes = kept;
    Ok(report)
}

fn foldable(graph: &Graph, node: &Node) -> bool {
    node.op != Op::Unknown && node.inputs.iter().flatten().all(|&v| graph.value(v).fact.constant.is_some())
}

fn fold_node(
    graph: &Graph,
    node: &Node,
    limits: FoldLimits,
    report: &mut Folded,
) -> Result<Vec<Constant>, OpError> {
    let facts = graph.input_facts(node);
    let declared = node.op.infer_outputs(&facts, node.outputs.len())?;
    if let Some(views) = rule::as_views(node, &facts, &declared)? {
        report.views += 1;
        return Ok(views);
    }
    let made = made_bytes(&facts, &declared)?;
    check(made, limits.node, "this node")?;
    report.made += made;
    check(report.made, limits.total, "this node, together with those before it,")?;
    let inputs = facts
        .iter()
        .map(|f| f.and_then(|f| f.constant.as_ref()).map(|c| c.to_tensor()).transpose())
        .collect::<Result<Vec<Option<Tensor>>, TensorError>>()?;
    let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
    report.evaluated += 1;
    let results = node.op.eval(&inputs, node.outputs.len())?;
    if results.len() < node.outputs.iter().rposition(Option::is_some).map_or(0, |i| i + 1) {
        return Err(OpError::other(format!("{} results for {} outputs", results.len(), node.outputs.len())));
    }
    Ok(results.into_iter().map(Constant::from).collect())
}

/// Bytes of the results, and of the inputs that must be gathered to compute them.
fn made_bytes(inputs: &[Option<&Fact>], outputs: &[Fact]) -> Result<ByteCount, OpError> {
    let mut sum = ByteCount(0);
    for fact in outputs {
        if let (Some(dtype), Some(shape)) = (fact.dtype, fact.concrete_shape()) {
            sum += ByteCount(shape.bytes(dtype)? as u64);
        }
    }
    for c in inputs.iter().flatten().filter_map(|f| f.constant.as_ref()) {
        if c.as_tensor().is_none() {
            sum += ByteCount(c.shape().bytes(c.dtype())? as u64);
        }
    }
    Ok(sum)
}

fn check(made: ByteCount, limit: ByteCount, what: &str) -> Result<(), OpError> {
    if made > limit {
        return Err(OpError::other(format!(
            "folding {what} would make {made} of constants, more than the limit of {limit}; \
             store the result as an initializer instead"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
