//! Operators that backends leave to the reference: reductions, which lowered graphs keep small.
//!
//! `cargo bench -p doyen-graph`

use criterion::{Criterion, Throughput};
use doyen_graph::{ir::Attrs, ops::Op};
use doyen_tensor::{DType, Tensor};
use std::{hint::black_box, time::Duration};

fn main() {
    let mut c = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let values: Vec<f32> = (0..16 * 2048).map(|i| (i % 251) as f32 - 125.0).collect();
    let x = Tensor::from_f32(DType::F32, [16, 2048], &values).expect("as many numbers as the shape has");
    let axes = Tensor::from_slice([1], &[-1i64]).expect("one axis");
    let mut group = c.benchmark_group("reduce");
    group.throughput(Throughput::Elements(values.len() as u64));
    for name in ["ReduceSum", "ReduceMean", "ReduceMax"] {
        let op = Op::parse("", name, 21, &Attrs::default()).expect("a known operator");
        group.bench_function(name, |b| {
            b.iter(|| op.eval(&[Some(black_box(&x)), Some(&axes)], 1).expect("valid inputs"));
        });
    }
    group.finish();
    c.final_summary();
}
