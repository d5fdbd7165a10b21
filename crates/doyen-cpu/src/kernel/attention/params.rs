//! What an attention node says and what a step brings: parameters, the ragged batch, bias and sink.

use doyen_graph::device::{GroupTables, SeqSpan};
use doyen_tensor::PageId;
use std::ops::Range;

/// Why attention cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    /// Storage that is not the size its layout needs.
    #[error("{what} hold {found} elements where the layout needs {expected}")]
    Size {
        /// Which storage.
        what: &'static str,
        /// Elements (f32 numbers or bytes) there are.
        found: usize,
        /// Elements the layout needs.
        expected: usize,
    },
    /// A page size that is not a power of two.
    #[error("pages of {0} positions; a power of two is needed")]
    PageSize(usize),
    /// 4-bit codes come in pairs.
    #[error("4-bit caches need an even head size, not {0}")]
    OddHead(usize),
    /// A number of query heads that the key heads cannot share evenly.
    #[error("{heads} query heads over {kv_heads} key heads")]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// Sequences that do not tile the tokens of the step in order.
    #[error("sequence {sequence} starts at token {found} where {expected} was next")]
    Spans {
        /// The sequence.
        sequence: usize,
        /// Where it starts.
        found: usize,
        /// Where it had to start.
        expected: usize,
    },
    /// A number of block tables other than that of sequences.
    #[error("{tables} block tables for {sequences} sequences")]
    Tables {
        /// Block tables.
        tables: usize,
        /// Sequences.
        sequences: usize,
    },
    /// A position without a page.
    #[error("sequence {sequence} has no page for position {position}")]
    NoPage {
        /// The sequence.
        sequence: usize,
        /// The position.
        position: usize,
    },
    /// A page outside of the store.
    #[error("sequence {sequence} refers to page {page} of {pages}")]
    PageRange {
        /// The sequence.
        sequence: usize,
        /// The page.
        page: PageId,
        /// Pages of the store.
        pages: usize,
    },
}

/// What an attention node says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParams {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a query or key head.
    pub k_head_size: usize,
    /// Channels of a value head.
    pub v_head_size: usize,
    /// Factor on q.k.
    pub scale: f32,
    /// `softcap * tanh(s / softcap)` before bias and mask, when positive.
    pub softcap: f32,
    /// Visible keys including the query's own position, when limited.
    pub window: Option<usize>,
    /// Whether a query sees only keys at or before its position. Otherwise it sees all keys of its sequence, those of
    /// later tokens of the step included.
    pub causal: bool,
}

impl AttentionParams {
    /// Query heads per key head.
    ///
    /// # Errors
    /// When they do not divide evenly.
    pub fn group(&self) -> Result<usize, AttentionError> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(AttentionError::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        Ok(self.heads / self.kv_heads)
    }

    /// The key positions that new token `i` of a sequence sees.
    pub fn visible(&self, span: SeqSpan, i: usize) -> Range<usize> {
        let end = if self.causal { span.past + i + 1 } else { span.past + span.len };
        let start = self.window.map_or(0, |w| (span.past + i + 1).saturating_sub(w));
        start.min(end)..end
    }
}

/// Rows of f32 at a stride: row `t` starts at `t * stride`. A part of packed QKV is such rows.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows `stride` elements apart.
    pub const fn new(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride }
    }

    /// `len` elements of row `t` from column `start` on.
    ///
    /// # Panics
    /// When they are out of bounds.
    #[inline]
    pub fn part(&self, t: usize, start: usize, len: usize) -> &'a [f32] {
        &self.data[t * self.stride + start..][..len]
    }
}

/// What joins the softmax's denominator beside the keys.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Sink<'a> {
    /// Nothing.
    #[default]
    None,
    /// A logit of zero (`smooth_softmax`).
    Zero,
    /// A logit per query head, `[heads]`.
    Heads(&'a [f32]),
}

impl Sink<'_> {
    pub(super) fn of(self, head: usize) -> Option<f32> {
        match self {
            Self::None => None,
            Self::Zero => Some(0.0),
            Self::Heads(sinks) => Some(sinks[head]),
        }
    }
}

/// Additive bias `[sequence][head][new token][key position]` at any strides; a stride of 0 repeats.
#[derive(Debug, Clone, Copy)]
pub struct Bias<'a> {
    /// The numbers.
    pub data: &'a [f32],
    /// Strides in elements of sequence, query head, new token, key position.
    pub strides: [usize; 4],
    /// Key positions it has; later keys are masked.
    pub keys: usize,
}

impl Bias<'_> {
    /// Adds the bias of a query to its scores for `keys`.
    pub(super) fn add(&self, [sequence, head, token]: [usize; 3], keys: Range<usize>, scores: &mut [f32]) {
        let [s, h, t, k] = self.strides;
        let base = sequence * s + head * h + token * t;
        for (key, score) in keys.zip(scores) {
            *score += if key < self.keys { self.data[base + key * k] } else { f32::NEG_INFINITY };
        }
    }
}

/// The sequences of a step with their block tables: checked, so that kernels can rely on them.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    spans: &'a [SeqSpan],
    tables: &'a GroupTables,
    tokens: usize,
    page_shift: u32,
    pages: usize,
}

impl<'a> Batch<'a> {
    /// A batch whose spans tile the step's tokens in order and whose tables name a page of a store of `pages` pages
    /// for every position that is written or can be seen under `window`. Once per step and cache group.
    ///
    /// # Errors
    /// Names the sequence and the position or page that is wrong.
    pub fn new(
        spans: &'a [SeqSpan],
        tables: &'a GroupTables,
        page_size: usize,
        pages: usize,
        window: Option<usize>,
    ) -> Result<Self, AttentionError> {
        if !page_size.is_power_of_two() {
            return Err(AttentionError::PageSize(page_size));
        }
        if tables.len() != spans.len() {
            return Err(AttentionError::Tables { tables: tables.len(), sequences: spans.len() });
        }
        let page_shift = page_size.trailing_zeros();
        let mut tokens = 0;
        for (sequence, span) in spans.iter().enumerate() {
            if span.first != tokens {
                return Err(AttentionError::Spans { sequence, found: span.first, expected: tokens });
            }
            tokens += span.len;
            if span.len == 0 {
                continue;
            }
            let seen = window.map_or(0, |w| (span.past + 1).saturating_sub(w).min(span.past));
            let (first, last) = (seen >> page_shift, (span.past + span.len - 1) >> page_shift);
            let table = tables.sequence(sequence);
            let Some(table) = table.get(first..=last) else {
                let position = table.len().max(first) << page_shift;
                return Err(AttentionError::NoPage { sequence, position });
            };
            if let Some(&page) = table.iter().find(|p| p.index() >= pages) {
                return Err(AttentionError::PageRange { sequence, page, pages });
            }
        }
        Ok(Self { spans, tables, tokens, page_shift, pages })
    }

    /// New tokens of the step.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Positions of a page.
    pub const fn page_size(&self) -> usize {
        1 << self.page_shift
    }

    /// Pages of the store the tables were checked against.
    pub const fn pages(&self) -> usize {
        self.pages
    }

    /// The sequences.
    pub const fn spans(&self) -> &'a [SeqSpan] {
        self.spans
    }

    /// The sequence that new token `t` belongs to.
    pub(super) fn sequence_of(&self, t: usize) -> usize {
        self.spans.partition_point(|s| s.first + s.len <= t)
    }

    /// Page and slot of a position.
    ///
    /// # Panics
    /// When it is not one that the batch was checked for.
    #[inline]
    pub fn place(&self, sequence: usize, position: usize) -> (usize, usize) {
        let page = self.tables.sequence(sequence)[position >> self.page_shift];
        (page.index(), position & (self.page_size() - 1))
    }

    /// Cuts positions into runs that lie in one page and are no longer than `longest`.
    pub(super) fn runs(
        &self,
        sequence: usize,
        positions: Range<usize>,
        longest: usize,
    ) -> impl Iterator<Item = Run> {
        let mut next = positions.start;
        std::iter::from_fn(move || {
            (next < positions.end).then(|| {
                let (page, slot) = self.place(sequence, next);
                let start = next;
                next = positions.end.min(start + (self.page_size() - slot).min(longest));
                Run { positions: start..next, page, slot }
            })
        })
    }
}

/// Positions of a sequence whose rows follow each other in a page.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) positions: Range<usize>,
    pub(super) page: usize,
    /// Slot of the first position.
    pub(super) slot: usize,
}
