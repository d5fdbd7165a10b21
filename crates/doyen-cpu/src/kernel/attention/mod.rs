//! Grouped-query attention of a ragged batch over a paged key/value cache.
//!
//! Semantics: contract section 3.1. A step first appends its new rows ([`KvStoreMut::append`]), then every query
//! attends ([`Attention::attend`]); queries and keys arrive normalised and rotated.
//!
//! Keys are processed in splits of [`SPLIT`] positions counted from the start of the sequence. A split gives a query
//! its maximum, sum and weighted values; splits are merged in ascending order. Everything inside is in an order that
//! depends only on the query's position and its visible keys, so a query gets the same bits however the prompt was
//! cut into chunks, whoever else is in the batch, and on any number of threads.
//!
//! * `params`: what the node says, and the ragged batch with its block tables, checked once per step
//! * `store`: the pages, their types, append and read; `narrow`: new rows on their way there
//! * `schedule`, `spread`: which worker does which part; `tile`: the work of one part
//! * `panel`: the loops over keys (`scores`) and values (`sums`), per instruction set (`lanes`) and storage type
//!   (`element`)
//! * `micro`: the softmax between them

mod element;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes_x86;
mod micro;
mod narrow;
mod panel;
mod params;
mod schedule;
mod scores;
mod spread;
mod store;
mod sums;
#[cfg(test)]
mod tests;
mod tile;

pub use params::{AttentionError, AttentionParams, Batch, Bias, Rows, Sink};
pub use store::{KvLayout, KvScales, KvStore, KvStoreMut, KvType};

use crate::detect::Isa;
use micro::Micro;
use narrow::Narrow;

/// Positions of a split. Fixed: changing it changes the bits of every long-context result.
pub const SPLIT: usize = 256;

/// Attention kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    isa: Isa,
    micro: Micro,
    narrow: Narrow,
}

impl Attention {
    /// The kernels for `isa`.
    pub fn new(isa: Isa) -> Self {
        Self { isa, micro: Micro::new(isa), narrow: narrow::narrow(isa) }
    }
}
