//! Metadata as `tokenizer.json` and `tokenizer_config.json`.
//!
//! Two kinds of vocabulary are read: byte-level BPE ("gpt2", with merges) in `bpe`, and SentencePiece's BPE ("llama", with
//! scores) in `pieces`. How text is cut up before the first kind is named, not described, in GGUF files; `pre` knows the
//! names.

mod bpe;
mod pieces;
mod pre;

use super::metadata::{Metadata, Strings};
use crate::ConvertError;
use serde_json::{Map, Value as Json, json};

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const TEMPLATE: &str = "tokenizer.chat_template";

/// Ids that name a special token: key, name in tokenizer_config.json.
const NAMED: [(&str, &str); 4] = [
    ("tokenizer.ggml.bos_token_id", "bos_token"),
    ("tokenizer.ggml.eos_token_id", "eos_token"),
    ("tokenizer.ggml.unknown_token_id", "unk_token"),
    ("tokenizer.ggml.padding_token_id", "pad_token"),
];

/// Ids that end a text beside `eos_token_id`.
const ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Control tokens that end a turn in released models, whatever the file calls its end of sequence.
const END_OF_TURN: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
];

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    /// Part of a format, not of a text.
    Control,
    /// A text that is never cut up.
    UserDefined,
    Unused,
    Byte,
}

/// The tokens of a file with their kinds.
struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: Vec<&'a str>,
    kinds: Vec<Kind>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self, ConvertError> {
        let tokens = metadata.strings(TOKENS)?.ok_or_else(|| metadata.absent(TOKENS, "the vocabulary"))?;
        let tokens: Vec<&str> = Strings::iter(tokens).collect();
        let kinds = match metadata.numbers(TYPES)? {
            None => vec![Kind::Normal; tokens.len()],
            Some(n) if n.count() != tokens.len() => {
                let found = format!("a list of {} numbers", n.count());
                return Err(metadata.wrong(
                    TYPES,
                    found,
                    &format!("one for each of {} tokens", tokens.len()),
                ));
            }
            Some(n) => n
                .iter()
                .enumerate()
                .map(|(id, s)| match s.unsigned() {
                    Some(1) => Ok(Kind::Normal),
                    Some(2) => Ok(Kind::Unknown),
                    Some(3) => Ok(Kind::Control),
                    Some(4) => Ok(Kind::UserDefined),
                    Some(0 | 5) => Ok(Kind::Unused),
                    Some(6) => Ok(Kind::Byte),
                    _ => Err(metadata.wrong(TYPES, format!("{s:?} at token {id}"), "types of 0 to 6")),
                })
                .collect::<Result<_, _>>()?,
        };
        Ok(Self { metadata, tokens, kinds })
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &'a str, Kind)> {
        self.tokens.iter().zip(&self.kinds).enumerate().map(|(id, (&t, &k))| (id, t, k))
    }

    /// The token that a key names by its id.
    fn named(&self, key: &str) -> Result<Option<&'a str>, ConvertError> {
        let Some(id) = self.metadata.unsigned(key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        let expected = format!("an id below {}, the number of tokens", self.tokens.len());
        token.map(|t| Some(*t)).ok_or_else(|| self.metadata.wrong(key, id, &expected))
    }

    /// Token texts to ids; no two tokens may be spelled alike.
    fn ids(&self) -> Result<Map<String, Json>, ConvertError> {
        let mut ids = Map::new();
        for (id, token, _) in self.iter() {
            if let Some(first) = ids.insert(token.to_owned(), id.into()) {
                let found = format!("{token:?} at {first} and again at {id}");
                return Err(self.metadata.wrong(TOKENS, found, "every token once"));
            }
        }
        Ok(ids)
    }

    /// Tokens that are found in a text before anything else looks at it.
    fn added(&self) -> Vec<Json> {
        let kinds = |k| matches!(k, Kind::Control | Kind::UserDefined | Kind::Unknown);
        let added = self.iter().filter(|(_, token, kind)| kinds(*kind) && !token.is_empty());
        added
            .map(|(id, token, kind)| {
                json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind != Kind::UserDefined,
                })
            })
            .collect()
    }

    /// A post-processor that puts the sequence between the tokens that the file wants around it.
    fn frame(&self, bos_default: bool) -> Result<Option<Json>, ConvertError> {
        let wanted = |key: &str, default| Ok::<_, ConvertError>(self.metadata.flag(key)?.unwrap_or(default));
        let bos =
            if wanted("tokenizer.ggml.add_bos_token", bos_default)? { self.named(NAMED[0].0)? } else { None };
        let eos = if wanted("tokenizer.ggml.add_eos_token", false)? { self.named(NAMED[1].0)? } else { None };
        if bos.is_none() && eos.is_none() {
            return Ok(None);
        }
        let special = |token: Option<&str>, sequence: usize| {
            token.map(|t| json!({"SpecialToken": {"id": t, "type_id": sequence}}))
        };
        let framed = |name: &str, sequence: usize| {
            let text = json!({"Sequence": {"id": name, "type_id": sequence}});
            [special(bos, sequence), Some(text), special(eos, sequence)].into_iter().flatten()
        };
        let ids: Map<String, Json> = self
            .iter()
            .filter(|(_, t, _)| bos == Some(*t) || eos == Some(*t))
            .map(|(id, t, _)| (t.to_owned(), json!({"id": t, "ids": [id], "tokens": [t]})))
            .collect();
        Ok(Some(json!({
            "type": "TemplateProcessing",
            "single": framed("A", 0).collect::<Vec<_>>(),
            "pair": framed("A", 0).chain(framed("B", 1)).collect::<Vec<_>>(),
            "special_tokens": ids,
        })))
    }
}

/// `bos_token_id`, `eos_token_id` and `pad_token_id` as fields of config.json.
pub(super) fn special_ids(metadata: &Metadata) -> Result<Map<String, Json>, ConvertError> {
    let vocabulary = Vocabulary::read(metadata)?;
    let mut out = Map::new();
    for (key, field) in [(NAMED[0].0, "bos_token_id"), (NAMED[3].0, "pad_token_id")] {
        if let Some(id) = metadata.unsigned(key)? {
            vocabulary.named(key)?;
            out.insert(field.into(), id.into());
        }
    }
    let mut ends = Vec::new();
    for key in [NAMED[1].0].iter().chain(&ENDS) {
        if vocabulary.named(key)?.is_some() {
            ends.extend(metadata.unsigned(key)?);
        }
    }
    for (id, token, kind) in vocabulary.iter() {
        if kind == Kind::Control && END_OF_TURN.contains(&token) && !ends.contains(&(id as u64)) {
            ends.push(id as u64);
        }
    }
    if !ends.is_empty() {
        out.insert("eos_token_id".into(), ends.into());
    }
    Ok(out)
}

/// The tokenizer's files. `rows` are those of the embedding.
pub(super) fn files(
    metadata: &Metadata,
    rows: usize,
    notices: &mut Vec<String>,
) -> Result<Vec<(&'static str, Vec<u8>)>, ConvertError> {
    let vocabulary = Vocabulary::read(metadata)?;
    let found = vocabulary.tokens.len();
    if found != rows {
        let expected = format!("{rows}, the rows of the token embedding");
        return Err(metadata.wrong(TOKENS, format!("a list of {found} texts"), &expected));
    }
    let tokenizer = match metadata.string(MODEL)? {
        Some("gpt2") => bpe::tokenizer(&vocabulary)?,
        Some("llama") => pieces::tokenizer(&vocabulary)?,
        Some(other) => {
            let expected = "\"gpt2\" (byte-level BPE) or \"llama\" (SentencePiece BPE)";
            return Err(metadata.wrong(MODEL, format!("{other:?}"), expected));
        }
        None => return Err(metadata.absent(MODEL, "the kind of tokenizer")),
    };
    let config = config(&vocabulary, notices)?;
    Ok(vec![
        ("tokenizer.json", tokenizer.to_string().into_bytes()),
        ("tokenizer_config.json", format!("{config:#}\n").into_bytes()),
    ])
}

fn config(vocabulary: &Vocabulary<'_>, notices: &mut Vec<String>) -> Result<Json, ConvertError> {
    let metadata = vocabulary.metadata;
    let mut out = Map::new();
    for (key, name) in [("add_bos_token", "bos"), ("add_eos_token", "eos")] {
        if let Some(add) = metadata.flag(&format!("tokenizer.ggml.add_{name}_token"))? {
            out.insert(key.into(), add.into());
        }
    }
    for (key, name) in NAMED {
        if let Some(token) = vocabulary.named(key)? {
            out.insert(name.into(), token.into());
        }
    }
    if let Some(template) = metadata.string(TEMPLATE)? {
        out.insert("chat_template".into(), template.into());
    } else {
        notices.push(format!("the file has no {TEMPLATE}: the package has no chat template"));
    }
    out.insert("clean_up_tokenization_spaces".into(), false.into());
    out.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    Ok(out.into())
}
