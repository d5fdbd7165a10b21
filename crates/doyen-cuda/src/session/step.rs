//! What a step brings beside token ids: sequences, block tables, wanted rows and their draws, tiles of attention; and the
//! few numbers it leaves: tokens, and a fault. One copy to the card, one from it.

use crate::{
    driver::{Addr, Buffer, Gpu, Pinned},
    error::CudaError,
};
use doyen_graph::device::{Choice, DeviceError, Draw, Limits, Program, RaggedBatch, SeqSpan};
use doyen_tensor::TokenId;

/// Where a step's tables lie on the card. Every table has a place of its own for the largest step, so that a captured
/// step finds the next one's tables where it looks for them.
pub(crate) struct Step {
    memory: Buffer,
    host: Pinned<u8>,
    left: Pinned<u8>,
    places: Places,
    /// Number of a node that found an index out of range, counted from 1.
    pub(crate) fault: Addr,
    /// The draw of each row, and the token chosen by it.
    pub(crate) draws: Addr,
    pub(crate) chosen: Addr,
    /// Queries of a tile that some attention node wants.
    tile_queries: Vec<usize>,
    pub(crate) token_sequence: Addr,
    pub(crate) first: Addr,
    pub(crate) len: Addr,
    pub(crate) past: Addr,
    pub(crate) rows: Addr,
    /// Slots of the states of fixed size, before (-1: none) and after the step.
    pub(crate) reads: Addr,
    pub(crate) writes: Addr,
    /// Per cache group: where each sequence's pages start, and the pages.
    pub(crate) tables: Vec<(Addr, Addr)>,
    /// In the order of `tile_queries`: the tiles, and how many.
    tiles: Vec<(Addr, usize)>,
    /// Positions of the longest sequence, new ones included.
    pub(crate) longest: usize,
    pub(crate) sequences: usize,
    /// Whether every sequence has one new token.
    pub(crate) decode: bool,
}

/// First bytes of the tables, and of the pages of each group behind them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Places {
    /// A fault, then a token a row: what a step leaves.
    fault: usize,
    draws: usize,
    token_sequence: usize,
    first: usize,
    len: usize,
    past: usize,
    rows: usize,
    reads: usize,
    writes: usize,
    tiles: Vec<usize>,
    starts: Vec<usize>,
    /// End of what is copied whole.
    head: usize,
    pages: Vec<usize>,
    end: usize,
}

const ALIGN: usize = 16;

/// `NO_TOKEN` of sample.cu.
const NO_TOKEN: u32 = u32::MAX;

/// Bytes of a draw: `Draw` of sample.cu.
const DRAW_BYTES: usize = 24;

/// A draw as sample.cu reads it; rows without one take the largest logit, which nobody reads.
fn draw_bytes(draw: Option<&Draw>) -> [u8; DRAW_BYTES] {
    let greedy = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, random: 0 };
    let draw = draw.unwrap_or(&greedy);
    let mut bytes = [0; DRAW_BYTES];
    bytes[..8].copy_from_slice(&draw.least_weight().to_le_bytes());
    let words = [draw.temperature.to_bits(), draw.top_k, draw.top_p_share().unwrap_or(0), draw.random];
    for (to, word) in bytes[8..].as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

impl Places {
    fn new(limits: &Limits, groups: usize, tile_queries: usize) -> Self {
        let mut end = 0;
        let mut take = |numbers: usize| {
            let start = end;
            end = (start + 4 * numbers).next_multiple_of(ALIGN);
            start
        };
        let fault = take(1 + limits.rows);
        let draws = take(limits.rows * DRAW_BYTES / 4);
        let token_sequence = take(limits.tokens);
        let (first, len, past) = (take(limits.sequences), take(limits.sequences), take(limits.sequences));
        let rows = take(limits.rows);
        let (reads, writes) = (take(limits.sequences), take(limits.sequences));
        let tiles = (0..tile_queries).map(|_| take(2 * limits.tokens)).collect();
        let starts = (0..groups).map(|_| take(limits.sequences)).collect();
        let head = take(0);
        let most = limits.sequences * limits.context.div_ceil(limits.page_size);
        let pages = (0..groups).map(|_| take(most)).collect();
        Self {
            fault,
            draws,
            token_sequence,
            first,
            len,
            past,
            rows,
            reads,
            writes,
            tiles,
            starts,
            head,
            pages,
            end,
        }
    }
}

impl Step {
    /// Room for the largest step of a program.
    pub(crate) fn new(gpu: &Gpu, program: &Program, tile_queries: Vec<usize>) -> Result<Self, DeviceError> {
        let places = Places::new(&program.limits, program.graph.groups.len(), tile_queries.len());
        let memory = Buffer::new(gpu, places.end, "the tables of a step")?;
        let at = |offset| memory.at(offset, 0);
        let (mut host, mut left) = (Pinned::new(gpu), Pinned::new(gpu));
        host.resize(places.end)?;
        left.resize(4 + 4 * program.limits.rows)?;
        let tables = places.starts.iter().zip(&places.pages);
        Ok(Self {
            host,
            left,
            fault: at(places.fault)?,
            draws: at(places.draws)?,
            chosen: at(places.fault + 4)?,
            token_sequence: at(places.token_sequence)?,
            first: at(places.first)?,
            len: at(places.len)?,
            past: at(places.past)?,
            rows: at(places.rows)?,
            reads: at(places.reads)?,
            writes: at(places.writes)?,
            tables: tables.map(|(&s, &p)| Ok((at(s)?, at(p)?))).collect::<Result<_, CudaError>>()?,
            tiles: places.tiles.iter().map(|&t| Ok((at(t)?, 0))).collect::<Result<_, CudaError>>()?,
            memory,
            places,
            tile_queries,
            longest: 0,
            sequences: 0,
            decode: false,
        })
    }

    /// Tiles of `queries` queries: sequence and first new token of each, and how many there are.
    pub(crate) fn tiles(&self, queries: usize) -> Result<(Addr, usize), CudaError> {
        let at = self.tile_queries.iter().position(|&q| q == queries);
        at.and_then(|i| self.tiles.get(i).copied()).ok_or_else(|| CudaError::Driver {
            what: "attention".into(),
            reason: format!("no tiles of {queries} queries were planned"),
        })
    }

    /// Brings a checked batch's tables to the card.
    pub(crate) fn fill(
        &mut self,
        gpu: &Gpu,
        batch: &RaggedBatch<'_>,
        draws: &[Option<Draw>],
        page_size: usize,
    ) -> Result<(), CudaError> {
        let spans = batch.sequences;
        let (host, places) = (self.host.resize(self.places.end)?, &self.places);
        put(host, places.fault, [0].into_iter());
        for (to, draw) in host[places.draws..].chunks_exact_mut(DRAW_BYTES).zip(draws) {
            to.copy_from_slice(&draw_bytes(draw.as_ref()));
        }
        put(host, places.token_sequence, tokens_of(spans));
        put(host, places.first, spans.iter().map(|s| s.first as i32));
        put(host, places.len, spans.iter().map(|s| s.len as i32));
        put(host, places.past, spans.iter().map(|s| s.past as i32));
        put(host, places.rows, batch.rows.iter().map(|&r| r.cast_signed()));
        put(host, places.reads, batch.states.iter().map(|s| s.read.map_or(-1, |r| r.0.cast_signed())));
        put(host, places.writes, batch.states.iter().map(|s| s.write.0.cast_signed()));
        for ((&queries, &place), (_, count)) in
            self.tile_queries.iter().zip(&places.tiles).zip(&mut self.tiles)
        {
            let tiles = spans.iter().enumerate().flat_map(|(i, s)| {
                (0..s.len).step_by(queries).flat_map(move |first| [i as i32, first as i32])
            });
            *count = put(host, place, tiles) / 2;
        }
        let pages = |i: usize| (spans[i].past + spans[i].len).div_ceil(page_size);
        let mut used = Vec::with_capacity(places.pages.len());
        for (g, table) in batch.tables.iter().enumerate().take(places.pages.len()) {
            let starts = (0..spans.len()).scan(0, |at, i| {
                let start = *at;
                *at += pages(i);
                Some(start as i32)
            });
            put(host, places.starts[g], starts);
            let all = (0..spans.len())
                .flat_map(|i| table.sequence(i)[..pages(i)].iter().map(|p| p.0.cast_signed()));
            used.push(4 * put(host, places.pages[g], all));
        }
        self.longest = spans.iter().map(|s| s.past + s.len).max().unwrap_or(0);
        self.sequences = spans.len();
        self.decode = spans.iter().all(|s| s.len == 1);
        self.memory.write(gpu, 0, &host[..places.head])?;
        for (&start, len) in places.pages.iter().zip(used) {
            self.memory.write(gpu, start, &host[start..start + len])?;
        }
        Ok(())
    }

    /// The fault and the choices of the first `rows` rows, once the step is done.
    pub(crate) fn left(
        &mut self,
        gpu: &Gpu,
        rows: usize,
    ) -> Result<(u32, impl Iterator<Item = Choice>), CudaError> {
        let left = self.left.resize(4 + 4 * rows)?;
        self.memory.read(gpu, self.places.fault, left)?;
        let mut numbers = left.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b));
        let fault = numbers.next().unwrap_or(0);
        let choice = |n| if n == NO_TOKEN { Choice::NotANumber } else { Choice::Token(TokenId(n)) };
        Ok((fault, numbers.map(choice)))
    }
}

/// The sequence of every token.
fn tokens_of(spans: &[SeqSpan]) -> impl Iterator<Item = i32> {
    spans.iter().enumerate().flat_map(|(i, s)| std::iter::repeat_n(i as i32, s.len))
}

/// Writes numbers from a byte on; how many.
fn put(host: &mut [u8], at: usize, numbers: impl Iterator<Item = i32>) -> usize {
    let mut count = 0;
    for (to, n) in host[at..].chunks_exact_mut(4).zip(numbers) {
        to.copy_from_slice(&n.to_le_bytes());
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_do_not_meet() {
        let limits = Limits { tokens: 7, rows: 3, sequences: 5, context: 100, page_size: 16 };
        let p = Places::new(&limits, 2, 1);
        let mut starts = vec![
            (p.fault, 4),
            (p.draws, 3 * DRAW_BYTES / 4),
            (p.token_sequence, 7),
            (p.first, 5),
            (p.len, 5),
            (p.past, 5),
            (p.rows, 3),
            (p.reads, 5),
            (p.writes, 5),
            (p.tiles[0], 14),
            (p.starts[0], 5),
            (p.starts[1], 5),
            (p.pages[0], 35),
            (p.pages[1], 35),
            (p.end, 0),
        ];
        starts.sort_unstable();
        for pair in starts.windows(2) {
            assert!(pair[0].0 + 4 * pair[0].1 <= pair[1].0, "{p:?}");
        }
        assert!(p.head <= p.pages[0] && p.starts[1] + 20 <= p.head);
    }

    #[test]
    fn every_token_knows_its_sequence() {
        let spans = [SeqSpan { first: 0, len: 2, past: 3 }, SeqSpan { first: 2, len: 1, past: 0 }];
        let mut host = [0; 16];
        assert_eq!(put(&mut host, 4, tokens_of(&spans)), 3);
        assert_eq!(host, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    }
}
