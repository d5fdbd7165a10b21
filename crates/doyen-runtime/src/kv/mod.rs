//! KV pages: a pool per cache group, and the block tables of sequences; slots of states of fixed size (`states`).
//!
//! The bytes of the pages are the device's; here only their numbers move. A sequence reserves what it will hold at most
//! when it starts, so a full pool is known before a step runs, never in the middle of one. Pages are taken as positions
//! are written; in a group with a window those that no query can see any more are given back after every step.

mod states;
#[cfg(test)]
mod tests;

use doyen_graph::device::{GroupPages, Program, StateSlots};
use doyen_tensor::PageId;
use states::{SequenceState, StatePool};

/// The pages of every cache group.
#[derive(Debug)]
pub struct PagePool {
    page_size: usize,
    /// Table entries to make room for when a sequence starts.
    table_len: usize,
    groups: Vec<Group>,
    states: StatePool,
}

#[derive(Debug)]
struct Group {
    pages: GroupPages,
    free: Vec<PageId>,
    /// Pages that are not set aside for a sequence.
    unreserved: usize,
}

/// Not enough room for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// Not enough free pages.
    #[error("the kv cache is full: {needed} more pages of {page_size} positions needed, {free} free")]
    Pages {
        /// Pages needed.
        needed: usize,
        /// Pages free.
        free: usize,
        /// Positions of a page.
        page_size: usize,
    },
    /// All slots of states of fixed size are taken.
    #[error("all slots of recurrent states are taken: {needed} needed, {free} free")]
    States {
        /// Slots needed.
        needed: usize,
        /// Slots free.
        free: usize,
    },
}

/// The block tables of one sequence, and its slots of states of fixed size.
#[derive(Debug, Default)]
pub struct BlockTables {
    tables: Vec<Table>,
    state: SequenceState,
}

#[derive(Debug, Default)]
struct Table {
    /// The pages of positions `0, page_size, ...`.
    pages: Vec<PageId>,
    /// How many of them, from the front, were given back.
    given_back: usize,
    /// Pages set aside in the pool.
    reserved: usize,
}

impl BlockTables {
    /// The table of a group: the pages of positions `0, page_size, ...`. Those that were given back are still listed,
    /// and never read.
    pub fn group(&self, group: usize) -> &[PageId] {
        self.tables.get(group).map_or(&[], |t| &t.pages)
    }

    /// The state slots that the next step reads and writes; `None` where the graph has no states of fixed size.
    pub fn states(&self) -> Option<StateSlots> {
        self.state.next()
    }

    /// Makes what a step wrote the sequence's state. To be called once a step is done, and not for one that failed.
    pub fn advance(&mut self) {
        self.state.advance();
    }
}

impl Group {
    /// What a sequence of `pages` pages holds at most beside its tokens in a step.
    fn reservation(&self, pages: usize) -> usize {
        self.pages.window.map_or(pages, |w| w.per_sequence.min(pages))
    }
}

impl PagePool {
    /// The pools of a program's cache groups.
    pub fn new(program: &Program) -> Self {
        let limits = &program.limits;
        let group = |pages: &GroupPages| Group {
            pages: *pages,
            free: (0..pages.pages as u32).rev().map(PageId).collect(),
            unreserved: pages.window.map_or(pages.pages, |w| limits.sequences * w.per_sequence),
        };
        Self {
            page_size: limits.page_size,
            table_len: limits.context.div_ceil(limits.page_size),
            groups: program.pages.iter().map(group).collect(),
            states: StatePool::new(program),
        }
    }

    /// Pages of a group that sequences hold.
    pub fn used(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |g| g.pages.pages - g.free.len())
    }

    /// Sets pages aside for a sequence that will have up to `positions` positions, in every group or none at all, and
    /// gives it state slots.
    ///
    /// # Errors
    /// When a group has too few pages left, or the slots are taken.
    pub fn reserve(&mut self, tables: &mut BlockTables, positions: usize) -> Result<(), Full> {
        let (page_size, pages) = (self.page_size, positions.div_ceil(self.page_size));
        tables.tables.resize_with(self.groups.len(), Table::default);
        for (table, group) in tables.tables.iter().zip(&self.groups) {
            let needed = group.reservation(pages).saturating_sub(table.reserved);
            if needed > group.unreserved {
                return Err(Full::Pages { needed, free: group.unreserved, page_size });
            }
        }
        self.states.reserve(&mut tables.state)?;
        for (table, group) in tables.tables.iter_mut().zip(&mut self.groups) {
            let needed = group.reservation(pages).saturating_sub(table.reserved);
            group.unreserved -= needed;
            table.reserved += needed;
            table.pages.reserve_exact(pages.min(self.table_len).saturating_sub(table.pages.len()));
        }
        Ok(())
    }

    /// Gives a sequence pages for its first `positions` positions, and state slots if it has none yet.
    ///
    /// # Errors
    /// When a group has too few free pages, which cannot happen to sequences that reserved them and take no more tokens
    /// in a step than were planned.
    pub fn grow(&mut self, tables: &mut BlockTables, positions: usize) -> Result<(), Full> {
        let pages = positions.div_ceil(self.page_size);
        tables.tables.resize_with(self.groups.len(), Table::default);
        self.states.reserve(&mut tables.state)?;
        for (table, group) in tables.tables.iter_mut().zip(&mut self.groups) {
            let needed = pages.saturating_sub(table.pages.len());
            let Some(left) = group.free.len().checked_sub(needed) else {
                return Err(Full::Pages { needed, free: group.free.len(), page_size: self.page_size });
            };
            table.pages.extend(group.free.drain(left..).rev());
        }
        Ok(())
    }

    /// Takes back what no query at `position` or later can see.
    pub fn trim(&mut self, tables: &mut BlockTables, position: usize) {
        for (table, group) in tables.tables.iter_mut().zip(&mut self.groups) {
            let Some(window) = group.pages.window else { continue };
            let first = (position + 1).saturating_sub(window.keys) / self.page_size;
            let first = first.clamp(table.given_back, table.pages.len());
            group.free.extend_from_slice(&table.pages[table.given_back..first]);
            table.given_back = first;
        }
    }

    /// Takes all pages and state slots of a sequence back.
    pub fn release(&mut self, tables: BlockTables) {
        self.states.release(tables.state);
        for (table, group) in tables.tables.into_iter().zip(&mut self.groups) {
            group.free.extend_from_slice(&table.pages[table.given_back..]);
            group.unreserved += table.reserved;
        }
    }
}
