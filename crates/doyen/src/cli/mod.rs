//! The command line: one file per verb.
//!
//! Results go to stdout and nothing else does; progress, summaries and errors go to stderr. Exit codes: 0 done, 1 a check
//! found a difference, 2 an error.

mod bench;
mod chat;
mod conformance;
mod convert;
mod doctor;
mod eval;
mod options;
mod reference;
mod run;
mod show;
mod verify;

pub use options::ModelArgs;
pub use reference::reference;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Run and convert quantized mixture-of-experts language models in ONNX form.
#[derive(Debug, Parser)]
#[command(name = "doyen", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  doyen run -p \"To sort a list in Python\"          text from the built-in model
  doyen convert Qwen3-30B-A3B -o qwen3-4bit          a checkpoint to a 4-bit package
  doyen chat qwen3-4bit                              talk to it
  doyen show qwen3-4bit                              where its bytes go
  doyen doctor                                       what limits this machine

Environment:
  DOYEN_CPU=scalar|avx2|avxvnni|avx512|amx|neon      force an instruction set, for comparisons";

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Chat(chat::Args),
    Convert(convert::Args),
    Eval(eval::Args),
    Show(show::Args),
    Verify(verify::Args),
    Conformance(conformance::Args),
    Bench(Box<bench::Args>),
    Doctor(doctor::Args),
}

/// What a verb that did not fail has to say with its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All is well.
    Done,
    /// A check found a difference.
    Different,
    /// Errors occurred that have been reported where they did.
    Reported,
}

impl Cli {
    /// Runs the verb.
    pub fn run(self) -> ExitCode {
        let result = match self.command {
            Command::Run(args) => args.run(),
            Command::Chat(args) => args.run(),
            Command::Convert(args) => args.run(),
            Command::Eval(args) => args.run(),
            Command::Show(args) => args.run(),
            Command::Verify(args) => args.run(),
            Command::Conformance(args) => args.run(),
            Command::Bench(args) => args.run(),
            Command::Doctor(args) => args.run(),
        };
        match result {
            Ok(Outcome::Done) => ExitCode::SUCCESS,
            Ok(Outcome::Different) => ExitCode::from(1),
            Ok(Outcome::Reported) => ExitCode::from(2),
            Err(error) => {
                crate::console::report(&error);
                ExitCode::from(2)
            }
        }
    }
}
