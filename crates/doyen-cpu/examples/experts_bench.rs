//! One mixture-of-experts layer (64 experts, 8 per token, hidden 2048, intermediate 768) beside a plain read loop.
//!
//! `cargo run --release -p doyen-cpu --example experts_bench -- [THREADS] [ROUNDS] [FILTER]`
//!
//! Every call routes anew at random over 75 to 300 MB of weights per case, more than the last-level cache. Rounds go through all
//! cases in turn. Bytes are those of the expected number of active experts. Scales are f16, blocks 32 (64 at 2 bits).

mod common;

use common::{Case, Quantized, Rng, report};
use doyen_cpu::{
    kernel::{
        experts::{Activation, Bank, Experts, Formats, Gate, Projection, Routes, Shape},
        linear::{Mode, Weights},
    },
    pool::Pool,
};
use doyen_tensor::{FloatType, FloatView, format::Bits};
use std::num::NonZeroUsize;

const SHAPE: Shape = Shape { experts: 64, hidden: 2048, inter: 768 };
const K: usize = 8;

struct Layer {
    fc1: Quantized,
    fc2: Quantized,
}

impl Bank for Layer {
    fn weights(&self, projection: Projection, expert: usize) -> Weights<'_> {
        let matrices = if projection == Projection::Fc2 { &self.fc2 } else { &self.fc1 };
        Weights::Int(matrices.get(expert))
    }

    fn bias(&self, _: Projection, _: usize) -> Option<FloatView<'_>> {
        None
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(cpus);
    let rounds = args.next().and_then(|a| a.parse().ok()).unwrap_or(15);
    let filter = args.next().unwrap_or_default();
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN), true).expect("a pool");
    let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
    let floor = rng.bytes(192 << 20);
    let x = rng.floats(128 * SHAPE.hidden);
    let mut cases = Vec::new();
    for (b1, b2) in [
        (Bits::B4, Bits::B4),
        (Bits::B8, Bits::B8),
        (Bits::B2, Bits::B2),
        (Bits::B2, Bits::B4),
        (Bits::B4, Bits::B8),
    ] {
        for tokens in [1, 8, 128] {
            for mode in [Mode::Fast, Mode::Exact] {
                let name = format!("M={tokens} fc1 {b1:?} fc2 {b2:?} {mode:?} f16 scales");
                if filter.split(',').all(|f| name.contains(f)) {
                    cases.push(case(
                        &pool,
                        name,
                        (b1, b2),
                        mode,
                        tokens,
                        &x[..tokens * SHAPE.hidden],
                        &mut rng,
                    ));
                }
            }
        }
    }
    report(&pool, rounds, &floor, &mut cases);
}

fn case<'a>(
    pool: &'a Pool,
    name: String,
    (b1, b2): (Bits, Bits),
    mode: Mode,
    tokens: usize,
    x: &'a [f32],
    rng: &mut Rng,
) -> Case<'a> {
    let Shape { experts: e, hidden, inter } = SHAPE;
    let block = |b: Bits| if b == Bits::B2 { 64 } else { 32 };
    let mut matrices =
        |rows, cols, b: Bits| Quantized::random(rng, e, (rows, cols), (b, block(b)), FloatType::F16, false);
    let layer = Layer { fc1: matrices(2 * inter, hidden, b1), fc2: matrices(hidden, inter, b2) };
    let formats = Formats {
        fc1: layer.weights(Projection::Fc1, 0).format(),
        fc2: layer.weights(Projection::Fc2, 0).format(),
        fc3: None,
    };
    let swiglu = Activation::SwiGlu { alpha: 1.0, beta: 0.0, limit: f32::INFINITY };
    let experts =
        Experts::new(SHAPE, formats, swiglu, Gate::Interleaved, mode, common::isa()).expect("a valid bank");
    let expert_bytes = layer.weights(Projection::Fc1, 0).bytes() + layer.weights(Projection::Fc2, 0).bytes();
    // Expected number of different experts among `tokens * K` random routes.
    let active = e as f64 * (1.0 - (1.0 - K as f64 / e as f64).powi(tokens as i32));
    let mut scratch = vec![0; experts.scratch_len(tokens, K).expect("scratch fits")];
    let mut out = vec![0.0; x.len()];
    let (mut ids, weights) = (vec![0u32; tokens * K], vec![1.0 / K as f32; tokens * K]);
    let mut rng = Rng(rng.next());
    let run = Box::new(move |_| {
        for routes in ids.chunks_mut(K) {
            draw(&mut rng, routes);
        }
        let routes = Routes { k: K, experts: &ids, weights: &weights };
        experts.run(pool, &layer, x, routes, &mut out, &mut scratch);
    });
    let macs = (tokens * K * 3 * hidden * inter) as f64;
    Case { name, bytes: active * expert_bytes as f64, macs, run }
}

/// Different experts at random.
fn draw(rng: &mut Rng, routes: &mut [u32]) {
    for i in 0..routes.len() {
        loop {
            let e = (rng.next() % SHAPE.experts as u64) as u32;
            if !routes[..i].contains(&e) {
                routes[i] = e;
                break;
            }
        }
    }
}
