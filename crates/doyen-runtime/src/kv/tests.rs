//! Pages are owned once, come back, and suffice: by example and by random schedules.

use super::*;
use crate::plan;
use doyen_graph::{
    device::{Limits, Numerics, WindowPages},
    lowered::{CacheGroup, KvFormat, Lowered},
};
use proptest::prelude::*;
use std::{collections::BTreeSet, sync::Arc};

fn program(limits: Limits, pages: Vec<GroupPages>) -> Program {
    Program {
        graph: Arc::new(Lowered::default()),
        slots: Vec::new(),
        arena: 0,
        scratch: 0,
        limits,
        pages,
        state_slots: 2 * limits.sequences,
        numerics: Numerics::Exact,
    }
}

const LIMITS: Limits = Limits { tokens: 8, rows: 1, sequences: 2, context: 64, page_size: 16 };
const WHOLE: GroupPages = GroupPages { pages: 8, window: None };

#[test]
fn pages_are_owned_once_and_come_back() {
    let mut pool = PagePool::new(&program(LIMITS, vec![WHOLE; 2]));
    let (mut a, mut b) = (BlockTables::default(), BlockTables::default());
    pool.reserve(&mut a, 32).unwrap();
    pool.reserve(&mut b, 64).unwrap();
    pool.grow(&mut a, 17).unwrap();
    pool.grow(&mut b, 64).unwrap();
    pool.grow(&mut a, 32).unwrap();
    for g in 0..2 {
        let all: BTreeSet<_> = a.group(g).iter().chain(b.group(g)).collect();
        assert_eq!((a.group(g).len(), b.group(g).len(), all.len(), pool.used(g)), (2, 4, 6, 6));
    }
    assert_eq!(pool.reserve(&mut a, 80), Err(Full::Pages { needed: 3, free: 2, page_size: 16 }));
    assert_eq!(pool.grow(&mut a, 80), Err(Full::Pages { needed: 3, free: 2, page_size: 16 }));
    assert_eq!(a.group(0).len(), 2);
    pool.release(a);
    pool.release(b);
    assert_eq!(pool.used(0), 0);
    pool.reserve(&mut BlockTables::default(), 128).unwrap();
}

#[test]
fn state_slots_change_places_after_every_step() {
    let mut pool = PagePool::new(&program(LIMITS, vec![WHOLE]));
    let (mut a, mut b) = (BlockTables::default(), BlockTables::default());
    assert_eq!(a.states(), None);
    pool.reserve(&mut a, 16).unwrap();
    pool.grow(&mut b, 1).unwrap();
    let first = a.states().unwrap();
    assert_eq!(first.read, None);
    assert_eq!(a.states(), Some(first), "a step that failed leaves them as they were");
    a.advance();
    let second = a.states().unwrap();
    assert_eq!(second.read, Some(first.write));
    assert_ne!(second.write, first.write);
    a.advance();
    assert_eq!(a.states().unwrap().write, first.write);
    assert_eq!(pool.reserve(&mut BlockTables::default(), 16), Err(Full::States { needed: 2, free: 0 }));
    pool.release(a);
    let mut c = BlockTables::default();
    pool.reserve(&mut c, 16).unwrap();
    assert_eq!(c.states().unwrap().read, None, "a new sequence starts from nothing");
}

#[test]
fn a_window_gives_back_what_no_query_sees() {
    let window = GroupPages { pages: 7, window: Some(WindowPages { keys: 17, per_sequence: 3 }) };
    let mut pool = PagePool::new(&program(LIMITS, vec![WHOLE, window]));
    let mut a = BlockTables::default();
    pool.reserve(&mut a, 64).unwrap();
    for cached in 1..=64 {
        pool.grow(&mut a, cached).unwrap();
        pool.trim(&mut a, cached);
        // The next query, at `cached`, sees the keys from `cached - 16` on.
        let first = cached.saturating_sub(16) / 16;
        assert_eq!(pool.used(0), cached.div_ceil(16));
        assert_eq!(pool.used(1), cached.div_ceil(16) - first, "{cached} positions");
        assert_eq!(a.group(1).len(), cached.div_ceil(16), "tables keep their places");
    }
    pool.release(a);
    assert_eq!((pool.used(0), pool.used(1)), (0, 0));
    for _ in 0..2 {
        pool.reserve(&mut BlockTables::default(), 16).unwrap();
    }
}

/// A sequence of a drawn run.
struct Running {
    tables: BlockTables,
    cached: usize,
    len: usize,
}

impl Running {
    /// Every position that a query of the coming `new` tokens writes or sees lies in a page of its own.
    fn own(&self, group: usize, window: Option<usize>, new: usize, page_size: usize) -> Vec<PageId> {
        let seen = window.map_or(0, |w| (self.cached + 1).saturating_sub(w));
        self.tables.group(group)[seen / page_size..(self.cached + new).div_ceil(page_size)].to_vec()
    }
}

proptest! {
    /// Whatever a scheduler does within the limits, planned pages suffice and nobody shares one.
    #[test]
    fn planned_pages_always_suffice(
        window in 1usize..80, shift in 0u32..6, sequences in 1usize..5, tokens in 1usize..40, context in 1usize..200,
        choices in prop::collection::vec((any::<usize>(), any::<usize>()), 1..60),
    ) {
        let page_size = 1 << shift;
        let tokens = tokens.max(sequences);
        let limits = Limits { tokens, rows: 1, sequences, context, page_size };
        let group = |window| CacheGroup {
            kv_heads: 1, k_head_size: 1, v_head_size: 1, format: KvFormat::Float, window, layers: Vec::new(),
        };
        let windows = [None, Some(window)];
        let pages = windows.map(|w| plan::pages(&group(w), &limits, false).unwrap());
        let mut pool = PagePool::new(&program(limits, pages.to_vec()));
        let mut running: Vec<Running> = Vec::new();
        for (a, b) in choices {
            if running.len() < sequences {
                let mut one = Running { tables: BlockTables::default(), cached: 0, len: 1 + a % context };
                pool.reserve(&mut one.tables, one.len).unwrap();
                running.push(one);
            }
            let mut room = tokens;
            let mut owned: [Vec<PageId>; 2] = Default::default();
            let first = b % running.len();
            running.rotate_left(first);
            let mut news = Vec::new();
            for (i, s) in running.iter_mut().enumerate() {
                // Mostly as much as there is room for, sometimes less.
                let new = (s.len - s.cached).min(room).min(1 + (a >> i) % (2 * tokens));
                room -= new;
                pool.grow(&mut s.tables, s.cached + new).unwrap();
                for (g, owned) in owned.iter_mut().enumerate() {
                    owned.extend(s.own(g, windows[g], new, page_size));
                }
                news.push(new);
            }
            for owned in &owned {
                prop_assert_eq!(owned.iter().collect::<BTreeSet<_>>().len(), owned.len(), "a page has two owners");
            }
            for (s, new) in running.iter_mut().zip(news) {
                s.cached += new;
                pool.trim(&mut s.tables, s.cached);
            }
            let (done, rest) = running.into_iter().partition(|s| s.cached == s.len);
            running = rest;
            for s in done {
                pool.release(s.tables);
            }
        }
        for s in running {
            pool.release(s.tables);
        }
        prop_assert_eq!((pool.used(0), pool.used(1)), (0, 0));
    }
}
