//! Byte-level BPE: tokens spelled in the alphabet of 256 byte characters, and merges in order of rank.

use super::{Vocabulary, pre};
use crate::ConvertError;
use serde_json::{Value as Json, json};

const MERGES: &str = "tokenizer.ggml.merges";

pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<Json, ConvertError> {
    let metadata = vocabulary.metadata;
    let pre = pre::of(metadata)?;
    let ids = vocabulary.ids()?;
    let texts = metadata.strings(MERGES)?.ok_or_else(|| metadata.absent(MERGES, "the merges of a BPE"))?;
    let mut merges = Vec::with_capacity(texts.count());
    for (rank, text) in texts.iter().enumerate() {
        // A space is spelled otherwise in byte-level tokens, so the first one not at the start is between the two.
        let first = text.chars().next().map_or(0, char::len_utf8);
        let pair = text[first..].find(' ').map(|at| (&text[..first + at], &text[first + at + 1..]));
        let known = pair.filter(|(a, b)| {
            ids.contains_key(*a) && ids.contains_key(*b) && ids.contains_key(&format!("{a}{b}"))
        });
        let (a, b) = known.ok_or_else(|| {
            let expected = "two tokens with a space between, which together are a token";
            metadata.wrong(MERGES, format!("{text:?} at rank {rank}"), expected)
        })?;
        merges.push(json!([a, b]));
    }
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let mut steps: Vec<Json> = pre.patterns.iter().map(|p| isolated(p)).collect();
    steps.push(level.clone());
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": if pre.nfc { json!({"type": "NFC"}) } else { Json::Null },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": vocabulary.frame(pre.bos)?.unwrap_or(level),
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.whole_words, "vocab": ids, "merges": merges,
        },
    }))
}

/// Cuts a text into the matches of a pattern and what is between them.
fn isolated(pattern: &str) -> Json {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}
