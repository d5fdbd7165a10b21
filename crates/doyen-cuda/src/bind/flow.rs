//! Products of up to 8 rows of activations with packed codes that flow through shared memory: launches of `flow.cu`.

use super::{
    Context,
    products::{FEW, Groups, Product, gemm},
};
use crate::{
    driver::{Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand},
    params,
    weights::Bank,
};

/// Columns of a warp, most warps of a block, floats of a warp's sums, bytes behind rows of codes and before stages: those of flow.cu.
const SLICE: usize = 256;
const WARPS: usize = 8;
const SUMS: usize = FEW * 20;
const SLACK: usize = 64;
const STAGES_AT: usize = 128;
/// Most stages: more bring nothing.
const STAGES: usize = 4;
/// Stages of a block from which on its start does not count.
const MANY: usize = 8;

/// How a bank's rows go through the shared memory of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// Warps that share the columns of 16 rows.
    slices: usize,
    /// Groups of 16 rows that a block's warps multiply at once.
    lots: usize,
    /// Of those in a stage.
    turns: usize,
    stages: usize,
    /// Dynamic shared memory.
    shared: usize,
    /// Blocks of a multiprocessor at once.
    blocks: usize,
}

impl Layout {
    /// For rows of `row_bytes` bytes of codes and `scales` scales, where a block may have `most` bytes of shared memory; none where
    /// there is no room for two stages.
    fn of(cols: usize, row_bytes: usize, scales: usize, (turns, most): (usize, usize)) -> Option<Self> {
        let slices = cols.div_ceil(SLICE);
        let lots = WARPS / slices.max(1);
        let stage = 16 * lots * turns * ((row_bytes | 16) + 2 * scales) + SLACK;
        // Sums share their place with activations.
        let place = (2 * lots * turns * slices * SUMS * 4).max(FEW * (slices * SLICE * 2 + 64));
        let fixed = STAGES_AT + place;
        // A multiprocessor keeps 1 KiB of every block for itself.
        let half = most.midpoint(1024).saturating_sub(1024);
        let stages = |room: usize| (room.saturating_sub(fixed) / stage).min(STAGES);
        let (stages, blocks) = match (lots, stages(half), stages(most)) {
            (0, ..) => return None,
            (_, two @ 2.., _) => (two, 2),
            (_, _, one @ 2..) => (one, 1),
            _ => return None,
        };
        Some(Self { slices, lots, turns, stages, shared: fixed + stages * stage, blocks })
    }

    const fn threads(self) -> u32 {
        (32 * self.slices * self.lots) as u32
    }
}

/// The kernels of a bank.
pub(super) struct Flow {
    layout: Layout,
    product: Function,
    activated: Function,
}

impl Flow {
    /// The kernels, where the bank's codes can be read so and a block has room for them.
    ///
    /// # Errors
    /// When they cannot be compiled.
    pub(super) fn load(gpu: &Gpu, bank: &Bank, operand: Operand) -> Result<Option<Self>, CudaError> {
        let Some((bits, row_bytes, scales)) = bank.flow() else { return Ok(None) };
        let fits = row_bytes * 8 / bits.get() <= bank.cols().next_multiple_of(SLICE);
        if !fits || !Module::Flow(bits, operand).is_for(gpu.arch()) {
            return Ok(None);
        }
        let layout = |turns| Layout::of(bank.cols(), row_bytes, scales, (turns, gpu.shared()));
        // Two turns a stage where two blocks have room nevertheless.
        let Some(layout) = layout(2).filter(|l| l.blocks == 2).or_else(|| layout(1)) else { return Ok(None) };
        // Banks of other shapes share the functions.
        let function = |entry| gpu.function(Module::Flow(bits, operand), entry, gpu.shared());
        Ok(Some(Self { layout, product: function("flow")?, activated: function("flow_activated")? }))
    }

    /// Whether a product of `rows` weight rows has stages enough that what a block does before its first one does not count.
    pub(super) fn fills(&self, gpu: &Gpu, rows: usize) -> bool {
        let Layout { lots, turns, blocks, .. } = self.layout;
        rows / (16 * lots * turns) >= MANY * blocks * gpu.multiprocessors()
    }

    /// A product of float32 activations, or of ones that [`Flow::activated`] left in the launch before.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn product(
        &self,
        cx: &Context<'_>,
        g: &Groups,
        job: &Product<'_>,
        narrowed: bool,
    ) -> Result<(), CudaError> {
        let early = u32::from(narrowed || !g.is_grouped());
        let params = params::Flow { narrowed: u32::from(narrowed), early, ..self.params(g, job)? };
        self.run(cx, &self.product, g, job.bank.rows().div_ceil(16), params)
    }

    /// FC1 and the activation, in the operand type.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn activated(
        &self,
        cx: &Context<'_>,
        g: &Groups,
        job: &Product<'_>,
        act: params::Activation,
    ) -> Result<(), CudaError> {
        let values = if act.gate == 0 { job.bank.rows() } else { job.bank.rows() / 2 };
        let params = self.params(g, job)?;
        let gemm = params::Gemm { y_stride: values as u64, ..params.gemm };
        self.run(cx, &self.activated, g, job.bank.rows().div_ceil(16), params::Flow { gemm, act, ..params })
    }

    fn params(&self, g: &Groups, job: &Product<'_>) -> Result<params::Flow, CudaError> {
        let Layout { slices, lots, turns, stages, .. } = self.layout;
        Ok(params::Flow {
            gemm: gemm(g, job)?,
            narrowed: 0,
            early: 0,
            slices: slices as u32,
            lots: lots as u32,
            turns: turns as u32,
            stages: stages as u32,
            act: params::Activation::IDENTITY,
        })
    }

    /// `groups` groups of 16 weight rows for every tile; the card's blocks share them.
    fn run(
        &self,
        cx: &Context<'_>,
        function: &Function,
        g: &Groups,
        groups: usize,
        params: params::Flow,
    ) -> Result<(), CudaError> {
        let layout = self.layout;
        let all = groups.div_ceil(layout.lots * layout.turns) * g.tiles;
        let blocks = all.min(layout.blocks * cx.gpu.multiprocessors());
        let grid = Grid::new([blocks, 1, 1], layout.threads()).shared(layout.shared);
        cx.gpu.launch(function, grid, params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: usize = 227 << 10;

    #[test]
    fn two_blocks_have_room_on_hopper() {
        let of =
            |cols, row_bytes, scales, turns| Layout::of(cols, row_bytes, scales, (turns, HOPPER)).unwrap();
        let fc1 = of(2048, 1024, 32, 2);
        assert_eq!((fc1.slices, fc1.lots, fc1.stages, fc1.blocks), (8, 1, 2, 2));
        let fc2 = of(768, 384, 12, 2);
        assert_eq!((fc2.slices, fc2.lots, fc2.stages, fc2.blocks), (3, 2, 3, 2));
        assert_eq!(of(2048, 2048, 32, 2).blocks, 1);
        let eight = of(2048, 2048, 32, 1);
        assert_eq!((eight.stages, eight.blocks), (2, 2));
        for layout in [fc1, fc2, eight] {
            assert!(2 * (layout.shared + 1024) <= 228 << 10);
        }
    }

    #[test]
    fn rows_that_are_too_long_are_refused() {
        assert_eq!(Layout::of(4096, 2048, 64, (1, HOPPER)), None);
        assert_eq!(Layout::of(2048, 2048, 32, (1, 64 << 10)), None);
    }
}
