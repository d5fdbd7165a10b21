//! Kernels of a step, on the best instruction set and all CPUs: products, experts, attention, norms, gather, add, softmax,
//! routing.
//!
//! `cargo bench -p doyen-cpu -- FILTER`. Small and warm: made to notice changes of the code. What kernels reach on this machine with cold
//! weights, beside a read loop, is what `doyen bench --op` says.

use criterion::{Criterion, Throughput};
use doyen_cpu::{
    bench::{CachedAttention, Env, ExpertLayer, KvType, MatMul, Matrices, QuantFormat, Rng, Subject},
    detect::Isa,
    kernel::{
        elementwise::{Binary, BinaryKernel, Broadcast},
        gather::{CodeType, Table},
        linear::Mode,
        norm::{Affine, Norm, Outputs, Residual},
        route::{Router, Weighting},
        softmax::Softmax,
    },
    machine::Machine,
    pool::Pool,
};
use doyen_tensor::{FloatType, FloatView, format::Bits};
use std::{
    hint::black_box,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

const TOKENS: usize = 16;
const HIDDEN: usize = 2048;

fn main() {
    let mut c = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let threads = NonZeroUsize::new(Machine::read().threads()).unwrap_or(NonZeroUsize::MIN);
    let pool = Pool::new(threads, true).expect("threads can be started");
    let isa = Isa::chosen().expect("DOYEN_CPU names an instruction set of this machine");
    products(&mut c, &pool, isa);
    attention(&mut c, &pool, isa);
    rows(&mut c, &pool, isa);
    routing(&mut c, &pool);
    gather(&mut c, &pool);
    c.final_summary();
}

/// A subject with one copy of its weights, at several numbers of tokens.
fn subject(c: &mut Criterion, env: &Env<'_>, name: &str, subject: &dyn Subject, tokens: &[usize]) {
    let works = subject.works(env, &mut Rng::default(), 1, tokens).expect("a valid shape");
    let mut group = c.benchmark_group(name);
    for (mut work, tokens) in works.into_iter().zip(tokens) {
        group.throughput(Throughput::Bytes(work.prepare(0) as u64));
        group.bench_function(format!("m={tokens}"), |b| {
            b.iter_custom(|n| {
                let mut spent = Duration::ZERO;
                for call in 0..n {
                    work.prepare(call as usize);
                    let start = Instant::now();
                    work.run();
                    spent += start.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
}

fn products(c: &mut Criterion, pool: &Pool, isa: Isa) {
    for bits in Bits::ALL {
        let format = QuantFormat { bits, block: 32, scales: FloatType::F16, zero_points: false };
        for (mode, name) in [(Mode::Fast, "fast"), (Mode::Exact, "exact")] {
            let env = Env { pool, isa, mode };
            let matmul = MatMul { rows: 1024, cols: HIDDEN, format };
            subject(c, &env, &format!("matmul/int{}-{name}", bits.get()), &matmul, &[1, 4, 32]);
            let layer =
                ExpertLayer { experts: 16, top_k: 4, hidden: 512, inter: 256, fc1: format, fc2: format };
            subject(c, &env, &format!("qmoe/int{}-{name}", bits.get()), &layer, &[1, 8]);
        }
    }
}

fn attention(c: &mut Criterion, pool: &Pool, isa: Isa) {
    let env = Env { pool, isa, mode: Mode::Fast };
    for kv in [KvType::F32, KvType::F16, KvType::Int8, KvType::Int4] {
        let shape = CachedAttention { heads: 8, kv_heads: 2, head_size: 64, context: 1024, kv };
        subject(c, &env, &format!("attention/{}", kv.name()), &shape, &[1, 64]);
    }
}

fn rows(c: &mut Criterion, pool: &Pool, isa: Isa) {
    let mut rng = Rng::default();
    let n = TOKENS * HIDDEN;
    let (x, skip, gamma) = (rng.floats(n), rng.floats(n), rng.floats(HIDDEN));
    let (mut y, mut sum) = (vec![0.0; n], vec![0.0; n]);
    let affine = Affine { gamma: &gamma, beta: None, eps: 1e-6 };
    let norm = Norm::new(isa);
    let mut group = c.benchmark_group("rows");
    group.throughput(Throughput::Elements(n as u64));
    group.bench_function("rms_norm", |b| {
        b.iter(|| norm.rms(pool, black_box(&x), None, affine, Outputs { y: &mut y, ..Outputs::default() }));
    });
    group.bench_function("skip_rms_norm", |b| {
        b.iter(|| {
            let residual = Residual { skip: &skip, bias: None };
            let out = Outputs { y: &mut y, sum: Some(&mut sum), ..Outputs::default() };
            norm.rms(pool, black_box(&x), Some(residual), affine, out);
        });
    });
    group.bench_function("layer_norm", |b| {
        b.iter(|| norm.layer(pool, black_box(&x), None, affine, Outputs { y: &mut y, ..Outputs::default() }));
    });
    let (add, shape) =
        (BinaryKernel::new(isa, Binary::Add), Broadcast::new(&[n], &[n]).expect("equal shapes"));
    group.bench_function("add", |b| b.iter(|| add.run(pool, &shape, black_box(&x), &skip, &mut y)));
    let softmax = Softmax::new(isa, false);
    group.bench_function("softmax", |b| b.iter(|| softmax.rows(pool, black_box(&x), HIDDEN, &mut y)));
    group.finish();
}

fn routing(c: &mut Criterion, pool: &Pool) {
    let (experts, k) = (128, 8);
    let logits = Rng::default().floats(TOKENS * experts);
    let (mut ids, mut weights) = (vec![0; TOKENS * k], vec![0.0; TOKENS * k]);
    let weighting = Weighting::of(true, false, false).expect("a weighting");
    let router = Router::new(experts, k, weighting).expect("fewer routes than experts");
    c.bench_function("route/top-8 of 128", |b| {
        b.iter(|| router.run(pool, black_box(&logits), None, &mut ids, &mut weights));
    });
}

fn gather(c: &mut Criterion, pool: &Pool) {
    let mut rng = Rng::default();
    let vocab = 4096;
    let mut floats = vec![0; vocab * HIDDEN * FloatType::F16.size()];
    rng.fill_stored(FloatType::F16, 1.0, &mut floats);
    let format = QuantFormat { bits: Bits::B4, block: 32, scales: FloatType::F16, zero_points: false };
    let codes = Matrices::random(&mut rng, 1, (vocab, HIDDEN), format).expect("memory");
    let values = FloatView::new(FloatType::F16, &floats).expect("whole numbers");
    let tables = [
        ("f16", Table::float(values, vocab, HIDDEN)),
        ("int4", Table::quantized(codes.get(0), CodeType::Packed)),
    ];
    let ids: Vec<i64> = (0..TOKENS).map(|_| rng.below(vocab) as i64).collect();
    let mut out = vec![0.0; TOKENS * HIDDEN];
    let mut group = c.benchmark_group("gather");
    group.throughput(Throughput::Elements(out.len() as u64));
    for (name, table) in tables {
        let table = table.expect("a table of its shape");
        group
            .bench_function(name, |b| b.iter(|| table.gather(pool, TOKENS, |i| ids[i], black_box(&mut out))));
    }
    group.finish();
}
