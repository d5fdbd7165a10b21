//! The `doyen` binary: parses the command line, runs the verb, reports errors.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    doyen::cli::Cli::parse().run()
}
