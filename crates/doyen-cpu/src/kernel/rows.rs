//! Running a row-wise kernel on the pool, where it is worth waking it.

use crate::pool::Pool;
use std::ops::Range;

/// Elements below which a region costs more than it saves: some 4 us of streaming against 1 to 2 us of fork and join with two
/// threads, 4 to 6 with sixteen.
const MIN_WORK: usize = 32 * 1024;

/// Calls `f` with ranges that tile `0 .. rows`, in parallel when `rows * cost` elements are worth it.
pub(crate) fn for_rows(pool: &Pool, rows: usize, cost: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
    if rows < 2 || rows.saturating_mul(cost) < MIN_WORK {
        return f(0..rows);
    }
    let split = pool.split(rows, 1);
    pool.run(&|worker| {
        let range = split.range(worker);
        if !range.is_empty() {
            f(range);
        }
    });
}
