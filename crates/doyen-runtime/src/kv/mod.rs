//! KV pages: a pool per cache group, and the block tables of sequences.
//!
//! The bytes of the pages are the device's; here only their numbers move. A sequence takes pages as it grows and gives
//! all of them back when it ends, so a full pool is known before a step runs, never in the middle of one.

use doyen_graph::device::Limits;
use doyen_tensor::PageId;

/// The free pages of every cache group.
#[derive(Debug)]
pub struct PagePool {
    page_size: usize,
    free: Vec<Vec<PageId>>,
}

/// Not enough free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the kv cache is full: {needed} more pages of {page_size} positions needed, {free} free")]
pub struct Full {
    /// Pages needed.
    pub needed: usize,
    /// Pages free.
    pub free: usize,
    /// Positions of a page.
    pub page_size: usize,
}

/// The block tables of one sequence: `tables[group]` lists the pages of positions `0, page_size, ...`.
#[derive(Debug, Default)]
pub struct BlockTables {
    tables: Vec<Vec<PageId>>,
}

impl BlockTables {
    /// The table of a group.
    pub fn group(&self, group: usize) -> &[PageId] {
        self.tables.get(group).map_or(&[], Vec::as_slice)
    }
}

impl PagePool {
    /// A pool of `limits.pages` pages for each of `groups` cache groups.
    pub fn new(groups: usize, limits: &Limits) -> Self {
        let pages = || (0..limits.pages as u32).rev().map(PageId).collect();
        Self { page_size: limits.page_size, free: (0..groups).map(|_| pages()).collect() }
    }

    /// Pages free in the group that has the fewest.
    pub fn free_pages(&self) -> usize {
        self.free.iter().map(Vec::len).min().unwrap_or(usize::MAX)
    }

    /// Gives a sequence enough pages for `positions` positions in every group, or none at all.
    ///
    /// # Errors
    /// When a group has too few free pages.
    pub fn grow(&mut self, tables: &mut BlockTables, positions: usize) -> Result<(), Full> {
        let pages = positions.div_ceil(self.page_size);
        tables.tables.resize_with(self.free.len(), Vec::new);
        for (table, free) in tables.tables.iter().zip(&self.free) {
            let needed = pages.saturating_sub(table.len());
            if needed > free.len() {
                return Err(Full { needed, free: free.len(), page_size: self.page_size });
            }
        }
        for (table, free) in tables.tables.iter_mut().zip(&mut self.free) {
            while table.len() < pages {
                table.extend(free.pop());
            }
        }
        Ok(())
    }

    /// Takes all pages of a sequence back.
    pub fn release(&mut self, tables: BlockTables) {
        for (mut table, free) in tables.tables.into_iter().zip(&mut self.free) {
            free.append(&mut table);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn pages_are_owned_once_and_come_back() {
        let limits = Limits { tokens: 1, rows: 1, sequences: 2, context: 64, page_size: 16, pages: 8 };
        let mut pool = PagePool::new(2, &limits);
        let (mut a, mut b) = (BlockTables::default(), BlockTables::default());
        pool.grow(&mut a, 17).unwrap();
        pool.grow(&mut b, 64).unwrap();
        pool.grow(&mut a, 32).unwrap();
        for g in 0..2 {
            let all: BTreeSet<_> = a.group(g).iter().chain(b.group(g)).collect();
            assert_eq!((a.group(g).len(), b.group(g).len(), all.len()), (2, 4, 6));
        }
        assert_eq!(pool.grow(&mut a, 80), Err(Full { needed: 3, free: 2, page_size: 16 }));
        assert_eq!(a.group(0).len(), 2);
        pool.release(a);
        pool.release(b);
        assert_eq!(pool.free_pages(), 8);
    }
}
