//! `doyen chat`: a conversation on the terminal.
//!
//! This file holds the loop; the state and its commands are in `session`.

mod session;

use super::{
    Outcome,
    options::{ModelArgs, SamplingArgs},
    run::summary,
};
use crate::{
    generate::{End, Options, generate},
    model::Model,
};
use anyhow::{Context, Result};
use rustyline::{DefaultEditor, error::ReadlineError};
use session::{Reply, Session};
use std::{
    io::{IsTerminal, Write},
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
    #[arg(short = 'n', long, value_name = "N")]
    max_new_tokens: Option<std::num::NonZeroUsize>,

    /// End answers at this string (may be given several times)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    #[command(flatten)]
    sampling: SamplingArgs,
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        let mut model = Model::load(&self.model, 1)?;
        model.require_template()?;
        let interrupt = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&interrupt);
        ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed)).context("cannot handle Ctrl-C")?;
        let options = Options {
            max_new_tokens: self.max_new_tokens.map(Into::into),
            sampling: self.sampling.over(&model.sampling),
            stop: self.stop,
        };
        let mut session = Session::new(self.system, options);
        let mut input = Input::new()?;
        while let Some(message) = input.message()? {
            match session.handle(&message) {
                Reply::Quit => break,
                Reply::Said(text) => eprintln!("{text}"),
                Reply::Ask => turn(&mut model, &mut session, &interrupt)?,
            }
        }
        input.save();
        Ok(Outcome::Done)
    }
}

/// Answers the conversation as it stands. A turn that fails is taken back, not the program down.
fn turn(model: &mut Model, session: &mut Session, interrupt: &AtomicBool) -> Result<()> {
    interrupt.store(false, Ordering::Relaxed);
    let mut answer = String::new();
    let prompt = match model.chat_prompt(session.messages()) {
        Ok(p) => p,
        Err(e) => {
            session.take_back();
            crate::console::report(&e);
            return Ok(());
        }
    };
    let options = session.options().clone();
    let mut stdout = std::io::stdout().lock();
    let result = generate(model, prompt, &options, interrupt, |text| {
        answer.push_str(text);
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to stdout")
    });
    writeln!(stdout)?;
    match result {
        Ok(stats) => {
            session.answered(answer, stats);
            if session.shows_stats() || stats.end == End::Interrupted {
                eprintln!("[{}]", summary(&stats));
            }
        }
        Err(e) => {
            session.take_back();
            crate::console::report(&e);
        }
    }
    Ok(())
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
                Err(ReadlineError::Interrupted) => eprintln!("(Ctrl-D or /quit to leave)"),
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
                eprintln!("the history was not saved to {}: {e}", path.display());
            }
        }
    }
}

fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")))?;
    Some(base.join("doyen/history"))
}
