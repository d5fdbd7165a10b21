//! `genai_config.json`, as ONNX Runtime GenAI and its exporters write it.
//!
//! Keys that are not read are allowed; a key that is read and has another type is refused with its path. What is absent
//! has the default of that runtime, or stays absent for [`super::ports`] to find in the graph.

use doyen_tensor::TokenId;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Name of the file.
pub const MANIFEST: &str = "genai_config.json";

/// The checkpoint's own file about generating, which packages may hold beside.
pub(super) const GENERATION: &str = "generation_config.json";

/// A value of another type than the manifest's format says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The file is no JSON, or no YAML.
    #[error("{file}: {message}")]
    Syntax {
        /// Name of the file.
        file: &'static str,
        /// What is wrong.
        message: String,
    },
    /// A value is of the wrong type or out of range.
    #[error("{file}: {path}: expected {expected}, found {found}")]
    Value {
        /// Name of the file.
        file: &'static str,
        /// Keys from the root, dots between them.
        path: String,
        /// What the format says.
        expected: &'static str,
        /// What the file says.
        found: String,
    },
}

/// What a manifest says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Manifest {
    /// `model.type`, such as `qwen3`.
    pub model_type: Option<String>,
    /// Tokens a sequence may have.
    pub context_length: Option<usize>,
    /// Tokens of the vocabulary.
    pub vocab_size: Option<usize>,
    /// Token at the start of a text.
    pub bos_token: Option<TokenId>,
    /// Tokens any of which ends a text.
    pub eos_tokens: Vec<TokenId>,
    /// Token that fills up batches.
    pub pad_token: Option<TokenId>,
    /// Folder of the tokenizer files, when it is not the package's own.
    pub tokenizer_dir: Option<String>,
    /// The decoder graph.
    pub decoder: Decoder,
    /// How to generate.
    pub search: Search,
}

/// `model.decoder`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decoder {
    /// Model file.
    pub filename: Option<String>,
    /// Channels of an attention head.
    pub head_size: Option<usize>,
    /// Channels of the residual stream.
    pub hidden_size: Option<usize>,
    /// Query heads.
    pub num_attention_heads: Option<usize>,
    /// Key and value heads.
    pub num_key_value_heads: Option<usize>,
    /// Layers.
    pub num_hidden_layers: Option<usize>,
    /// Kind of each layer, in hybrid models.
    pub layer_types: Vec<String>,
    /// Names of graph inputs by what they are for; `%d` stands for the layer.
    pub inputs: BTreeMap<String, String>,
    /// Names of graph outputs by what they are for; `%d` stands for the layer.
    pub outputs: BTreeMap<String, String>,
    /// Layers that see a window only.
    pub sliding_window: Option<SlidingWindow>,
    /// Execution providers the package was exported for; none means CPU.
    pub providers: Vec<String>,
}

/// `model.decoder.sliding_window`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlidingWindow {
    /// Keys a query sees.
    pub window_size: Option<usize>,
    /// Layers whose caches are that long only; all when empty.
    pub layers: Vec<usize>,
    /// Whether the caller must slide the caches.
    pub slide_key_value_cache: bool,
    /// Whether prompts are given in windows.
    pub slide_inputs: bool,
}

/// `search`: sampling defaults of the package.
#[derive(Debug, Clone, PartialEq)]
pub struct Search {
    /// Draw tokens instead of taking the best.
    pub do_sample: bool,
    /// Tokens at least.
    pub min_length: usize,
    /// Prompt and generated tokens at most; the context length when absent.
    pub max_length: Option<usize>,
    /// Keep the k best tokens.
    pub top_k: usize,
    /// Keep the best tokens up to this probability.
    pub top_p: Option<f64>,
    /// Divides the logits.
    pub temperature: f64,
    /// Divides the logits of tokens seen before.
    pub repetition_penalty: f64,
    /// Seed, when fixed.
    pub random_seed: Option<u64>,
}

impl Default for Search {
    fn default() -> Self {
        Self {
            do_sample: false,
            min_length: 0,
            max_length: None,
            top_k: 50,
            top_p: None,
            temperature: 1.0,
            repetition_penalty: 1.0,
            random_seed: None,
        }
    }
}

impl Manifest {
    /// Reads the bytes of an `inference_metadata.yaml`, which mobius writes for onnx-genai.
    ///
    /// # Errors
    /// When they are no YAML, more than any manifest, or a value has the wrong type (named by its path).
    pub fn parse_inference_metadata(bytes: &[u8]) -> Result<Self, ManifestError> {
        super::inference::parse(bytes)
    }

    /// Reads the bytes of a `genai_config.json`.
    ///
    /// # Errors
    /// When they are no JSON object, or a value has the wrong type (named by its path).
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let value = json(MANIFEST, bytes)?;
        let root = Keys::new(&value, MANIFEST, String::new())?;
        let model = root.object("model")?;
        Ok(Self {
            model_type: model.string("type")?,
            context_length: model.size("context_length")?,
            vocab_size: model.size("vocab_size")?,
            bos_token: model.token("bos_token_id")?,
            eos_tokens: model.tokens("eos_token_id")?,
            pad_token: model.token("pad_token_id")?,
            tokenizer_dir: model.string("tokenizer_dir")?,
            decoder: Decoder::parse(&model.object("decoder")?)?,
            search: Search::parse(&root.object("search")?)?,
        })
    }
}

impl Manifest {
    /// Takes the tokens that end a text from `generation_config.json`.
    ///
    /// # Errors
    /// As [`Manifest::parse`].
    pub(super) fn read_generation(&mut self, bytes: &[u8]) -> Result<(), ManifestError> {
        let value = json(GENERATION, bytes)?;
        self.eos_tokens = Keys::new(&value, GENERATION, String::new())?.tokens("eos_token_id")?;
        Ok(())
    }
}

fn json(file: &'static str, bytes: &[u8]) -> Result<Value, ManifestError> {
    serde_json::from_slice(bytes).map_err(|e| ManifestError::Syntax { file, message: e.to_string() })
}

impl Decoder {
    fn parse(keys: &Keys<'_>) -> Result<Self, ManifestError> {
        let sliding = keys.object("sliding_window")?;
        let sliding_window = (!sliding.is_absent())
            .then(|| {
                Ok(SlidingWindow {
                    window_size: sliding.size("window_size")?,
                    layers: sliding.sizes("layers")?,
                    slide_key_value_cache: sliding.flag("slide_key_value_cache")?.unwrap_or(true),
                    slide_inputs: sliding.flag("slide_inputs")?.unwrap_or(true),
                })
            })
            .transpose()?;
        Ok(Self {
            filename: keys.string("filename")?,
            head_size: keys.size("head_size")?,
            hidden_size: keys.size("hidden_size")?,
            num_attention_heads: keys.size("num_attention_heads")?,
            num_key_value_heads: keys.size("num_key_value_heads")?,
            num_hidden_layers: keys.size("num_hidden_layers")?,
            layer_types: keys.strings("layer_types")?,
            inputs: keys.object("inputs")?.texts()?,
            outputs: keys.object("outputs")?.texts()?,
            sliding_window,
            providers: keys.object("session_options")?.providers()?,
        })
    }
}

impl Search {
    fn parse(keys: &Keys<'_>) -> Result<Self, ManifestError> {
        let default = Self::default();
        Ok(Self {
            do_sample: keys.flag("do_sample")?.unwrap_or(default.do_sample),
            min_length: keys.size("min_length")?.unwrap_or(default.min_length),
            // Zero means "the context length" there.
            max_length: keys.size("max_length")?.filter(|&n| n > 0),
            top_k: keys.size("top_k")?.unwrap_or(default.top_k),
            top_p: keys.number("top_p")?.filter(|&p| p > 0.0),
            temperature: keys.number("temperature")?.unwrap_or(default.temperature),
            repetition_penalty: keys.number("repetition_penalty")?.unwrap_or(default.repetition_penalty),
            // Negative means "not fixed" there.
            random_seed: keys.integer("random_seed")?.and_then(|n| u64::try_from(n).ok()),
        })
    }
}

/// An object of the manifest with its path; an absent one has no keys.
pub(super) struct Keys<'a> {
    object: Option<&'a Map<String, Value>>,
    /// Name of the file.
    file: &'static str,
    path: String,
}

impl<'a> Keys<'a> {
    pub(super) fn new(value: &'a Value, file: &'static str, path: String) -> Result<Self, ManifestError> {
        match value {
            Value::Object(object) => Ok(Self { object: Some(object), file, path }),
            Value::Null => Ok(Self { object: None, file, path }),
            other => Err(wrong(file, path, "an object", other)),
        }
    }

    /// The keys there are.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.object.into_iter().flatten().map(|(name, _)| name.as_str())
    }

    const fn is_absent(&self) -> bool {
        self.object.is_none()
    }

    fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// A value that is there and not null, read by `read`.
    fn get<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ManifestError> {
        match self.object.and_then(|o| o.get(key)) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                read(value).map(Some).ok_or_else(|| wrong(self.file, self.path(key), expected, value))
            }
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Self, ManifestError> {
        Self::new(self.object.and_then(|o| o.get(key)).unwrap_or(&Value::Null), self.file, self.path(key))
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<String>, ManifestError> {
        self.get(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ManifestError> {
        self.get(key, "true or false", Value::as_bool)
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ManifestError> {
        self.get(key, "a number", Value::as_f64)
    }

    fn integer(&self, key: &str) -> Result<Option<i64>, ManifestError> {
        self.get(key, "an integer", Value::as_i64)
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ManifestError> {
        self.get(key, "a size", as_size)
    }

    fn sizes(&self, key: &str) -> Result<Vec<usize>, ManifestError> {
        let list = self.get(key, "a list of sizes", |v| v.as_array()?.iter().map(as_size).collect())?;
        Ok(list.unwrap_or_default())
    }

    fn strings(&self, key: &str) -> Result<Vec<String>, ManifestError> {
        let list = self.get(key, "a list of strings", |v| {
            v.as_array()?.iter().map(|s| s.as_str().map(str::to_owned)).collect()
        })?;
        Ok(list.unwrap_or_default())
    }

    fn token(&self, key: &str) -> Result<Option<TokenId>, ManifestError> {
        self.get(key, "a token id", as_token)
    }

    fn tokens(&self, key: &str) -> Result<Vec<TokenId>, ManifestError> {
        let list = self.get(key, "a token id or a list of token ids", |v| match v {
            Value::Array(list) => list.iter().map(as_token).collect(),
            one => as_token(one).map(|t| vec![t]),
        })?;
        Ok(list.unwrap_or_default())
    }

    /// An object whose values are all names.
    fn texts(&self) -> Result<BTreeMap<String, String>, ManifestError> {
        let Some(object) = self.object else { return Ok(BTreeMap::new()) };
        object
            .iter()
            .filter(|(_, v)| !v.is_null())
            .map(|(k, v)| match v.as_str() {
                Some(name) => Ok((k.clone(), name.to_owned())),
                None => Err(wrong(self.file, self.path(k), "a name", v)),
            })
            .collect()
    }

    /// Names in `provider_options: [{"cuda": {...}}, ...]`.
    fn providers(&self) -> Result<Vec<String>, ManifestError> {
        let list = self.get("provider_options", "a list of objects", |v| {
            let mut names = Vec::new();
            for entry in v.as_array()? {
                names.extend(entry.as_object()?.keys().cloned());
            }
            Some(names)
        })?;
        Ok(list.unwrap_or_default())
    }
}

fn as_size(v: &Value) -> Option<usize> {
    usize::try_from(v.as_u64()?).ok()
}

fn as_token(v: &Value) -> Option<TokenId> {
    u32::try_from(v.as_u64()?).ok().map(TokenId)
}

fn wrong(file: &'static str, path: String, expected: &'static str, found: &Value) -> ManifestError {
    const SHOWN: usize = 60;
    let mut found = found.to_string();
    if let Some((cut, _)) = found.char_indices().nth(SHOWN) {
        found.truncate(cut);
        found.push_str("...");
    }
    let path = if path.is_empty() { "the file".to_owned() } else { path };
    ManifestError::Value { file, path, expected, found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eos_is_one_or_a_list() {
        let one = Manifest::parse(br#"{"model": {"eos_token_id": 2}}"#).unwrap();
        assert_eq!(one.eos_tokens, [TokenId(2)]);
        let two = Manifest::parse(br#"{"model": {"eos_token_id": [2, 7]}}"#).unwrap();
        assert_eq!(two.eos_tokens, [TokenId(2), TokenId(7)]);
    }

    #[test]
    fn runtime_defaults() {
        let m = Manifest::parse(br#"{"search": {"max_length": 0, "top_p": 0, "random_seed": -1}, "x": 1}"#)
            .unwrap();
        assert_eq!(m.search, Search::default());
    }

    #[test]
    fn wrong_types_are_named_by_their_path() {
        for (text, path) in [
            ("[]", "the file"),
            (r#"{"model": 3}"#, "model"),
            (r#"{"model": {"eos_token_id": [1, -1]}}"#, "model.eos_token_id"),
            (r#"{"model": {"decoder": {"inputs": {"input_ids": 4}}}}"#, "model.decoder.inputs.input_ids"),
            (
                r#"{"model": {"decoder": {"session_options": {"provider_options": ["cuda"]}}}}"#,
                "model.decoder.session_options.provider_options",
            ),
            (r#"{"search": {"top_k": 1.5}}"#, "search.top_k"),
            (r#"{"model": {"context_length": "many"}}"#, "model.context_length"),
        ] {
            match Manifest::parse(text.as_bytes()) {
                Err(ManifestError::Value { path: found, .. }) => assert_eq!(found, path),
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!(matches!(Manifest::parse(b"{"), Err(ManifestError::Syntax { .. })));
    }
}
