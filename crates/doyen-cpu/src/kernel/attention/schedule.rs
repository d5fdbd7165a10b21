//! Which worker does which part of an attention step.
//!
//! Two plans, with the same bits as result. A sequence with many new tokens, as in prefill, is cut into tiles of tokens
//! and one key head; a worker takes a tile through all its splits and merges as it goes. With few new tokens, as in
//! decode, reading the cache is the work: splits are shared out instead, several heads at a time (`spread`).

use super::{
    Attention, SPLIT,
    micro::{Micro, clear},
    panel::{Loops, PAD},
    params::{AttentionParams, Batch, Bias, Rows, Sink},
    spread::{SPREAD_ROWS, is_spread},
    store::{KvStore, KvType},
    tile::{Tile, TileScratch, block_tokens, run_numbers},
};
use crate::pool::{Pool, UnsafeSlice};

/// Rows of a tile: enough to reuse a run of keys from the first-level cache, few enough to keep the scores of a split
/// (60 x 256 x 4 = 60 KiB) in the second.
const TILE_ROWS: usize = 60;
/// Multiply-adds below which waking the pool costs more than it saves.
const MIN_WORK: usize = 64 * 1024;

/// One attention call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) micro: Micro,
    pub(super) key_loops: Loops,
    pub(super) value_loops: Loops,
    /// The loops of widened runs.
    pub(super) key_floats: Loops,
    pub(super) value_floats: Loops,
    pub(super) params: AttentionParams,
    pub(super) group: usize,
    pub(super) q: Rows<'a>,
    pub(super) keys: KvStore<'a>,
    pub(super) values: KvStore<'a>,
    pub(super) batch: Batch<'a>,
    pub(super) sink: Sink<'a>,
    pub(super) bias: Option<Bias<'a>>,
}

/// Tokens of a tile: whole blocks.
fn tile_tokens(group: usize) -> usize {
    let block = block_tokens(group);
    (TILE_ROWS / (group.max(1) * block)).max(1) * block
}

/// Rows that a worker has buffers for.
fn worker_rows(group: usize) -> usize {
    (tile_tokens(group) * group).max(SPREAD_ROWS)
}

/// Scratch of one worker: a run, queries, scores, states of a split and running states.
fn worker_scratch(params: &AttentionParams, group: usize) -> usize {
    worker_run(params)
        + worker_rows(group)
            * (params.k_head_size.next_multiple_of(PAD) + SPLIT + 2 * (params.v_head_size + 2))
}

/// Numbers of a run that is widened.
fn worker_run(params: &AttentionParams) -> usize {
    run_numbers(params.k_head_size).max(run_numbers(params.v_head_size))
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
        let call = Call {
            micro: self.micro,
            key_loops: Loops::new(self.isa, keys.ty(), params.k_head_size),
            value_loops: Loops::new(self.isa, values.ty(), params.v_head_size),
            key_floats: Loops::new(self.isa, KvType::F32, params.k_head_size),
            value_floats: Loops::new(self.isa, KvType::F32, params.v_head_size),
            params: *params,
            group,
            q,
            keys,
            values,
            batch: *batch,
            sink,
            bias,
        };
        call.run(pool, scratch, out);
    }
}

impl Call<'_> {
    fn run(&self, pool: &Pool, scratch: &mut [f32], out: &mut [f32]) {
        let threads = pool.threads();
        let (workers, states) = scratch.split_at_mut(threads * worker_scratch(&self.params, self.group));
        let (workers, out) = (UnsafeSlice::new(workers), UnsafeSlice::new(out));
        let parallel = threads > 1 && self.work() >= MIN_WORK;
        let team = Team { pool: parallel.then_some(pool), workers, out };
        let (tokens, heads) = (self.batch.tokens(), self.params.kv_heads);
        // Enough tiles for all workers to finish together.
        let few = parallel && tokens * heads < 4 * threads;
        self.spread(&team, states, few);
        if self.batch.spans().iter().any(|s| s.len > 0 && !is_spread(s.len, few)) {
            let most = tile_tokens(self.group);
            let size = if parallel { (tokens * heads / (4 * threads)).clamp(1, most) } else { most };
            team.each(tokens.div_ceil(size) * heads, &|worker, i| self.block(i, size, few, &team, worker));
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
    fn block(&self, i: usize, size: usize, few: bool, team: &Team<'_>, worker: usize) {
        let (block, kv_head) = (i / self.params.kv_heads, i % self.params.kv_heads);
        let end = ((block + 1) * size).min(self.batch.tokens());
        let mut next = block * size;
        while next < end {
            let sequence = self.batch.sequence_of(next);
            let span = self.batch.spans()[sequence];
            let tokens = (span.first + span.len).min(end) - next;
            if !is_spread(span.len, few) {
                let tile = Tile { sequence, first: next - span.first, tokens, kv_head, kv_heads: 1 };
                self.tile(&tile, team, worker);
            }
            next += tokens;
        }
    }

    /// A tile through all its splits.
    fn tile(&self, tile: &Tile, team: &Team<'_>, worker: usize) {
        let width = self.params.v_head_size + 2;
        let states = tile.rows(self) * width;
        let (mut scratch, rest) = self.worker(team, worker);
        let (part, run) = rest.split_at_mut(rest.len() / 2);
        let (part, run) = (&mut part[..states], &mut run[..states]);
        run.chunks_exact_mut(width).for_each(clear);
        tile.queries(self, &mut scratch);
        for split in tile.splits(self) {
            tile.split(self, split, &mut scratch, part);
            for (run, part) in run.chunks_exact_mut(width).zip(part.chunks_exact(width)) {
                (self.micro.merge)(run, part);
            }
        }
        for (r, state) in run.chunks_exact(width).enumerate() {
            self.finish(tile.place(self, r), state, team);
        }
    }

    /// The buffers of a worker: for a tile, and for states.
    pub(super) fn worker<'s>(&self, team: &Team<'s>, worker: usize) -> (TileScratch<'s>, &'s mut [f32]) {
        let len = worker_scratch(&self.params, self.group);
        // SAFETY: a worker number is in use by one thread at a time, and each has its own part.
        let own = unsafe { team.workers.range(worker * len..(worker + 1) * len) };
        let rows = worker_rows(self.group);
        let (run, own) = own.split_at_mut(worker_run(&self.params));
        let (q, rest) = own.split_at_mut(rows * self.params.k_head_size.next_multiple_of(PAD));
        let (scores, states) = rest.split_at_mut(rows * SPLIT);
        (TileScratch { q, scores, run }, states)
    }

    pub(super) fn finish(&self, (token, head): (usize, usize), state: &[f32], team: &Team<'_>) {
        let d = self.params.v_head_size;
        let start = (token * self.params.heads + head) * d;
        // SAFETY: each (token, head) is finished once, by one worker.
        let out = unsafe { team.out.range(start..start + d) };
        let scales = self.values.scales();
        let scales = scales.head(head / self.group, d);
        (self.micro.finish)(state, self.sink.of(head), scales, out);
    }
}

/// Who works on a call, where it writes, and its buffers.
pub(super) struct Team<'s> {
    /// None: the caller alone.
    pub(super) pool: Option<&'s Pool>,
    workers: UnsafeSlice<'s, f32>,
    out: UnsafeSlice<'s, f32>,
}

impl Team<'_> {
    /// Calls `f(worker, i)` for each `i` in `0 .. n`; workers take the next one as they become free.
    pub(super) fn each(&self, n: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        match self.pool {
            Some(pool) => pool.for_each_dynamic_on(n, f),
            None => (0..n).for_each(|i| f(0, i)),
        }
    }
}
