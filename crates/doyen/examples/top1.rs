//! What 8-bit and 4-bit weights cost the tiny models of the tests: the table of `docs/families.md`.
//!
//! `cargo run --release -p doyen --example top1 [NAME...]` reads `goldens` of the folder `DOYEN_SHARED` and the references of the
//! converter's tests. Each checkpoint is converted in float32, with 8-bit and with 4-bit feed-forwards (experts, shared
//! experts, dense ones; everything else as `convert` does by itself) and run in exact mode.

use anyhow::{Context, Result};
use doyen::{
    model,
    verify::{difference, golden},
};
use doyen_convert::{
    Options, Silent, Target, convert,
    options::{Setting, Width},
};
use doyen_graph::device::Numerics;
use doyen_runtime::{Engine, Plan, PlanOptions, sample::argmax};
use doyen_tensor::{FloatType, TokenId, format::Bits};
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Random sequences beside the recorded prompts, which have few positions.
const SEQUENCES: usize = 32;
const LENGTH: usize = 32;

/// Two logits are close when they differ by less than this share of a row's standard deviation.
const CLOSE: f64 = 0.25;

fn main() -> Result<()> {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    println!(
        "| family | float32, largest error | recorded: 8/8 | 4/4 | random: 8/8 | 4/4 | close, of those that differ |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (name, checkpoint, recorded) in references()? {
        if asked.is_empty() || asked.contains(&name) {
            println!("{}", row(&name, &checkpoint, &recorded).with_context(|| name.clone())?);
        }
    }
    Ok(())
}

/// Name, checkpoint and recorded outputs of every reference.
fn references() -> Result<Vec<(String, PathBuf, PathBuf)>> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shared =
        std::env::var_os("DOYEN_SHARED").map_or_else(|| crates.join("../../../shared"), PathBuf::from);
    let mut out = Vec::new();
    for (root, inner) in
        [(shared.join("goldens"), "checkpoint"), (crates.join("../doyen-convert/tests/data/families"), "")]
    {
        for entry in fs::read_dir(&root).with_context(|| format!("cannot read {}", root.display()))? {
            let dir = entry?.path();
            let (checkpoint, recorded) = (dir.join(inner), dir.join("golden.safetensors"));
            if checkpoint.join("config.json").is_file() && recorded.is_file() {
                let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
                out.push((name, checkpoint, recorded));
            }
        }
    }
    out.sort();
    Ok(out)
}

/// The feed-forwards at one width, the rest as `convert` chooses.
fn at(bits: Bits) -> Options {
    let w = Width::Bits(bits);
    Options {
        settings: vec![Setting::Experts(w), Setting::Mlp(w), Setting::SharedExperts(w)],
        ..Options::default()
    }
}

fn row(name: &str, checkpoint: &Path, recorded: &Path) -> Result<String> {
    let goldens = golden::read(recorded)?;
    let long_context = name.ends_with("_long_context");
    let float = Options { long_context, ..Options::float(FloatType::F32) };
    let exact = Logits::of(checkpoint, &float, &goldens)?;
    let want: Vec<f32> = goldens.iter().flat_map(|g| g.logits.clone().unwrap_or_default()).collect();
    let error = difference(&exact.recorded, &want, exact.vocab).max_abs;
    let (mut counts, mut differ, mut close) = ([String::new(), String::new()], 0, 0);
    for bits in [Bits::B8, Bits::B4] {
        let got = Logits::of(checkpoint, &Options { long_context, ..at(bits) }, &goldens)?;
        for (cell, got, want) in [(0, &got.recorded, &want), (1, &got.random, &exact.random)] {
            let d = difference(got, want, exact.vocab);
            let _ = write!(counts[cell], " {}/{} |", d.top1, d.rows);
            let margins = margins(got, want, exact.vocab);
            differ += margins.len();
            close += margins.iter().filter(|m| **m < CLOSE).count();
        }
    }
    let [recorded, random] = counts;
    Ok(format!("| `{name}` | {error:.1e} |{recorded}{random} {close}/{differ} |"))
}

/// Of every row whose largest logit moved: by how much the old one was the larger, in standard deviations of the row.
fn margins(got: &[f32], want: &[f32], vocab: usize) -> Vec<f64> {
    let rows = got.chunks_exact(vocab).zip(want.chunks_exact(vocab));
    rows.filter_map(|(got, want)| {
        let (now, then) = (argmax(got).index(), argmax(want).index());
        let mean = want.iter().map(|&x| f64::from(x)).sum::<f64>() / vocab as f64;
        let variance = want.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / vocab as f64;
        (now != then).then(|| f64::from(want[then] - want[now]) / variance.sqrt())
    })
    .collect()
}

/// Logits of all positions, `[positions, vocab]`.
struct Logits {
    recorded: Vec<f32>,
    random: Vec<f32>,
    vocab: usize,
}

impl Logits {
    /// Converts a checkpoint and runs it on the recorded prompts and on random tokens.
    fn of(checkpoint: &Path, options: &Options, goldens: &[golden::Golden]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let (source, package) = (dir.path().join("checkpoint"), dir.path().join("package"));
        fs::create_dir(&source)?;
        for entry in fs::read_dir(checkpoint)? {
            let entry = entry?;
            fs::copy(entry.path(), source.join(entry.file_name()))?;
        }
        if !source.join("tokenizer.json").exists() {
            let empty = r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}"#;
            fs::write(source.join("tokenizer.json"), empty)?;
        }
        convert(&source, &Target::new(&package), options, &mut Silent)?;
        let package = model::open(Some(&package))?;
        let device = model::cpu(None)?;
        let longest = goldens.iter().map(|g| g.prompt.len()).max().unwrap_or(0).max(LENGTH);
        let plan = PlanOptions { context: longest + 1, numerics: Numerics::Exact, ..PlanOptions::default() };
        let plan = Plan::new(Arc::new(model::lowered(&package)?), &device, &plan)?;
        let mut engine = Engine::new(&plan, &device)?;
        let vocab = engine.vocab();
        let mut run = |tokens: &[TokenId], out: &mut Vec<f32>| {
            engine.logits(tokens, |_, row| out.extend_from_slice(row))
        };
        let (mut recorded, mut random) = (Vec::new(), Vec::new());
        for g in goldens {
            run(&g.prompt, &mut recorded)?;
        }
        let mut state = 1;
        for _ in 0..SEQUENCES {
            let tokens: Vec<TokenId> = (0..LENGTH).map(|_| token(&mut state, vocab)).collect();
            run(&tokens, &mut random)?;
        }
        Ok(Self { recorded, random, vocab })
    }
}

/// The next of a fixed sequence of random tokens (a linear congruence modulo 2^64, its upper half).
fn token(state: &mut u64, vocab: usize) -> TokenId {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    TokenId(((*state >> 33) % vocab as u64) as u32)
}
