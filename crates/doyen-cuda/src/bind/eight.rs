//! Products of up to 8 rows of activations with packed codes that are read 16 bytes a lane: launches of `eight.cu`.

use super::{
    Context,
    products::{FEW, Groups, Product, gemm},
    stream,
};
use crate::{
    driver::{Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand},
    params,
    weights::Bank,
};
use doyen_tensor::format::Bits;

/// Warps of a block, and blocks of a multiprocessor at once.
const WARPS: usize = 8;
const BLOCKS: usize = 3;
/// Most dynamic shared memory: with less than this two blocks have room on any card.
const SHARED: usize = 72 << 10;

/// Dynamic shared memory: 8 rows of activations of whole segments of 64 bytes of codes, two bytes each.
const fn shared(bits: Bits, cols: usize) -> usize {
    FEW * 2 * cols.next_multiple_of(512 / bits.get())
}

/// The kernels of a bank.
pub(super) struct Eight {
    bits: Bits,
    product: Function,
    activated: Function,
}

impl Eight {
    /// The kernels, where the bank's codes can be read so and a block has room for its activations.
    ///
    /// # Errors
    /// When they cannot be compiled.
    pub(super) fn load(gpu: &Gpu, bank: &Bank, operand: Operand) -> Result<Option<Self>, CudaError> {
        let Some(bits) = bank.eight() else { return Ok(None) };
        let shared = shared(bits, bank.cols());
        if shared > SHARED.min(gpu.shared() / 2) {
            return Ok(None);
        }
        let function = |entry| gpu.function(Module::Eight(bits, operand), entry, shared);
        Ok(Some(Self { bits, product: function("eight")?, activated: function("eight_activated")? }))
    }

    /// A product of float32 activations, or of ones that [`Eight::activated`] left.
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
        let params = params::Eight { narrowed: u32::from(narrowed), ..params(g, job)? };
        self.run(cx, &self.product, g, (job.bank, job.bank.rows().div_ceil(16)), params)
    }

    /// FC1 and the activation, in the operand type and the order in which `next` reads its codes.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn activated(
        &self,
        cx: &Context<'_>,
        g: &Groups,
        job: &Product<'_>,
        act: params::Activation,
        next: &Self,
    ) -> Result<(), CudaError> {
        let rows = job.bank.rows();
        let (values, per_group) = if act.gate == 0 { (rows, 16) } else { (rows / 2, 8) };
        let params = params(g, job)?;
        let gemm = params::Gemm { y_stride: values as u64, ..params.gemm };
        let params = params::Eight { gemm, y_span: stream::span(next.bits), act, ..params };
        self.run(cx, &self.activated, g, (job.bank, values.div_ceil(per_group)), params)
    }

    /// `groups` groups of 16 weight rows for every tile.
    fn run(
        &self,
        cx: &Context<'_>,
        function: &Function,
        g: &Groups,
        (bank, groups): (&Bank, usize),
        params: params::Eight,
    ) -> Result<(), CudaError> {
        let warps = cx.gpu.multiprocessors() * BLOCKS * WARPS;
        let split = split(groups * g.tiles, bank.cols().div_ceil(512 / self.bits.get()), warps);
        let per_block = WARPS / split;
        // A warp that goes on to other rows has their codes on their way; where there are enough for all, each takes two.
        let blocks = match groups.div_ceil(per_block) {
            blocks if g.tiles == 1 => blocks.min(warps / WARPS),
            blocks if groups * g.tiles >= 4 * warps => blocks.div_ceil(2),
            blocks => blocks,
        };
        let params = params::Eight { split: split as u32, ..params };
        let grid = Grid::new([blocks, g.tiles, 1], 32 * WARPS as u32).shared(shared(self.bits, bank.cols()));
        cx.gpu.launch(function, grid, params)
    }
}

/// Warps that share the columns of 16 rows: as many as the card runs at once, each with a segment at least.
const fn split(groups: usize, segments: usize, warps: usize) -> usize {
    let mut split = 1;
    while split < WARPS && groups * split * 2 <= warps && split * 2 <= segments {
        split *= 2;
    }
    split
}

fn params(g: &Groups, job: &Product<'_>) -> Result<params::Eight, CudaError> {
    let act = params::Activation::IDENTITY;
    Ok(params::Eight { gemm: gemm(g, job)?, narrowed: 0, split: 1, y_span: 0, act })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_shared_until_the_card_is_full() {
        let warps = 132 * BLOCKS * WARPS;
        assert_eq!(split(9496, 16, warps), 1);
        assert_eq!(split(256, 32, warps), 8);
        assert_eq!(split(96 * 8, 16, warps), 4);
        assert_eq!(split(16, 1, warps), 1);
    }

    #[test]
    fn activations_fill_whole_segments() {
        assert_eq!(shared(Bits::B4, 2048), 8 * 4096);
        assert_eq!(shared(Bits::B2, 200), 8 * 512);
    }
}
