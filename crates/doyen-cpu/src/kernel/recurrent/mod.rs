//! Operators whose past is a state of fixed size: causal convolution and linear attention.
//!
//! * this file: the sequences of a step and where their states lie
//! * `conv`: the convolution, by channels
//! * `linear`: linear attention, by heads and blocks of value channels; `scan` its loops over the tokens
//!
//! A step reads a sequence's state in one slot and writes it to another. Tokens are taken one after the other with the
//! same arithmetic whatever the chunk, so that a prompt in chunks gives bitwise what it gives as a whole.

mod conv;
mod linear;
mod scan;
#[cfg(test)]
mod tests;

pub use conv::{CausalConv, ConvParams};
pub use linear::{LinearAttention, LinearParams, Operands};

use crate::pool::UnsafeSlice;
use doyen_graph::device::{SeqSpan, StateSlots};
use std::ops::Range;

/// The slots of one state: `slot * size ..` is that of a slot.
pub struct States<'a> {
    memory: UnsafeSlice<'a, f32>,
    size: usize,
    spans: &'a [SeqSpan],
    slots: &'a [StateSlots],
}

/// A step that does not fit the states.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Sequences without slots, or slots outside of the memory.
    #[error("sequence {sequence}: its state slots are not among the {slots} there are")]
    Slots {
        /// The sequence.
        sequence: usize,
        /// Slots there are.
        slots: usize,
    },
    /// A slot that is written and belongs to somebody else in the step.
    #[error("sequence {sequence}: another sequence uses the state slot that it writes")]
    Shared {
        /// The sequence.
        sequence: usize,
    },
}

impl<'a> States<'a> {
    /// The states of `size` elements in `memory`, and the sequences of a step with their slots.
    ///
    /// # Errors
    /// When a sequence has no slots, or writes one that another sequence or it itself uses otherwise.
    pub fn new(
        memory: &'a mut [f32],
        size: usize,
        spans: &'a [SeqSpan],
        slots: &'a [StateSlots],
    ) -> Result<Self, StateError> {
        let there = memory.len().checked_div(size).unwrap_or(usize::MAX);
        for sequence in 0..spans.len() {
            let own = slots.get(sequence).ok_or(StateError::Slots { sequence, slots: there })?;
            if own.read.into_iter().chain([own.write]).any(|s| s.index() >= there) {
                return Err(StateError::Slots { sequence, slots: there });
            }
            let clash = |(i, s): (usize, &StateSlots)| {
                s.read == Some(own.write) || (i != sequence && s.write == own.write)
            };
            if slots[..spans.len()].iter().enumerate().any(clash) {
                return Err(StateError::Shared { sequence });
            }
        }
        Ok(Self { memory: UnsafeSlice::new(memory), size, spans, slots })
    }

    /// Number of sequences.
    const fn sequences(&self) -> usize {
        self.spans.len()
    }

    /// The tokens of a sequence.
    fn tokens(&self, sequence: usize) -> Range<usize> {
        let span = self.spans[sequence];
        span.first..span.first + span.len
    }

    /// Tokens of the step.
    fn all_tokens(&self) -> usize {
        self.spans.iter().map(|s| s.len).sum()
    }

    /// Part of a sequence's state before the step; `None` before its first token.
    fn before(&self, sequence: usize, range: Range<usize>) -> Option<&'a [f32]> {
        let at = self.slots[sequence].read?.index() * self.size;
        debug_assert!(range.end <= self.size, "inside the state");
        // SAFETY: `new` checked that no sequence writes a slot that one reads.
        Some(unsafe { self.memory.shared(at + range.start..at + range.end) })
    }

    /// Part of a sequence's state after the step, to write.
    ///
    /// # Safety
    /// While the result lives, nobody may take an overlapping part of the same sequence's state.
    #[allow(clippy::mut_from_ref)]
    unsafe fn after(&self, sequence: usize, range: Range<usize>) -> &'a mut [f32] {
        let at = self.slots[sequence].write.index() * self.size;
        debug_assert!(range.end <= self.size, "inside the state");
        // SAFETY: `new` checked that the slot is no other sequence's; the caller promises the rest.
        unsafe { self.memory.range(at + range.start..at + range.end) }
    }
}
