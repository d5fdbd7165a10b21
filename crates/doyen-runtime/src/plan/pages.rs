//! How many KV pages every cache group needs.

use doyen_graph::{
    device::{GroupPages, Limits, WindowPages},
    lowered::CacheGroup,
};

/// Pages of a group for as many sequences of as many positions as the limits say. With `keep`, windows give nothing back.
/// `None` when there would be more than page ids.
///
/// A query sees `w` keys, its own included. Between two steps a sequence with `p` positions holds the pages of `p+1-w`
/// (what its next query sees first) to `p-1`: at most `ceil((w-1) / page_size) + 1`. A step adds at most
/// `ceil(n / page_size)` for its `n` new tokens, which over all sequences is no more than a page each and
/// `tokens / page_size` together.
pub(crate) fn pages(group: &CacheGroup, limits: &Limits, keep: bool) -> Option<GroupPages> {
    let Limits { tokens, sequences, context, page_size, .. } = *limits;
    let whole = context.div_ceil(page_size).checked_mul(sequences)?;
    let window = group.window.filter(|_| !keep).and_then(|keys| {
        let per_sequence = keys.saturating_sub(1).div_ceil(page_size) + 2;
        let pages = per_sequence.checked_mul(sequences)?.checked_add(tokens / page_size)?;
        (pages < whole).then_some(GroupPages { pages, window: Some(WindowPages { keys, per_sequence }) })
    });
    let pages = window.unwrap_or(GroupPages { pages: whole, window: None });
    u32::try_from(pages.pages).is_ok().then_some(pages)
}
