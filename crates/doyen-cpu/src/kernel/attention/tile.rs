//! The work of one part: some consecutive queries of one sequence and some key heads against one split of the keys.
//!
//! Rows of a tile are (key head, token, query head of the group). Keys are taken in runs that stay in the first-level
//! cache while all rows use them. Tokens see different keys; a block of a few tokens goes through the keys that all of
//! them see together, and token by token through the few others.
//!
//! The heads of a page lie side by side, so several heads at a time read memory in long strides: 20 GB/s on one core
//! where runs of one head, 16 KiB each, gave 14.

use super::{
    SPLIT,
    micro::{clear, split_state_mut},
    panel::{Accumulate, Loops, PAD, Scores},
    params::Run,
    schedule::Call,
    store::{KvScales, KvStore, KvType},
};
use std::ops::Range;

/// Rows of a block of tokens: whole register tiles of every instruction set.
pub(super) const BLOCK_ROWS: usize = 12;
/// Stored bytes of a run: half of the first-level cache (a quarter was 3 to 9 percent slower, an eighth a fifth). While one is worked
/// on, the next is asked for: without that reading takes 1.7 times as long, with heads one after the other a page was 4 percent slower.
const RUN_BYTES: usize = 16 * 1024;
/// Rows of a head that meet a run of narrow numbers before it pays to widen them all at once.
const WIDENED_ROWS: usize = 2 * BLOCK_ROWS;

/// Consecutive new tokens of a sequence, seen by the query heads of some consecutive key heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    pub(super) sequence: usize,
    /// First new token, counted within the sequence.
    pub(super) first: usize,
    pub(super) tokens: usize,
    /// First key head, and how many.
    pub(super) kv_head: usize,
    pub(super) kv_heads: usize,
}

/// Buffers for a tile.
#[derive(Debug)]
pub(super) struct TileScratch<'s> {
    /// `[rows, k_head_size rounded up to PAD]`
    pub(super) q: &'s mut [f32],
    /// `[rows, SPLIT]`
    pub(super) scores: &'s mut [f32],
    /// [`run_numbers`] of the longer of keys and values.
    pub(super) run: &'s mut [f32],
}

/// Positions of a run whose rows take `row` bytes.
fn run_positions(row: usize) -> usize {
    (RUN_BYTES / row.max(1)).max(1).next_multiple_of(4)
}

/// Numbers of a run of rows of `d` that is widened.
pub(super) fn run_numbers(d: usize) -> usize {
    run_positions(4 * d) * d
}

/// A run as its loops take it.
struct Stored<'a> {
    loops: Loops,
    rows: &'a [u8],
    /// Bytes of a row.
    pitch: usize,
}

/// Rows of `d` numbers as they lie, or widened into `run` for the `floats` loops.
fn stored<'a>(
    (loops, floats): (Loops, Loops),
    (rows, ty): (&'a [u8], KvType),
    d: usize,
    run: Option<&'a mut [f32]>,
) -> Stored<'a> {
    let pitch = ty.row_bytes(d);
    let Some(run) = run else { return Stored { loops, rows, pitch } };
    let run = &mut run[..rows.len() / pitch.max(1) * d];
    (loops.widen)(rows, run);
    // SAFETY: floats have no padding, and bytes no alignment.
    let rows = unsafe { std::slice::from_raw_parts(run.as_ptr().cast(), size_of_val(run)) };
    Stored { loops: floats, rows, pitch: 4 * d }
}

impl Tile {
    /// The splits in which some query of the tile sees a key.
    pub(super) fn splits(&self, call: &Call<'_>) -> Range<usize> {
        let keys = self.keys(call);
        keys.start / SPLIT..keys.end.div_ceil(SPLIT)
    }

    /// The keys that some query of the tile sees.
    pub(super) fn keys(&self, call: &Call<'_>) -> Range<usize> {
        let span = call.batch.spans()[self.sequence];
        let first = call.params.visible(span, self.first);
        let last = call.params.visible(span, self.first + self.tokens - 1);
        first.start..last.end
    }

    /// Those of `keys` that token `i` of the tile sees.
    fn visible(&self, call: &Call<'_>, i: usize, keys: &Range<usize>) -> Range<usize> {
        let span = call.batch.spans()[self.sequence];
        overlap(&call.params.visible(span, self.first + i), keys)
    }

    /// Rows of one key head.
    fn head_rows(&self, call: &Call<'_>) -> usize {
        self.tokens * call.group
    }

    /// All rows.
    pub(super) fn rows(&self, call: &Call<'_>) -> usize {
        self.kv_heads * self.head_rows(call)
    }

    /// Token of the step and query head of row `r`.
    pub(super) fn place(&self, call: &Call<'_>, r: usize) -> (usize, usize) {
        let (head, r) = (r / self.head_rows(call), r % self.head_rows(call));
        let first = call.batch.spans()[self.sequence].first + self.first;
        (first + r / call.group, (self.kv_head + head) * call.group + r % call.group)
    }

    /// Copies the queries into scratch, times the scale of scores and those of the keys; before [`Tile::split`].
    pub(super) fn queries(&self, call: &Call<'_>, scratch: &mut TileScratch<'_>) {
        let (d, scale) = (call.params.k_head_size, call.params.scale);
        let key_scales = call.keys.scales();
        let rows = scratch.q.chunks_exact_mut(d.next_multiple_of(PAD).max(1));
        for (r, row) in rows.take(self.rows(call)).enumerate() {
            let (token, head) = self.place(call, r);
            let q = call.q.part(token, head * d, d);
            let (row, padding) = row.split_at_mut(d);
            padding.fill(0.0);
            match key_scales.head(head / call.group, d) {
                KvScales::Tensor(s) => row.iter_mut().zip(q).for_each(|(r, q)| *r = q * (scale * s)),
                KvScales::Channel(s) => {
                    row.iter_mut().zip(q).zip(s).for_each(|((r, q), s)| *r = q * (scale * s));
                }
            }
        }
    }

    /// Computes the state of every row for one split into `states [rows, v_head_size + 2]`.
    pub(super) fn split(
        &self,
        call: &Call<'_>,
        split: usize,
        scratch: &mut TileScratch<'_>,
        states: &mut [f32],
    ) {
        let width = call.params.v_head_size + 2;
        states.chunks_exact_mut(width).for_each(clear);
        let keys = overlap(&self.keys(call), &(split * SPLIT..(split + 1) * SPLIT));
        self.scores(call, &keys, scratch);
        for r in 0..self.rows(call) {
            let i = r / call.group % self.tokens;
            let visible = self.visible(call, i, &keys);
            if visible.is_empty() {
                continue;
            }
            let scores = &mut scratch.scores[r * SPLIT + visible.start % SPLIT..][..visible.len()];
            if call.params.softcap > 0.0 {
                (call.micro.softcap)(scores, call.params.softcap);
            }
            if let Some(bias) = call.bias {
                let (_, head) = self.place(call, r);
                bias.add([self.sequence, head, self.first + i], visible, scores);
            }
            let (max, sum) = (call.micro.weights)(scores);
            *split_state_mut(&mut states[r * width..(r + 1) * width]).1 = [max, sum];
        }
        self.values(call, &keys, scratch, states);
    }

    /// Whether runs of a store are widened before rows meet them.
    fn widens(&self, call: &Call<'_>, store: &KvStore<'_>) -> bool {
        store.ty() != KvType::F32 && self.head_rows(call) >= WIDENED_ROWS
    }

    fn scores(&self, call: &Call<'_>, keys: &Range<usize>, scratch: &mut TileScratch<'_>) {
        let d = call.params.k_head_size;
        let pitch = d.next_multiple_of(PAD);
        let first_value = self.runs(call, &call.values, keys.clone()).next();
        let after = first_value.map_or(&[][..], |run| call.values.rows(&run, self.kv_head));
        let TileScratch { q, scores, run: wide } = scratch;
        let widens = self.widens(call, &call.keys);
        self.each_run(call, &call.keys, keys, after, |head, run, k, mut ahead| {
            let wide = widens.then_some(&mut **wide);
            let k = stored((call.key_loops, call.key_floats), (k, call.keys.ty()), d, wide);
            self.parts(call, &run.positions, &mut |rows, seen| {
                let row = head * self.head_rows(call) + rows.start;
                let at = seen.start - run.positions.start;
                (k.loops.scores)(Scores {
                    q: &q[row * pitch..],
                    rows: rows.len(),
                    d,
                    k: &k.rows[at * k.pitch..][..seen.len() * k.pitch],
                    keys: seen.len(),
                    ahead: std::mem::take(&mut ahead),
                    out: &mut scores[row * SPLIT + seen.start % SPLIT..],
                });
            });
        });
    }

    fn values(
        &self,
        call: &Call<'_>,
        keys: &Range<usize>,
        scratch: &mut TileScratch<'_>,
        states: &mut [f32],
    ) {
        let d = call.params.v_head_size;
        let pitch = d + 2;
        let TileScratch { scores, run: wide, .. } = scratch;
        let widens = self.widens(call, &call.values);
        self.each_run(call, &call.values, keys, &[], |head, run, v, mut ahead| {
            let wide = widens.then_some(&mut **wide);
            let v = stored((call.value_loops, call.value_floats), (v, call.values.ty()), d, wide);
            self.parts(call, &run.positions, &mut |rows, seen| {
                let row = head * self.head_rows(call) + rows.start;
                let at = seen.start - run.positions.start;
                (v.loops.accumulate)(Accumulate {
                    p: &scores[row * SPLIT + seen.start % SPLIT..],
                    rows: rows.len(),
                    d,
                    v: &v.rows[at * v.pitch..][..seen.len() * v.pitch],
                    keys: seen.len(),
                    ahead: std::mem::take(&mut ahead),
                    acc: &mut states[row * pitch..],
                    pitch,
                });
            });
        });
    }

    /// Calls `f(head of the tile, run, its stored rows, rows that come next)` in the order of memory; `after` comes
    /// after the last.
    fn each_run<'a>(
        &self,
        call: &Call<'_>,
        store: &KvStore<'a>,
        keys: &Range<usize>,
        after: &'a [u8],
        mut f: impl FnMut(usize, &Run, &'a [u8], &'a [u8]),
    ) {
        let mut runs = self.runs(call, store, keys.clone()).peekable();
        while let Some(run) = runs.next() {
            for head in 0..self.kv_heads {
                let ahead = if head + 1 < self.kv_heads {
                    store.rows(&run, self.kv_head + head + 1)
                } else {
                    runs.peek().map_or(after, |next| store.rows(next, self.kv_head))
                };
                f(head, &run, store.rows(&run, self.kv_head + head), ahead);
            }
        }
    }

    /// The stored rows of `keys` in runs that fit into the first-level cache.
    fn runs(&self, call: &Call<'_>, store: &KvStore<'_>, keys: Range<usize>) -> impl Iterator<Item = Run> {
        let d = store.layout().head_size;
        let row = if self.widens(call, store) { 4 * d } else { store.ty().row_bytes(d) };
        call.batch.runs(self.sequence, keys, run_positions(row))
    }

    /// Calls `f(rows, keys)` so that every row gets those of `keys` that it sees once, in ascending order.
    fn parts(&self, call: &Call<'_>, keys: &Range<usize>, f: &mut dyn FnMut(Range<usize>, Range<usize>)) {
        let size = block_tokens(call.group);
        for first in (0..self.tokens).step_by(size) {
            let tokens = first..self.tokens.min(first + size);
            let common =
                overlap(&self.visible(call, tokens.start, keys), &self.visible(call, tokens.end - 1, keys));
            let edges = |f: &mut dyn FnMut(Range<usize>, Range<usize>),
                         of: fn(Range<usize>, &Range<usize>) -> Range<usize>| {
                for i in tokens.clone() {
                    let seen = of(self.visible(call, i, keys), &common);
                    if !seen.is_empty() {
                        f(i * call.group..(i + 1) * call.group, seen);
                    }
                }
            };
            if common.is_empty() {
                edges(f, |seen, _| seen);
                continue;
            }
            edges(f, |seen, common| seen.start..common.start);
            f(tokens.start * call.group..tokens.end * call.group, common.clone());
            edges(f, |seen, common| common.end..seen.end);
        }
    }
}

/// Tokens of a block.
pub(super) fn block_tokens(group: usize) -> usize {
    (BLOCK_ROWS / group.max(1)).max(1)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    start.min(end)..end
}
