//! Recorded logits: safetensors with `prompt_k` int64 `[n]`, `logits_k` float32 `[n, vocab]` (all positions) and
//! `greedy_k` int64 `[m]`; the last two may be called `ort_logits_k` and `ort_greedy_k`.

use super::{Difference, difference, token_ids};
use anyhow::{Context, Result, bail, ensure};
use doyen_runtime::{Engine, Request, SamplingParams};
use doyen_tensor::TokenId;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::path::Path;

/// One prompt with what was recorded for it.
#[derive(Debug, Clone)]
pub struct Golden {
    /// Token ids.
    pub prompt: Vec<TokenId>,
    /// `[prompt, vocab]`, if recorded.
    pub logits: Option<Vec<f32>>,
    /// Greedy continuation, end tokens ignored, if recorded.
    pub greedy: Option<Vec<TokenId>>,
}

/// Reads a file of recorded prompts. Prompts may be in another file of the same folder or its parent
/// (`golden.safetensors`) when only outputs were recorded.
///
/// # Errors
/// When the file cannot be read or holds no prompts.
pub fn read(path: &Path) -> Result<Vec<Golden>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = SafeTensors::deserialize(&bytes)
        .with_context(|| format!("{} is no safetensors file", path.display()))?;
    let prompts = if file.tensor("prompt_0").is_ok() { None } else { beside(path) };
    let prompts = prompts.transpose()?;
    let prompt_file = match &prompts {
        Some(b) => SafeTensors::deserialize(b)?,
        None => SafeTensors::deserialize(&bytes)?,
    };
    let mut out = Vec::new();
    while let Ok(prompt) = prompt_file.tensor(&format!("prompt_{}", out.len())) {
        let k = out.len();
        let find = |name: &str| {
            file.tensor(&format!("{name}_{k}")).or_else(|_| file.tensor(&format!("ort_{name}_{k}")))
        };
        out.push(Golden {
            prompt: token_ids(&int64(&prompt).context("prompt")?)?,
            logits: find("logits").ok().map(|t| float32(&t)).transpose()?,
            greedy: find("greedy")
                .ok()
                .map(|t| token_ids(&int64(&t)?))
                .transpose()?
                .filter(|g| !g.is_empty()),
        });
        let found = out.last().is_some_and(|g: &Golden| g.logits.is_some() || g.greedy.is_some());
        ensure!(
            found,
            "{}: prompt_{k} has neither logits_{k} nor greedy_{k}: nothing to compare",
            path.display()
        );
    }
    let prompts = prompt_file.names().into_iter().filter(|n| n.starts_with("prompt_")).count();
    ensure!(
        prompts == out.len(),
        "{}: {prompts} prompts, but prompt_{} is missing: they are numbered from 0 without gaps",
        path.display(),
        out.len()
    );
    ensure!(
        !out.is_empty(),
        "{} has no prompts (prompt_0, prompt_1, ...), nor has a golden.safetensors beside it",
        path.display()
    );
    Ok(out)
}

fn beside(path: &Path) -> Option<Result<Vec<u8>>> {
    let dir = path.parent()?;
    [dir.join("golden.safetensors"), dir.join("../golden.safetensors")]
        .into_iter()
        .find(|p| p.exists() && p != path)
        .map(|p| std::fs::read(&p).with_context(|| format!("cannot read {}", p.display())))
}

fn int64(t: &TensorView<'_>) -> Result<Vec<i64>> {
    if t.dtype() != Dtype::I64 {
        bail!("expected int64, found {:?}", t.dtype());
    }
    let (words, _) = t.data().as_chunks::<8>();
    Ok(words.iter().map(|b| i64::from_le_bytes(*b)).collect())
}

fn float32(t: &TensorView<'_>) -> Result<Vec<f32>> {
    if t.dtype() != Dtype::F32 {
        bail!("logits: expected float32, found {:?}", t.dtype());
    }
    let (words, _) = t.data().as_chunks::<4>();
    Ok(words.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// Where a greedy continuation first differs from the recorded one.
#[derive(Debug, Clone, Copy)]
pub struct GreedyDifference {
    /// Index in the continuation.
    pub at: usize,
    /// Recorded token.
    pub want: TokenId,
    /// Token this engine chose.
    pub got: TokenId,
    /// By how much its logit exceeds the recorded token's here: the smaller, the closer the call.
    pub margin: f32,
}

/// What came of a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Against the recorded logits.
    pub logits: Option<Difference>,
    /// Tokens of the recorded continuation.
    pub greedy_tokens: usize,
    /// First difference from it.
    pub greedy: Option<GreedyDifference>,
}

/// Runs a prompt and compares.
///
/// # Errors
/// When the engine fails, or the recorded logits are not the prompt's.
pub fn compare(engine: &mut Engine, golden: &Golden) -> Result<Outcome> {
    let vocab = engine.vocab();
    let logits = match &golden.logits {
        None => None,
        Some(want) => {
            let expected = golden.prompt.len() * vocab;
            ensure!(
                want.len() == expected,
                "recorded logits of a prompt of {} tokens: expected {expected} numbers for a vocabulary of {vocab}, \
                 found {}; was the file recorded from another model?",
                golden.prompt.len(),
                want.len()
            );
            let mut got = Vec::with_capacity(expected);
            engine.logits(&golden.prompt, |_, row| got.extend_from_slice(row))?;
            Some(difference(&got, want, vocab))
        }
    };
    let greedy = match &golden.greedy {
        None => None,
        Some(want) => first_difference(engine, &golden.prompt, want)?,
    };
    let greedy_tokens = golden.greedy.as_ref().map_or(0, Vec::len);
    Ok(Outcome { prompt: golden.prompt.len(), logits, greedy_tokens, greedy })
}

fn first_difference(
    engine: &mut Engine,
    prompt: &[TokenId],
    want: &[TokenId],
) -> Result<Option<GreedyDifference>> {
    let mut request = Request::new(prompt.to_vec(), SamplingParams::default());
    request.max_new_tokens = Some(want.len());
    let mut got = Vec::new();
    let reason = engine.generate(request, |t| {
        got.push(t);
        true
    })?;
    ensure!(
        got.len() == want.len(),
        "the greedy continuation ended after {} of {} tokens ({reason:?})",
        got.len(),
        want.len()
    );
    let Some(at) = got.iter().zip(want).position(|(g, w)| g != w) else { return Ok(None) };
    let so_far: Vec<TokenId> = prompt.iter().chain(&got[..at]).copied().collect();
    let mut margin = 0.0;
    engine.logits(&so_far, |position, row| {
        if position + 1 == so_far.len() {
            margin = row[got[at].index()] - row[want[at].index()];
        }
    })?;
    Ok(Some(GreedyDifference { at, want: want[at], got: got[at], margin }))
}
