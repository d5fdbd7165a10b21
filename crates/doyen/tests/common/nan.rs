//! NaN on its way through caches of codes, which have none for it: queries that see such a row get NaN, in this step and in
//! later ones, and nobody else.

use doyen::conformance::DeviceRunner;
use doyen_graph::{
    check::check,
    device::{Device, GroupTables, RaggedBatch, SeqSpan},
    ir::{Attr, Attrs, Dim, Fact, Graph},
    lowered::LOp,
    naive::NaiveRunner,
    ops::gqa::input as at,
    pass::lower::lower_case,
    testkit::{Model, Reference, Runner},
};
use doyen_runtime::{Plan, PlanOptions};
use doyen_tensor::{PageId, Tensor};
use std::sync::Arc;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_SIZE: usize = 8;

/// A first prompt of two sequences of `seq` tokens over caches of `bits`, 0 for caches of floats; channel 3 of key head 1 is NaN in token 1 of
/// sequence 0, of the keys or of the values.
fn case(bits: i64, seq: usize, in_keys: bool) -> (Model, Vec<Tensor>) {
    let numbers = |heads: usize, nan: bool| {
        let size = heads * HEAD_SIZE;
        let mut v: Vec<f32> = (0..2 * seq * size).map(|i| (i * 37 % 101) as f32 / 64.0 - 0.75).collect();
        if nan && seq > 1 {
            v[size + HEAD_SIZE + 3] = f32::NAN;
        }
        Tensor::from_slice([2, seq, size], &v).unwrap()
    };
    let last = vec![seq as i32 - 1; 2];
    let given = [
        (at::QUERY, numbers(HEADS, false)),
        (at::KEY, numbers(KV_HEADS, in_keys)),
        (at::VALUE, numbers(KV_HEADS, !in_keys)),
        (at::SEQLENS_K, Tensor::from_slice([2], &last).unwrap()),
        (at::TOTAL_SEQUENCE_LENGTH, Tensor::scalar(seq as i32)),
    ];
    let mut g = Graph::new("g", [("", 21), ("com.microsoft", 1)]);
    let mut operands = vec![None; 16];
    for (i, t) in &given {
        let dims: Vec<Dim> = t.shape().iter().map(|&d| Dim::from(d)).collect();
        operands[*i] = Some(g.add_input(&format!("i{i}"), Fact::new(t.dtype(), dims)));
    }
    let mut attrs = Attrs::default();
    for (name, value) in [("num_heads", HEADS), ("kv_num_heads", KV_HEADS)] {
        attrs.set(name, Attr::Int(value as i64));
    }
    if bits > 0 {
        let scale = g.add_constant("scale", Tensor::from_slice([1], &[0.25f32]).unwrap());
        operands[at::K_SCALE] = Some(scale);
        operands[at::V_SCALE] = Some(scale);
        attrs.set("kv_cache_bit_width", Attr::Int(bits));
        for name in ["k_quant_type", "v_quant_type"] {
            attrs.set(name, Attr::from("PER_TENSOR"));
        }
    }
    let op = ("com.microsoft", "GroupQueryAttention");
    for v in g.add_node("attention", op, attrs, &operands, &["y", "k", "v"]).unwrap() {
        g.add_output(v);
    }
    check(&mut g).unwrap();
    (Model { graph: g }, given.into_iter().map(|(_, t)| t).collect())
}

/// Whether all, or none, of a head's channels are NaN, for each token and head of `[.., HEADS * HEAD_SIZE]`; caches of floats
/// keep the channels of values apart.
fn nan_heads(y: &[f32], bits: i64) -> Vec<bool> {
    let all = |head: &[f32]| {
        let n = head.iter().filter(|v| v.is_nan()).count();
        assert!(n == 0 || n == HEAD_SIZE || bits == 0, "a head is NaN as a whole: {head:?}");
        n > 0
    };
    y.chunks(HEAD_SIZE).map(all).collect()
}

/// Queries that see a NaN become NaN in one step of a prompt, on the device and on both references. Caches of floats are
/// compared where `floats` is.
pub fn queries_that_see_a_nan_become_nan(device: impl Fn() -> Box<dyn Device>, floats: bool) {
    let all = [(8, true), (8, false), (4, true), (4, false), (0, true), (0, false)];
    for (bits, in_keys) in all {
        let (model, inputs) = case(bits, 3, in_keys);
        // Heads 2 and 3 read key head 1.
        let want: Vec<bool> =
            (0..2 * 3 * HEADS).map(|i| (1..3).contains(&(i / HEADS)) && i % HEADS >= 2).collect();
        let got = DeviceRunner::new(device()).run(&model, &inputs).unwrap();
        assert_eq!(nan_heads(&got[0].to_f32().unwrap(), bits), want, "{bits} bits, in the keys: {in_keys}");
        for runner in [&Reference as &dyn Runner, &NaiveRunner] {
            let theirs = runner.run(&model, &inputs).unwrap();
            let y = theirs[0].to_f32().unwrap();
            let seen: Vec<bool> = y.chunks(HEAD_SIZE).map(|h| h.iter().any(|v| v.is_nan())).collect();
            assert_eq!(seen, want, "{}, {bits} bits, in the keys: {in_keys}", runner.name());
            // Present caches hold the same codes, zero where NaN was.
            if bits > 0 || floats {
                for (mine, theirs) in got[1..3].iter().zip(&theirs[1..3]) {
                    assert_eq!(mine.bytes(), theirs.bytes(), "{}, {bits} bits", runner.name());
                }
            }
        }
    }
}

/// Later steps see it too, until the row is written again.
pub fn later_steps_remember_until_the_row_is_written_again(device: &dyn Device, bits: i64) {
    let (model, inputs) = case(bits, 3, true);
    let prompt = lower_case(&model.graph, &inputs).unwrap();
    let (_, next) = case(bits, 1, true);
    let next: Vec<Tensor> = next.into_iter().take(3).collect();
    let options =
        PlanOptions { context: 8, sequences: 2, page_size: 8, taps: true, ..PlanOptions::default() };
    let plan = Plan::new(Arc::new(prompt.graph.clone()), device, &options).unwrap();
    let attention = prompt.graph.nodes.iter().find(|n| matches!(n.op, LOp::Attention(_))).unwrap();
    let y = attention.outputs[0].unwrap();
    let mut session = device.load(plan.program().clone()).unwrap();
    let mut tables = GroupTables::default();
    tables.push(&[PageId(0)]);
    tables.push(&[PageId(1)]);
    let mut step = |len: usize, past: usize, inputs: &[Tensor]| {
        let flat = |t: &Tensor| {
            let columns = t.shape()[2];
            Tensor::from_slice([1, 2 * len, columns], &t.to_f32().unwrap()).unwrap()
        };
        let sequences = [0, 1].map(|s| SeqSpan { first: s * len, len, past });
        let batch = RaggedBatch {
            tokens: &vec![0; 2 * len],
            sequences: &sequences,
            tables: std::slice::from_ref(&tables),
            states: &[],
            rows: &[],
            inputs: &inputs.iter().take(3).map(flat).collect::<Vec<_>>(),
        };
        session.step(&batch).unwrap();
        nan_heads(&session.value(y).unwrap().to_f32().unwrap(), bits)
    };
    step(3, 0, &inputs);
    assert_eq!(step(1, 3, &next), [false, false, true, true, false, false, false, false]);
    // Another sequence takes the page over.
    let (_, clean) = case(bits, 1, false);
    assert_eq!(step(1, 0, &clean), [false; 8]);
    assert_eq!(step(1, 1, &clean), [false; 8], "position 1 was written again");
}
