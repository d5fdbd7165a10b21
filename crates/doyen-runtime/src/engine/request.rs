//! What callers hand in and get back.

use crate::sample::SamplingParams;
use doyen_tensor::TokenId;

/// A request of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

/// A prompt and how to go on from it.
#[derive(Debug, Clone)]
pub struct Request {
    /// Token ids of the prompt; nothing is added.
    pub prompt: Vec<TokenId>,
    /// Tokens to generate at most; `None` goes on to the end of the context.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end the generation; they are not handed out.
    pub eos: Vec<TokenId>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
}

impl Request {
    /// A request without end tokens and without a limit but the context.
    pub const fn new(prompt: Vec<TokenId>, sampling: SamplingParams) -> Self {
        Self { prompt, max_new_tokens: None, eos: Vec::new(), sampling }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model gave an end token.
    Eos,
    /// `max_new_tokens` were generated.
    Length,
    /// The context is full.
    Context,
    /// The caller ended it.
    Cancelled,
    /// The model's logits are NaN, so no token can be chosen: damaged weights or scales, or an overflow.
    NotANumber,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A new token of a request.
    Token {
        /// The request.
        id: RequestId,
        /// The token.
        token: TokenId,
    },
    /// A request ended; it produces no more events.
    Finished {
        /// The request.
        id: RequestId,
        /// Why.
        reason: FinishReason,
        /// Tokens of its prompt.
        prompt_tokens: usize,
        /// Tokens generated, an end token (or what could not be chosen) included.
        generated: usize,
    },
}
