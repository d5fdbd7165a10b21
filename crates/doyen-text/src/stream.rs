//! Token ids to text, one at a time.
//!
//! [`Detokenizer`] releases text as soon as no later token can change it: never half a character, never a
//! replacement character for bytes that are still to come. At every point the text released so far is the
//! beginning of a whole decode of the same ids, and [`Detokenizer::finish`] brings exactly the rest. A token
//! costs the same whatever came before it: what is kept is the unfinished end, not the history.
//!
//! Stop strings are looked for in the released text by [`crate::stop`].

mod bytes;
mod local;

use doyen_tensor::TokenId;

use self::bytes::{ByteRun, Utf8Stream, byte_token, push_spelled};
use self::local::LocalSteps;
use crate::tokenizer::{Decoder, Fallback, Specials, Tokenizer};

/// Turns a stream of token ids into text.
///
/// ```
/// # fn show(tokenizer: &doyen_text::Tokenizer, ids: &[doyen_tensor::TokenId]) {
/// let mut detokenizer = doyen_text::Detokenizer::new(tokenizer);
/// for &id in ids {
///     print!("{}", detokenizer.push(id));
/// }
/// print!("{}", detokenizer.finish());
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    specials: Specials,
    flow: Flow,
    released: String,
}

/// State of the decoder steps.
#[derive(Debug, Clone)]
enum Flow {
    Bytes(Utf8Stream),
    Text { tokens: LocalSteps, fallback: Option<(ByteRun, LocalSteps)>, strip: Vec<(char, usize)> },
}

impl Detokenizer {
    /// A stream whose text equals the whole decode of its ids, special tokens left out.
    ///
    /// SentencePiece-like tokenizers drop the space before the first word: right for a chat answer. To continue
    /// a text, use [`continuing`](Self::continuing).
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self::with_specials(tokenizer, Specials::Skip)
    }

    /// As [`new`](Self::new), with a choice about special tokens.
    pub fn with_specials(tokenizer: &Tokenizer, specials: Specials) -> Self {
        let flow = match tokenizer.decoder() {
            Decoder::Bytes => Flow::Bytes(Utf8Stream::default()),
            Decoder::Text { tokens, fallback, strip } => Flow::Text {
                tokens: LocalSteps::new(tokens),
                fallback: match fallback {
                    Fallback::None => None,
                    Fallback::Bytes(after) => Some((ByteRun::default(), LocalSteps::new(after))),
                },
                strip: strip.clone(),
            },
        };
        Self { tokenizer: tokenizer.clone(), specials, flow, released: String::new() }
    }

    /// A stream that continues after `prompt`: what its tokens add to the text of the prompt, including the
    /// space before the first word. A character that the prompt left unfinished comes out whole.
    pub fn continuing(tokenizer: &Tokenizer, prompt: &[TokenId]) -> Self {
        let mut stream = Self::new(tokenizer);
        for &id in prompt {
            stream.push(id);
        }
        match &mut stream.flow {
            Flow::Bytes(_) | Flow::Text { fallback: None, .. } => {}
            Flow::Text { fallback: Some((run, after)), .. } => {
                if run.forget_complete() {
                    after.skip_first();
                }
            }
        }
        stream.released.clear();
        stream
    }

    /// Takes the next token and returns the text that is complete now, often empty.
    ///
    /// Special tokens are left out (unless kept by choice), and so are ids outside of the vocabulary, which
    /// models with padded logits can produce.
    pub fn push(&mut self, id: TokenId) -> &str {
        self.released.clear();
        let Some(mut token) = self.tokenizer.decoded_token(id, self.specials) else {
            return "";
        };
        match &mut self.flow {
            Flow::Bytes(stream) => {
                push_spelled(&token, &mut stream.pending);
                stream.release(&mut self.released);
            }
            Flow::Text { tokens, fallback, strip } => {
                tokens.apply(&mut token);
                match fallback {
                    None => strip_into(&token, strip, &mut self.released),
                    Some((run, after)) => {
                        if let Some(byte) = byte_token(&token) {
                            run.bytes.push(byte);
                        } else {
                            run.release(|piece| after.apply_into(piece, strip, &mut self.released));
                            after.apply_into(token, strip, &mut self.released);
                        }
                    }
                }
            }
        }
        &self.released
    }

    /// Ends the stream and returns the rest of the text: bytes that never became a character are U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.released.clear();
        match &mut self.flow {
            Flow::Bytes(stream) => stream.finish(&mut self.released),
            Flow::Text { fallback: Some((run, after)), strip, .. } => {
                run.release(|piece| after.apply_into(piece, strip, &mut self.released));
            }
            Flow::Text { fallback: None, .. } => {}
        }
        &self.released
    }
}

impl LocalSteps {
    fn apply_into(&mut self, mut token: String, strip: &mut [(char, usize)], out: &mut String) {
        self.apply(&mut token);
        strip_into(&token, strip, out);
    }
}

/// Appends `text` without the characters that are still to be taken off the beginning of the whole text.
fn strip_into(text: &str, strip: &mut [(char, usize)], out: &mut String) {
    'chars: for (at, c) in text.char_indices() {
        for (content, left) in &mut *strip {
            if *left > 0 {
                if c == *content {
                    *left -= 1;
                    continue 'chars;
                }
                *left = 0;
            }
        }
        out.push_str(&text[at..]);
        return;
    }
}
