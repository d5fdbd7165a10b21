//! The `doyen` binary: parses the command line, runs the verb, reports errors.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = doyen::cli::Cli::parse();
    survive_file_limits();
    doyen_graph::package::explain_truncated_files();
    cli.run()
}

/// A write beyond the limit on file sizes (`ulimit -f`) is to fail like any other, and be cleaned up after, not to end
/// the process: the signal is blocked here, before there are other threads, which inherit that.
#[cfg(unix)]
fn survive_file_limits() {
    use nix::sys::signal::{SigSet, Signal};
    // Without it the process ends at the limit, as it would have.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

#[cfg(not(unix))]
const fn survive_file_limits() {}
