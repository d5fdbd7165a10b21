//! Special tokens and sampling defaults: `generation_config.json` where it is given, else `config.json`.

use super::Fields;
use crate::ConvertError;
use doyen_tensor::TokenId;
use serde_json::{Map, Value};

/// Special tokens, and how the checkpoint's makers sample from it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SpecialTokens {
    /// Begin of sequence.
    pub bos: Option<TokenId>,
    /// Tokens that end a sequence.
    pub eos: Vec<TokenId>,
    /// Padding.
    pub pad: Option<TokenId>,
    /// `do_sample`, `temperature`, `top_k`, `top_p` and `repetition_penalty`, as far as they are given.
    pub sampling: Map<String, Value>,
}

impl SpecialTokens {
    pub(super) fn read(
        config: &Fields,
        generation: Option<&Fields>,
        vocab: usize,
    ) -> Result<Self, ConvertError> {
        let pick = |name: &str| match generation {
            Some(g) if g.value(name).is_some() => g,
            _ => config,
        };
        let ids = |name: &'static str| ids(pick(name), name, vocab);
        let mut sampling = Map::new();
        for name in ["do_sample", "temperature", "top_k", "top_p", "repetition_penalty"] {
            if let Some(v) = generation.and_then(|g| g.value(name)) {
                sampling.insert(name.to_owned(), v.clone());
            }
        }
        Ok(Self {
            bos: ids("bos_token_id")?.first().copied(),
            eos: ids("eos_token_id")?,
            pad: ids("pad_token_id")?.first().copied(),
            sampling,
        })
    }
}

/// A token id, a list of them, or nothing.
fn ids(f: &Fields, name: &str, vocab: usize) -> Result<Vec<TokenId>, ConvertError> {
    let one = |v: &Value| match v.as_u64() {
        Some(id) if id < vocab as u64 => Ok(TokenId(id as u32)),
        _ => Err(f.wrong(name, v, format!("token ids below vocab_size = {vocab}"))),
    };
    match f.value(name) {
        None => Ok(Vec::new()),
        // Released files write -1 for "none".
        Some(v) if v.as_i64() == Some(-1) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(v) => one(v).map(|id| vec![id]),
    }
}
