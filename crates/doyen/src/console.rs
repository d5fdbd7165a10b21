//! The two streams: results on stdout, everything else (errors with their causes, summaries, progress) on stderr.
//!
//! Nothing here panics when a stream is closed or full, as `println!` and `eprintln!` do: what cannot be said on stderr
//! is left unsaid, a full stdout is an error, and a reader that has gone away (`doyen show | head`) is neither.

use anyhow::{Context, Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    borrow::Cow,
    fmt,
    io::{self, Write},
    time::Duration,
};

/// Nobody reads stdout any more: there is no use in going on, and nothing to report.
#[derive(Debug, Clone, Copy)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout has gone away")
    }
}

impl std::error::Error for ReaderGone {}

/// Writes text to stdout at once, for results that come piece by piece.
///
/// # Errors
/// [`ReaderGone`], or whatever else keeps stdout from taking the text.
pub fn stream(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(Error::new(ReaderGone)),
        result => result.context("cannot write to stdout"),
    }
}

/// Writes a whole result to stdout; a reader that has gone away has seen what it wanted.
///
/// # Errors
/// When stdout cannot take the text, a full disk for example.
pub fn print(text: &str) -> Result<()> {
    match stream(text) {
        Err(e) if e.is::<ReaderGone>() => Ok(()),
        result => result,
    }
}

/// A line on stderr.
pub fn say(line: impl fmt::Display) {
    // There is nowhere else to say that this failed.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Prints an error with its causes, one a line.
pub fn report(error: &Error) {
    let mut last = error.to_string();
    say(format_args!("error: {last}"));
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        // Many errors end with the text of their source, or are nothing but it.
        if !last.ends_with(&text) {
            say(format_args!("  caused by: {text}"));
        }
        last = text;
    }
}

/// A line that shows that something is being done; hidden when stderr is not a terminal.
pub fn spinner(what: impl Into<Cow<'static, str>>) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// A bar over `total` units of `template`'s kind.
///
/// # Panics
/// Never: the templates are this crate's own.
pub fn bar(total: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}
