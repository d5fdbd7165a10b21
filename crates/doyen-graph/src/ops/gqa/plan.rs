//! What `seqlens_k` and `total_sequence_length` mean for a run: which rows of the caches are past, which tokens are
//! new, and which rows a window-sized cache keeps. Every length is checked against the buffers here.

use super::super::OpError;
use super::{GroupQueryAttention, QkOutput};

/// One sequence of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sequence {
    /// Tokens before this run.
    pub(super) past: usize,
    /// Rows of the past caches that hold the latest of them.
    pub(super) kept: usize,
    /// New tokens that count; the rest of a first prompt's row is padding.
    pub(super) valid: usize,
}

/// All sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) sequences: Vec<Sequence>,
    /// No past: positions count from the first.
    pub(super) first_prompt: bool,
    /// Largest total length.
    pub(super) total: usize,
    /// Rows of the present caches.
    pub(super) rows: usize,
}

/// Rows in use after `tokens` tokens of a cache of `capacity` rows for a window of `window`: all of them while they
/// fit, then between the window and the capacity, falling back to the window each time the buffer was full.
pub const fn window_rows(tokens: usize, capacity: usize, window: usize) -> usize {
    if tokens <= capacity {
        return tokens;
    }
    let step = capacity - window + 1;
    tokens - step * (tokens - capacity).div_ceil(step)
}

impl Plan {
    /// Checks the lengths of a run of `seq` new tokens on caches of `capacity` rows.
    pub(super) fn new(
        op: &GroupQueryAttention,
        seqlens: &[i64],
        total: i64,
        seq: usize,
        capacity: usize,
    ) -> Result<Self, OpError> {
        let bad_total = |expected: String| OpError::input("total_sequence_length", expected, total);
        let total = usize::try_from(total)
            .ok()
            .filter(|&t| t >= seq && t > 0)
            .ok_or_else(|| bad_total(format!("at least {} (the new tokens)", seq.max(1))))?;
        let first_prompt = total == seq;
        let reach = if first_prompt || op.window_cache { total } else { capacity.saturating_add(seq) };
        if total > reach {
            return Err(bad_total(format!("at most {reach} (rows of past_key and the new tokens)")));
        }
        let window = op.window.filter(|_| op.window_cache);
        let sequences = seqlens
            .iter()
            .map(|&last| {
                let low = if first_prompt { 1 } else { seq };
                let length = last.checked_add(1).and_then(|t| usize::try_from(t).ok());
                let Some(length) = length.filter(|t| (low..=total).contains(t)) else {
                    let expected = format!("lengths minus 1 from {} to {}", low as i64 - 1, total - 1);
                    return Err(OpError::input("seqlens_k", expected, last));
                };
                if first_prompt {
                    return Ok(Sequence { past: 0, kept: 0, valid: length });
                }
                let past = length - seq;
                if window.is_none() && past > capacity {
                    let expected =
                        format!("at most {} (rows of past_key and the new tokens)", capacity + seq - 1);
                    return Err(OpError::input("seqlens_k", expected, last));
                }
                let kept = window.map_or(past, |w| window_rows(past, capacity, w));
                Ok(Sequence { past, kept, valid: seq })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let rows = if op.window_cache { capacity } else { capacity.max(total) };
        Ok(Self { sequences, first_prompt, total, rows })
    }
}

impl Sequence {
    /// Tokens after this run.
    pub(super) const fn length(&self) -> usize {
        self.past + self.valid
    }

    /// Position of the first row of the pool of kept and new keys.
    pub(super) const fn first(&self) -> usize {
        self.past - self.kept
    }

    /// Whether the query at new token `i` sees the key at position `j`.
    pub(super) fn sees(&self, op: &GroupQueryAttention, i: usize, j: usize) -> bool {
        if !op.causal {
            return j < self.length();
        }
        let at = self.past + i;
        j <= at && op.window.is_none_or(|w| j + w > at)
    }
}

impl QkOutput {
    /// The value to report for a key, from its score and its probability.
    pub(super) const fn of(self, score: f64, probability: f64) -> f64 {
        match self {
            Self::AfterSoftmax => probability,
            _ => score,
        }
    }
}
