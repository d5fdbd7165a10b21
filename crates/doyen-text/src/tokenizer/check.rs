//! What a `tokenizer.json` must satisfy before the tokenizer library sees it.
//!
//! The library lets normalizers multiply text without limit, cuts strings by byte counts and takes any id. The
//! rules here make such files errors. They are about safety and about guesses the library would make silently;
//! whether the parts fit together is the library's business.

use serde_json::Value;

use super::TokenizerError;

/// Largest file that is read. The largest released ones have about 35 MB.
const MAX_FILE_BYTES: usize = 256 << 20;
/// Longer than any token that was ever trained (runs of some hundred spaces).
const MAX_TOKEN_BYTES: usize = u16::MAX as usize;
/// Ids may be sparse, but logits and masks are as long as the largest id: this many ids per token, plus [`ID_SLACK`].
const IDS_PER_TOKEN: u64 = 4;
const ID_SLACK: u64 = 1 << 16;
/// How many times longer chained replacements may make a text; SentencePiece's space mark makes 3.
const MAX_GROWTH: u64 = 1 << 10;

/// Part of the document, key of its nested parts, and the types the library reads; its own message for an unknown
/// one does not name it.
const PARTS: [(&str, &str, &[&str]); 3] = [
    (
        "normalizer",
        "normalizers",
        &[
            "BertNormalizer",
            "ByteLevel",
            "Lowercase",
            "NFC",
            "NFD",
            "NFKC",
            "NFKD",
            "Nmt",
            "Precompiled",
            "Prepend",
            "Replace",
            "Sequence",
            "Strip",
            "StripAccents",
        ],
    ),
    (
        "pre_tokenizer",
        "pretokenizers",
        &[
            "BertPreTokenizer",
            "ByteLevel",
            "CharDelimiterSplit",
            "Digits",
            "FixedLength",
            "Metaspace",
            "Punctuation",
            "Sequence",
            "Split",
            "UnicodeScripts",
            "Whitespace",
            "WhitespaceSplit",
        ],
    ),
    (
        "post_processor",
        "processors",
        &["BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"],
    ),
];

/// The models the library reads.
const MODELS: [&str; 4] = ["BPE", "Unigram", "WordPiece", "WordLevel"];

/// Parses and checks `bytes`.
pub(super) fn read(bytes: &[u8], file: &'static str) -> Result<Value, TokenizerError> {
    let malformed = |reason: String| TokenizerError::Malformed { file, reason };
    if bytes.len() > MAX_FILE_BYTES {
        return Err(malformed(format!("{} bytes; the limit is {MAX_FILE_BYTES}", bytes.len())));
    }
    let document = parse(bytes, file)?;
    let root = document
        .as_object()
        .ok_or_else(|| malformed("the document is not a JSON object; is this a tokenizer.json?".into()))?;
    let model = root
        .get("model")
        .and_then(Value::as_object)
        .ok_or_else(|| malformed("there is no \"model\" object; is this a tokenizer.json?".into()))?;
    if let Some(kind) = model.get("type").and_then(Value::as_str)
        && !MODELS.contains(&kind)
    {
        return Err(TokenizerError::UnknownModel { file, found: kind.to_owned(), known: MODELS.join(", ") });
    }
    let ids = Ids::collect(&document).map_err(malformed)?;
    ids.check().map_err(malformed)?;
    merges(&document).map_err(malformed)?;
    unigram(&document).map_err(malformed)?;
    for (part, nested, known) in PARTS {
        types(part, &document[part], nested, known).map_err(malformed)?;
    }
    for part in ["normalizer", "decoder"] {
        let growth = growth(&document[part]).map_err(malformed)?;
        if growth > MAX_GROWTH {
            let reason = format!(
                "the {part}'s replacements can make a text {growth} times longer; the limit is {MAX_GROWTH}"
            );
            return Err(malformed(reason));
        }
    }
    Ok(document)
}

/// JSON bytes to a value, with the file's name and the position in the error.
pub(super) fn parse(bytes: &[u8], file: &'static str) -> Result<Value, TokenizerError> {
    if bytes.is_empty() {
        return Err(TokenizerError::Malformed { file, reason: "the file is empty".into() });
    }
    serde_json::from_slice(bytes).map_err(|e| TokenizerError::NotJson { file, reason: e.to_string() })
}

/// Every token with its id, from the model and from `added_tokens`.
struct Ids<'a>(Vec<(&'a str, u64)>);

impl<'a> Ids<'a> {
    fn collect(document: &'a Value) -> Result<Self, String> {
        let mut ids = Vec::new();
        match &document["model"]["vocab"] {
            Value::Object(vocab) => {
                for (token, id) in vocab {
                    let id = id.as_u64().ok_or_else(|| format!("token {token:?} has the id {id}"))?;
                    ids.push((token.as_str(), id));
                }
            }
            Value::Array(vocab) => {
                for (id, entry) in vocab.iter().enumerate() {
                    let token = entry[0].as_str().ok_or_else(|| format!("vocab entry {id} has no token"))?;
                    ids.push((token, id as u64));
                }
            }
            _ => {
                return Err(
                    "the model has no \"vocab\" (a vocabulary in a file of its own is not read)".into()
                );
            }
        }
        if ids.is_empty() {
            return Err("the model's vocabulary is empty".into());
        }
        match &document["added_tokens"] {
            Value::Null => {}
            Value::Array(added) => {
                for token in added {
                    let content = token["content"].as_str().ok_or("an added token has no \"content\"")?;
                    let id =
                        token["id"].as_u64().ok_or_else(|| format!("added token {content:?} has no id"))?;
                    if content.is_empty() {
                        return Err(format!("the added token with id {id} is empty"));
                    }
                    ids.push((content, id));
                }
            }
            _ => return Err("\"added_tokens\" is not a list".into()),
        }
        Ok(Self(ids))
    }

    fn check(&self) -> Result<(), String> {
        let limit = self.0.len() as u64 * IDS_PER_TOKEN + ID_SLACK;
        for &(token, id) in &self.0 {
            if token.len() > MAX_TOKEN_BYTES {
                return Err(format!(
                    "the token with id {id} has {} bytes; the limit is {MAX_TOKEN_BYTES}",
                    token.len()
                ));
            }
            if id >= limit {
                let count = self.0.len();
                return Err(format!("token {token:?} has the id {id}, too large for {count} tokens"));
            }
        }
        Ok(())
    }
}

fn types(part: &str, node: &Value, nested: &str, known: &[&str]) -> Result<(), String> {
    if let Some(kind) = node["type"].as_str() {
        if !known.contains(&kind) {
            return Err(format!("the {part} has the unknown type {kind:?}; known are {}", known.join(", ")));
        }
        if kind == "FixedLength" && node["length"] == 0 {
            return Err(format!("the {part} cuts text into pieces of length 0"));
        }
    }
    node[nested].as_array().into_iter().flatten().try_for_each(|member| types(part, member, nested, known))
}

/// A continuation prefix is cut off the right side of every merge by length, so it must be there.
fn merges(document: &Value) -> Result<(), String> {
    let model = &document["model"];
    let Some(prefix) = model["continuing_subword_prefix"].as_str().filter(|p| !p.is_empty()) else {
        return Ok(());
    };
    for merge in model["merges"].as_array().into_iter().flatten() {
        let right = match merge {
            Value::String(pair) => pair.split_once(' ').map(|(_, right)| right),
            pair => pair[1].as_str(),
        };
        if !right.is_some_and(|right| right.starts_with(prefix)) {
            return Err(format!("the right side of merge {merge} lacks the continuation prefix {prefix:?}"));
        }
    }
    Ok(())
}

/// Scores order the lattice; a NaN or infinity in it has no order.
fn unigram(document: &Value) -> Result<(), String> {
    let Some(vocab) = document["model"]["vocab"].as_array() else {
        return Ok(());
    };
    for entry in vocab {
        if !entry[1].as_f64().is_some_and(f64::is_finite) {
            return Err(format!("the score of vocab entry {entry} is not a finite number"));
        }
    }
    match document["model"]["unk_id"].as_u64() {
        Some(id) if id >= vocab.len() as u64 => {
            Err(format!("unk_id {id} is outside of the vocabulary of {} tokens", vocab.len()))
        }
        _ => Ok(()),
    }
}

/// Upper bound of how many times longer the replacements in `node` make a text.
fn growth(node: &Value) -> Result<u64, String> {
    let members = ["normalizers", "decoders"].into_iter().filter_map(|key| node[key].as_array()).flatten();
    let mut total = 1u64;
    for member in members {
        total = total.saturating_mul(growth(member)?);
    }
    if node["type"] == "Replace" {
        let content = node["content"].as_str().map_or(0, str::len) as u64;
        let pattern = match node["pattern"]["String"].as_str() {
            Some("") => return Err("a Replace has an empty pattern".into()),
            Some(pattern) => pattern.len() as u64,
            // A regular expression may match the empty string at every position: content plus what was there.
            None => return Ok(total.saturating_mul(content + 1)),
        };
        total = total.saturating_mul(content.div_ceil(pattern).max(1));
    }
    Ok(total)
}
