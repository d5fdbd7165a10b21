//! The operator and the operands of a bank of experts, each expert's constants where they lie. Used by `dense_experts`.

use super::{
    expert::Expert,
    pattern::{Codes, Linear, Weight},
};
use crate::{
    ir::{Constant, Part},
    lowered::{ConstId, Lowered},
    ops::{
        Op,
        activation::Activation,
        moe::Moe,
        qmoe::{Kind, Prepacked, QMoe},
        quant::Block,
        route::Routing,
    },
};
use doyen_tensor::format::Bits;

/// Operands from the operator's weights on, with their names below the node's.
type Operands = Vec<Option<(&'static str, Constant)>>;

/// A bank of experts that are all like the first.
pub(super) fn of(graph: &Lowered, experts: &[Expert], k: usize) -> Option<(Op, Operands)> {
    // How the operator itself would route plays no part: ids and weights are operands.
    let routing = Routing { k, normalize: false, sparse_mixer: false, topk_softmax_always: false };
    let first = experts.first()?;
    match first.fc1.weight {
        Weight::Float(_) => {
            Some((Op::Moe(Moe { routing, activation: first.activation }), floats(graph, experts)?))
        }
        Weight::Codes(codes) => {
            Some((Op::QMoe(quantized(first, codes, routing, first.activation)), codes_of(graph, experts)?))
        }
    }
}

fn quantized(first: &Expert, codes: Codes, routing: Routing, activation: Activation) -> QMoe {
    let bits = |l: &Linear| match l.weight {
        Weight::Codes(c) => c.bits,
        Weight::Float(_) => Bits::B4,
    };
    QMoe {
        routing,
        activation,
        kind: Kind::Int,
        fc1_bits: codes.bits,
        fc2_bits: bits(&first.fc2),
        fc3_bits: first.fc3.as_ref().map_or(codes.bits, bits),
        block: Block::Blocks(codes.block),
        weights_prepacked: Prepacked::Raw,
        accuracy_level: codes.accuracy_level,
    }
}

const PROJECTIONS: [fn(&Expert) -> Option<Linear>; 3] = [|e| Some(e.fc1), |e| Some(e.fc2), |e| e.fc3];

/// MoE's weights and biases: `[K,N]` as `[E,N,K]`, `[N]` as `[E,N]`.
fn floats(graph: &Lowered, experts: &[Expert]) -> Option<Operands> {
    const NAMES: [[&str; 2]; 3] = [["fc1", "fc1_bias"], ["fc2", "fc2_bias"], ["fc3", "fc3_bias"]];
    let mut out = Vec::new();
    for (of, [weights, biases]) in PROJECTIONS.into_iter().zip(NAMES) {
        let weight = |e: &Expert| match of(e)?.weight {
            Weight::Float(w) => Some(w),
            Weight::Codes(_) => None,
        };
        stack(&mut out, (graph, experts), weights, weight, transposed)?;
        stack(&mut out, (graph, experts), biases, |e| of(e)?.bias, transposed)?;
    }
    Some(out)
}

/// QMoE's weights, scales and biases, then its zero points: `[N,blocks,bytes]` as `[E,N,blocks*bytes]`, the others by rows.
fn codes_of(graph: &Lowered, experts: &[Expert]) -> Option<Operands> {
    const NAMES: [[&str; 4]; 3] = [
        ["fc1", "fc1_scales", "fc1_bias", "fc1_zero_points"],
        ["fc2", "fc2_scales", "fc2_bias", "fc2_zero_points"],
        ["fc3", "fc3_scales", "fc3_bias", "fc3_zero_points"],
    ];
    let (mut out, mut zero_points) = (Vec::new(), Vec::new());
    for (of, [weights, scales, biases, zeros]) in PROJECTIONS.into_iter().zip(NAMES) {
        let codes = |e: &Expert| match of(e)?.weight {
            Weight::Codes(c) => Some(c),
            Weight::Float(_) => None,
        };
        let rows = experts.first().and_then(codes).map_or(0, |c| c.rows);
        let by_rows = |c: &Constant| flattened(c, rows);
        stack(&mut out, (graph, experts), weights, |e| Some(codes(e)?.packed), by_rows)?;
        stack(&mut out, (graph, experts), scales, |e| Some(codes(e)?.scales), by_rows)?;
        stack(&mut out, (graph, experts), biases, |e| of(e)?.bias, transposed)?;
        stack(&mut zero_points, (graph, experts), zeros, |e| codes(e)?.zero_points, by_rows)?;
    }
    out.extend(zero_points);
    Some(out)
}

/// Adds what `pick` finds of every expert, side by side along a new first axis; nothing where the experts have none.
fn stack(
    out: &mut Operands,
    (graph, experts): (&Lowered, &[Expert]),
    name: &'static str,
    pick: impl Fn(&Expert) -> Option<ConstId>,
    part: impl Fn(&Constant) -> Option<Part>,
) -> Option<()> {
    let all: Option<Vec<ConstId>> = experts.iter().map(pick).collect();
    out.push(match all {
        None => None,
        Some(all) => {
            let dtype = graph.constant(*all.first()?).data.dtype();
            let parts = all.iter().map(|c| part(&graph.constant(*c).data)).collect::<Option<Vec<_>>>()?;
            Some((name, Constant::from_parts(dtype, 0, parts).ok()?))
        }
    });
    Some(())
}

/// A constant with its axes in reverse, behind an axis of one.
fn transposed(c: &Constant) -> Option<Part> {
    let [part] = c.parts() else { return None };
    let (mut shape, mut strides) = (vec![1], vec![part.shape.numel().ok()?]);
    shape.extend(part.shape.iter().rev());
    strides.extend(part.strides.iter().rev());
    Some(Part { bytes: part.bytes.clone(), offset: part.offset, shape: shape.into(), strides })
}

/// A contiguous constant as `[1,rows,..]`.
fn flattened(c: &Constant, rows: usize) -> Option<Part> {
    let tensor = c.as_tensor()?;
    let all = tensor.shape().numel().ok()?;
    let cols = all.checked_div(rows).filter(|cols| cols * rows == all)?;
    let bytes = tensor.shared_bytes().clone();
    Some(Part { bytes, offset: 0, shape: [1, rows, cols].into(), strides: vec![all, cols, 1] })
}
