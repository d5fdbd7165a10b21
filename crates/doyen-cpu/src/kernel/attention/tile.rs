//! The work of one part: some consecutive queries of one sequence and key head against one split of the keys.
//!
//! Rows of a tile are (token, query head of the group), token outermost. A run of keys is loaded (dequantized, where
//! the store holds codes) once and used by all rows while it is in the cache.

use super::{
    SPLIT,
    micro::{clear, split_state_mut},
    schedule::Call,
};
use std::ops::Range;

/// Consecutive new tokens of a sequence, seen by the query heads of one key head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    pub(super) sequence: usize,
    /// First new token, counted within the sequence.
    pub(super) first: usize,
    pub(super) tokens: usize,
    pub(super) kv_head: usize,
}

/// Buffers for a tile's split.
#[derive(Debug)]
pub(super) struct SplitScratch<'s> {
    /// `[rows, SPLIT]`
    pub(super) scores: &'s mut [f32],
    /// Room for a dequantized run of keys or values.
    pub(super) run: &'s mut [f32],
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

    /// Keys of a split that token `i` of the tile sees.
    fn visible(&self, call: &Call<'_>, i: usize, split: usize) -> Range<usize> {
        let span = call.batch.spans()[self.sequence];
        let keys = call.params.visible(span, self.first + i);
        let (start, end) = (keys.start.max(split * SPLIT), keys.end.min((split + 1) * SPLIT));
        start.min(end)..end
    }

    /// Index of token `i` of the tile in the step.
    pub(super) fn token(&self, call: &Call<'_>, i: usize) -> usize {
        call.batch.spans()[self.sequence].first + self.first + i
    }

    /// Computes the state of every row for one split into `states [rows, v_head_size + 2]`.
    pub(super) fn split(
        &self,
        call: &Call<'_>,
        split: usize,
        scratch: &mut SplitScratch<'_>,
        states: &mut [f32],
    ) {
        let width = call.params.v_head_size + 2;
        states.chunks_exact_mut(width).for_each(clear);
        let keys = self.keys(call);
        let keys = keys.start.max(split * SPLIT)..keys.end.min((split + 1) * SPLIT);
        self.scores(call, split, keys.clone(), scratch);
        for i in 0..self.tokens {
            let visible = self.visible(call, i, split);
            if visible.is_empty() {
                continue;
            }
            for g in 0..call.group {
                let r = i * call.group + g;
                let scores = &mut row_scores(scratch.scores, r)[within(&visible, split)];
                if call.params.softcap > 0.0 {
                    (call.micro.softcap)(scores, call.params.softcap);
                }
                if let Some(bias) = call.bias {
                    let head = self.kv_head * call.group + g;
                    bias.add([self.sequence, head, self.first + i], visible.clone(), scores);
                }
                let (max, sum) = (call.micro.weights)(scores);
                *split_state_mut(&mut states[r * width..(r + 1) * width]).1 = [max, sum];
            }
        }
        self.values(call, split, keys, scratch, states);
    }

    fn scores(&self, call: &Call<'_>, split: usize, keys: Range<usize>, scratch: &mut SplitScratch<'_>) {
        let d = call.params.k_head_size;
        for (run, page, slot) in call.batch.runs(self.sequence, keys) {
            let slots = slot..slot + run.len();
            let k = call.keys.read(page, self.kv_head, slots, scratch.run, call.micro.dequantize);
            for i in 0..self.tokens {
                let seen = overlap(&self.visible(call, i, split), &run);
                if seen.is_empty() {
                    continue;
                }
                let k = &k[(seen.start - run.start) * d..(seen.end - run.start) * d];
                let token = self.token(call, i);
                for g in 0..call.group {
                    let q = call.q.part(token, (self.kv_head * call.group + g) * d, d);
                    let out = &mut row_scores(scratch.scores, i * call.group + g)[within(&seen, split)];
                    (call.micro.scores)(q, k, call.params.scale, out);
                }
            }
        }
    }

    fn values(
        &self,
        call: &Call<'_>,
        split: usize,
        keys: Range<usize>,
        scratch: &mut SplitScratch<'_>,
        states: &mut [f32],
    ) {
        let d = call.params.v_head_size;
        for (run, page, slot) in call.batch.runs(self.sequence, keys) {
            let slots = slot..slot + run.len();
            let v = call.values.read(page, self.kv_head, slots, scratch.run, call.micro.dequantize);
            for i in 0..self.tokens {
                let seen = overlap(&self.visible(call, i, split), &run);
                if seen.is_empty() {
                    continue;
                }
                let v = &v[(seen.start - run.start) * d..(seen.end - run.start) * d];
                for r in i * call.group..(i + 1) * call.group {
                    let p = &row_scores(scratch.scores, r)[within(&seen, split)];
                    (call.micro.accumulate)(p, v, &mut states[r * (d + 2)..][..d]);
                }
            }
        }
    }
}

fn row_scores(scores: &mut [f32], row: usize) -> &mut [f32] {
    &mut scores[row * SPLIT..(row + 1) * SPLIT]
}

/// Positions as offsets into their split.
fn within(positions: &Range<usize>, split: usize) -> Range<usize> {
    positions.start - split * SPLIT..positions.end - split * SPLIT
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    start.min(end)..end
}
