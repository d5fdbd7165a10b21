//! Times experts and products on a card: chains of layers with their own random weights, so that no cache holds them, run
//! as steps of a session; and attention over long caches and of prompts. Prints time a layer and the rates that the bytes and
//! operations it needs make of it.
//!
//! Usage: bench [CUBIN_FOLDER [NAME...]]: names of what is timed, as 4/4, 2/4, 8/8 (widths of experts), products, attention and
//! prompts, and numbers of tokens; all of it unless told.

mod graph;
mod past;

use doyen_cuda::{CudaDevice, CudaOptions, Dense, KvType, module::Operand};
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

/// Steps of a shape that are run.
const STEPS: usize = 40;

/// Adds a layer that reads a value; what the next one reads.
type Layer<'a> = &'a dyn Fn(&mut Build, LValueId) -> Result<LValueId>;

/// Median seconds of a step of `depth` layers, for each number of tokens.
fn times(
    device: &CudaDevice,
    counts: &[usize],
    width: usize,
    layer: Layer<'_>,
    depth: usize,
) -> Result<Vec<f64>> {
    let mut build = Build::new(depth as u64);
    let mut at = build.input(width);
    for _ in 0..depth {
        at = layer(&mut build, at)?;
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let mut session = session(device, &build.graph, most, Numerics::Fast)?;
    let mut medians = Vec::new();
    for &tokens in counts {
        // Few tokens leave room for the same experts in the card's cache: every step routes anew.
        let sets = if tokens <= 64 { 12 } else { 2 };
        let given = (0..sets).map(|_| inputs(&mut build, tokens)).collect::<Result<Vec<_>>>()?;
        let mut seconds = Vec::new();
        // The first steps of a shape are launched one by one, then recorded.
        for i in 0..STEPS {
            let start = Instant::now();
            step(session.as_mut(), tokens, &given[i % sets])?;
            if i >= 4 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        seconds.sort_by(f64::total_cmp);
        medians.push(seconds[seconds.len() / 2]);
    }
    Ok(medians)
}

/// Seconds a layer: the difference of two depths, so that the copies and the waiting of a step drop out.
fn seconds(
    device: &CudaDevice,
    counts: &[usize],
    width: usize,
    layer: Layer<'_>,
    depths: (usize, usize),
) -> Result<Vec<f64>> {
    let (few, many) =
        (times(device, counts, width, layer, depths.0)?, times(device, counts, width, layer, depths.1)?);
    Ok(few.iter().zip(many).map(|(a, b)| (b - a) / (depths.1 - depths.0) as f64).collect())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let cache = args.next().map(Into::into);
    let wanted: Vec<String> = args.collect();
    let (numbers, names): (Vec<String>, Vec<String>) =
        wanted.into_iter().partition(|w| w.parse::<usize>().is_ok());
    let wants = |name: &str| names.is_empty() || names.iter().any(|w| w == name);
    let counts = |all: &[usize]| -> Vec<usize> {
        let kept = |n: &&usize| numbers.is_empty() || numbers.contains(&n.to_string());
        all.iter().filter(kept).copied().collect()
    };
    let options = CudaOptions {
        ordinal: 0,
        operand: Some(Operand::F16),
        kv: KvType::Float(FloatType::F16),
        cache,
        packaged: None,
        dense: Dense::default(),
    };
    let device = CudaDevice::new(&options)?;
    let Bank { experts, k, hidden, inter, block, .. } = BANK;
    println!("experts E={experts} k={k} H={hidden} I={inter} block {block}, a layer with its routing");
    println!("{:>6} {:>8} {:>10} {:>10} {:>10}", "bits", "tokens", "us", "GB/s", "TFLOP/s");
    let experts_counts = counts(&[1, 2, 4, 8, 16, 64, 512, 4096]);
    for bits in [(4, 4), (2, 4), (8, 8)] {
        if !wants(&format!("{}/{}", bits.0, bits.1)) {
            continue;
        }
        // Layers share their logits, so that a layer more is not an input more.
        let layer = |b: &mut Build, x: LValueId| {
            let logits = b.graph.inputs.get(1).copied().unwrap_or_else(|| b.input(experts));
            b.routed(x, logits, Bank { bits, ..BANK })
        };
        let found = seconds(&device, &experts_counts, hidden, &layer, (1, 5))?;
        for (&tokens, seconds) in experts_counts.iter().zip(found) {
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
    if wants("attention") {
        past::print(&device)?;
    }
    if wants("prompts") {
        past::print_prompts(&device, |tokens| !counts(&[tokens]).is_empty())?;
    }
    if !wants("products") {
        return Ok(());
    }
    println!("MatMulNBits 4 bits, block 32");
    for (n, k, depth) in [(151_936, 2048, 5), (4096, 4096, 13)] {
        let layer = |b: &mut Build, x: LValueId| b.product(x, (n, k), (4, 32)).map(|_| x);
        let counts = counts(&[1, 2, 8, 512]);
        for (&tokens, seconds) in counts.iter().zip(seconds(&device, &counts, k, &layer, (1, depth))?) {
            let bytes = (n * k / 2 + n * k / 32 * 2) as f64;
            let operations = (2 * n * k * tokens) as f64;
            println!(
                "N={n} K={k} M={tokens}: {:.1} us, {:.0} GB/s, {:.1} TFLOP/s",
                seconds * 1e6,
                bytes / seconds / 1e9,
                operations / seconds / 1e12
            );
        }
    }
    Ok(())
}
