//! Why a chat template could not be compiled or rendered.

use std::error::Error as _;

/// Why a chat template could not be compiled or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template is not UTF-8.
    #[error("{file}: the chat template is not UTF-8 text (from byte {at})")]
    NotUtf8 {
        /// Where the template came from.
        file: String,
        /// Offset of the first bad byte.
        at: usize,
    },
    /// The template is not Jinja.
    #[error("{file}, line {line}: the chat template is not valid Jinja: {reason}")]
    Syntax {
        /// Where the template came from.
        file: String,
        /// Line in the template, from 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// The template itself refused its input with `raise_exception`.
    #[error("the chat template refuses these messages: {message}")]
    Raised {
        /// The template's own words.
        message: String,
    },
    /// Rendering failed.
    #[error("{file}, line {line}: the chat template failed: {reason}")]
    Render {
        /// Where the template came from.
        file: String,
        /// Line in the template, from 1.
        line: usize,
        /// What went wrong there.
        reason: String,
    },
    /// Rendering took more steps or memory than a chat template reasonably needs.
    #[error("{file}: the chat template does not end (stopped after {fuel} steps)")]
    Endless {
        /// Where the template came from.
        file: String,
        /// The limit that was exceeded.
        fuel: u64,
    },
    /// The template is far larger than a chat template.
    #[error("{file}: the chat template has {bytes} bytes; the limit is {limit}")]
    TooLong {
        /// Where the template came from.
        file: String,
        /// Its size.
        bytes: usize,
        /// The largest size that is read.
        limit: usize,
    },
    /// The template engine could not run.
    #[error("{file}: the chat template could not be evaluated: {reason}")]
    Engine {
        /// Where the template came from.
        file: String,
        /// Why not.
        reason: String,
    },
    /// The configuration that holds the template, or the input for it, is malformed.
    #[error("{file}: {reason}")]
    Config {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// There are several templates and not the one asked for.
    #[error("there is no chat template {wanted:?}; there are {known}")]
    UnknownName {
        /// The name asked for.
        wanted: String,
        /// The names there are.
        known: String,
    },
}

/// Carries a template's own message through the engine's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

impl TemplateError {
    pub(super) fn engine(error: &super::deep::DeepError, file: &str) -> Self {
        Self::Engine { file: file.to_owned(), reason: error.to_string() }
    }

    pub(super) fn syntax(error: &minijinja::Error, file: &str) -> Self {
        Self::Syntax { file: file.to_owned(), line: error.line().unwrap_or(1), reason: reason(error) }
    }

    pub(super) fn render(error: &minijinja::Error, file: &str, fuel: u64) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref() {
                return Self::Raised { message: message.clone() };
            }
            if current
                .downcast_ref::<minijinja::Error>()
                .is_some_and(|e| e.kind() == minijinja::ErrorKind::OutOfFuel)
            {
                return Self::Endless { file: file.to_owned(), fuel };
            }
            cause = current.source();
        }
        Self::Render { file: file.to_owned(), line: error.line().unwrap_or(1), reason: reason(error) }
    }
}

fn reason(error: &minijinja::Error) -> String {
    let kind = error.kind();
    let mut text = match error.detail() {
        Some(detail) => format!("{kind}: {detail}"),
        None => kind.to_string(),
    };
    if let Some(source) = error.source() {
        text = format!("{text} ({source})");
    }
    text
}
