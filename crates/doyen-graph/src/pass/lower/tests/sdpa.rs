//! Attention and MultiHeadAttention over explicit caches, with masks that the graph computes.

use super::{
    build::{Build, CONTEXT, HEADS, HIDDEN, VOCAB},
    equal::agrees,
    refuse::{refusal, says},
};
use crate::{
    ir::{Attr, Attrs, Dim, Fact, Graph, ValueId},
    lowered::{Attention, CachePorts, LOp, Lowered},
    pass::lower::{LowerSpec, StatePair, StatePorts},
};
use doyen_tensor::{DType, Tensor};

/// Channels of a key head and of a value head.
const KEY: usize = 12;
const VALUE: usize = 8;

/// What an attention of the tests is.
struct Node<'a> {
    op: (&'a str, &'a str),
    kv_heads: usize,
    attrs: Vec<(&'a str, Attr)>,
    /// Inputs up to the past key.
    inputs: Vec<Option<ValueId>>,
}

fn attention(b: &mut Build, node: Node<'_>) -> ValueId {
    let ports = CachePorts {
        past_key: "past_key".into(),
        past_value: "past_value".into(),
        present_key: "present_key".into(),
        present_value: "present_value".into(),
    };
    let mut inputs = node.inputs;
    for (name, size) in [(&ports.past_key, KEY), (&ports.past_value, VALUE)] {
        let shape: [Dim; 4] = ["batch".into(), node.kv_heads.into(), "past".into(), size.into()];
        inputs.push(Some(b.g.add_input(name, Fact::new(DType::F32, shape))));
    }
    let mut attrs = Attrs::default();
    for (name, value) in node.attrs {
        attrs.set(name, value);
    }
    let outs = ["attention", &ports.present_key, &ports.present_value];
    let made = b.g.add_node("attention", node.op, attrs, &inputs, &outs).unwrap();
    b.g.add_output(made[1]);
    b.g.add_output(made[2]);
    b.spec.states.push(StatePair { layer: 0, ports: StatePorts::KeyValue(ports) });
    made[0]
}

/// The rest of a decoder after an attention of rank 3.
fn finish(mut b: Build, y: ValueId) -> (Graph, LowerSpec) {
    let o = b.matmul("o", y, HEADS * VALUE, HIDDEN);
    b.head(o)
}

/// Projections of the embedding: queries, keys, values.
fn projections(b: &mut Build, kv_heads: usize) -> [Option<ValueId>; 3] {
    let x = b.embed();
    let table = b.weight("positions_table", &[CONTEXT, HIDDEN], 1.0);
    let positions = b.positions();
    let p = b.node("Gather", "position_rows", [], &[Some(table), Some(positions)]);
    let x = b.node("Add", "placed", [], &[Some(x), Some(p)]);
    let sizes = [("q", HEADS * KEY), ("k", kv_heads * KEY), ("v", kv_heads * VALUE)];
    sizes.map(|(name, size)| Some(b.matmul(name, x, HIDDEN, size)))
}

fn attention_of(l: &Lowered) -> &Attention {
    let found = l.nodes.iter().find_map(|n| match &n.op {
        LOp::Attention(a) => Some(a),
        _ => None,
    });
    found.unwrap()
}

/// Positions of queries `[batch, new, 1]` and of keys `[batch, 1, total]`, counted from the mask as mobius does.
fn counted(b: &mut Build) -> [Option<ValueId>; 2] {
    let mask = b.g.find("attention_mask");
    let axis = b.g.add_constant("mask_axis", Tensor::scalar(1i64));
    let counted = b.node("CumSum", "counted", [], &[mask, Some(axis)]);
    let new = b.node("Shape", "new", [("start", Attr::Int(1))], &[b.g.find("input_ids")]);
    let total = b.node("Shape", "whole", [("start", Attr::Int(1))], &[mask]);
    let past = b.node("Sub", "past_length", [], &[Some(total), Some(new)]);
    let one = b.ints("axis_1", &[1]);
    let two = b.ints("axis_2", &[2]);
    let own = b.node("Slice", "own", [], &[Some(counted), Some(past), Some(total), Some(one)]);
    [
        Some(b.node("Unsqueeze", "query_positions", [], &[Some(own), Some(two)])),
        Some(b.node("Unsqueeze", "key_positions", [], &[Some(counted), Some(one)])),
    ]
}

/// A condition on positions as `[batch, 1, new, total]` of numbers to add.
fn added(b: &mut Build, shown: ValueId, lowest: f32) -> ValueId {
    let zero = b.g.add_constant("zero", Tensor::scalar(0f32));
    let lowest = b.g.add_constant("lowest", Tensor::scalar(lowest));
    let mask = b.node("Where", "mask", [], &[Some(shown), Some(zero), Some(lowest)]);
    let one = b.ints("mask_heads", &[1]);
    b.node("Unsqueeze", "mask_4d", [], &[Some(mask), Some(one)])
}

fn heads(q: usize, kv: usize) -> Vec<(&'static str, Attr)> {
    vec![("q_num_heads", Attr::Int(q as i64)), ("kv_num_heads", Attr::Int(kv as i64))]
}

#[test]
fn attention_with_a_causal_mask_and_narrower_values() {
    let mut b = Build::new(DType::F32);
    let qkv = projections(&mut b, 2);
    let [at, keys] = counted(&mut b);
    let shown = b.node("GreaterOrEqual", "shown", [], &[at, keys]);
    let mask = Some(added(&mut b, shown, f32::MIN));
    let inputs = qkv.into_iter().chain([mask]).collect();
    let y = attention(&mut b, Node { op: ("", "Attention"), kv_heads: 2, attrs: heads(HEADS, 2), inputs });
    let (mut graph, spec) = finish(b, y);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    let a = attention_of(&l);
    assert_eq!((a.causal, a.window, a.heads, a.kv_heads), (true, None, HEADS, 2));
    assert_eq!((l.groups[0].k_head_size, l.groups[0].v_head_size), (KEY, VALUE));
}

#[test]
fn attention_with_a_window_written_as_a_mask() {
    let mut b = Build::new(DType::F32);
    let qkv = projections(&mut b, HEADS);
    let [at, keys] = counted(&mut b);
    let past = b.node("GreaterOrEqual", "not_later", [], &[at, keys]);
    let distance = b.node("Sub", "distance", [], &[at, keys]);
    let window = b.g.add_constant("window", Tensor::scalar(5i64));
    let near = b.node("Less", "near", [], &[Some(distance), Some(window)]);
    let shown = b.node("And", "shown", [], &[Some(past), Some(near)]);
    let mask = Some(added(&mut b, shown, -10000.0));
    let inputs = qkv.into_iter().chain([mask]).collect();
    let y = attention(
        &mut b,
        Node { op: ("", "Attention"), kv_heads: HEADS, attrs: heads(HEADS, HEADS), inputs },
    );
    let (mut graph, spec) = finish(b, y);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!((attention_of(&l).causal, attention_of(&l).window), (true, Some(5)));
    assert_eq!(l.groups[0].window, Some(5));
}

#[test]
fn attention_behind_transposes() {
    let mut b = Build::new(DType::F32);
    let qkv = projections(&mut b, 2);
    let mut inputs = Vec::new();
    for ((p, name), heads) in qkv.into_iter().zip(["q", "k", "v"]).zip([HEADS, 2, 2]) {
        let shape = b.ints(&format!("{name}_shape"), &[0, 0, heads as i64, -1]);
        let split = b.node("Reshape", &format!("{name}_split"), [], &[p, Some(shape)]);
        let perm = Attr::Ints(vec![0, 2, 1, 3]);
        inputs.push(Some(b.node("Transpose", &format!("{name}_heads"), [("perm", perm)], &[Some(split)])));
    }
    inputs.push(None);
    let attrs = vec![("is_causal", Attr::Int(1)), ("softcap", Attr::Float(3.0)), ("scale", Attr::Float(0.5))];
    let y = attention(&mut b, Node { op: ("", "Attention"), kv_heads: 2, attrs, inputs });
    let perm = Attr::Ints(vec![0, 2, 1, 3]);
    let y = b.node("Transpose", "back", [("perm", perm)], &[Some(y)]);
    let merged = b.ints("merged", &[0, 0, -1]);
    let y = b.node("Reshape", "joined", [], &[Some(y), Some(merged)]);
    let (mut graph, spec) = finish(b, y);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!((attention_of(&l).softcap, attention_of(&l).scale), (3.0, 0.5));
}

#[test]
fn multi_head_attention_with_bias_and_padding_mask() {
    let mut b = Build::new(DType::F32);
    let [q, k, v] = projections(&mut b, HEADS);
    let bias = b.weight("bias", &[HEADS * (2 * KEY + VALUE)], 0.5);
    let mask = b.node("Cast", "padding", [("to", Attr::Int(6))], &[b.g.find("attention_mask")]);
    let inputs = vec![q, k, v, Some(bias), Some(mask), None];
    let attrs = vec![("num_heads", Attr::Int(HEADS as i64)), ("unidirectional", Attr::Int(1))];
    let op = ("com.microsoft", "MultiHeadAttention");
    let y = attention(&mut b, Node { op, kv_heads: HEADS, attrs, inputs });
    let (mut graph, spec) = finish(b, y);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert!(attention_of(&l).causal);
}

#[test]
fn multi_head_attention_with_packed_keys_and_an_attention_bias() {
    let mut b = Build::new(DType::F32);
    let x = b.embed();
    let q = b.matmul("q", x, HIDDEN, HEADS * VALUE);
    let kv = b.matmul("kv", x, HIDDEN, HEADS * 2 * VALUE);
    let shape = b.ints("kv_shape", &[0, 0, HEADS as i64, 2, VALUE as i64]);
    let kv = b.node("Reshape", "packed", [], &[Some(kv), Some(shape)]);
    let [at, keys] = counted(&mut b);
    let shown = b.node("GreaterOrEqual", "shown", [], &[at, keys]);
    let mask = Some(added(&mut b, shown, f32::NEG_INFINITY));
    let inputs = vec![Some(q), Some(kv), None, None, None, mask];
    let attrs = vec![("num_heads", Attr::Int(HEADS as i64)), ("scale", Attr::Float(0.4))];
    let op = ("com.microsoft", "MultiHeadAttention");
    let y = attention(&mut b, Node { op, kv_heads: HEADS, attrs, inputs });
    let past = b.g.find("past_key").unwrap();
    b.g.value_mut(past).fact.shape.as_mut().unwrap()[3] = VALUE.into();
    let (mut graph, spec) = finish(b, y);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!((attention_of(&l).causal, attention_of(&l).head_size), (true, VALUE));
}

/// Masks that a ragged batch cannot express, and what each refusal says.
#[test]
fn other_masks_are_refused() {
    type Shown = fn(&mut Build, Option<ValueId>, Option<ValueId>) -> ValueId;
    let chunks: Shown = |b, at, keys| {
        let size = b.g.add_constant("chunk", Tensor::scalar(4i64));
        let own = b.node("Div", "own_chunk", [], &[at, Some(size)]);
        let theirs = b.node("Div", "their_chunk", [], &[keys, Some(size)]);
        let same = b.node("Equal", "same_chunk", [], &[Some(own), Some(theirs)]);
        let past = b.node("GreaterOrEqual", "not_later", [], &[at, keys]);
        b.node("And", "shown", [], &[Some(same), Some(past)])
    };
    let holes: Shown = |b, at, keys| {
        let two = b.g.add_constant("two", Tensor::scalar(2i64));
        let parity = b.node("Mod", "parity", [], &[keys, Some(two)]);
        let zero = b.g.add_constant("even", Tensor::scalar(1i64));
        let odd = b.node("Equal", "odd", [], &[Some(parity), Some(zero)]);
        let past = b.node("GreaterOrEqual", "not_later", [], &[at, keys]);
        b.node("And", "shown", [], &[Some(odd), Some(past)])
    };
    let ids: Shown = |b, at, keys| {
        let ids = b.g.find("input_ids");
        let axis = b.ints("ids_axis", &[2]);
        let ids = b.node("Unsqueeze", "ids", [], &[ids, Some(axis)]);
        let past = b.node("GreaterOrEqual", "not_later", [], &[at, keys]);
        let three = b.g.add_constant("three", Tensor::scalar(3i64));
        let some = b.node("Greater", "some", [], &[Some(ids), Some(three)]);
        b.node("And", "shown", [], &[Some(some), Some(past)])
    };
    let cases: [(Shown, &[&str]); 3] = [
        (chunks, &["attention", "attn_mask", "keys"]),
        (holes, &["attention", "attn_mask", "not consecutive"]),
        // Refused where lengths and tokens meet.
        (ids, &["no known meaning", "\"shown\""]),
    ];
    for (shown, words) in cases {
        let mut b = Build::new(DType::F32);
        let qkv = projections(&mut b, 2);
        let [at, keys] = counted(&mut b);
        let shown = shown(&mut b, at, keys);
        let mask = Some(added(&mut b, shown, f32::MIN));
        let inputs = qkv.into_iter().chain([mask]).collect();
        let node = Node { op: ("", "Attention"), kv_heads: 2, attrs: heads(HEADS, 2), inputs };
        let y = attention(&mut b, node);
        says(&refusal(finish(b, y)), words);
    }
}
