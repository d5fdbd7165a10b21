//! Why a tokenizer could not be read or used.

/// Why a tokenizer could not be read or used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// A file is not JSON.
    #[error("{file} is not valid JSON: {reason}")]
    NotJson {
        /// Name of the file.
        file: &'static str,
        /// The parser's reason, with line and column.
        reason: String,
    },
    /// The tokenizer's algorithm is not known.
    #[error("{file}: the model type {found:?} is unknown; known are {known}")]
    UnknownModel {
        /// Name of the file.
        file: &'static str,
        /// The type in the file.
        found: String,
        /// The types that are known.
        known: String,
    },
    /// A file's content contradicts itself or exceeds a limit.
    #[error("{file}: {reason}")]
    Malformed {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The decoder contains a step that is not supported.
    #[error("{file}: the decoder has {what}, which is not supported")]
    Decoder {
        /// Name of the file.
        file: &'static str,
        /// The step.
        what: String,
    },
    /// The tokenizer library refuses the file.
    #[error("{file} cannot be used: {reason}")]
    Library {
        /// Name of the file.
        file: &'static str,
        /// The library's reason.
        reason: String,
    },
    /// The tokenizer library refuses a text or a list of ids.
    #[error("the text cannot be tokenized: {reason}")]
    Encode {
        /// The library's reason.
        reason: String,
    },
    /// The tokenizer library failed in a way it should not; the tokenizer must be loaded anew.
    #[error(
        "the tokenizer failed internally and cannot be used any more; its tokenizer.json is probably damaged"
    )]
    Poisoned,
}
