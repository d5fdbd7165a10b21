//! How tokens become text, as far as streaming has to know it.
//!
//! A `tokenizer.json` lists decoder steps. [`Decoder`] is that list sorted by what each step needs to see: the
//! bytes of all tokens, single tokens, runs of byte tokens, or the beginning of the text. The whole decode is
//! the library's; `crate::stream` follows this description and is tested to agree with it.

use serde_json::Value;

use super::TokenizerError;

/// The decoder steps of a tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decoder {
    /// Tokens spell bytes in the GPT-2 alphabet (or are text, if they have other characters): one UTF-8 stream.
    Bytes,
    /// Tokens are text.
    Text {
        /// Steps on single tokens, in order.
        tokens: Vec<Local>,
        /// Whether tokens of the form `<0xE2>` are bytes, and the steps after that.
        fallback: Fallback,
        /// Characters taken off the beginning of the whole text.
        strip: Vec<(char, usize)>,
    },
}

/// Whether tokens of the form `<0xE2>` stand for bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// They are ordinary text.
    None,
    /// A run of them is one piece if it is UTF-8 as a whole, else one U+FFFD per byte; then these steps follow.
    Bytes(Vec<Local>),
}

/// A step that needs to see one token, and whether it is the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Local {
    /// Replaces every occurrence of the pattern.
    Replace { pattern: String, content: String },
    /// Turns the mark into a space, or into nothing in the first token if `drop_first`.
    Metaspace { mark: char, drop_first: bool },
    /// Takes up to `count` characters off the beginning of the token.
    Strip { content: char, count: usize },
    /// Joins tokens by spaces except where a token has the prefix, and then tidies punctuation if `cleanup`.
    WordPiece { prefix: String, cleanup: bool },
    /// Joins tokens by spaces.
    Spaces,
}

impl Decoder {
    /// Reads the `decoder` object of `tokenizer.json`.
    pub(super) fn read(config: &Value, file: &'static str) -> Result<Self, TokenizerError> {
        let mut steps = Vec::new();
        flatten(config, &mut steps);
        let kind = |step: &Value| step["type"].as_str().unwrap_or_default().to_owned();
        if steps.is_empty() && config.is_null() {
            return Ok(Self::Text {
                tokens: vec![Local::Spaces],
                fallback: Fallback::None,
                strip: Vec::new(),
            });
        }
        if let [only] = steps[..]
            && kind(only) == "ByteLevel"
        {
            return Ok(Self::Bytes);
        }
        let unsupported = |what: String| TokenizerError::Decoder { file, what };
        let (mut tokens, mut fallback, mut strip) = (Vec::new(), Fallback::None, Vec::new());
        let mut fused = false;
        for step in steps {
            let name = kind(step);
            match (name.as_str(), &mut fallback) {
                ("Fuse", _) => fused = true,
                ("Strip", _) if fused => {
                    strip.push(strip_of(step).ok_or_else(|| unsupported(step.to_string()))?);
                }
                _ if fused => return Err(unsupported(format!("{name} after Fuse"))),
                ("ByteFallback", Fallback::None) => fallback = Fallback::Bytes(Vec::new()),
                (_, done) => {
                    let local = local(step).ok_or_else(|| unsupported(step.to_string()))?;
                    match done {
                        Fallback::None => tokens.push(local),
                        Fallback::Bytes(after) => after.push(local),
                    }
                }
            }
        }
        Ok(Self::Text { tokens, fallback, strip })
    }
}

fn flatten<'a>(config: &'a Value, steps: &mut Vec<&'a Value>) {
    match config["type"].as_str() {
        Some("Sequence") => {
            config["decoders"].as_array().into_iter().flatten().for_each(|s| flatten(s, steps));
        }
        _ if config.is_null() => {}
        _ => steps.push(config),
    }
}

/// Stripping the end of a text would need to know that it ends; no released tokenizer does it.
fn strip_of(step: &Value) -> Option<(char, usize)> {
    let count = usize::try_from(step["start"].as_u64()?).ok()?;
    (step["stop"].as_u64()? == 0).then_some((one_char(&step["content"])?, count))
}

fn local(step: &Value) -> Option<Local> {
    Some(match step["type"].as_str()? {
        "Replace" => Local::Replace {
            pattern: step["pattern"]["String"].as_str()?.to_owned(),
            content: step["content"].as_str()?.to_owned(),
        },
        "Metaspace" => Local::Metaspace {
            mark: one_char(&step["replacement"])?,
            drop_first: step["prepend_scheme"].as_str() != Some("never"),
        },
        "Strip" => {
            let (content, count) = strip_of(step)?;
            Local::Strip { content, count }
        }
        "WordPiece" => Local::WordPiece {
            prefix: step["prefix"].as_str()?.to_owned(),
            cleanup: step["cleanup"].as_bool()?,
        },
        _ => return None,
    })
}

fn one_char(value: &Value) -> Option<char> {
    let mut chars = value.as_str()?.chars();
    chars.next().filter(|_| chars.next().is_none())
}
