//! What the runtime itself does in a step: choosing tokens, and taking and giving back KV pages.
//!
//! `cargo bench -p doyen-runtime -- FILTER`

use criterion::{BatchSize, Criterion, Throughput};
use doyen_graph::{
    device::{GroupPages, Limits, Numerics, Program},
    lowered::Lowered,
};
use doyen_runtime::{
    Sampler, SamplingParams,
    kv::{BlockTables, PagePool},
};
use doyen_tensor::TokenId;
use std::{hint::black_box, sync::Arc, time::Duration};

fn main() {
    let mut c = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    sampling(&mut c);
    pages(&mut c);
    c.final_summary();
}

fn sampling(c: &mut Criterion) {
    let draw = SamplingParams { temperature: 0.8, seed: 1, ..SamplingParams::default() };
    let cases = [
        ("greedy", SamplingParams::default()),
        ("temperature", draw.clone()),
        ("top-k", SamplingParams { top_k: 40, ..draw.clone() }),
        ("top-p", SamplingParams { top_p: 0.9, ..draw.clone() }),
        ("min-p", SamplingParams { min_p: 0.05, ..draw.clone() }),
        (
            "all",
            SamplingParams {
                top_k: 40,
                top_p: 0.9,
                min_p: 0.05,
                repetition_penalty: 1.1,
                frequency_penalty: 0.1,
                presence_penalty: 0.1,
                ..draw
            },
        ),
    ];
    for vocab in [32_000, 151_936] {
        // A few likely tokens above many unlikely ones, as models give.
        let logits: Vec<f32> = (0..vocab)
            .map(|i| {
                let noise = (i as u32).wrapping_mul(2_654_435_761) >> 16;
                noise as f32 / 65536.0 * 8.0 + if i % 4999 == 0 { 10.0 } else { 0.0 }
            })
            .collect();
        let prompt: Vec<TokenId> = (0..512).map(TokenId).collect();
        let mut group = c.benchmark_group(format!("sample/vocab={vocab}"));
        group.throughput(Throughput::Elements(vocab as u64));
        for (name, params) in &cases {
            let mut sampler = Sampler::new(params.clone(), &prompt);
            sampler.reserve(vocab, vocab);
            group.bench_function(*name, |b| b.iter(|| sampler.sample(black_box(&logits))));
        }
        group.finish();
    }
}

/// Sequences of 4096 positions, two cache groups, pages of 32.
fn pages(c: &mut Criterion) {
    let limits = Limits { tokens: 256, rows: 32, sequences: 32, context: 4096, page_size: 32 };
    let program = Program {
        graph: Arc::new(Lowered::default()),
        slots: Vec::new(),
        arena: 0,
        scratch: 0,
        limits,
        pages: vec![GroupPages { pages: 32 * 128, window: None }; 2],
        state_slots: 0,
        numerics: Numerics::Fast,
    };
    let mut pool = PagePool::new(&program);
    let mut group = c.benchmark_group("kv");
    group.bench_function("start and end a sequence", |b| {
        b.iter(|| {
            let mut tables = BlockTables::default();
            pool.reserve(&mut tables, 4096).expect("room");
            pool.grow(&mut tables, 4096).expect("reserved");
            pool.release(black_box(tables));
        });
    });
    group.bench_function("one more position", |b| {
        b.iter_batched_ref(
            BlockTables::default,
            |tables| {
                for position in 1..=64 {
                    pool.grow(tables, position).expect("room");
                    pool.trim(tables, position);
                }
                pool.release(std::mem::take(tables));
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}
