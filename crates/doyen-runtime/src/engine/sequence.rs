//! The state of one request inside the engine.

use super::{FinishReason, Request, RequestId};
use crate::{kv::BlockTables, sample::Sampler};
use doyen_tensor::TokenId;

/// A request with its tokens, cache and sampler.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: RequestId,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<TokenId>,
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Tokens generated.
    pub(super) generated: usize,
    /// Tokens whose keys and values are in the caches.
    pub(super) cached: usize,
    /// Positions to reserve pages for.
    pub(super) reserve: usize,
    pub(super) tables: BlockTables,
    pub(super) sampler: Sampler,
    pub(super) finished: bool,
    max_new_tokens: usize,
    eos: Vec<TokenId>,
}

impl Sequence {
    pub(super) fn new(id: RequestId, request: Request, (context, vocab): (usize, usize)) -> Self {
        let mut sampler = Sampler::new(request.sampling, &request.prompt);
        let prompt = request.prompt.len();
        let max_new_tokens = request.max_new_tokens.unwrap_or(usize::MAX);
        let reserve = prompt.saturating_add(max_new_tokens).min(context);
        let mut tokens = request.prompt;
        // Room for the whole answer, so that no step allocates.
        let answer = reserve.saturating_sub(prompt) + 1;
        tokens.reserve_exact(answer);
        sampler.reserve(answer, vocab);
        Self {
            id,
            tokens,
            prompt,
            generated: 0,
            cached: 0,
            reserve,
            tables: BlockTables::default(),
            sampler,
            finished: false,
            max_new_tokens,
            eos: request.eos,
        }
    }

    /// Tokens that have not been run yet.
    pub(super) const fn pending(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// Whether the generation ends with this, its latest token.
    pub(super) fn finish_reason(&self, token: TokenId, context: usize) -> Option<FinishReason> {
        if self.eos.contains(&token) {
            Some(FinishReason::Eos)
        } else if self.generated >= self.max_new_tokens {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= context {
            Some(FinishReason::Context)
        } else {
            None
        }
    }
}
