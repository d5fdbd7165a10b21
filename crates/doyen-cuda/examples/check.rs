//! Compares the tensor-core kernels with the float32 ones on a card: experts at every pair of widths, block sizes, zero
//! points, biases and gates, and products, with few and many rows; and tokens chosen on the card with the host's choice, which
//! is the same to the last bit. The float32 kernels themselves are judged by the conformance cases. Nodes with a past, experts of
//! small floats and dense ones are compared with the plain executor.
//!
//! Usage: check [CUBIN_FOLDER [--every N] [NAME...]]: names of what is compared, as past, prompts, draws, products and experts; all of
//! it unless told. With `--every`, one of N of each. The exit code is 1 when something differs.

mod graph;
mod stateful;

use doyen_cuda::{CudaDevice, CudaOptions, Dense, KvType, module::Operand};
use doyen_graph::{
    device::{Draw, Numerics},
    lowered::Lowered,
};
use doyen_tensor::{DType, FloatType, Tensor};
use graph::{Bank, Build, Result, choose, inputs, session, step};
use std::{num::NonZeroUsize, process::ExitCode};

/// ||a - b|| / ||b||; NaN never passes a comparison.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let size: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    if a.len() == b.len() { (difference / size).sqrt() } else { f64::NAN }
}

struct Check {
    devices: [(Operand, CudaDevice, f64); 2],
    /// One of how many is compared.
    every: usize,
    run: usize,
    failed: usize,
    worst: f64,
}

impl Check {
    fn compare(&mut self, name: &str, graph: &Lowered, tokens: usize, given: &[Tensor]) -> Result<()> {
        let result = |device: &CudaDevice, numerics| -> Result<Vec<f32>> {
            let mut session = session(device, graph, tokens, numerics)?;
            step(session.as_mut(), tokens, given)?;
            Ok(session.output(0).to_vec())
        };
        let exact = result(&self.devices[0].1, Numerics::Exact)?;
        for (operand, device, limit) in &self.devices {
            let found = distance(&result(device, Numerics::Fast)?, &exact);
            self.run += 1;
            self.worst = self.worst.max(found / limit);
            if found.is_nan() || found > *limit {
                self.failed += 1;
                println!("DIFFERS {name}, {tokens} tokens, {operand}: {found:.2e} (limit {limit:.0e})");
            }
        }
        Ok(())
    }
}

fn experts(check: &mut Check) -> Result<()> {
    let base = Bank {
        experts: 16,
        k: 4,
        hidden: 256,
        inter: 192,
        bits: (4, 4),
        block: 64,
        zero_points: false,
        biases: false,
        fusion: Some(1),
        scales: DType::F16,
    };
    // Routes of a few tokens that go to experts of their own, with columns beside whole segments.
    let many = Bank { experts: 64, k: 8, hidden: 320, inter: 224, block: 32, ..base };
    let mut cases = Vec::new();
    for b1 in [2, 4, 8] {
        for b2 in [2, 4, 8] {
            for block in [0, 16, 32, 64] {
                for zero_points in [false, true] {
                    cases.push(Bank { bits: (b1, b2), block, zero_points, ..base });
                }
            }
        }
    }
    for fusion in [None, Some(0), Some(1), Some(2)] {
        cases.push(Bank { fusion, biases: true, ..base });
        cases.push(Bank { fusion, inter: 80, block: 16, scales: DType::F32, ..base });
        cases.push(Bank { fusion, bits: (2, 8), block: 0, zero_points: true, biases: true, ..base });
    }
    for bits in [(4, 4), (2, 8), (8, 2), (8, 4)] {
        cases.push(Bank { bits, ..many });
        cases.push(Bank { bits, hidden: 512, inter: 256, zero_points: true, biases: true, ..many });
        cases.push(Bank { bits, hidden: 512, inter: 256, block: 64, k: 5, fusion: None, ..many });
    }
    cases.push(Bank { inter: 256, block: 128, scales: DType::BF16, ..base });
    cases.push(Bank { inter: 256, block: 256, ..base });
    for (i, &bank) in cases.iter().enumerate().step_by(check.every) {
        let mut build = Build::new(i as u64);
        let x = build.input(bank.hidden);
        let y = build.experts(x, bank)?;
        build.graph.outputs.push(y);
        for tokens in [1, 2, 5, 40, 200] {
            let given = inputs(&mut build, tokens)?;
            check.compare(&format!("{bank:?}"), &build.graph, tokens, &given)?;
        }
    }
    Ok(())
}

fn products(check: &mut Check) -> Result<()> {
    let blocks = [(16, 336), (32, 320), (64, 512), (128, 1024), (256, 200)];
    let cases = [2, 4, 8].into_iter().flat_map(|bits| blocks.map(|(block, k)| (bits, block, k)));
    for (bits, block, k) in cases.step_by(check.every) {
        let mut build = Build::new((bits * 1000 + block) as u64);
        let x = build.input(k);
        let y = build.product(x, (200, k), (bits, block))?;
        build.graph.outputs.push(y);
        for tokens in [1, 2, 7, 13, 70, 130] {
            let given = inputs(&mut build, tokens)?;
            check.compare(&format!("{bits} bits, block {block}, K {k}"), &build.graph, tokens, &given)?;
        }
    }
    // As many rows as a vocabulary has, which keep every block of a card busy.
    for (bits, block) in [(2, 64), (4, 32), (4, 128), (8, 64)] {
        let (n, k) = (69_632, 2048);
        let mut build = Build::new((bits * 100 + block) as u64);
        let x = build.input(k);
        let y = build.product(x, (n, k), (bits, block))?;
        build.graph.outputs.push(y);
        for tokens in [1, 3, 8] {
            let given = inputs(&mut build, tokens)?;
            check.compare(&format!("{bits} bits, block {block}, N {n}"), &build.graph, tokens, &given)?;
        }
    }
    Ok(())
}

/// Rows of few and of many logits, smooth ones and ones of few values, some of them no numbers; every kind of draw.
fn draws(check: &mut Check) -> Result<()> {
    for vocab in [5, 33, 1000, 32_003, 151_936].into_iter().step_by(check.every) {
        let mut build = Build::new(vocab as u64);
        let x = build.input(vocab);
        let y = build.selected(x, vocab);
        build.graph.outputs.push(y);
        let mut draws = Vec::new();
        for temperature in [0.0, 0.3, 1.0, 1.7] {
            for (top_k, top_p, min_p) in [
                (0, 1.0, 0.0),
                (1, 1.0, 0.0),
                (40, 1.0, 0.0),
                (0, 0.9, 0.0),
                (50, 0.95, 0.0),
                (0, 0.999, 0.1),
                (7, 1.0, 0.2),
            ] {
                let random = (build.floats(1, 0.5)[0] * 16_777_216.0) as i32 as u32 & 0xff_ffff;
                draws.push(Draw { temperature, top_k, top_p, min_p, random });
            }
        }
        let mut logits = build.floats(draws.len() * vocab, 12.0);
        for (i, l) in logits.iter_mut().enumerate() {
            match i / vocab % 4 {
                1 => *l = l.round(),
                2 if i % 3 == 0 => *l = f32::NAN,
                3 => *l = 4.0,
                _ => {}
            }
        }
        let given = [Tensor::from_slice([draws.len(), vocab], &logits)?];
        let mut session = session(&check.devices[0].1, &build.graph, draws.len(), Numerics::Fast)?;
        let chosen = choose(session.as_mut(), &draws, &given)?;
        for ((draw, row), chosen) in draws.iter().zip(logits.chunks_exact(vocab)).zip(chosen) {
            let expected = Some(draw.choose(row, &mut Vec::new()));
            check.run += 1;
            if chosen != expected {
                check.failed += 1;
                println!("DIFFERS {draw:?} of {vocab} logits: {chosen:?} for {expected:?}");
            }
        }
    }
    Ok(())
}

fn main() -> Result<ExitCode> {
    let mut args = std::env::args().skip(1);
    let cache: Option<std::path::PathBuf> = args.next().map(Into::into);
    let mut names: Vec<String> = args.collect();
    let mut every = 1;
    if names.first().is_some_and(|n| n == "--every") {
        every = names.get(1).ok_or("--every takes a number")?.parse::<NonZeroUsize>()?.get();
        names.drain(..2);
    }
    let wants = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    let open = |operand, limit, (dense, kv)| {
        let options = CudaOptions {
            ordinal: 0,
            operand: Some(operand),
            kv: KvType::Float(kv),
            cache: cache.clone(),
            packaged: None,
            dense,
        };
        Ok::<_, Box<dyn std::error::Error>>((operand, CudaDevice::new(&options)?, limit))
    };
    let packed = (Dense::default(), FloatType::F32);
    let devices = [open(Operand::F16, 2e-3, packed)?, open(Operand::Bf16, 1.5e-2, packed)?];
    let (_, dense, _) = open(Operand::F16, 0.0, (Dense { all: true, ..packed.0 }, FloatType::F32))?;
    let mut stateful = stateful::Outcome::default();
    if wants("past") {
        stateful = stateful::run(&devices[0].1, &dense, every)?;
    }
    println!(
        "{} comparisons with the plain executor, {} differ, the largest at {:.2} of its limit",
        stateful.run, stateful.failed, stateful.worst
    );
    if wants("prompts") {
        for (operand, kv, limit) in
            [(Operand::F16, FloatType::F16, 2e-3), (Operand::Bf16, FloatType::BF16, 1.5e-2)]
        {
            let (_, device, _) = open(operand, limit, (packed.0, kv))?;
            let found = stateful::prompts(&device, limit)?;
            println!(
                "{} comparisons of attention over {operand} caches, {} differ, the largest at {:.2} of its limit",
                found.run, found.failed, found.worst
            );
            stateful.failed += found.failed;
        }
    }
    let mut check = Check { devices, every, run: 0, failed: 0, worst: 0.0 };
    if wants("draws") {
        draws(&mut check)?;
    }
    if wants("products") {
        products(&mut check)?;
    }
    if wants("experts") {
        experts(&mut check)?;
    }
    println!(
        "{} comparisons, {} differ, the largest at {:.2} of its limit",
        check.run, check.failed, check.worst
    );
    Ok(if check.failed + stateful.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
