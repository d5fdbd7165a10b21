//! `doyen chat`: a conversation on the terminal.
//!
//! This file holds the loop; the state and its commands are in `session`.

mod session;

use super::{
    Outcome,
    options::{ModelArgs, SamplingArgs, at_least_one},
    run::summary,
};
use crate::{
    console::{self, ReaderGone},
    generate::{End, Options, Stats, generate},
    model::Model,
};
use anyhow::{Context, Result, anyhow};
use doyen_runtime::{EngineError, FinishReason};
use rustyline::{DefaultEditor, error::ReadlineError};
use session::{Reply, Session};
use signal_hook::{consts::SIGINT, flag};
use std::{
    io::IsTerminal,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Talk to a model
///
/// Each line is a message; end a line with \ to go on in the next, or put """ on lines of its own around a longer
/// message. Ctrl-C ends the turn, Ctrl-D the program. /help lists the commands.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen chat
  doyen chat qwen3-4bit --system \"Answer in one sentence.\" --temperature 0.7
  printf 'What is a socket?\\n' | doyen chat qwen3-4bit --seed 1")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Tokens of an answer at most [default: to the end of the context]
    #[arg(value_parser = at_least_one, short = 'n', long, value_name = "N", allow_negative_numbers = true)]
    max_new_tokens: Option<std::num::NonZeroUsize>,

    /// End answers at this string (may be given several times)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    #[command(flatten)]
    sampling: SamplingArgs,
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        self.sampling.check()?;
        let mut model = Model::load(&self.model, 1)?;
        model.require_template()?;
        let interrupt = Arc::new(AtomicBool::new(false));
        flag::register(SIGINT, Arc::clone(&interrupt)).context("cannot handle Ctrl-C")?;
        let options = Options {
            max_new_tokens: self.max_new_tokens.map(Into::into),
            sampling: self.sampling.over(&model.sampling),
            stop: self.stop,
        };
        let mut session = Session::new(self.system, options);
        let mut input = Input::new()?;
        let result = converse(&mut model, &mut session, &mut input, &interrupt);
        input.save();
        match result {
            Err(e) if e.is::<ReaderGone>() => Ok(Outcome::Done),
            // On a terminal the user has seen the error and gone on; a script has only the exit code.
            Ok(Conversation::Refused) if !input.terminal => Ok(Outcome::Reported),
            result => result.map(|_| Outcome::Done),
        }
    }
}

/// How a conversation went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conversation {
    Well,
    /// Some command or message was refused; the errors have been reported.
    Refused,
}

fn converse(
    model: &mut Model,
    session: &mut Session,
    input: &mut Input,
    interrupt: &AtomicBool,
) -> Result<Conversation> {
    let mut conversation = Conversation::Well;
    while let Some(message) = input.message()? {
        let outcome = match session.handle(&message) {
            Ok(Reply::Quit) => break,
            Ok(Reply::Said(text)) => {
                console::say(text);
                Ok(())
            }
            Ok(Reply::Ask) => turn(model, session, interrupt),
            Err(e) => Err(e),
        };
        match outcome {
            Err(e) if e.is::<ReaderGone>() => return Err(e),
            Err(e) => {
                console::report(&e);
                conversation = Conversation::Refused;
            }
            Ok(()) => {}
        }
    }
    Ok(conversation)
}

/// Answers the conversation as it stands. The message of a turn that fails is taken back.
fn turn(model: &mut Model, session: &mut Session, interrupt: &AtomicBool) -> Result<()> {
    interrupt.store(false, Ordering::Relaxed);
    match answer(model, session, interrupt) {
        Ok((text, stats)) => {
            session.answered(text, stats);
            if stats.end == End::Engine(FinishReason::Context) {
                console::say(format_args!(
                    "[the context of {} positions is full, the answer is cut short: /reset starts over]",
                    model.engine.limits().context
                ));
            }
            if session.shows_stats() || stats.end == End::Interrupted {
                console::say(format_args!("[{}]", summary(&stats)));
            }
            Ok(())
        }
        Err(e) => {
            session.take_back();
            Err(match e.downcast_ref::<EngineError>() {
                Some(EngineError::PromptTooLong { prompt, context }) => anyhow!(
                    "the conversation has {prompt} tokens with this message, the context holds {context}; the message \
                     was not sent: /reset starts over (/save FILE keeps the conversation), or start the chat with a \
                     longer --context"
                ),
                _ => e,
            })
        }
    }
}

/// Streams the answer to stdout, a line's end after it.
fn answer(model: &mut Model, session: &Session, interrupt: &AtomicBool) -> Result<(String, Stats)> {
    let prompt = model.chat_prompt(session.messages())?;
    let mut text = String::new();
    let result = generate(model, prompt, session.options(), interrupt, |piece| {
        text.push_str(piece);
        console::stream(piece)
    });
    if result.is_ok() || !text.is_empty() {
        console::stream("\n")?;
    }
    Ok((text, result?))
}

/// Messages from the terminal (with editing and history) or from a pipe.
struct Input {
    editor: DefaultEditor,
    history: Option<PathBuf>,
    terminal: bool,
}

impl Input {
    fn new() -> Result<Self> {
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        let terminal = std::io::stdin().is_terminal();
        let history = history_file().filter(|_| terminal);
        if let Some(path) = &history {
            // The first conversation has no history.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, terminal })
    }

    fn line(&mut self, prompt: &str) -> Result<Option<String>> {
        loop {
            match self.editor.readline(if self.terminal { prompt } else { "" }) {
                Ok(line) => return Ok(Some(line)),
                Err(ReadlineError::Interrupted) => console::say("(Ctrl-D or /quit to leave)"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(e) => return Err(e).context("cannot read the terminal"),
            }
        }
    }

    /// The next message that is not blank; `None` at the end of the input.
    fn message(&mut self) -> Result<Option<String>> {
        loop {
            let Some(first) = self.line("> ")? else { return Ok(None) };
            let message = if first.trim() == "\"\"\"" { self.block()? } else { self.continued(first)? };
            if !message.trim().is_empty() {
                let _ = self.editor.add_history_entry(&message);
                return Ok(Some(message));
            }
        }
    }

    fn continued(&mut self, mut message: String) -> Result<String> {
        while message.ends_with('\\') {
            message.pop();
            message.push('\n');
            match self.line(". ")? {
                Some(next) => message.push_str(&next),
                None => break,
            }
        }
        Ok(message)
    }

    fn block(&mut self) -> Result<String> {
        let mut lines = Vec::new();
        while let Some(line) = self.line(". ")? {
            if line.trim() == "\"\"\"" {
                break;
            }
            lines.push(line);
        }
        Ok(lines.join("\n"))
    }

    fn save(&mut self) {
        if let Some(path) = &self.history {
            if let Some(dir) = path.parent() {
                let _ = std::fs::create_dir_all(dir);
            }
            if let Err(e) = self.editor.save_history(path) {
                console::say(format_args!("the history was not saved to {}: {e}", path.display()));
            }
        }
    }
}

fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")))?;
    Some(base.join("doyen/history"))
}
