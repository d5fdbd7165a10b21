//! Slots of states of fixed size: two for each sequence that runs.
//!
//! A step reads one and writes the other, and only when it is done do they change places: a step that failed can be
//! tried again.

use super::Full;
use doyen_graph::device::{Program, StateSlot, StateSlots};

/// The slots that no sequence holds.
#[derive(Debug)]
pub(super) struct StatePool {
    free: Vec<StateSlot>,
    /// All of them.
    slots: usize,
}

/// The slots of one sequence; none where the graph has no states of fixed size.
#[derive(Debug, Default)]
pub(super) struct SequenceState {
    slots: Option<[StateSlot; 2]>,
    /// Whether the first slot holds what came before.
    written: bool,
}

impl SequenceState {
    /// What the next step reads and writes.
    pub(super) fn next(&self) -> Option<StateSlots> {
        self.slots.map(|[read, write]| StateSlots { read: self.written.then_some(read), write })
    }

    /// Makes what a step wrote the sequence's state.
    pub(super) fn advance(&mut self) {
        if let Some(slots) = &mut self.slots {
            slots.reverse();
            self.written = true;
        }
    }
}

impl StatePool {
    /// All slots of a program.
    pub(super) fn new(program: &Program) -> Self {
        let slots = program.state_slots;
        Self { free: (0..slots as u32).rev().map(StateSlot).collect(), slots }
    }

    /// Gives a sequence its slots, where it has none and the program has any.
    ///
    /// # Errors
    /// When other sequences hold them all.
    pub(super) fn reserve(&mut self, state: &mut SequenceState) -> Result<(), Full> {
        if self.slots == 0 || state.slots.is_some() {
            return Ok(());
        }
        let left = self.free.len().checked_sub(2);
        let left = left.ok_or(Full::States { needed: 2, free: self.free.len() })?;
        state.slots = Some([self.free[left], self.free[left + 1]]);
        self.free.truncate(left);
        Ok(())
    }

    /// Takes a sequence's slots back.
    #[allow(clippy::needless_pass_by_value, reason = "who gives slots back has them no more")]
    pub(super) fn release(&mut self, state: SequenceState) {
        self.free.extend(state.slots.into_iter().flatten());
    }
}
