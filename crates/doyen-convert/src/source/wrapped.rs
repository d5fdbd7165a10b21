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
        // Where nothing but their names keeps them apart, towers lie beside the text model's modules.
        let all = model != ALONE;
        let left = self.rename(|stored| alone(stored, model, all))?;
        let mut modules = BTreeMap::new();
        for stored in &left {
            *modules.entry(module(stored)).or_default() += 1;
        }
        Ok(modules)
    }

    /// Puts a text model that is alone, but below another module's name or none, under the names that it should have. Other
    /// tensors keep theirs.
    ///
    /// # Errors
    /// When a tensor is there twice.
    pub(crate) fn lift_text(&mut self) -> Result<(), ConvertError> {
        let embedding = |model: &&str| self.tensors.contains_key(&format!("{model}{EMBEDDING}"));
        let Some(&model) = [ALONE, NONE].iter().chain(&MODELS).find(|m| embedding(m)) else { return Ok(()) };
        if model != ALONE {
            self.rename(|stored| {
                Some(alone(stored, model, model != NONE).unwrap_or_else(|| stored.to_owned()))
            })?;
        }
        Ok(())
    }

    /// Puts every tensor under the name that `new` gives it. Returns those without one, which are dropped.
    fn rename(&mut self, new: impl Fn(&str) -> Option<String>) -> Result<Vec<String>, ConvertError> {
        let mut dropped = Vec::new();
        for (stored, mut entry) in std::mem::take(&mut self.tensors) {
            let Some(name) = new(&stored) else {
                dropped.push(stored);
                continue;
            };
            if name != stored {
                entry.stored_name = Some(stored.clone());
            }
            if let Some(other) = self.tensors.insert(name.clone(), entry) {
                let other = other.stored_name.unwrap_or(name);
                return Err(ConvertError::tensor(&stored, format!("is in the checkpoint as {other:?}, too")));
            }
        }
        Ok(dropped)
    }
}

/// The name that a tensor of a text model below `model` has when that is alone; `all` of what lies there belongs to it, or
/// only what has a decoder's names.
fn alone(stored: &str, model: &str, all: bool) -> Option<String> {
    if let Some(rest) = HEADS.iter().find_map(|h| stored.strip_prefix(h)) {
        return Some(format!("{HEAD}{rest}"));
    }
    let inner = stored.strip_prefix(model).filter(|rest| all || is_decoder(rest));
    inner.map(|rest| format!("{ALONE}{rest}"))
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
