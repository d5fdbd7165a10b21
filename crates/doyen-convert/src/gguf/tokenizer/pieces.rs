//! SentencePiece's BPE: pieces with scores, of which the pair with the best joint piece is merged first.
//!
//! `tokenizer.json` has merges instead of scores. Every way to put a piece together from two others is a merge, and
//! merges are ranked by the score of what they make: the same order.

use super::{Kind, TOKENS, Vocabulary};
use crate::ConvertError;
use serde_json::{Value as Json, json};
use std::collections::HashMap;

const SCORES: &str = "tokenizer.ggml.scores";
/// Stands for a space inside of pieces.
const SPACE: &str = "\u{2581}";

pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<Json, ConvertError> {
    let metadata = vocabulary.metadata;
    let unknown = vocabulary.named("tokenizer.ggml.unknown_token_id")?;
    let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let bytes = vocabulary.kinds.contains(&Kind::Byte);
    if bytes {
        check_bytes(vocabulary)?;
    }
    let replace =
        |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", SPACE)];
    let mut decoders = vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": vocabulary.frame(true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": bytes, "ignore_merges": false,
            "vocab": vocabulary.ids()?, "merges": merges(vocabulary)?,
        },
    }))
}

/// A byte that no token spells would become the unknown token in one reader and vanish in another.
fn check_bytes(vocabulary: &Vocabulary<'_>) -> Result<(), ConvertError> {
    let mut found = [false; 256];
    for (id, token, _) in vocabulary.iter().filter(|(.., kind)| *kind == Kind::Byte) {
        let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|t| t.len() == 2);
        let byte = hex.and_then(|h| u8::from_str_radix(h, 16).ok());
        let expected = "byte tokens spelled as <0x0A>";
        let byte =
            byte.ok_or_else(|| vocabulary.metadata.wrong(TOKENS, format!("{token:?} at {id}"), expected))?;
        found[usize::from(byte)] = true;
    }
    match found.iter().position(|f| !f) {
        None => Ok(()),
        Some(byte) => {
            let found = format!("without a token for the byte 0x{byte:02X}");
            Err(vocabulary.metadata.wrong(TOKENS, found, "a token for every byte, since there are some"))
        }
    }
}

fn merges(vocabulary: &Vocabulary<'_>) -> Result<Vec<Json>, ConvertError> {
    let metadata = vocabulary.metadata;
    let count = vocabulary.tokens.len();
    let numbers =
        metadata.numbers(SCORES)?.ok_or_else(|| metadata.absent(SCORES, "a score for each token"))?;
    if numbers.count() != count {
        let found = format!("a list of {} numbers", numbers.count());
        return Err(metadata.wrong(SCORES, found, &format!("one for each of {count} tokens")));
    }
    let scores: Option<Vec<f64>> = numbers.iter().map(super::super::metadata::Scalar::float).collect();
    let scores = scores.ok_or_else(|| metadata.wrong(SCORES, "not finite somewhere", "finite numbers"))?;
    // Tokens that are never cut up may be put together as well: runs of spaces, which no text spells as the token does.
    let whole = |kind: Kind| matches!(kind, Kind::Normal | Kind::UserDefined | Kind::Unused);
    let mergeable = || vocabulary.iter().filter(|(.., kind)| whole(*kind));
    let pieces: HashMap<&str, usize> = mergeable().map(|(id, token, _)| (token, id)).collect();
    let mut found = Vec::new();
    for (id, piece, _) in mergeable() {
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(&l), Some(&r)) = (pieces.get(left), pieces.get(right)) {
                found.push((id, l, r));
            }
        }
    }
    let key = |&(id, l, r): &(usize, usize, usize)| (id, l, r);
    found.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(key(a).cmp(&key(b))));
    Ok(found.into_iter().map(|(_, l, r)| json!([vocabulary.tokens[l], vocabulary.tokens[r]])).collect())
}
