//! Times experts and products on a card: chains of layers with their own random weights, so that no cache holds them, run
//! as steps of a session. Prints time a layer and the rates that the bytes and operations it needs make of it.
//!
//! Usage: bench [CUBIN_FOLDER]

mod graph;

use doyen_cuda::{CudaDevice, CudaOptions, module::Operand};
use doyen_graph::{device::Numerics, lowered::LValueId};
use doyen_tensor::{DType, FloatType};
use graph::{Bank, Build, Result, inputs, session, step};
use std::time::Instant;

const BANK: Bank = Bank {
    experts: 128,
    k: 8,
    hidden: 2048,
    inter: 768,
    bits: (4, 4),
    block: 64,
    zero_points: false,
    biases: false,
    fusion: Some(1),
    scales: DType::F16,
};

/// Adds a layer that reads a value; what the next one reads.
type Layer<'a> = &'a dyn Fn(&mut Build, LValueId) -> Result<LValueId>;

/// Median seconds of a step of `depth` layers.
fn time(device: &CudaDevice, tokens: usize, width: usize, layer: Layer<'_>, depth: usize) -> Result<f64> {
    let mut build = Build::new(tokens as u64);
    let mut at = build.input(width);
    for _ in 0..depth {
        at = layer(&mut build, at)?;
    }
    let given = inputs(&mut build, tokens)?;
    let mut session = session(device, &build.graph, tokens, Numerics::Fast)?;
    let mut times = Vec::new();
    for i in 0..12 {
        let start = Instant::now();
        step(session.as_mut(), tokens, &given)?;
        if i >= 3 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Seconds a layer: the difference of two depths, so that the copies and the waiting of a step drop out.
fn seconds(
    device: &CudaDevice,
    tokens: usize,
    width: usize,
    layer: Layer<'_>,
    depths: (usize, usize),
) -> Result<f64> {
    let (a, b) =
        (time(device, tokens, width, layer, depths.0)?, time(device, tokens, width, layer, depths.1)?);
    Ok((b - a) / (depths.1 - depths.0) as f64)
}

fn main() -> Result<()> {
    let cache = std::env::args().nth(1).map(Into::into);
    let options = CudaOptions { ordinal: 0, operand: Some(Operand::F16), kv: FloatType::F16, cache };
    let device = CudaDevice::new(&options)?;
    let Bank { experts, k, hidden, inter, block, .. } = BANK;
    println!("experts E={experts} k={k} H={hidden} I={inter} block {block}, a layer with its routing");
    println!("{:>6} {:>8} {:>10} {:>10} {:>10}", "bits", "tokens", "us", "GB/s", "TFLOP/s");
    for bits in [(4, 4), (2, 4), (8, 8)] {
        for tokens in [1usize, 8, 64, 512, 4096] {
            let seconds =
                seconds(&device, tokens, hidden, &|b, x| b.experts(x, Bank { bits, ..BANK }), (1, 5))?;
            // Distinct experts of random routes, on average.
            let distinct = experts as f64 * (1.0 - (1.0 - k as f64 / experts as f64).powi(tokens as i32));
            let codes = 2 * inter * hidden * bits.0 / 8 + inter * hidden * bits.1 / 8;
            let scales = 3 * inter * hidden / block * 2;
            let bytes = distinct * (codes + scales) as f64;
            let operations = (tokens * k * 3 * 2 * inter * hidden) as f64;
            println!(
                "{:>6} {tokens:>8} {:>10.1} {:>10.0} {:>10.1}",
                format!("{}/{}", bits.0, bits.1),
                seconds * 1e6,
                bytes / seconds / 1e9,
                operations / seconds / 1e12
            );
        }
    }
    println!("MatMulNBits 4 bits, block 32");
    for (n, k, tokens, depth) in
        [(151_936, 2048, 1, 5), (4096, 4096, 1, 13), (4096, 4096, 8, 13), (4096, 4096, 512, 9)]
    {
        let layer = |b: &mut Build, x: LValueId| b.product(x, (n, k), (4, 32)).map(|_| x);
        let seconds = seconds(&device, tokens, k, &layer, (1, depth))?;
        let bytes = (n * k / 2 + n * k / 32 * 2) as f64;
        let operations = (2 * n * k * tokens) as f64;
        println!(
            "N={n} K={k} M={tokens}: {:.1} us, {:.0} GB/s, {:.1} TFLOP/s",
            seconds * 1e6,
            bytes / seconds / 1e9,
            operations / seconds / 1e12
        );
    }
    Ok(())
}
