//! What is not proven to treat each token alike is refused, naming the node.

use super::build::{Build, HEAD, HEADS, HIDDEN, KV_HEADS, Lengths, genai_llama, hybrid};
use crate::{
    check::check,
    ir::{Attr, Graph, ValueId},
    pass::{
        dead::dead,
        fold::{FoldLimits, fold},
        lower::{LowerSpec, StatePair, StatePorts, lower},
    },
};
use doyen_tensor::{DType, Tensor};

pub(super) fn refusal((mut graph, spec): (Graph, LowerSpec)) -> String {
    check(&mut graph).unwrap();
    fold(&mut graph, FoldLimits::default()).unwrap();
    dead(&mut graph);
    lower(&graph, &spec).expect_err("lowers").to_string()
}

/// A layer whose packed query is changed by `change` before the attention.
fn with(change: impl FnOnce(&mut Build, ValueId) -> ValueId) -> (Graph, LowerSpec) {
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let x = change(&mut b, e);
    let qkv = b.matmul("qkv.0", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    b.head(o)
}

#[track_caller]
pub(super) fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn sums_over_tokens() {
    let text = refusal(with(|b, e| {
        let axis = b.ints("axis", &[1]);
        b.node("CumSum", "running_sum", [], &[Some(e), Some(axis)])
    }));
    says(&text, &["running_sum", "CumSum"]);
    let text = refusal(with(|b, e| {
        let axis = b.ints("axis", &[1]);
        let mean = b.node("ReduceMean", "pooled", [("keepdims", Attr::Int(1))], &[Some(e), Some(axis)]);
        b.node("Add", "centred", [], &[Some(e), Some(mean)])
    }));
    says(&text, &["pooled", "ReduceMean"]);
}

#[test]
fn values_that_depend_on_the_length() {
    let text = refusal(with(|b, e| {
        let (_, total) = b.lengths(Lengths::Genai);
        let f = b.node("Cast", "total_float", [("to", Attr::Int(1))], &[Some(total)]);
        b.node("Mul", "scaled", [], &[Some(e), Some(f)])
    }));
    says(&text, &["total_float", "length of the sequence"]);
}

#[test]
fn thresholds_on_lengths_are_found() {
    // Looks like the total length up to 40 tokens, then stays.
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let qkv = b.matmul("qkv.0", e, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let (_, total) = b.lengths(Lengths::Genai);
    let limit = b.g.add_constant("limit", Tensor::scalar(40i32));
    let clipped = b.node("Min", "clipped", [], &[Some(total), Some(limit)]);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let attention = b.g.nodes.last_mut().unwrap();
    attention.inputs[6] = Some(clipped);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    says(&refusal(b.head(o)), &["attention.0", "total_sequence_length", "clipped"]);
}

#[test]
fn lengths_out_of_token_ids() {
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let qkv = b.matmul("qkv.0", e, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let ids = b.g.find("input_ids");
    let axis = b.ints("ids_axis", &[1]);
    let sum = b.node("ReduceSum", "ids_sum", [("keepdims", Attr::Int(0))], &[ids, Some(axis)]);
    let cast = b.node("Cast", "ids_length", [("to", Attr::Int(6))], &[Some(sum)]);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    b.g.nodes.last_mut().unwrap().inputs[5] = Some(cast);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let text = refusal(b.head(o));
    assert!(text.contains("ids_sum") || text.contains("ids_length"), "{text}");
}

#[test]
fn caches_read_by_plain_operators_and_swapped_presents() {
    let (mut graph, mut spec) = genai_llama(DType::F32);
    let StatePorts::KeyValue(p) = &mut spec.states[0].ports else { unreachable!() };
    std::mem::swap(&mut p.present_key, &mut p.present_value);
    says(&refusal((graph.clone(), spec)), &["attention.0", "past key"]);

    let (_, spec) = genai_llama(DType::F32);
    let attention = graph.nodes.iter_mut().find(|n| n.name == "attention.0").unwrap();
    attention.inputs[3] = None;
    attention.inputs[4] = None;
    says(&refusal((graph, spec)), &["attention.0", "past key"]);
}

#[test]
fn ports_that_nobody_explains() {
    let (mut graph, spec) = genai_llama(DType::F32);
    graph.add_input("image", crate::ir::Fact::new(DType::F32, [1.into()]));
    says(&refusal((graph, spec)), &["image"]);

    let (graph, mut spec) = genai_llama(DType::F32);
    spec.input_ids = "ids".into();
    says(&refusal((graph, spec)), &["ids", "not an input"]);
}

#[test]
fn recurrent_nodes_without_their_state() {
    let (mut graph, spec) = hybrid();
    graph.nodes.iter_mut().find(|n| n.name == "linear").unwrap().inputs[3] = None;
    says(&refusal((graph, spec)), &["linear", "past_state", "missing"]);

    let (graph, mut spec) = hybrid();
    let StatePorts::Fixed { present: a, .. } = spec.states[0].ports.clone() else { unreachable!() };
    let StatePorts::Fixed { present: b, .. } = spec.states[1].ports.clone() else { unreachable!() };
    for (pair, other) in spec.states.iter_mut().zip([b, a]) {
        if let StatePorts::Fixed { present, .. } = &mut pair.ports {
            *present = other;
        }
    }
    says(&refusal((graph, spec)), &["conv", "past_state", "belongs to it"]);
}

#[test]
fn states_of_fixed_size_are_no_caches() {
    let (graph, mut spec) = genai_llama(DType::F32);
    let StatePorts::KeyValue(p) = spec.states[1].ports.clone() else { unreachable!() };
    let fixed = |past, present| StatePair { layer: 1, ports: StatePorts::Fixed { past, present } };
    spec.states[1] = fixed(p.past_key, p.present_key);
    spec.states.push(fixed(p.past_value, p.present_value));
    says(&refusal((graph, spec)), &["attention.1", "past_key.1", "not a cache input"]);
}

/// Probing a long context must not write out a matrix of its square.
#[test]
fn squares_of_the_length_are_not_computed() {
    let text = refusal(with(|b, e| {
        let mask = b.g.find("attention_mask");
        let long = b.ints("long_context", &[131_072]);
        let shape = b.node("Shape", "extents", [], &[mask]);
        let clipped = b.node("Min", "clipped_extents", [], &[Some(shape), Some(long)]);
        let twice = b.node("Mul", "squared_extents", [], &[Some(clipped), Some(clipped)]);
        let ones = b.node("ConstantOfShape", "square", [], &[Some(twice)]);
        let axes = b.ints("both_axes", &[0, 1]);
        let sum = b.node("ReduceSum", "area", [("keepdims", Attr::Int(1))], &[Some(ones), Some(axes)]);
        b.node("Mul", "scaled_by_area", [], &[Some(e), Some(sum)])
    }));
    says(&text, &["attention_mask", "area", "cannot be computed at"]);
}
