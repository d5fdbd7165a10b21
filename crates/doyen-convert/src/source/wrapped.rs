//! The tensors of a text model inside of a multimodal one, under the names that they would have alone.
//!
//! Releases differ in where they put it. It is found by its embedding; what lies elsewhere belongs to the towers and the
//! projectors between, and is left out.

use super::Checkpoint;
use crate::ConvertError;
use std::collections::BTreeMap;

/// Where the modules of a text model lie that are below `model.` when it is alone.
const MODELS: [&str; 6] = [
    "language_model.model.",
    "model.language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "language_model.",
    ALONE,
];

/// Where its head lies.
const HEADS: [&str; 3] = ["language_model.lm_head.", "model.language_model.lm_head.", HEAD];

const ALONE: &str = "model.";
const NONE: &str = "";
const HEAD: &str = "lm_head.";
const EMBEDDING: &str = "embed_tokens.weight";

impl Checkpoint {
    /// Keeps the text model's tensors only. Returns how many others there are of each module that was left out.
    ///
    /// # Errors
    /// When no text model is found, or a tensor of its is there twice.
    pub(crate) fn unwrap_text(&mut self) -> Result<BTreeMap<String, usize>, ConvertError> {
        let embedding = |model: &&str| format!("{model}{EMBEDDING}");
        let Some(&model) = MODELS.iter().find(|m| self.tensors.contains_key(&embedding(m))) else {
            let places: Vec<String> = MODELS.iter().map(embedding).collect();
            let message = format!(
                "not in the checkpoint, nor is the embedding elsewhere; expected one of {}",
                places.join(", ")
            );
            return Err(ConvertError::tensor(&embedding(&ALONE), message));
        };
        let mut left = BTreeMap::new();
        for (stored, mut entry) in std::mem::take(&mut self.tensors) {
            let head = HEADS.iter().find_map(|h| stored.strip_prefix(h)).map(|rest| format!("{HEAD}{rest}"));
            // Where nothing but their names keeps them apart, towers lie beside the text model's modules.
            let inner = stored.strip_prefix(model).filter(|rest| model != ALONE || is_decoder(rest));
            let Some(alone) = head.or_else(|| inner.map(|rest| format!("{ALONE}{rest}"))) else {
                *left.entry(module(&stored)).or_default() += 1;
                continue;
            };
            if alone != stored {
                entry.stored_name = Some(stored.clone());
            }
            if let Some(other) = self.tensors.insert(alone.clone(), entry) {
                let other = other.stored_name.unwrap_or(alone);
                return Err(ConvertError::tensor(&stored, format!("is in the checkpoint as {other:?}, too")));
            }
        }
        Ok(left)
    }

    /// Puts a text model that is alone, but below another module's name or none, under the names that it should have. Other
    /// tensors keep theirs.
    pub(crate) fn lift_text(&mut self) {
        let embedding = |model: &&str| self.tensors.contains_key(&format!("{model}{EMBEDDING}"));
        let Some(&model) = [ALONE, NONE].iter().chain(&MODELS).find(|m| embedding(m)) else { return };
        if model == ALONE {
            return;
        }
        for (stored, mut entry) in std::mem::take(&mut self.tensors) {
            let head = HEADS.iter().find_map(|h| stored.strip_prefix(h)).map(|rest| format!("{HEAD}{rest}"));
            let inner = stored.strip_prefix(model).filter(|rest| model != NONE || is_decoder(rest));
            let name = head.or_else(|| inner.map(|rest| format!("{ALONE}{rest}")));
            let name = name.unwrap_or_else(|| stored.clone());
            if name != stored {
                entry.stored_name = Some(stored);
            }
            self.tensors.insert(name, entry);
        }
    }

    /// Whether it holds a head of its own.
    pub(crate) fn has_head(&self) -> bool {
        self.tensors.keys().any(|n| n.starts_with(HEAD))
    }
}

/// Whether a module is a decoder's: its layers, its embedding, or a norm beside them.
fn is_decoder(name: &str) -> bool {
    name.starts_with("layers.")
        || name.starts_with("embed_tokens.")
        || name.split('.').next().is_some_and(|m| m.ends_with("norm"))
}

/// The first two names of a tensor's path.
fn module(name: &str) -> String {
    name.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}
