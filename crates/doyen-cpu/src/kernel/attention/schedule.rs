//! Which worker does which part of an attention step.
//!
//! Two plans, with the same bits as result. When there are enough (token, key head) pairs for all workers, a worker
//! takes a tile through all its splits and merges as it goes. When there are few, as in the decoding of a long
//! sequence, workers share out the splits and leave their states in scratch, to be merged afterwards.

use super::{
    Attention, SPLIT,
    micro::{Micro, clear},
    params::{AttentionParams, Batch, Bias, Rows, Sink},
    store::KvStore,
    tile::{SplitScratch, Tile},
};
use crate::pool::{Pool, UnsafeSlice};

/// Rows of a tile: enough to reuse a run of keys from the first-level cache, few enough to keep the scores of a split
/// (64 x 256 x 4 = 64 KiB) in the second.
const TILE_ROWS: usize = 64;
/// Multiply-adds below which waking the pool costs more than it saves.
const MIN_WORK: usize = 64 * 1024;

/// One attention call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) micro: Micro,
    pub(super) params: AttentionParams,
    pub(super) group: usize,
    pub(super) q: Rows<'a>,
    pub(super) keys: KvStore<'a>,
    pub(super) values: KvStore<'a>,
    pub(super) batch: Batch<'a>,
    pub(super) sink: Sink<'a>,
    pub(super) bias: Option<Bias<'a>>,
}

/// Tokens of a tile.
fn tile_tokens(group: usize) -> usize {
    (TILE_ROWS / group.max(1)).max(1)
}

/// Scratch of one worker: scores, a run of keys or values, states of a split and running states.
fn worker_scratch(params: &AttentionParams, group: usize) -> usize {
    let rows = tile_tokens(group) * group;
    let run = KvStore::read_scratch(params.k_head_size.max(params.v_head_size));
    rows * (SPLIT + 2 * (params.v_head_size + 2)) + run
}

/// States of one token for all heads and splits of `context` positions.
fn token_states(params: &AttentionParams, context: usize) -> usize {
    params.heads * (context.div_ceil(SPLIT) + 1) * (params.v_head_size + 2)
}

impl Attention {
    /// f32 elements of scratch that [`Attention::attend`] takes for sequences of up to `context` positions on a pool of
    /// `threads`.
    ///
    /// # Panics
    /// When the heads do not divide evenly, which [`AttentionParams::group`] tells beforehand.
    pub fn scratch_len(params: &AttentionParams, threads: usize, context: usize) -> usize {
        let group = params.group().expect("checked when the node was bound");
        threads * worker_scratch(params, group) + token_states(params, context)
    }

    /// Attention of the step's queries over the stores, which hold the new rows already.
    ///
    /// `q [tokens, heads * k_head_size]`; `out [tokens, heads * v_head_size]`; `scratch` as [`Attention::scratch_len`]
    /// says for the longest sequence of the batch. A query that sees no key (all masked by a bias) gets zeros.
    ///
    /// # Panics
    /// When lengths, stores, sink and batch do not agree with the parameters.
    #[allow(clippy::too_many_arguments, reason = "what the operator has; a struct would only rename them")]
    pub fn attend(
        &self,
        pool: &Pool,
        params: &AttentionParams,
        q: Rows<'_>,
        (keys, values): (KvStore<'_>, KvStore<'_>),
        batch: &Batch<'_>,
        (sink, bias): (Sink<'_>, Option<Bias<'_>>),
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let group = params.group().expect("checked when the node was bound");
        for (store, d) in [(keys, params.k_head_size), (values, params.v_head_size)] {
            let layout = store.layout();
            assert_eq!((layout.kv_heads, layout.head_size), (params.kv_heads, d), "heads of the store");
            assert_eq!(
                (layout.pages, layout.page_size),
                (batch.pages(), batch.page_size()),
                "pages of the store"
            );
        }
        if let Sink::Heads(sinks) = sink {
            assert_eq!(sinks.len(), params.heads, "sinks");
        }
        assert_eq!(out.len(), batch.tokens() * params.heads * params.v_head_size, "length of the output");
        let call =
            Call { micro: self.micro, params: *params, group, q, keys, values, batch: *batch, sink, bias };
        call.run(pool, scratch, out);
    }
}

impl Call<'_> {
    fn run(&self, pool: &Pool, scratch: &mut [f32], out: &mut [f32]) {
        let threads = pool.threads();
        let (workers, states) = scratch.split_at_mut(threads * worker_scratch(&self.params, self.group));
        let workers = UnsafeSlice::new(workers);
        let out = UnsafeSlice::new(out);
        let (tokens, heads) = (self.batch.tokens(), self.params.kv_heads);
        let pairs = tokens * heads;
        if threads == 1 || self.work() < MIN_WORK {
            for i in 0..tokens.div_ceil(tile_tokens(self.group)) * heads {
                self.block(i, tile_tokens(self.group), &workers, 0, &out);
            }
        } else if pairs >= 4 * threads || (pairs >= threads && pairs.is_multiple_of(threads)) {
            let size = (pairs / (4 * threads)).clamp(1, tile_tokens(self.group));
            pool.for_each_dynamic_on(tokens.div_ceil(size) * heads, &|worker, i| {
                self.block(i, size, &workers, worker, &out);
            });
        } else {
            self.by_splits(pool, &workers, states, &out);
        }
    }

    /// Multiply-adds of the call, roughly.
    fn work(&self) -> usize {
        let keys: usize = self
            .batch
            .spans()
            .iter()
            .filter(|s| s.len > 0)
            .map(|&s| s.len * self.params.visible(s, s.len - 1).len())
            .sum();
        keys * self.params.heads * (self.params.k_head_size + self.params.v_head_size)
    }

    /// Block `i`: `size` tokens of the step for one key head, which may belong to several sequences.
    fn block(
        &self,
        i: usize,
        size: usize,
        workers: &UnsafeSlice<'_, f32>,
        worker: usize,
        out: &UnsafeSlice<'_, f32>,
    ) {
        let (block, kv_head) = (i / self.params.kv_heads, i % self.params.kv_heads);
        let end = ((block + 1) * size).min(self.batch.tokens());
        let mut next = block * size;
        while next < end {
            let sequence = self.batch.sequence_of(next);
            let span = self.batch.spans()[sequence];
            let tokens = (span.first + span.len).min(end) - next;
            let tile = Tile { sequence, first: next - span.first, tokens, kv_head };
            self.tile(&tile, workers, worker, out);
            next += tokens;
        }
    }

    /// A tile through all its splits.
    fn tile(&self, tile: &Tile, workers: &UnsafeSlice<'_, f32>, worker: usize, out: &UnsafeSlice<'_, f32>) {
        let width = self.params.v_head_size + 2;
        let states = tile.tokens * self.group * width;
        let (mut scratch, rest) = self.worker(workers, worker);
        let (part, run) = rest.split_at_mut(rest.len() / 2);
        let (part, run) = (&mut part[..states], &mut run[..states]);
        run.chunks_exact_mut(width).for_each(clear);
        for split in tile.splits(self) {
            tile.split(self, split, &mut scratch, part);
            for (run, part) in run.chunks_exact_mut(width).zip(part.chunks_exact(width)) {
                (self.micro.merge)(run, part);
            }
        }
        for (r, state) in run.chunks_exact(width).enumerate() {
            self.finish(
                tile.token(self, r / self.group),
                tile.kv_head * self.group + r % self.group,
                state,
                out,
            );
        }
    }

    /// Few queries, many keys: pieces of few tokens, the splits of each shared out.
    fn by_splits(
        &self,
        pool: &Pool,
        workers: &UnsafeSlice<'_, f32>,
        states: &mut [f32],
        out: &UnsafeSlice<'_, f32>,
    ) {
        let (kv_heads, width) = (self.params.kv_heads, self.params.v_head_size + 2);
        for (sequence, span) in self.batch.spans().iter().enumerate() {
            let mut first = 0;
            while first < span.len {
                let one = Tile { sequence, first, tokens: 1, kv_head: 0 };
                // A later token of the piece adds at most one split.
                let splits = one.splits(self).len() + 1;
                let fit = states.len() / (self.params.heads * splits * width);
                let tokens = fit.min(tile_tokens(self.group)).min(SPLIT).min(span.len - first).max(1);
                let piece = Tile { tokens, ..one };
                let splits = piece.splits(self);
                let rows = tokens * self.group;
                let shared = UnsafeSlice::new(states);
                pool.for_each_dynamic_on(kv_heads * splits.len(), &|worker, i| {
                    let tile = Tile { kv_head: i / splits.len(), ..piece };
                    let (mut scratch, _) = self.worker(workers, worker);
                    // SAFETY: task i has block i of the states to itself.
                    let part = unsafe { shared.range(i * rows * width..(i + 1) * rows * width) };
                    tile.split(self, splits.start + i % splits.len(), &mut scratch, part);
                });
                let tasks = pool.split(kv_heads * rows, 1);
                pool.run(&|worker| {
                    let (_, own) = self.worker(workers, worker);
                    let run = &mut own[..width];
                    for i in tasks.range(worker) {
                        let (kv_head, r) = (i / rows, i % rows);
                        clear(run);
                        for block in kv_head * splits.len()..(kv_head + 1) * splits.len() {
                            (self.micro.merge)(run, &states[(block * rows + r) * width..][..width]);
                        }
                        let token = piece.token(self, r / self.group);
                        self.finish(token, kv_head * self.group + r % self.group, run, out);
                    }
                });
                first += tokens;
            }
        }
    }

    /// The buffers of a worker: for a split, and for states.
    fn worker<'s>(&self, workers: &UnsafeSlice<'s, f32>, worker: usize) -> (SplitScratch<'s>, &'s mut [f32]) {
        let len = worker_scratch(&self.params, self.group);
        // SAFETY: a worker number is in use by one thread at a time, and each has its own part.
        let own = unsafe { workers.range(worker * len..(worker + 1) * len) };
        let (scores, rest) = own.split_at_mut(tile_tokens(self.group) * self.group * SPLIT);
        let (run, states) =
            rest.split_at_mut(KvStore::read_scratch(self.params.k_head_size.max(self.params.v_head_size)));
        (SplitScratch { scores, run }, states)
    }

    fn finish(&self, token: usize, head: usize, state: &[f32], out: &UnsafeSlice<'_, f32>) {
        let d = self.params.v_head_size;
        let start = (token * self.params.heads + head) * d;
        // SAFETY: each (token, head) is finished once, by one worker.
        let out = unsafe { out.range(start..start + d) };
        (self.micro.finish)(state, self.sink.of(head), out);
    }
}
