//! `doyen eval`: how well a model predicts a text.

use super::{
    Outcome,
    options::{MAX_TEXT, ModelArgs, at_least_one, read_text},
};
use crate::{console, model::Model};
use anyhow::{Context, Result, ensure};
use doyen_graph::device::Numerics;
use doyen_tensor::TokenId;
use std::{num::NonZeroUsize, path::PathBuf, time::Instant};

/// Negative log-likelihood and perplexity of a text
///
/// The text is tokenized whole and cut into consecutive windows; each window is run alone and its first token is not
/// scored. A last window shorter than the others is left out unless it is the only one.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen eval qwen3-4bit --text wiki.txt
  doyen eval docmoe-2x4 --text heldout.txt --window 512 --windows 64 --json")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The text
    #[arg(long, value_name = "FILE")]
    text: PathBuf,

    /// Tokens of a window
    #[arg(value_parser = at_least_one, long, value_name = "N", default_value = "512", allow_negative_numbers = true)]
    window: NonZeroUsize,

    /// Score this many windows at most [default: all]
    #[arg(value_parser = at_least_one, long, value_name = "N", allow_negative_numbers = true)]
    windows: Option<NonZeroUsize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn run(mut self) -> Result<Outcome> {
        let window = self.window.get();
        ensure!(window > 1, "--window must be at least 2: the first token of a window is not scored");
        let what = format!("cannot read the text {}", self.text.display());
        let file = std::fs::File::open(&self.text).with_context(|| what.clone())?;
        let text = read_text(file, MAX_TEXT).context(what)?;
        let context = *self.model.context.get_or_insert(self.window);
        ensure!(
            self.window <= context,
            "--window {window} does not fit --context {context}: give a window of at most {context}"
        );
        let mut model = Model::load(&self.model, 1)?;
        let tokens = model.tokenizer.encode(&text).context("cannot tokenize the text")?;
        ensure!(tokens.len() > 1, "the text has {} tokens, at least 2 are needed", tokens.len());
        let windows = windows(&tokens, window, self.windows.map(NonZeroUsize::get));
        let start = Instant::now();
        let bar = console::bar(windows.len() as u64, "{bar:30} {pos}/{len} windows  {msg}  {eta} left");
        let mut scores = Vec::with_capacity(windows.len());
        for w in windows {
            scores.push(score(&mut model, w)?);
            bar.set_message(format!("{:.4} nats/token", Score::total(&scores).mean()));
            bar.inc(1);
        }
        bar.finish_and_clear();
        self.print(&model, &scores, start.elapsed().as_secs_f64())?;
        Ok(Outcome::Done)
    }

    fn print(&self, model: &Model, scores: &[Score], seconds: f64) -> Result<()> {
        let window = self.window;
        let all = Score::total(scores);
        let accuracy = all.correct as f64 / all.tokens as f64;
        let rate = all.tokens as f64 / seconds;
        if self.json {
            let per_window: Vec<f64> = scores.iter().map(Score::mean).collect();
            let result = serde_json::json!({
                "nll": all.mean(), "perplexity": all.mean().exp(), "tokens": all.tokens,
                "windows": scores.len(), "window": window, "top1_accuracy": accuracy,
                "numerics": Numerics::from(self.model.numerics).name(), "kv_dtype": model.kv_dtype, "window_nll": per_window, "seconds": seconds, "tok_s": rate,
            });
            return console::print(&format!("{result}\n"));
        }
        console::print(&format!(
            "{:.6} nats/token, perplexity {:.4}, top-1 accuracy {accuracy:.4} over {} tokens in {} windows of {window} \
             ({rate:.0} tok/s)\n",
            all.mean(),
            all.mean().exp(),
            all.tokens,
            scores.len()
        ))
    }
}

fn windows(tokens: &[TokenId], window: usize, most: Option<usize>) -> Vec<&[TokenId]> {
    if tokens.len() < window {
        return vec![tokens];
    }
    tokens.chunks_exact(window).take(most.unwrap_or(usize::MAX)).collect()
}

/// Sums over the scored tokens of a window.
#[derive(Debug, Clone, Copy, Default)]
struct Score {
    nll: f64,
    tokens: usize,
    correct: usize,
}

impl Score {
    fn mean(&self) -> f64 {
        self.nll / self.tokens as f64
    }

    fn total(scores: &[Self]) -> Self {
        scores.iter().fold(Self::default(), |a, s| Self {
            nll: a.nll + s.nll,
            tokens: a.tokens + s.tokens,
            correct: a.correct + s.correct,
        })
    }
}

fn score(model: &mut Model, window: &[TokenId]) -> Result<Score> {
    let mut score = Score::default();
    model.engine.logits(window, |position, logits| {
        let Some(next) = window.get(position + 1) else { return };
        score.nll += nll(logits, next.index());
        score.tokens += 1;
        score.correct += usize::from(doyen_runtime::sample::argmax(logits) == *next);
    })?;
    ensure!(
        !score.nll.is_nan(),
        "the model computes NaN on this text: its weights or scales are damaged; `doyen verify` shows the first node"
    );
    Ok(score)
}

/// `log(sum(exp(logits))) - logits[token]`, in f64.
fn nll(logits: &[f32], token: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    sum.ln() + f64::from(max) - f64::from(logits[token])
}
