//! Operands that a lowered graph needs as constants: weights, scales, shapes, axes.

use crate::{
    ir::{Graph, ValueId},
    ops::{Op, gqa::input as gqa},
};
use std::collections::BTreeSet;

/// Whether operand `index` is a parameter rather than a value of the run.
fn is_parameter(op: &Op, index: usize) -> bool {
    match op {
        Op::Range(_) | Op::ConstantOfShape(_) => true,
        Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_) => index == 0,
        Op::Reshape(_)
        | Op::Expand(_)
        | Op::Tile(_)
        | Op::TopK(_)
        | Op::Squeeze(_)
        | Op::Unsqueeze(_)
        | Op::Split(_)
        | Op::Trilu(_)
        | Op::CumSum(_)
        | Op::Reduce(_) => index == 1,
        Op::OnnxRotary(_) | Op::CausalConv(_) => (1..=2).contains(&index),
        Op::Slice(_) | Op::Clip(_) | Op::MatMul(_) | Op::Gemm(_) | Op::Norm(_) | Op::MatMulNBits(_) => {
            index >= 1
        }
        Op::GatherBlockQuantized(_) => index != 1,
        Op::ContribRotary(_) | Op::MRotary(_) => (2..=3).contains(&index),
        Op::Moe(_) | Op::SkipNorm(_) => index >= 2,
        Op::QMoe(_) => index >= 2 && index != 14,
        Op::GroupQueryAttention(_) => {
            index >= gqa::SEQLENS_K && !(gqa::POSITION_IDS..=gqa::ATTENTION_BIAS).contains(&index)
        }
        _ => false,
    }
}

/// The graph inputs that parameters are made of.
pub(super) fn demanded(graph: &Graph) -> BTreeSet<ValueId> {
    let mut wanted = BTreeSet::new();
    for node in graph.nodes.iter().rev() {
        let whole = node.outputs.iter().flatten().any(|v| wanted.contains(v));
        for (i, v) in node.inputs.iter().enumerate() {
            if let Some(v) = v.filter(|_| whole || is_parameter(&node.op, i)) {
                wanted.insert(v);
            }
        }
    }
    wanted
}
