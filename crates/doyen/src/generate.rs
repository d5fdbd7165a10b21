//! One generation: prompt tokens in, streamed text and timings out. Used by `run` and `chat`.

use crate::model::Model;
use anyhow::{Result, bail};
use doyen_runtime::{Engine, Event, FinishReason, Request, SamplingParams};
use doyen_tensor::TokenId;
use doyen_text::{Detokenizer, StopMatcher};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// What to generate.
#[derive(Debug, Clone)]
pub struct Options {
    /// Tokens at most; `None` goes on to the end of the context.
    pub max_new_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
}

/// Why the text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The engine's reason.
    Engine(FinishReason),
    /// A stop string.
    Stop,
    /// The user interrupted.
    Interrupted,
}

impl End {
    /// A word for summaries and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Engine(FinishReason::Eos) => "eos",
            Self::Engine(FinishReason::Length) => "length",
            Self::Engine(FinishReason::Context) => "context",
            Self::Engine(FinishReason::Cancelled) => "cancelled",
            Self::Engine(FinishReason::NotANumber) => "nan",
            Self::Stop => "stop",
            Self::Interrupted => "interrupted",
        }
    }
}

/// What a generation took.
#[derive(Debug, Clone, Copy)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Until the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Why it ended.
    pub end: End,
}

impl Stats {
    /// Prompt tokens per second.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.prefill)
    }

    /// Generated tokens per second, the first one (which the prompt gave) left out; none without others.
    pub fn decode_rate(&self) -> Option<f64> {
        (self.generated > 1).then(|| rate(self.generated - 1, self.decode))
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// Generates, handing text to `emit` as soon as it is certain. `interrupt` ends it between two steps.
///
/// # Errors
/// When the prompt does not fit, the device fails, or `emit` does (a closed pipe).
pub fn generate(
    model: &mut Model,
    prompt: Vec<TokenId>,
    options: &Options,
    interrupt: &AtomicBool,
    mut emit: impl FnMut(&str) -> Result<()>,
) -> Result<Stats> {
    let mut text = Detokenizer::continuing(&model.tokenizer, &prompt);
    let mut stop = StopMatcher::new(&options.stop)?;
    let prompt_tokens = prompt.len();
    let request = Request {
        prompt,
        max_new_tokens: options.max_new_tokens,
        eos: model.eos.clone(),
        sampling: options.sampling.clone(),
    };
    let start = Instant::now();
    let id = model.engine.submit(request)?;
    let (mut first, mut generated) = (None, 0);
    let end = drive(&mut model.engine, interrupt, |token| {
        first.get_or_insert_with(Instant::now);
        generated += 1;
        let step = stop.push(text.push(token));
        emit(step.text)?;
        Ok(step.stopped.is_some())
    });
    // Also after a failure: a sequence left behind would go on in the next generation.
    model.engine.cancel(id);
    let (end, done) = (end?, Instant::now());
    if end != End::Stop {
        let step = stop.push(text.finish());
        emit(step.text)?;
        if step.stopped.is_none() {
            emit(stop.finish())?;
        }
    }
    let first = first.unwrap_or(done);
    Ok(Stats { prompt_tokens, generated, prefill: first - start, decode: done - first, end })
}

/// Steps the engine until its only sequence ends. `token` takes each token and says whether a stop string was reached.
fn drive(
    engine: &mut Engine,
    interrupt: &AtomicBool,
    mut token: impl FnMut(TokenId) -> Result<bool>,
) -> Result<End> {
    loop {
        if interrupt.load(Ordering::Relaxed) {
            return Ok(End::Interrupted);
        }
        for event in engine.step()? {
            match *event {
                Event::Token { token: t, .. } => {
                    if token(t)? {
                        return Ok(End::Stop);
                    }
                }
                Event::Finished { reason: FinishReason::NotANumber, prompt_tokens, generated, .. } => bail!(
                    "the logits after {} tokens are NaN: the package's weights or scales are damaged, or values overflow \
                     (keys and values beyond 65504 do in f16 caches: try --kv-dtype f32); `doyen verify` shows the first node \
                     that differs from the reference",
                    prompt_tokens + generated - 1
                ),
                Event::Finished { reason, .. } => return Ok(End::Engine(reason)),
            }
        }
    }
}
