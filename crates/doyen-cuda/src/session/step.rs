//! What a step brings beside token ids: sequences, block tables, wanted rows, tiles of attention; one copy to the card.

use crate::{
    driver::{Addr, Buffer, Gpu},
    error::CudaError,
};
use doyen_graph::device::{DeviceError, Program, RaggedBatch};

/// Where a step's tables lie on the card.
pub(crate) struct Step {
    memory: Buffer,
    host: Vec<u8>,
    /// Queries of a tile that some attention node wants.
    tile_queries: Vec<usize>,
    pub(crate) token_sequence: Addr,
    pub(crate) first: Addr,
    pub(crate) len: Addr,
    pub(crate) past: Addr,
    pub(crate) rows: Addr,
    /// Per cache group: where each sequence's pages start, and the pages.
    pub(crate) tables: Vec<(Addr, Addr)>,
    /// In the order of `tile_queries`.
    tiles: Vec<(Addr, usize)>,
    /// Positions of the longest sequence, new ones included.
    pub(crate) longest: usize,
    /// Whether every sequence has one new token.
    pub(crate) decode: bool,
}

const ALIGN: usize = 16;

impl Step {
    /// Room for the largest step of a program.
    pub(crate) fn new(gpu: &Gpu, program: &Program, tile_queries: Vec<usize>) -> Result<Self, DeviceError> {
        let limits = &program.limits;
        let pages = limits.sequences * limits.context.div_ceil(limits.page_size);
        let groups = program.graph.groups.len();
        // Tokens, then sequences, rows and tiles of at most one query each, in numbers of 4 bytes; every run is padded.
        let numbers = limits.tokens * (1 + 2 * tile_queries.len())
            + limits.sequences * (3 + groups)
            + limits.rows
            + pages * groups;
        let runs = 5 + tile_queries.len() + 2 * groups;
        let memory = Buffer::new(gpu, 4 * numbers + ALIGN * runs, "the tables of a step")?;
        let start = memory.start();
        Ok(Self {
            host: Vec::with_capacity(memory.len()),
            memory,
            token_sequence: start,
            first: start,
            len: start,
            past: start,
            rows: start,
            tables: vec![(start, start); groups],
            tiles: vec![(start, 0); tile_queries.len()],
            tile_queries,
            longest: 0,
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

    fn push(&mut self, numbers: impl Iterator<Item = i32>) -> Result<Addr, CudaError> {
        self.host.resize(self.host.len().next_multiple_of(ALIGN), 0);
        let start = self.host.len();
        numbers.for_each(|n| self.host.extend_from_slice(&n.to_le_bytes()));
        self.memory.at(start, self.host.len() - start)
    }

    /// Brings a checked batch's tables to the card.
    pub(crate) fn fill(
        &mut self,
        gpu: &Gpu,
        batch: &RaggedBatch<'_>,
        page_size: usize,
    ) -> Result<(), CudaError> {
        self.host.clear();
        let spans = batch.sequences;
        let of_tokens = spans.iter().enumerate().flat_map(|(i, s)| std::iter::repeat_n(i as i32, s.len));
        self.token_sequence = self.push(of_tokens)?;
        self.first = self.push(spans.iter().map(|s| s.first as i32))?;
        self.len = self.push(spans.iter().map(|s| s.len as i32))?;
        self.past = self.push(spans.iter().map(|s| s.past as i32))?;
        self.rows = self.push(batch.rows.iter().map(|&r| r.cast_signed()))?;
        let pages = |i: usize| (spans[i].past + spans[i].len).div_ceil(page_size);
        for g in 0..self.tables.len() {
            let starts = (0..spans.len()).scan(0, |at, i| {
                let start = *at;
                *at += pages(i);
                Some(start as i32)
            });
            let starts = self.push(starts)?;
            let table = &batch.tables[g];
            let all = (0..spans.len())
                .flat_map(|i| table.sequence(i)[..pages(i)].iter().map(|p| p.0.cast_signed()));
            self.tables[g] = (starts, self.push(all)?);
        }
        for q in 0..self.tile_queries.len() {
            let queries = self.tile_queries[q];
            let tiles = spans.iter().enumerate().flat_map(|(i, s)| {
                (0..s.len).step_by(queries).flat_map(move |first| [i as i32, first as i32])
            });
            let count = spans.iter().map(|s| s.len.div_ceil(queries)).sum();
            self.tiles[q] = (self.push(tiles)?, count);
        }
        self.longest = spans.iter().map(|s| s.past + s.len).max().unwrap_or(0);
        self.decode = spans.iter().all(|s| s.len == 1);
        self.memory.write(gpu, 0, &self.host)
    }
}
