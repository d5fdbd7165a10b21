//! Items that workers take from runs of their own, then from each other's.
//!
//! Used by [`super::Pool::for_each_dynamic_on`]. Lives on the caller's stack: a region allocates nothing.

use super::split::Split;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs at most; more workers share them.
const MAX_RUNS: usize = 32;

/// A counter alone on its cache line.
#[repr(align(64))]
struct Next(AtomicUsize);

/// `0 .. n` cut into one contiguous run a worker, and the next item of each.
pub(super) struct Runs {
    split: Split,
    count: usize,
    next: [Next; MAX_RUNS],
}

impl Runs {
    pub(super) fn new(n: usize, workers: usize) -> Self {
        let runs = workers.clamp(1, MAX_RUNS);
        let split = Split::new(n, 1, runs);
        let start = |run: usize| if run < runs { split.range(run).start } else { n };
        Self { split, count: runs, next: std::array::from_fn(|run| Next(AtomicUsize::new(start(run)))) }
    }

    /// Calls `f` for items that nobody else takes: those of the worker's own run in order, then what is left of the others.
    pub(super) fn each(&self, worker: usize, mut f: impl FnMut(usize)) {
        for i in 0..self.count {
            let run = (worker + i) % self.count;
            let end = self.split.range(run).end;
            loop {
                let item = self.next[run].0.fetch_add(1, Ordering::Relaxed);
                if item >= end {
                    break;
                }
                f(item);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_taken_once_and_the_own_run_comes_first() {
        for (n, workers) in [(0, 3), (1, 2), (7, 3), (100, 4), (50, 40)] {
            let runs = Runs::new(n, workers);
            let mut taken = Vec::new();
            runs.each(workers - 1, |i| taken.push(i));
            let own = runs.split.range((workers - 1) % runs.count);
            assert_eq!(taken[..own.len()], own.collect::<Vec<_>>());
            runs.each(0, |_| panic!("nothing is left"));
            taken.sort_unstable();
            assert_eq!(taken, (0..n).collect::<Vec<_>>());
        }
    }
}
