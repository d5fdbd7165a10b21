//! Text in and out of a language model: tokenizers, streaming detokenization, stop strings, chat templates.
//!
//! Everything here works on bytes and strings that the caller has read; nothing touches files or devices. Input comes
//! from model authors and users, so bad input is an error with a reason and never a panic.
//!
//! * [`Tokenizer`] reads Hugging Face `tokenizer.json` and turns text into ids and back.
//! * [`Detokenizer`] turns ids into text one at a time, releasing only what no later token can change.
//! * [`StopMatcher`] finds stop strings in that text, wherever tokens begin and end.
//! * [`ChatTemplate`] renders a conversation as `transformers` does; [`ChatTemplates`] finds a package's template.
//!
//! The way of one answer, with a word-level tokenizer of five words:
//!
//! ```
//! use doyen_text::{ChatInput, ChatTemplates, Detokenizer, Now, StopMatcher, Tokenizer};
//! use serde_json::json;
//!
//! let tokenizer = json!({
//!     "version": "1.0", "added_tokens": [],
//!     "pre_tokenizer": {"type": "Whitespace"},
//!     "model": {"type": "WordLevel", "unk_token": "?",
//!               "vocab": {"?": 0, "user": 1, "assistant": 2, "good": 3, "day": 4}},
//! });
//! let config = json!({
//!     "chat_template": "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}assistant",
//! });
//! let tokenizer = Tokenizer::from_bytes(tokenizer.to_string().as_bytes(), Some(config.to_string().as_bytes()))?;
//! let templates = ChatTemplates::find(None, Some(config.to_string().as_bytes()))?.expect("there is one");
//!
//! let prompt = templates.pick(false)?.render(&ChatInput {
//!     messages: &[json!({"role": "user", "content": "good day"})],
//!     tools: None,
//!     documents: None,
//!     add_generation_prompt: true,
//!     tokens: tokenizer.named(),
//!     extra: &serde_json::Map::new(),
//!     now: Now::utc(),
//! })?;
//! assert_eq!(prompt, "user good day\nassistant");
//! let ids: Vec<u32> = tokenizer.encode(&prompt)?.iter().map(|id| id.0).collect();
//! assert_eq!(ids, [1, 3, 4, 2]);
//!
//! // What a model might answer: "good day user".
//! let mut detokenizer = Detokenizer::new(&tokenizer);
//! let mut stops = StopMatcher::new([" user"])?;
//! let mut answer = String::new();
//! for id in [3, 4, 1] {
//!     let step = stops.push(detokenizer.push(doyen_tensor::TokenId(id)));
//!     answer.push_str(step.text);
//!     if step.stopped.is_some() {
//!         break;
//!     }
//! }
//! assert_eq!(answer, "good day");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod stop;
pub mod stream;
pub mod template;
pub mod tokenizer;

pub use stop::{StopError, StopMatcher, StopStep};
pub use stream::Detokenizer;
pub use template::{ChatInput, ChatTemplate, ChatTemplates, Now, TemplateError};
pub use tokenizer::{NamedTokens, Specials, Tokenizer, TokenizerError, TokenizerFiles};
