//! Attention of steps that bring several tokens to a sequence: which kernel of `prefill.cu` takes a node, and its launch.

use super::ready;
use crate::{
    driver::{Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand},
    params,
    session::caches::Row,
};
use doyen_graph::lowered::Attention;
use doyen_tensor::FloatType;

/// Rows of (query, head) of a block and keys of a tile, of heads of a size: `Shape` of prefill.cu.
#[derive(Debug)]
struct Shape {
    head_size: usize,
    rows: usize,
    keys: usize,
    entry: &'static str,
}

const SHAPES: [Shape; 4] = [
    Shape { head_size: 64, rows: 128, keys: 64, entry: "prefill_64" },
    Shape { head_size: 96, rows: 128, keys: 64, entry: "prefill_96" },
    Shape { head_size: 128, rows: 128, keys: 64, entry: "prefill_128" },
    Shape { head_size: 256, rows: 64, keys: 32, entry: "prefill_256" },
];

/// `THREADS` and `STAGES` of prefill.cu.
const THREADS: u32 = 128;
const STAGES: usize = 2;
/// Keys that a thread brings from one page at most.
const LEAST_PAGE_SHIFT: u32 = 3;

impl Shape {
    /// Of a node's heads, where all that share a key head fit into a block.
    fn of(op: &Attention) -> Option<&'static Self> {
        let fits = |s: &&Self| {
            s.head_size == op.head_size && op.v_head_size == op.head_size && op.heads <= s.rows * op.kv_heads
        };
        SHAPES.iter().find(fits)
    }

    /// Queries of a block, each with all heads that share a key head.
    const fn queries(&self, op: &Attention) -> usize {
        self.rows * op.kv_heads / op.heads
    }

    /// Dynamic shared memory of a block: queries, then keys and values of every stage, in lines of 16-byte pieces.
    const fn shared(&self) -> usize {
        let padding = if self.head_size.is_multiple_of(64) { 0 } else { 16 };
        (self.rows + 2 * STAGES * self.keys) * (2 * self.head_size + padding)
    }

    /// Shared memory beside that: bits of a tile's values, and where the block is.
    const fn fixed(&self) -> usize {
        self.keys * self.head_size / 8 + 64
    }
}

/// Queries of a tile of a node, where its heads are of a shape that there are kernels for.
pub(crate) fn prefill_queries(op: &Attention) -> Option<usize> {
    Shape::of(op).map(|s| s.queries(op))
}

/// The kernel of a node.
pub(super) struct Prefill {
    shape: &'static Shape,
    operand: Operand,
    /// Queries of a tile.
    pub(super) queries: usize,
    function: Option<Function>,
}

impl Prefill {
    /// For a node without a bias that stores keys and values as `row`, on a card with `shared` bytes of shared memory for a block.
    pub(super) fn new(op: &Attention, row: Row, shared: usize) -> Option<Self> {
        let operand = match row {
            Row::Float(FloatType::F16) => Operand::F16,
            Row::Float(FloatType::BF16) => Operand::Bf16,
            _ => return None,
        };
        let shape = Shape::of(op).filter(|s| s.shared() + s.fixed() <= shared)?;
        Some(Self { shape, operand, queries: shape.queries(op), function: None })
    }

    /// # Errors
    /// When it cannot be compiled.
    pub(super) fn load(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.function =
            Some(gpu.function(Module::Prefill(self.operand), self.shape.entry, self.shape.shared())?);
        Ok(())
    }

    /// Whether there are kernels for a step: one that decodes leaves most rows of a block empty.
    pub(super) const fn takes(decode: bool, page_shift: u32) -> bool {
        !decode && page_shift >= LEAST_PAGE_SHIFT
    }

    /// Launches it on `tiles` tiles of [`Self::queries`] queries.
    pub(super) fn launch(&self, gpu: &Gpu, tiles: usize, params: params::Attend) -> Result<(), CudaError> {
        let blocks = tiles * params.batch.kv_heads as usize;
        let grid = Grid::new([blocks, 1, 1], THREADS).shared(self.shape.shared());
        gpu.launch(ready(self.function.as_ref())?, grid, params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_graph::lowered::CacheSlot;

    fn attention(heads: usize, kv_heads: usize, head_size: usize) -> Attention {
        Attention {
            slot: CacheSlot { group: 0, layer: 0 },
            heads,
            kv_heads,
            head_size,
            v_head_size: head_size,
            scale: 1.0,
            softcap: 0.0,
            window: None,
            causal: true,
            smooth_softmax: false,
            packed_qkv: false,
            rotary: None,
            qk_norm: None,
        }
    }

    #[test]
    fn blocks_hold_whole_queries() {
        for (heads, kv_heads, head_size, queries) in [
            (32, 4, 128, Some(16)),
            (64, 8, 64, Some(16)),
            (6, 2, 96, Some(42)),
            (8, 4, 256, Some(32)),
            (130, 1, 128, None),
            (128, 1, 128, Some(1)),
            (32, 4, 80, None),
        ] {
            assert_eq!(prefill_queries(&attention(heads, kv_heads, head_size)), queries);
        }
    }

    /// Every shape runs on every card: 99 KiB are the least that a block may have.
    #[test]
    fn shapes_fit_every_card() {
        for s in &SHAPES {
            assert!(s.shared() + s.fixed() <= 99 << 10, "{s:?}");
        }
        let wide = Prefill::new(&attention(32, 4, 128), Row::Float(FloatType::F32), 99 << 10);
        assert!(wide.is_none());
    }
}
