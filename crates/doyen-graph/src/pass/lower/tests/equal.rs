//! What lowers, lowers to the same function.

use super::build::{Build, HEAD, HEADS, HIDDEN, KV_HEADS, Lengths, VOCAB, genai_llama, hybrid, qwen3_moe};
use crate::{
    check::check,
    interp::Interpreter,
    ir::{Attr, Graph},
    lowered::{Extent, KvFormat, LOp, Lowered},
    naive::{Naive, NewTokens},
    pass::{
        dead::dead,
        fold::{FoldLimits, fold},
        lower::{LowerSpec, StatePorts, lower},
    },
};
use doyen_tensor::{DType, Tensor};

/// Logits of the exported graph on a whole prompt with empty caches, whose head size the lowered graph knows.
fn exported(graph: &Graph, spec: &LowerSpec, lowered: &Lowered, tokens: &[u32]) -> Vec<f32> {
    let n = tokens.len();
    let ids: Vec<i64> = tokens.iter().map(|&t| i64::from(t)).collect();
    let mut inputs = vec![(spec.input_ids.as_str(), Tensor::from_slice([1, n], &ids).unwrap())];
    if let Some(mask) = &spec.attention_mask {
        inputs.push((mask, Tensor::from_slice([1, n], &vec![1i64; n]).unwrap()));
    }
    if let Some(positions) = &spec.position_ids {
        inputs.push((positions, Tensor::from_slice([1, n], &(0..n as i64).collect::<Vec<_>>()).unwrap()));
    }
    for pair in &spec.states {
        let p = match &pair.ports {
            StatePorts::KeyValue(p) => p,
            StatePorts::Fixed { past, .. } => {
                let fact = &graph.value(graph.find(past).unwrap()).fact;
                let dims = fact.shape.iter().flatten().skip(1).map(|d| d.known().unwrap());
                let shape: Vec<usize> = [1].into_iter().chain(dims).collect();
                let zeros = vec![0f32; shape.iter().product()];
                inputs.push((past, Tensor::from_f32(fact.dtype.unwrap(), shape, &zeros).unwrap()));
                continue;
            }
        };
        for name in [&p.past_key, &p.past_value] {
            let fact = &graph.value(graph.find(name).unwrap()).fact;
            let group = lowered.groups.iter().find(|g| g.layers.contains(p)).unwrap();
            let width = fact.dim(3).known().unwrap_or(group.k_head_size);
            let shape = [1, group.kv_heads, 0, width];
            let empty = Tensor::from_bytes(fact.dtype.unwrap(), shape, Vec::new().into()).unwrap();
            inputs.push((name, empty));
        }
    }
    Interpreter::new(graph).run(&inputs).unwrap()[0].to_f32().unwrap()
}

pub(super) fn lowered(graph: &Graph, spec: &LowerSpec) -> Lowered {
    let mut graph = graph.clone();
    fold(&mut graph, FoldLimits::default()).unwrap();
    dead(&mut graph);
    lower(&graph, spec).unwrap_or_else(|e| panic!("{e}"))
}

fn close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0f32, f32::max);
    assert!(worst <= tolerance, "{what}: off by {worst}");
    assert!(want.iter().any(|w| w.abs() > 0.1), "{what}: logits are all about zero");
}

/// Whole prompts, then prefill and decode of two interleaved sequences, against recomputation by the interpreter.
pub(super) fn agrees(graph: &mut Graph, spec: &LowerSpec, vocabulary: usize, tolerance: f32) -> Lowered {
    check(graph).unwrap();
    let lowered = lowered(graph, spec);
    let prompts: [Vec<u32>; 2] =
        [(0..9).map(|i| i * 7 % 31).collect(), (0..6).map(|i| (i * 11 + 3) % 31).collect()];
    let want: Vec<Vec<f32>> = prompts.iter().map(|p| exported(graph, spec, &lowered, p)).collect();
    let mut run = Naive::new(lowered.clone()).unwrap();
    let rows: Vec<u32> = (0..prompts[0].len() as u32).collect();
    let whole = run.step(&[NewTokens { sequence: 0, tokens: &prompts[0] }], &rows, &[]).unwrap();
    close(&whole[0].to_f32().unwrap(), &want[0], tolerance, "whole prompt");

    let mut run = Naive::new(lowered.clone()).unwrap();
    let cut = [(0..4, 0..2), (4..5, 2..5), (5..8, 5..6), (8..9, 6..6)];
    for (a, b) in cut {
        let batch = [
            NewTokens { sequence: 1, tokens: &prompts[1][b.clone()] },
            NewTokens { sequence: 0, tokens: &prompts[0][a.clone()] },
        ];
        let batch = if b.is_empty() { &batch[1..] } else { &batch[..] };
        let last = (a.len() + b.len() - 1) as u32;
        let got = run.step(batch, &[last], &[]).unwrap();
        assert_eq!(got[0].shape().dims(), [1, 1, vocabulary]);
        let at = a.end - 1;
        let want = &want[0][at * vocabulary..(at + 1) * vocabulary];
        close(&got[0].to_f32().unwrap(), want, tolerance, &format!("token {at} of a chunked prompt"));
    }
    lowered
}

fn count(graph: &Lowered, is: impl Fn(&LOp) -> bool) -> usize {
    graph.nodes.iter().filter(|n| is(&n.op)).count()
}

#[test]
fn genai_llama_lowers_to_the_same_function() {
    let (mut graph, spec) = genai_llama(DType::F32);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!(count(&l, |op| matches!(op, LOp::Attention(a) if a.packed_qkv && a.rotary.is_some())), 2);
    assert_eq!(count(&l, |op| *op == LOp::SiluMul), 2);
    assert_eq!(l.groups.len(), 1);
    assert_eq!(l.groups[0].layers[1].past_key, "past_key.1");
    assert!(l.positions.is_none());
    assert_eq!(l.value(l.outputs[0]).dims, [Extent::Fixed(1), Extent::Rows(1), Extent::Fixed(VOCAB)]);
}

#[test]
fn rows_are_selected_right_after_the_last_attention() {
    let (mut graph, spec) = genai_llama(DType::F32);
    check(&mut graph).unwrap();
    let l = lowered(&graph, &spec);
    let selected: Vec<&str> =
        l.nodes.iter().filter(|n| matches!(n.op, LOp::SelectRows { .. })).map(|n| n.name.as_str()).collect();
    assert_eq!(selected, ["attention.1/rows", "next_norm.0.sum/rows"]);
    let attention = l.nodes.iter().rposition(|n| matches!(n.op, LOp::Attention(_))).unwrap();
    for node in &l.nodes[attention + 1..] {
        for v in node.outputs.iter().flatten() {
            assert!(!l.value(*v).dims.iter().any(|d| matches!(d, Extent::Tokens(_))), "{}", node.name);
        }
    }
}

/// Channels last, a dilated convolution, more query heads than states, a decay for every key channel.
#[test]
fn recurrent_layers_lower_to_the_same_function() {
    let (mut graph, spec) = hybrid();
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!(l.states.iter().map(|s| s.dims.len()).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(count(&l, |op| matches!(op, LOp::CausalConv(c) if c.dilation == 2 && c.held() == 4)), 1);
    assert_eq!(count(&l, |op| matches!(op, LOp::LinearAttention(a) if a.decay_per_key && a.q_heads == 4)), 1);
}

#[test]
fn float16_weights_are_computed_in_float32() {
    let (mut graph, spec) = genai_llama(DType::F16);
    // The exported graph rounds every result to float16, the lowered one none.
    let l = agrees(&mut graph, &spec, VOCAB, 3e-2);
    let logits = l.value(l.outputs[0]);
    assert_eq!((logits.dtype, logits.declared), (DType::F32, DType::F16));
}

#[test]
fn qwen3_moe_lowers_to_the_same_function() {
    for given in [false, true] {
        let (mut graph, spec) = qwen3_moe(given);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        assert_eq!(count(&l, |op| matches!(op, LOp::Attention(a) if a.qk_norm == Some(1e-6))), 2);
        assert_eq!(count(&l, |op| matches!(op, LOp::Experts(e) if e.experts == 6 && e.k == 2)), 2);
        let route = l.nodes.iter().find(|n| matches!(n.op, LOp::Route(_))).unwrap();
        assert_eq!(route.inputs[1].is_some(), given);
        let bank = l.nodes.iter().find(|n| matches!(n.op, LOp::Experts(_))).unwrap();
        assert_eq!(bank.inputs.len(), if given { 16 } else { 8 });
    }
}

#[test]
fn windows_softcaps_and_sinks_reach_the_attention() {
    let mut b = Build::new(DType::F32);
    let residual = b.embed();
    let mut x = b.norm("first_norm", residual, HIDDEN);
    for (layer, window) in [3, -1].into_iter().enumerate() {
        let qkv = b.matmul(&format!("qkv.{layer}"), x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
        let extra = [
            ("local_window_size", Attr::Int(window)),
            ("softcap", Attr::Float(2.0)),
            ("smooth_softmax", Attr::Int(1)),
            ("scale", Attr::Float(0.4)),
            ("rotary_interleaved", Attr::Int(1)),
        ];
        let y = b.attention(layer, Lengths::Genai, [Some(qkv), None, None], extra);
        x = b.matmul(&format!("o.{layer}"), y, HEADS * HEAD, HIDDEN);
    }
    let (mut graph, spec) = b.head(x);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!(l.groups.iter().map(|g| g.window).collect::<Vec<_>>(), [Some(3), None]);
}

#[test]
fn positions_read_by_plain_operators_become_running_positions() {
    let mut b = Build::new(DType::F32);
    let positions = b.positions();
    let e = b.embed();
    let table = b.weight("positions_table", &[40, HIDDEN], 1.0);
    let p = b.node("Gather", "position_rows", [], &[Some(table), Some(positions)]);
    let x = b.node("Add", "placed", [], &[Some(e), Some(p)]);
    let qkv = b.matmul("qkv.0", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let sum = b.node("Add", "sum", [], &[Some(x), Some(o)]);
    let (mut graph, spec) = b.head(sum);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert!(l.positions.is_some());
}

#[test]
fn shapes_computed_from_the_input_are_followed() {
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let shape = b.node("Shape", "ids_shape", [], &[b.g.find("input_ids")]);
    let heads = b.ints("heads", &[HEADS as i64, -1]);
    let to = b.node("Concat", "heads_shape", [("axis", Attr::Int(0))], &[Some(shape), Some(heads)]);
    let split = b.node("Reshape", "split", [], &[Some(e), Some(to)]);
    let act = b.node("Tanh", "act", [], &[Some(split)]);
    let back = b.ints("back", &[0, 0, -1]);
    let x = b.node("Reshape", "back_together", [], &[Some(act), Some(back)]);
    let qkv = b.matmul("qkv.0", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let (mut graph, spec) = b.head(o);
    agrees(&mut graph, &spec, VOCAB, 1e-4);
}

/// Rotary embedding as a node of its own: with positions and tables, and with rows of the tables gathered first.
#[test]
fn rotary_embeddings_outside_of_attention_read_running_positions() {
    for gathered in [false, true] {
        let mut b = Build::new(DType::F32);
        let positions = b.positions();
        let x = b.embed();
        let (cos, sin) = b.caches();
        let mut qk = Vec::new();
        for (name, heads) in [("q", HEADS), ("k", KV_HEADS)] {
            let p = b.matmul(name, x, HIDDEN, heads * HEAD);
            let out = format!("{name}_rotated");
            let attrs = [("num_heads", Attr::Int(heads as i64))];
            qk.push(Some(if gathered {
                let rows = ["cos", "sin"].map(|t| {
                    let table = b.g.find(t);
                    b.node("Gather", &format!("{name}_{t}_rows"), [], &[table, Some(positions)])
                });
                b.node("RotaryEmbedding", &out, attrs, &[Some(p), Some(rows[0]), Some(rows[1])])
            } else {
                let inputs = [Some(p), Some(positions), Some(cos), Some(sin)];
                b.node("com.microsoft::RotaryEmbedding", &out, attrs, &inputs)
            }));
        }
        let v = b.matmul("v", x, HIDDEN, KV_HEADS * HEAD);
        let off = [("do_rotary", Attr::Int(0))];
        let y = b.attention(0, Lengths::Genai, [qk[0], qk[1], Some(v)], off);
        let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
        let (mut graph, spec) = b.head(o);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        assert!(l.positions.is_some());
        assert!(l.nodes.iter().all(|n| !matches!(&n.op, LOp::Attention(a) if a.rotary.is_some())));
    }
}

/// Positions computed from the mask, as some exporters do, mean the same.
#[test]
fn positions_counted_from_the_mask_are_recognised() {
    let mut b = Build::new(DType::F32);
    let x = b.embed();
    let mask = b.g.find("attention_mask");
    let axis = b.g.add_constant("mask_axis", Tensor::scalar(1i64));
    let counted = b.node("CumSum", "counted", [], &[mask, Some(axis)]);
    let one = b.ints("minus", &[1]);
    let from_zero = b.node("Sub", "from_zero", [], &[Some(counted), Some(one)]);
    let shape = b.node("Shape", "new_shape", [("start", Attr::Int(1))], &[b.g.find("input_ids")]);
    let whole = b.node("Shape", "whole_shape", [("start", Attr::Int(1))], &[mask]);
    let past = b.node("Sub", "past_length", [], &[Some(whole), Some(shape)]);
    let positions = b.node("Slice", "positions", [], &[Some(from_zero), Some(past), Some(whole), Some(one)]);
    let table = b.weight("positions_table", &[40, HIDDEN], 1.0);
    let p = b.node("Gather", "position_rows", [], &[Some(table), Some(positions)]);
    let x = b.node("Add", "placed", [], &[Some(x), Some(p)]);
    let qkv = b.matmul("qkv.0", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let (mut graph, spec) = b.head(o);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert!(l.positions.is_some());
}

/// A float MoE whose weights a Mul scales outside, and a shared expert with a sigmoid gate.
#[test]
fn float_experts_and_a_shared_expert_lower_to_the_same_function() {
    const EXPERTS: usize = 5;
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let qkv = b.matmul("qkv.0", e, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let (x, sum) = b.skip_norm("post_norm", e, o);
    let router = b.matmul("router", x, HIDDEN, EXPERTS);
    let flat = b.ints("flat", &[-1, EXPERTS as i64]);
    let logits = b.node("Reshape", "router_flat", [], &[Some(router), Some(flat)]);
    let fc1 = b.weight("fc1", &[EXPERTS, 64, HIDDEN], 0.2);
    let fc2 = b.weight("fc2", &[EXPERTS, HIDDEN, 32], 0.2);
    let attrs = [
        ("k", Attr::Int(2)),
        ("activation_type", Attr::from("swiglu")),
        ("swiglu_fusion", Attr::Int(1)),
        ("normalize_routing_weights", Attr::Int(1)),
    ];
    let moe = b.node("MoE", "moe", attrs, &[Some(x), Some(logits), Some(fc1), None, Some(fc2)]);
    let axis = b.ints("last", &[-1]);
    let weights = b.node("Softmax", "router_softmax", [("axis", Attr::Int(-1))], &[Some(logits)]);
    let k = b.ints("k", &[2]);
    let top = b.nodes("TopK", &["top", "top_ids"], [], &[Some(weights), Some(k)])[0];
    let total = b.node("ReduceSum", "top_sum", [("keepdims", Attr::Int(1))], &[Some(top), Some(axis)]);
    let scaled = b.node("Mul", "scaled", [], &[Some(moe), Some(total)]);
    let shared = b.silu_mlp(0, x);
    let gate = b.matmul("shared_gate", x, HIDDEN, 1);
    let gate = b.node("Sigmoid", "shared_sigmoid", [], &[Some(gate)]);
    let shared = b.node("Mul", "shared_scaled", [], &[Some(shared), Some(gate)]);
    let both = b.node("Add", "both", [], &[Some(scaled), Some(shared)]);
    let out = b.node("Add", "out", [], &[Some(sum), Some(both)]);
    let (mut graph, spec) = b.head(out);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!(count(&l, |op| matches!(op, LOp::Experts(e) if matches!(e.op, crate::ops::Op::Moe(_)))), 1);
}

/// Codes of eight or four bits in the cache, scales for all or per channel, and sinks.
#[test]
fn quantized_caches_and_sinks_keep_their_function() {
    for (width, kind, dtype) in [(8, "PER_TENSOR", DType::I8), (4, "PER_CHANNEL", DType::U8)] {
        let mut b = Build::new(DType::F32);
        let e = b.embed();
        let x = b.norm("first_norm", e, HIDDEN);
        let qkv = b.matmul("qkv.0", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
        let extra = [
            ("k_quant_type", Attr::from(kind)),
            ("v_quant_type", Attr::from(kind)),
            ("kv_cache_bit_width", Attr::Int(width)),
        ];
        let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], extra);
        let shape: &[usize] = if width == 8 { &[1] } else { &[1, KV_HEADS, 1, HEAD] };
        let n = shape.iter().product();
        let scales = |i: usize| if width == 8 { 0.03 } else { 0.4 + 0.02 * i as f32 };
        let scales: Vec<f32> = (0..n).map(scales).collect();
        let scales = b.g.add_constant("kv_scales", Tensor::from_slice(shape, &scales).unwrap());
        let sink = b.weight("sink", &[HEADS], 1.0);
        let node = b.g.nodes.last_mut().unwrap();
        node.inputs.extend([None, None, Some(sink), Some(scales), Some(scales)]);
        for name in ["past_key.0", "past_value.0"] {
            let past = b.g.find(name).unwrap();
            let channels = if width == 8 { HEAD } else { HEAD / 2 };
            let fact = &mut b.g.value_mut(past).fact;
            fact.dtype = Some(dtype);
            fact.shape.as_mut().unwrap()[3] = channels.into();
        }
        let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
        let (mut graph, spec) = b.head(o);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        let format = match width {
            8 => KvFormat::Int8 { per_channel: false },
            _ => KvFormat::Int4 { per_channel: true },
        };
        assert_eq!(l.groups[0].format, format);
    }
}

#[test]
fn attention_takes_running_positions() {
    let mut b = Build::new(DType::F32);
    let positions = b.positions();
    let x = b.embed();
    let qkv = b.matmul("qkv.0", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    b.g.nodes.last_mut().unwrap().inputs.push(Some(positions));
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let (mut graph, spec) = b.head(o);
    assert!(agrees(&mut graph, &spec, VOCAB, 1e-4).positions.is_none());
}
