//! Quantized and float products beside a plain read loop of the same run.
//!
//! `cargo run --release -p doyen-cpu --example qlinear_bench -- [THREADS] [ROUNDS] [FILTER] [MIB]`
//!
//! Weights are `[2048, 2048]`, in as many copies as fill MIB (192, more than the last-level cache; 1 or less means one
//! copy, which stays in cache); every call takes the next one. Rounds go through all cases in turn.

mod common;

use common::{Case, Quantized, Rng, report, store};
use doyen_cpu::{
    kernel::linear::{FloatMatrix, Linear, Mode, Orientation, Output, Weights},
    pool::Pool,
};
use doyen_tensor::{FloatType, FloatView, format::Bits};
use std::num::NonZeroUsize;

const N: usize = 2048;
const K: usize = 2048;

fn main() {
    let mut args = std::env::args().skip(1);
    let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(cpus);
    let rounds = args.next().and_then(|a| a.parse().ok()).unwrap_or(50);
    let filter = args.next().unwrap_or_default();
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN), true).expect("a pool");
    let total = args.next().and_then(|a| a.parse().ok()).unwrap_or(192usize) << 20;
    let copies_of = |bytes: usize| (total / bytes).max(1);
    let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
    let floor = rng.bytes(total.max(8 << 20));

    let formats = [
        (Bits::B4, 32, FloatType::F16, false),
        (Bits::B4, 32, FloatType::F16, true),
        (Bits::B4, 128, FloatType::F16, false),
        (Bits::B4, 32, FloatType::F32, false),
        (Bits::B8, 32, FloatType::F16, false),
        (Bits::B8, 128, FloatType::F16, true),
        (Bits::B2, 32, FloatType::F16, false),
        (Bits::B2, 64, FloatType::F16, true),
        (Bits::B2, 128, FloatType::F16, false),
        (Bits::B4, K, FloatType::F16, false),
    ];
    let weights: Vec<Quantized> = formats
        .iter()
        .map(|&(bits, block, scale, zero)| {
            Quantized::random(&mut rng, copies_of(N * bits.packed_len(K)), (N, K), (bits, block), scale, zero)
        })
        .collect();
    let float: Vec<(FloatType, Vec<u8>)> = [FloatType::F32, FloatType::F16, FloatType::BF16]
        .map(|ty| (ty, store(ty, &rng.floats(copies_of(N * K * ty.size()) * N * K))))
        .into();
    let x = rng.floats(128 * K);
    let mut cases = Vec::new();
    for tokens in [1, 2, 4, 8, 16, 128] {
        for w in &weights {
            for mode in [Mode::Fast, Mode::Exact] {
                let copies = copies_of(N * w.bits.packed_len(K));
                let zero = if w.zero_points { "zp" } else { "-" };
                let label = format!("{:?} b{} {} {zero}", w.bits, w.block, w.scale.dtype());
                let get = move |i: usize| Weights::Int(w.get(i % copies));
                cases.extend(case(&pool, &label, mode, tokens, &x, get, &filter));
            }
        }
        for (ty, bytes) in &float {
            for orientation in [Orientation::RowMajor, Orientation::ColumnMajor] {
                let label = format!("{} {orientation:?}", ty.dtype());
                let copies = bytes.len() / (N * K * ty.size());
                let get = move |i: usize| {
                    let values =
                        FloatView::new(*ty, bytes).expect("whole numbers").slice(i % copies * N * K, N * K);
                    Weights::Float(FloatMatrix { rows: N, cols: K, orientation, stride: K, values })
                };
                cases.extend(case(&pool, &label, Mode::Exact, tokens, &x, get, &filter));
            }
        }
    }
    report(&pool, rounds, &floor, &mut cases);
}

/// A case, unless the filter leaves it out.
fn case<'a>(
    pool: &'a Pool,
    label: &str,
    mode: Mode,
    tokens: usize,
    x: &'a [f32],
    weights: impl Fn(usize) -> Weights<'a> + 'a,
    filter: &str,
) -> Option<Case<'a>> {
    let first = weights(0);
    let linear = Linear::new(first.format(), mode, common::isa());
    let name = format!("M={tokens} {label} {}", linear.kernel());
    if !filter.split(',').all(|f| name.contains(f)) {
        return None;
    }
    let mut y = vec![0.0; tokens * N];
    let mut scratch = vec![0; linear.scratch_len(tokens).expect("scratch fits") + 64];
    let aligned = scratch.as_ptr().align_offset(64);
    let mut calls = 0;
    let run = Box::new(move |_| {
        calls += 1;
        let mut out = Output::new(&mut y, tokens, N);
        linear.run(pool, &weights(calls), &x[..tokens * K], None, &mut out, &mut scratch[aligned..]);
    });
    Some(Case { name, bytes: first.bytes() as f64, macs: (tokens * N * K) as f64, run })
}
