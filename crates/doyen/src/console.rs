//! What goes to stderr: errors with their causes, and progress.

use indicatif::{ProgressBar, ProgressStyle};
use std::{borrow::Cow, time::Duration};

/// Prints an error with its causes, one a line.
pub fn report(error: &anyhow::Error) {
    eprintln!("error: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        // Transparent wrappers repeat their source.
        if text != last {
            eprintln!("  caused by: {text}");
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
