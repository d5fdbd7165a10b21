//! The floor: a loop that reads bytes over the pool and does nothing else with them.

use super::{BenchError, data::memory};
use crate::{pool::Pool, session::Memory};
use std::{
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// Bytes of a sample at least: a region costs about two microseconds, which this many keep below a percent.
const SAMPLE: usize = 8 << 20;

/// Reads every byte of `data` over the pool, as a lower bound for any kernel that has to.
pub fn read(pool: &Pool, data: &[u8]) {
    let sum = AtomicU64::new(0);
    let split = pool.split(data.len(), 4096);
    pool.run(&|worker| {
        let mut lanes = [0u64; 16];
        for chunk in data[split.range(worker)].as_chunks::<128>().0 {
            for (lane, word) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *lane = lane.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        sum.fetch_add(lanes.iter().fold(0, |a, b| a.wrapping_add(*b)), Ordering::Relaxed);
    });
    black_box(sum.into_inner());
}

/// A buffer that is read piece by piece, another piece each time.
#[derive(Debug)]
pub struct ReadLoop {
    data: Memory,
    piece: usize,
    next: usize,
}

impl ReadLoop {
    /// A loop over `bytes` (a page at least) for a pool of `threads`. More bytes than the caches hold measure memory.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn new(bytes: usize, threads: usize) -> Result<Self, BenchError> {
        let mut data = memory(bytes.max(4096), "the read loop")?;
        super::Rng::default().fill(&mut data);
        let piece = Self::sample_len(threads).min(data.len());
        Ok(Self { data, piece, next: 0 })
    }

    /// Bytes of a sample for a pool of `threads`.
    pub fn sample_len(threads: usize) -> usize {
        SAMPLE.saturating_mul(threads.div_ceil(2).max(1))
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Reads the next piece (as often as makes a sample, when the buffer is smaller): bytes read and seconds taken.
    pub fn sample(&mut self, pool: &Pool) -> (usize, f64) {
        let times = Self::sample_len(pool.threads()) / self.piece;
        let pieces = self.data.len() / self.piece;
        let start = Instant::now();
        for _ in 0..times.max(1) {
            read(pool, &self.data[self.next % pieces * self.piece..][..self.piece]);
            self.next = self.next.wrapping_add(1);
        }
        (times.max(1) * self.piece, start.elapsed().as_secs_f64())
    }
}
