//! Decode: few new tokens, many keys. The splits of all such sequences are shared out, and their states merged after.
//!
//! A task is one split of one piece (a sequence's few tokens) for some key heads: as many as leave each worker a few
//! tasks, since heads lie side by side in memory. States wait in scratch; when that is full, what is there is worked
//! off before the next pieces are taken.

use super::{
    SPLIT,
    micro::clear,
    schedule::{Call, Team},
    tile::Tile,
};
use crate::pool::UnsafeSlice;

/// New tokens of a sequence up to which its splits are shared out: the cache is read once for all of them.
const FEW_TOKENS: usize = 4;
/// Rows of a task at most (or one token's group): what its queries and scores take of the second-level cache.
pub(super) const SPREAD_ROWS: usize = 128;
/// Pieces that are worked off together at most.
const PIECES: usize = 64;
/// Tasks that each worker should have, so that all finish together.
const TASKS: usize = 4;

/// A sequence's few tokens, for all key heads.
#[derive(Debug, Clone, Copy)]
struct Piece {
    tile: Tile,
    /// First split and how many.
    split: usize,
    splits: usize,
    /// Splits and rows of the pieces before, and where the states start.
    splits_before: usize,
    rows_before: usize,
    states: usize,
}

/// Pieces that are worked off together.
struct Round {
    pieces: [Option<Piece>; PIECES],
    len: usize,
    splits: usize,
    rows: usize,
    states: usize,
}

impl Round {
    const fn new() -> Self {
        Self { pieces: [None; PIECES], len: 0, splits: 0, rows: 0, states: 0 }
    }

    /// The last piece for which `before` is not above `i`.
    fn piece(&self, i: usize, before: fn(&Piece) -> usize) -> Option<&Piece> {
        let pieces = &self.pieces[..self.len];
        let after = pieces.partition_point(|p| p.as_ref().is_some_and(|p| before(p) <= i));
        pieces[..after].last().and_then(Option::as_ref)
    }
}

/// Whether a sequence with `len` new tokens is worked off by splits; `few`: there are few tiles in the step.
pub(super) const fn is_spread(len: usize, few: bool) -> bool {
    few || len <= FEW_TOKENS
}

impl Call<'_> {
    /// All sequences for which [`is_spread`] says so.
    pub(super) fn spread(&self, team: &Team<'_>, states: &mut [f32], few: bool) {
        let row = self.params.v_head_size + 2;
        let most = (SPREAD_ROWS / self.group.max(1)).clamp(1, SPLIT);
        let mut round = Round::new();
        for (sequence, span) in self.batch.spans().iter().enumerate() {
            let mut first = 0;
            while first < span.len && is_spread(span.len, few) {
                let all = Tile { sequence, first, tokens: 1, kv_head: 0, kv_heads: self.params.kv_heads };
                // More tokens of the piece, no more than a split has keys, add at most one split.
                let splits = all.splits(self).len() + 1;
                let token = self.params.heads * splits * row;
                let tokens = (states.len() / token).min(most).min(span.len - first).max(1);
                if round.len == PIECES || round.states + tokens * token > states.len() {
                    self.work_off(&round, team, states);
                    round = Round::new();
                }
                round = self.add(round, Tile { tokens, ..all });
                first += tokens;
            }
        }
        self.work_off(&round, team, states);
    }

    fn add(&self, mut round: Round, tile: Tile) -> Round {
        let (splits, rows) = (tile.splits(self), tile.rows(self));
        round.pieces[round.len] = Some(Piece {
            tile,
            split: splits.start,
            splits: splits.len(),
            splits_before: round.splits,
            rows_before: round.rows,
            states: round.states,
        });
        round.len += 1;
        round.splits += splits.len();
        round.rows += rows;
        round.states += splits.len() * rows * (self.params.v_head_size + 2);
        round
    }

    fn work_off(&self, round: &Round, team: &Team<'_>, states: &mut [f32]) {
        let (row, kv_heads) = (self.params.v_head_size + 2, self.params.kv_heads);
        let tokens = round.pieces.iter().flatten().map(|p| p.tile.tokens).max().unwrap_or(1);
        let most = (SPREAD_ROWS / (self.group * tokens)).clamp(1, kv_heads.max(1));
        let size = match team.pool {
            Some(pool) => (round.splits * kv_heads / (TASKS * pool.threads())).clamp(1, most),
            None => most,
        };
        let parts = kv_heads.div_ceil(size);
        let size = kv_heads.div_ceil(parts.max(1));
        let shared = UnsafeSlice::new(states);
        team.each(round.splits * parts, &|worker, i| {
            let Some(piece) = round.piece(i / parts, |p| p.splits_before) else { return };
            let split = i / parts - piece.splits_before;
            let first = (i % parts * size).min(kv_heads);
            let tile = Tile { kv_head: first, kv_heads: size.min(kv_heads - first), ..piece.tile };
            let head_rows = piece.tile.tokens * self.group;
            let start = piece.states + (split * kv_heads + first) * head_rows * row;
            // SAFETY: the task has the states of its split and heads to itself.
            let part = unsafe { shared.range(start..start + tile.rows(self) * row) };
            let (mut scratch, _) = self.worker(team, worker);
            tile.queries(self, &mut scratch);
            tile.split(self, piece.split + split, &mut scratch, part);
            if piece.splits == 1 {
                for (r, state) in part.chunks_exact(row).enumerate() {
                    self.finish(tile.place(self, r), state, team);
                }
            }
        });
        if round.pieces.iter().flatten().any(|p| p.splits > 1) {
            team.each(round.rows, &|worker, i| {
                let Some(piece) = round.piece(i, |p| p.rows_before).filter(|p| p.splits > 1) else { return };
                let (_, own) = self.worker(team, worker);
                let (run, r, rows) = (&mut own[..row], i - piece.rows_before, piece.tile.rows(self));
                clear(run);
                for split in 0..piece.splits {
                    (self.micro.merge)(run, &states[piece.states + (split * rows + r) * row..][..row]);
                }
                self.finish(piece.tile.place(self, r), run, team);
            });
        }
    }
}
