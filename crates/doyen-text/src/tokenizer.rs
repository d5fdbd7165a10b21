//! [`Tokenizer`]: Hugging Face tokenizer files to token ids and back.
//!
//! The work is done by the `tokenizers` library, which trusts its input. This module does not: files are checked
//! first (`check`), and a panic inside the library becomes an error that sticks to the tokenizer. Streaming is
//! in [`crate::stream`], chat templates are in [`crate::template`].

mod check;
mod decoder;
mod error;
mod specials;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use doyen_tensor::TokenId;
use serde_json::Value;
use tokenizers::Model as _;

pub(crate) use self::decoder::{Decoder, Fallback, Local};
pub use self::error::TokenizerError;
pub use self::specials::NamedTokens;

/// Whether special tokens appear in decoded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Left out, as for a reader.
    Skip,
    /// Written out, as for a parser of tool calls.
    Keep,
}

/// The files a tokenizer is read from, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct TokenizerFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// `tokenizer_config.json`, if there is one.
    pub config: Option<&'a [u8]>,
    /// `special_tokens_map.json`, if there is one. Tokens named in `tokenizer_config.json` take precedence.
    pub special_tokens_map: Option<&'a [u8]>,
}

/// A tokenizer; cheap to clone and shared between threads.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    library: tokenizers::Tokenizer,
    decoder: Decoder,
    special_ids: HashSet<u32>,
    named: NamedTokens,
    vocab_size: usize,
    /// Set when the library panicked: its scratch buffers may be in any state.
    poisoned: AtomicBool,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, if given, `tokenizer_config.json`.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files).
    pub fn from_bytes(tokenizer: &[u8], config: Option<&[u8]>) -> Result<Self, TokenizerError> {
        Self::from_files(&TokenizerFiles { tokenizer, config, special_tokens_map: None })
    }

    /// Reads a tokenizer from its files.
    ///
    /// # Errors
    /// Every error names the file. [`TokenizerError::NotJson`] with the position, [`TokenizerError::UnknownModel`]
    /// with the models that are known, [`TokenizerError::Malformed`] for content that is wrong in itself,
    /// [`TokenizerError::Library`] for anything the tokenizer library refuses, with its reason.
    pub fn from_files(files: &TokenizerFiles<'_>) -> Result<Self, TokenizerError> {
        const FILE: &str = "tokenizer.json";
        let document = check::read(files.tokenizer, FILE)?;
        let named = named_tokens(files.config, "tokenizer_config.json")?
            .or(named_tokens(files.special_tokens_map, "special_tokens_map.json")?);
        let decoder = Decoder::read(&document["decoder"], FILE)?;
        let library = guarded(FILE, || {
            let mut library =
                tokenizers::Tokenizer::from_bytes(files.tokenizer).map_err(|e| e.to_string())?;
            // Settings for training batches: they must never shorten or lengthen a prompt.
            library.with_padding(None).with_truncation(None).map_err(|e| e.to_string())?;
            Ok(library)
        })?;
        let special_ids = check_added(&document, &library, FILE)?;
        let vocab_size = vocab_size(&document);
        let poisoned = AtomicBool::new(false);
        let tokenizer =
            Self { shared: Arc::new(Shared { library, decoder, special_ids, named, vocab_size, poisoned }) };
        tokenizer.try_out(FILE)?;
        Ok(tokenizer)
    }

    /// Token ids of `text`, without the tokens a post-processor would put around it.
    ///
    /// Special tokens written out in the text become their ids, which is what a rendered chat template needs.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the library refuses the text (a regular expression running away), or
    /// [`TokenizerError::Poisoned`] after a defect in it.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_as(text, false)
    }

    /// Token ids of `text` framed as the tokenizer's post-processor says (usually a leading BOS).
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_as(text, true)
    }

    /// The text of `ids`. Ids outside of the vocabulary are left out; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Poisoned`] after a defect in the tokenizer library.
    pub fn decode(&self, ids: &[TokenId], specials: Specials) -> Result<String, TokenizerError> {
        if ids.is_empty() {
            return Ok(String::new());
        }
        let ids: Vec<u32> = ids.iter().map(|id| id.0).collect();
        self.call(|| self.shared.library.decode(&ids, specials == Specials::Skip).map_err(|e| e.to_string()))
    }

    /// One more than the largest token id: the least number of logits a model for this tokenizer has.
    ///
    /// Models often have more, for alignment; those ids decode to nothing.
    pub fn vocab_size(&self) -> usize {
        self.shared.vocab_size
    }

    /// The id of a token given as it is spelled in the vocabulary (`"<|im_end|>"`, `"Ġthe"`).
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.shared.library.token_to_id(token).map(TokenId)
    }

    /// A token as it is spelled in the vocabulary, `None` for an id outside of it.
    pub fn id_to_token(&self, id: TokenId) -> Option<String> {
        self.shared.library.id_to_token(id.0)
    }

    /// Whether `id` is a special token.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.shared.special_ids.contains(&id.0)
    }

    /// The named special tokens of the configuration files, as strings.
    pub fn named(&self) -> &NamedTokens {
        &self.shared.named
    }

    /// The id of the beginning-of-sequence token, if the files name one that the vocabulary has.
    pub fn bos(&self) -> Option<TokenId> {
        self.token_to_id(self.shared.named.bos()?)
    }

    /// The id of the end-of-sequence token, if the files name one that the vocabulary has.
    ///
    /// Generation often ends at further tokens; those are listed in the model's own configuration.
    pub fn eos(&self) -> Option<TokenId> {
        self.token_to_id(self.shared.named.eos()?)
    }

    /// How tokens become text.
    pub(crate) fn decoder(&self) -> &Decoder {
        &self.shared.decoder
    }

    /// The token that the decoder steps start from; `None` if there is none or it is left out.
    pub(crate) fn decoded_token(&self, id: TokenId, specials: Specials) -> Option<String> {
        let library = &self.shared.library;
        let added = library.get_added_vocabulary();
        let token = added.simple_id_to_token(id.0).or_else(|| library.get_model().id_to_token(id.0))?;
        (specials == Specials::Keep || !added.is_special_token(&token)).then_some(token)
    }

    fn encode_as(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, TokenizerError> {
        let encoded = self
            .call(|| self.shared.library.encode_fast(text, add_special_tokens).map_err(|e| e.to_string()))?;
        Ok(encoded.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Finds out at load what would fail at the first prompt: steps that panic on any text, ids that come from
    /// the post-processor and were never checked.
    fn try_out(&self, file: &'static str) -> Result<(), TokenizerError> {
        let ids = self
            .encode_with_special("a 1")
            .map_err(|e| TokenizerError::Library { file, reason: e.to_string() })?;
        for id in ids {
            if self.id_to_token(id).is_none() {
                let reason = format!("the post-processor adds the token id {id}, which the vocabulary lacks");
                return Err(TokenizerError::Malformed { file, reason });
            }
        }
        Ok(())
    }

    fn call<T>(&self, work: impl FnOnce() -> Result<T, String>) -> Result<T, TokenizerError> {
        if self.shared.poisoned.load(Ordering::Relaxed) {
            return Err(TokenizerError::Poisoned);
        }
        if let Ok(result) = catch_unwind(AssertUnwindSafe(work)) {
            return result.map_err(|reason| TokenizerError::Encode { reason });
        }
        self.shared.poisoned.store(true, Ordering::Relaxed);
        Err(TokenizerError::Poisoned)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.shared.vocab_size)
            .field("named", &self.shared.named)
            .finish_non_exhaustive()
    }
}

/// Runs the library on a file; its errors and panics become errors that name the file.
fn guarded<T>(file: &'static str, work: impl FnOnce() -> Result<T, String>) -> Result<T, TokenizerError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|reason| TokenizerError::Library { file, reason }),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(TokenizerError::Library { file, reason: format!("internal failure: {said}") })
        }
    }
}

fn named_tokens(bytes: Option<&[u8]>, file: &'static str) -> Result<NamedTokens, TokenizerError> {
    let Some(bytes) = bytes else {
        return Ok(NamedTokens::default());
    };
    match check::parse(bytes, file)? {
        Value::Object(config) => Ok(NamedTokens::from_config(&config)),
        _ => Err(TokenizerError::Malformed { file, reason: "the document is not a JSON object".into() }),
    }
}

/// The ids of all special tokens, after checking that every added token has the id it is declared with.
fn check_added(
    document: &Value,
    library: &tokenizers::Tokenizer,
    file: &'static str,
) -> Result<HashSet<u32>, TokenizerError> {
    let mut special = HashSet::new();
    for token in document["added_tokens"].as_array().into_iter().flatten() {
        let (Some(content), Some(declared)) = (token["content"].as_str(), token["id"].as_u64()) else {
            continue;
        };
        let Some(assigned) = library.token_to_id(content) else {
            continue;
        };
        if u64::from(assigned) != declared {
            let reason = format!(
                "the added token {content:?} is declared with id {declared} but gets id {assigned}, because ids of \
                 added tokens continue the vocabulary without gaps"
            );
            return Err(TokenizerError::Malformed { file, reason });
        }
        if token["special"] == true {
            special.insert(assigned);
        }
    }
    Ok(special)
}

fn vocab_size(document: &Value) -> usize {
    let of_model = match &document["model"]["vocab"] {
        Value::Object(vocab) => vocab.values().filter_map(Value::as_u64).max().map_or(0, |id| id + 1),
        Value::Array(vocab) => vocab.len() as u64,
        _ => 0,
    };
    let added = document["added_tokens"].as_array().into_iter().flatten();
    let of_added = added.filter_map(|token| token["id"].as_u64()).max().map_or(0, |id| id + 1);
    of_model.max(of_added) as usize
}
