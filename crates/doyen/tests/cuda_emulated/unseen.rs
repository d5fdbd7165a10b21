//! What a query does not see does not reach it through the tensor cores, which multiply whole tiles: rows of a page that were
//! never written, tokens to come, tokens that left the window, and pages that were given to somebody else.

use crate::card;
use doyen::device::{FloatName, KvName};
use doyen_graph::{
    device::{Device, GroupTables, RaggedBatch, SeqSpan, Session},
    ir::{Attr, Attrs, Dim, Fact, Graph},
    lowered::{CacheSlot, LOp, LValueId, Lowered},
    ops::gqa::input as at,
    pass::lower::lower_case,
};
use doyen_runtime::{Plan, PlanOptions};
use doyen_tensor::{DType, PageId, Tensor};
use std::sync::Arc;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const PAGE: usize = 16;
const CONTEXT: usize = 112;
const PAGES: usize = CONTEXT / PAGE;
/// Tokens of the first prompt: tiles of 64 keys end within pages, pages within tiles.
const PROMPT: usize = 75;
/// The token that is no number, and the channel of key head 1 that is none.
const BAD: (usize, usize) = (37, 5);

/// Where a NaN is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bad {
    Nowhere,
    Key,
    Value,
}

/// GroupQueryAttention of one sequence, lowered.
fn attention(head_size: usize, window: Option<usize>) -> Lowered {
    let mut g = Graph::new("g", [("", 21), ("com.microsoft", 1)]);
    let mut operands = vec![None; 16];
    let rows =
        |heads: usize| Tensor::from_slice([1, 3, heads * head_size], &vec![0f32; 3 * heads * head_size]);
    let given = [
        (at::QUERY, rows(HEADS).unwrap()),
        (at::KEY, rows(KV_HEADS).unwrap()),
        (at::VALUE, rows(KV_HEADS).unwrap()),
        (at::SEQLENS_K, Tensor::from_slice([1], &[2i32]).unwrap()),
        (at::TOTAL_SEQUENCE_LENGTH, Tensor::scalar(3i32)),
    ];
    for (i, t) in &given {
        let dims: Vec<Dim> = t.shape().iter().map(|&d| Dim::from(d)).collect();
        operands[*i] = Some(g.add_input(&format!("i{i}"), Fact::new(t.dtype(), dims)));
    }
    let mut attrs = Attrs::default();
    for (name, value) in [("num_heads", HEADS), ("kv_num_heads", KV_HEADS)] {
        attrs.set(name, Attr::Int(value as i64));
    }
    if let Some(w) = window {
        attrs.set("local_window_size", Attr::Int(w as i64));
    }
    let op = ("com.microsoft", "GroupQueryAttention");
    for v in g.add_node("attention", op, attrs, &operands, &["y", "k", "v"]).unwrap() {
        g.add_output(v);
    }
    doyen_graph::check::check(&mut g).unwrap();
    let inputs: Vec<Tensor> = given.into_iter().map(|(_, t)| t).collect();
    lower_case(&g, &inputs).unwrap().graph.clone()
}

struct Sequence {
    session: Box<dyn Session>,
    y: LValueId,
    head_size: usize,
    past: usize,
    bad: Bad,
}

impl Sequence {
    /// A sequence whose pages hold nothing but NaN.
    fn new(device: &dyn Device, kv: DType, graph: &Lowered, head_size: usize, bad: Bad) -> Self {
        let options = PlanOptions {
            context: CONTEXT,
            sequences: 1,
            page_size: PAGE,
            taps: true,
            ..PlanOptions::default()
        };
        let plan = Plan::new(Arc::new(graph.clone()), device, &options).unwrap();
        let node = graph.nodes.iter().find(|n| matches!(n.op, LOp::Attention(_))).unwrap();
        let mut session = device.load(plan.program().clone()).unwrap();
        let nan = vec![f32::NAN; KV_HEADS * CONTEXT * head_size];
        let nan = Tensor::from_f32(kv, [KV_HEADS, CONTEXT, head_size], &nan).unwrap();
        session.write_cache(CacheSlot { group: 0, layer: 0 }, &pages(), &nan, &nan).unwrap();
        Self { session, y: node.outputs[0].unwrap(), head_size, past: 0, bad }
    }

    /// Adds `len` tokens; their outputs, `[len, HEADS * head_size]`.
    fn step(&mut self, len: usize) -> Vec<f32> {
        let numbers = |heads: usize, bad: bool| {
            let width = heads * self.head_size;
            let number = |i: usize| ((self.past * width + i) * 37 % 101) as f32 / 64.0 - 0.75;
            let mut v: Vec<f32> = (0..len * width).map(number).collect();
            if bad && (self.past..self.past + len).contains(&BAD.0) {
                v[(BAD.0 - self.past) * width + self.head_size + BAD.1] = f32::NAN;
            }
            Tensor::from_slice([1, len, width], &v).unwrap()
        };
        let inputs = [
            numbers(HEADS, false),
            numbers(KV_HEADS, self.bad == Bad::Key),
            numbers(KV_HEADS, self.bad == Bad::Value),
        ];
        let mut tables = GroupTables::default();
        tables.push(&pages());
        let batch = RaggedBatch {
            tokens: &vec![0; len],
            sequences: &[SeqSpan { first: 0, len, past: self.past }],
            tables: std::slice::from_ref(&tables),
            states: &[],
            rows: &[],
            inputs: &inputs,
        };
        self.session.step(&batch).unwrap();
        self.past += len;
        self.session.value(self.y).unwrap().to_f32().unwrap()
    }
}

/// Pages of the sequence, out of order.
fn pages() -> Vec<PageId> {
    (0..PAGES).map(|p| PageId((p * 3 % PAGES) as u32)).collect()
}

/// A prompt, a longer continuation and decoded tokens, with and without the bad token: who sees it, and nobody else, is no number;
/// all others are what they are without it.
fn sees_what_it_may(kv: (KvName, DType), compute: FloatName, head_size: usize, window: Option<usize>) {
    let graph = attention(head_size, window);
    let device = card(compute, kv.0);
    let start = |bad| Sequence::new(device.as_ref(), kv.1, &graph, head_size, bad);
    let mut clean = start(Bad::Nowhere);
    let mut others = [start(Bad::Key), start(Bad::Value)];
    for len in [PROMPT, 20, 1, 1] {
        let first = clean.past;
        let want = clean.step(len);
        assert!(
            want.iter().all(|v| v.is_finite()),
            "{kv:?}, heads of {head_size}, {window:?}: {len} after {first}"
        );
        for other in &mut others {
            let got = other.step(len);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let (token, head, channel) =
                    (first + i / (HEADS * head_size), i / head_size % HEADS, i % head_size);
                let sees =
                    token >= BAD.0 && window.is_none_or(|w| token < BAD.0 + w) && head >= HEADS / KV_HEADS;
                let lost = sees && (other.bad == Bad::Key || channel == BAD.1);
                let name = format!("{kv:?}, head size {head_size}, window {window:?}, {:?}", other.bad);
                assert_eq!(got.is_nan(), lost, "{name}: token {token}, head {head}, channel {channel}");
                assert!(
                    lost || got.to_bits() == want.to_bits(),
                    "{name}: token {token}, head {head}: {got} for {want}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a card; `all_on_an_emulated_card` runs it on an emulated one"]
fn what_a_query_does_not_see_does_not_reach_it() {
    let types = [
        ((KvName::F16, DType::F16), FloatName::F16),
        ((KvName::Bf16, DType::BF16), FloatName::Bf16),
        ((KvName::F32, DType::F32), FloatName::F32),
    ];
    for (kv, compute) in types {
        for (head_size, window) in [(64, None), (128, Some(50)), (96, Some(30)), (256, None), (40, Some(3))] {
            sees_what_it_may(kv, compute, head_size, window);
        }
    }
}
