//! The names GGUF files give to ways of cutting up a text before byte-level BPE, and the regular expressions they stand
//! for: those of the tokenizers the names were given for.

use super::super::metadata::Metadata;
use crate::ConvertError;

const KEY: &str = "tokenizer.ggml.pre";

/// How a text is cut up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pre {
    names: &'static [&'static str],
    /// Each cuts what the ones before it left whole.
    pub patterns: &'static [&'static str],
    /// Whether pieces that are tokens are not built from merges.
    pub whole_words: bool,
    /// Whether a sequence starts with the BOS token where the file does not say.
    pub bos: bool,
    /// Whether texts are composed (NFC) first.
    pub nfc: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PLAIN: Pre = Pre { names: &[], patterns: &[], whole_words: false, bos: false, nfc: false };

const KNOWN: [Pre; 7] = [
    Pre {
        names: &["gpt-2", "phi-2", "olmo", "mpt", "jais", "jina-es", "jina-de", "gigachat", "roberta-bpe"],
        patterns: &[GPT2],
        ..PLAIN
    },
    Pre {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        patterns: &[r"\p{N}", GPT2],
        ..PLAIN
    },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        patterns: &[LLAMA3],
        whole_words: true,
        bos: true,
        ..PLAIN
    },
    Pre { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], patterns: &[LLAMA3], ..PLAIN },
    Pre {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"],
        patterns: &[QWEN2],
        nfc: true,
        ..PLAIN
    },
    Pre { names: &["gpt-4o", "llama4"], patterns: &[GPT4O], ..PLAIN },
    Pre { names: &["tekken"], patterns: &[TEKKEN], whole_words: true, bos: true, ..PLAIN },
];

/// What the file asks for.
pub(super) fn of(metadata: &Metadata) -> Result<Pre, ConvertError> {
    let known = || {
        let names: Vec<_> = KNOWN.iter().flat_map(|p| p.names).copied().collect();
        format!("one of {}", names.join(", "))
    };
    let name = metadata.string(KEY)?.ok_or_else(|| metadata.absent(KEY, &known()))?;
    let found = KNOWN.iter().find(|p| p.names.contains(&name));
    found.copied().ok_or_else(|| metadata.wrong(KEY, format!("{name:?}"), &known()))
}
