//! The engine: load a planned model, submit requests, stream tokens.
//!
//! Every [`Engine::step`] runs one ragged batch over all running sequences: one token of each that is generating, a chunk
//! of the prompt of each that is not yet. A sequence gets bitwise the same logits in any company (the device's promise),
//! so joining and leaving never change a result. A request reserves the pages it
//! will ever hold when it starts, so that what runs can always finish. With a device's native kernels steps allocate
//! nothing.

mod request;
mod sequence;

pub use request::{Event, FinishReason, Request, RequestId};

use crate::{
    kv::{Full, PagePool},
    plan::Plan,
    sample::SamplingParams,
};
use doyen_graph::{
    device::{
        Choice, Device, DeviceError, Draw, GroupTables, Limits, RaggedBatch, SeqSpan, Session, StateSlots,
    },
    lowered::Extent,
};
use doyen_tensor::TokenId;
use sequence::Sequence;
use std::collections::VecDeque;

/// Why a request or a step fails.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// Nothing to continue.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// A prompt that leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, the context holds {context}: shorten the prompt or plan a longer context (--context)"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions of the context.
        context: usize,
    },
    /// A token the model does not have.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Vocabulary {
        /// The token.
        token: TokenId,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A sampling parameter out of range.
    #[error("{0}")]
    Sampling(String),
    /// A graph that is not a language model.
    #[error("the graph has no output `logits [rows, vocabulary]`")]
    NoLogits,
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Who wants to see the logits of every token that is chosen.
type Watch<'a> = &'a mut dyn FnMut(RequestId, &[f32]);

/// A loaded model with its sequences.
pub struct Engine {
    session: Box<dyn Session>,
    limits: Limits,
    vocab: usize,
    pool: PagePool,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    next_id: u64,
    batch: Batch,
    events: Vec<Event>,
}

/// The buffers of a step, reused.
#[derive(Debug)]
struct Batch {
    tokens: Vec<u32>,
    spans: Vec<SeqSpan>,
    rows: Vec<u32>,
    tables: Vec<GroupTables>,
    states: Vec<StateSlots>,
    /// The running sequence of each span.
    members: Vec<usize>,
    /// What the device is to choose from each row, and what it chose.
    draws: Vec<Option<Draw>>,
    choices: Vec<Option<Choice>>,
}

impl Batch {
    /// Buffers for the largest step, so that no step allocates.
    fn new(limits: &Limits, groups: usize) -> Self {
        let sequences = limits.sequences;
        let pages = sequences.saturating_mul(limits.context.div_ceil(limits.page_size));
        Self {
            tokens: Vec::with_capacity(limits.tokens),
            spans: Vec::with_capacity(sequences),
            rows: Vec::with_capacity(limits.rows),
            tables: (0..groups).map(|_| GroupTables::with_capacity(sequences, pages)).collect(),
            states: Vec::with_capacity(sequences),
            members: Vec::with_capacity(sequences),
            draws: Vec::with_capacity(sequences),
            choices: Vec::with_capacity(sequences),
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.rows.clear();
        self.members.clear();
        self.draws.clear();
        self.states.clear();
        self.tables.iter_mut().for_each(GroupTables::clear);
    }

    /// Appends the next `len` tokens of a sequence.
    fn push(&mut self, member: usize, sequence: &Sequence, len: usize) {
        let (first, past) = (self.tokens.len(), sequence.cached);
        self.tokens.extend(sequence.tokens[past..past + len].iter().map(|t| t.0));
        self.spans.push(SeqSpan { first, len, past });
        self.members.push(member);
        self.states.extend(sequence.tables.states());
        for (g, table) in self.tables.iter_mut().enumerate() {
            table.push(sequence.tables.group(g));
        }
    }

    fn view(&self) -> RaggedBatch<'_> {
        RaggedBatch {
            tokens: &self.tokens,
            sequences: &self.spans,
            tables: &self.tables,
            states: &self.states,
            rows: &self.rows,
            inputs: &[],
        }
    }
}

impl Engine {
    /// Loads a planned model on its device.
    ///
    /// # Errors
    /// When the graph is no language model or the device cannot load it.
    pub fn new(plan: &Plan, device: &dyn Device) -> Result<Self, EngineError> {
        let program = plan.program();
        let graph = &program.graph;
        let vocab = match graph.outputs.first().map(|&v| graph.value(v).dims.as_slice()) {
            Some([.., Extent::Rows(1), Extent::Fixed(v)]) if graph.tokens.is_some() => *v,
            _ => return Err(EngineError::NoLogits),
        };
        let session = device.load(program.clone())?;
        Ok(Self {
            session,
            limits: program.limits,
            vocab,
            pool: PagePool::new(program),
            batch: Batch::new(&program.limits, graph.groups.len()),
            running: Vec::with_capacity(program.limits.sequences),
            waiting: VecDeque::new(),
            next_id: 0,
            // A token and its end for every sequence.
            events: Vec::with_capacity(2 * program.limits.sequences),
        })
    }

    /// Size of the vocabulary.
    pub const fn vocab(&self) -> usize {
        self.vocab
    }

    /// What the model was planned for.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Queues a request; it starts with the next step that has room.
    ///
    /// # Errors
    /// When the prompt is empty, leaves no room in the context (never truncated), has tokens outside the vocabulary, or
    /// a sampling parameter is out of range.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        self.check_tokens(&request.prompt)?;
        if request.prompt.len() >= self.limits.context {
            let (prompt, context) = (request.prompt.len(), self.limits.context);
            return Err(EngineError::PromptTooLong { prompt, context });
        }
        request.sampling.validate().map_err(EngineError::Sampling)?;
        if request.max_new_tokens == Some(0) {
            return Err(EngineError::Sampling("max new tokens: expected at least 1, found 0".into()));
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Sequence::new(id, request, (self.limits.context, self.vocab)));
        Ok(id)
    }

    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        match tokens.iter().find(|t| t.index() >= self.vocab) {
            Some(&token) => Err(EngineError::Vocabulary { token, vocab: self.vocab }),
            None => Ok(()),
        }
    }

    /// Ends a request; its pages are free at once and it produces no more events.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|s| s.id != id);
        if let Some(i) = self.running.iter().position(|s| s.id == id) {
            let sequence = self.running.remove(i);
            self.pool.release(sequence.tables);
        }
    }

    /// Whether nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// KV pages of a cache group that running requests hold.
    pub fn pages_used(&self, group: usize) -> usize {
        self.pool.used(group)
    }

    /// Runs one step over all running sequences and says what happened. Nothing happens when idle.
    ///
    /// # Errors
    /// When the device fails; the step can be tried again.
    pub fn step(&mut self) -> Result<&[Event], EngineError> {
        self.advance(None)
    }

    /// As [`Engine::step`], showing `each` the logits `[vocab]` that a request's next token is chosen from, which a device
    /// keeps to itself otherwise.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn step_with(&mut self, mut each: impl FnMut(RequestId, &[f32])) -> Result<&[Event], EngineError> {
        self.advance(Some(&mut each))
    }

    fn advance(&mut self, each: Option<Watch<'_>>) -> Result<&[Event], EngineError> {
        self.events.clear();
        self.admit();
        self.form_batch(each.is_none())?;
        if self.batch.spans.is_empty() {
            return Ok(&self.events);
        }
        let mut choices = std::mem::take(&mut self.batch.choices);
        let done = self.session.step_choosing(&self.batch.view(), &self.batch.draws, &mut choices);
        self.batch.choices = choices;
        done?;
        self.collect(each);
        Ok(&self.events)
    }

    fn admit(&mut self) {
        while self.running.len() < self.limits.sequences {
            let Some(next) = self.waiting.front_mut() else { return };
            if self.pool.reserve(&mut next.tables, next.reserve).is_err() {
                return;
            }
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// The next batch; whether the device may choose tokens itself.
    fn form_batch(&mut self, choose: bool) -> Result<(), EngineError> {
        self.batch.clear();
        let mut room = self.limits.tokens;
        // Generating sequences first: a long prompt must not hold anybody's next token back.
        let generating = |s: &Sequence| s.pending() == 1;
        for first in [true, false] {
            for (i, s) in self.running.iter_mut().enumerate().filter(|(_, s)| generating(s) == first) {
                let len = s.pending().min(room);
                if len == 0 {
                    continue;
                }
                room -= len;
                self.pool.grow(&mut s.tables, s.cached + len).map_err(full)?;
                self.batch.push(i, s, len);
                if len == s.pending() {
                    self.batch.rows.push(self.batch.tokens.len() as u32 - 1);
                    self.batch.draws.push(s.sampler.draw().filter(|_| choose));
                }
            }
        }
        Ok(())
    }

    fn collect(&mut self, mut each: Option<Watch<'_>>) {
        let logits = self.session.output(0);
        let mut row = 0;
        for (span, &member) in self.batch.spans.iter().zip(&self.batch.members) {
            let s = &mut self.running[member];
            s.cached += span.len;
            s.tables.advance();
            self.pool.trim(&mut s.tables, s.cached);
            if s.pending() > 0 {
                continue;
            }
            let choice = if let Some(choice) = self.batch.choices.get(row).copied().flatten() {
                s.sampler.advance();
                choice
            } else {
                let logits = &logits[row * self.vocab..(row + 1) * self.vocab];
                if let Some(each) = &mut each {
                    each(s.id, logits);
                }
                s.sampler.sample(logits)
            };
            row += 1;
            let token = match choice {
                Choice::Token(token) => token,
                Choice::NotANumber => TokenId(0),
            };
            s.tokens.push(token);
            s.generated += 1;
            let id = s.id;
            let reason = match choice {
                Choice::NotANumber => Some(FinishReason::NotANumber),
                Choice::Token(token) => s.finish_reason(token, self.limits.context),
            };
            if !matches!(reason, Some(FinishReason::Eos | FinishReason::NotANumber)) {
                self.events.push(Event::Token { id, token });
            }
            if let Some(reason) = reason {
                s.finished = true;
                self.events.push(Event::Finished {
                    id,
                    reason,
                    prompt_tokens: s.prompt,
                    generated: s.generated,
                });
            }
        }
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].finished {
                let s = self.running.remove(i);
                self.pool.release(s.tables);
            } else {
                i += 1;
            }
        }
    }

    /// Runs `tokens` as one sequence of its own and hands every position's logits `[vocab]` to `each`, in order.
    ///
    /// # Errors
    /// As [`Engine::submit`], and when no pages are free because requests are running.
    pub fn logits(
        &mut self,
        tokens: &[TokenId],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        if tokens.len() > self.limits.context {
            return Err(EngineError::PromptTooLong { prompt: tokens.len(), context: self.limits.context });
        }
        let request = Request::new(tokens.to_vec(), SamplingParams::default());
        let mut sequence = Sequence::new(RequestId(u64::MAX), request, (self.limits.context, self.vocab));
        self.pool.reserve(&mut sequence.tables, tokens.len()).map_err(full)?;
        let result = self.run_chunks(&mut sequence, &mut each);
        self.pool.release(sequence.tables);
        result
    }

    fn run_chunks(
        &mut self,
        sequence: &mut Sequence,
        each: &mut impl FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        while sequence.pending() > 0 {
            let len = sequence.pending().min(self.limits.rows).min(self.limits.tokens);
            self.pool.grow(&mut sequence.tables, sequence.cached + len).map_err(full)?;
            self.batch.clear();
            self.batch.push(0, sequence, len);
            self.batch.rows.extend(0..len as u32);
            self.session.step(&self.batch.view())?;
            for (i, row) in self.session.output(0).chunks_exact(self.vocab).take(len).enumerate() {
                each(sequence.cached + i, row);
            }
            sequence.cached += len;
            sequence.tables.advance();
            self.pool.trim(&mut sequence.tables, sequence.cached);
        }
        Ok(())
    }

    /// Generates from a prompt until it ends, handing each token over as it comes; the simple case of the engine.
    /// Returns why it ended. `each` returns whether to go on.
    ///
    /// # Errors
    /// As [`Engine::submit`] and [`Engine::step`].
    pub fn generate(
        &mut self,
        request: Request,
        mut each: impl FnMut(TokenId) -> bool,
    ) -> Result<FinishReason, EngineError> {
        let own = self.submit(request)?;
        let result = loop {
            match self.step() {
                Ok(events) => {
                    if let Some(reason) = outcome(events, own, &mut each) {
                        break Ok(reason);
                    }
                }
                Err(e) => break Err(e),
            }
        };
        self.cancel(own);
        result
    }
}

/// Hands the tokens of a request over; why it ended, if it did.
fn outcome(events: &[Event], own: RequestId, each: &mut impl FnMut(TokenId) -> bool) -> Option<FinishReason> {
    for event in events {
        match *event {
            Event::Token { id, token } if id == own && !each(token) => return Some(FinishReason::Cancelled),
            Event::Finished { id, reason, .. } if id == own => return Some(reason),
            _ => {}
        }
    }
    None
}

/// Pages that a reservation should have guaranteed, or that [`Engine::logits`] finds taken.
fn full(e: Full) -> EngineError {
    EngineError::Device(DeviceError::Step(e.to_string()))
}
