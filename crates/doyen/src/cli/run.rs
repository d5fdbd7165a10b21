//! `doyen run`: text from a prompt.

use super::{
    Outcome,
    options::{ModelArgs, PromptArgs, SamplingArgs, at_least_one},
};
use crate::{
    console::{self, ReaderGone},
    generate::{Options, Stats, generate},
    model::{Message, Model, peak_memory},
};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use std::sync::atomic::AtomicBool;

/// Continue a prompt, or answer it
///
/// The generated text goes to stdout as it comes, and nothing else does.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen run -p \"To sort a list in Python\"
  doyen run qwen3-4bit --chat -p \"Why is the sky blue?\" --max-new-tokens 200
  git diff | doyen run qwen3-4bit --chat --stop \"\\n\\n\" --temperature 0.7 --seed 1
  doyen run --file notes.txt --stats json 2>stats.json")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    prompt: PromptArgs,

    /// Tokens to generate at most
    #[arg(value_parser = at_least_one, short = 'n', long, value_name = "N", default_value = "256", allow_negative_numbers = true)]
    max_new_tokens: std::num::NonZeroUsize,

    /// End the text at this string (may be given several times)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// Continue the prompt as it is (the default)
    #[arg(long, conflicts_with = "chat")]
    raw: bool,

    /// Put the prompt into the model's chat template as the user's message
    #[arg(long)]
    chat: bool,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// How the summary on stderr looks
    #[arg(long, value_enum, default_value_t)]
    stats: StatsFormat,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum StatsFormat {
    /// One line for people
    #[default]
    Text,
    /// One JSON object
    Json,
    /// Nothing
    None,
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        self.sampling.check()?;
        let prompt = self.prompt.text()?;
        let mut model = Model::load(&self.model, 1)?;
        let prompt = if self.chat {
            model.chat_prompt(&[Message::new("user", prompt)])?
        } else {
            model.raw_prompt(&prompt)?
        };
        ensure!(
            !prompt.is_empty(),
            "the prompt is empty, and this model's tokenizer puts no token before a text: give a text with -p TEXT or \
             --file FILE, or pipe it in"
        );
        let options = Options {
            max_new_tokens: Some(self.max_new_tokens.get()),
            sampling: self.sampling.over(&model.sampling),
            stop: self.stop,
        };
        let stats = match generate(&mut model, prompt, &options, &AtomicBool::new(false), console::stream) {
            Err(e) if e.is::<ReaderGone>() => return Ok(Outcome::Done),
            result => result?,
        };
        match self.stats {
            StatsFormat::Text => console::say(format_args!("\n{}", summary(&stats))),
            StatsFormat::Json => console::say(json(&stats)),
            StatsFormat::None => {}
        }
        Ok(Outcome::Done)
    }
}

/// One line on a generation: rates and peak memory.
pub(super) fn summary(stats: &Stats) -> String {
    let rate = stats.decode_rate().map_or_else(String::new, |r| format!(" at {r:.0} tok/s"));
    let memory = peak_memory().map_or_else(String::new, |m| format!(", peak memory {m}"));
    format!(
        "prompt {} tokens at {:.0} tok/s, {} generated{rate}, ended by {}{memory}",
        stats.prompt_tokens,
        stats.prefill_rate(),
        stats.generated,
        stats.end.name(),
    )
}

fn json(stats: &Stats) -> serde_json::Value {
    serde_json::json!({
        "prompt_tokens": stats.prompt_tokens,
        "prompt_ms": stats.prefill.as_secs_f64() * 1e3,
        "prompt_tok_s": stats.prefill_rate(),
        "generated_tokens": stats.generated,
        "decode_ms": stats.decode.as_secs_f64() * 1e3,
        "decode_tok_s": stats.decode_rate(),
        "finish_reason": stats.end.name(),
        "peak_memory_bytes": peak_memory().map(|m| m.0),
    })
}
