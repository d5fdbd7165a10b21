//! Products of many rows of activations with packed codes on Hopper: launches of `wide.cu`.

use super::{
    Context,
    products::{Groups, Product, gemm},
    ready, stream,
};
use crate::{
    driver::{Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand},
    params,
    weights::Bank,
};
use doyen_tensor::format::Bits;

/// Weight rows of a block.
const ROWS: usize = 128;
/// Columns of a step.
const STEP: usize = 64;
/// Steps of activations in shared memory.
const STAGES: usize = 4;

/// Numbers of a row of narrowed activations: whole steps.
pub(super) const fn line(cols: usize) -> usize {
    cols.next_multiple_of(STEP)
}

/// Rows of activations of the tiles there are kernels for.
const TILES: [usize; 3] = [48, 64, 128];

/// Rows of a tile of `routes` routes to `experts` experts, of which tiles of `rows` are the best that other cards have: most
/// experts with a share of 36 rows or fewer have no more than 48.
pub(super) const fn rows_grouped(routes: usize, experts: usize, rows: usize) -> usize {
    if rows == 64 && routes <= 36 * experts { TILES[0] } else { rows }
}

/// The kernels of a bank, by the rows of a tile.
pub(super) struct Wide {
    bits: Bits,
    products: [Function; 3],
    activated: [Function; 3],
    narrow: Function,
}

impl Wide {
    /// # Errors
    /// When they cannot be compiled.
    pub(super) fn load(gpu: &Gpu, bits: Bits, operand: Operand) -> Result<Option<Self>, CudaError> {
        let module = Module::Wide(bits, operand);
        if !module.is_for(gpu.arch()) {
            return Ok(None);
        }
        let of = |entry, rows| gpu.function(module, entry, STAGES * rows * STEP * 2);
        Ok(Some(Self {
            bits,
            products: [of("wide_48", 48)?, of("wide_64", 64)?, of("wide_128", 128)?],
            activated: [
                of("wide_activated_48", 48)?,
                of("wide_activated_64", 64)?,
                of("wide_activated_128", 128)?,
            ],
            narrow: gpu.function(module, "narrow_wide", 0)?,
        }))
    }

    /// A product; activations are narrowed first.
    ///
    /// # Errors
    /// When a launch fails.
    pub(super) fn product(&self, cx: &Context<'_>, g: &Groups, job: &Product<'_>) -> Result<(), CudaError> {
        self.narrow(cx, job)?;
        self.launch(cx, g, &Product { x: job.narrow, ..*job })
    }

    /// A product of activations that are narrowed already.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn launch(&self, cx: &Context<'_>, g: &Groups, job: &Product<'_>) -> Result<(), CudaError> {
        let rows = job.bank.rows();
        let params = params::Wide { gemm: params(g, job)?, y_span: 0, act: params::Activation::IDENTITY };
        run(cx, &self.products, g, rows.div_ceil(ROWS), params)
    }

    /// FC1 and the activation; what `next` will read, in its order.
    ///
    /// # Errors
    /// When a launch fails.
    pub(super) fn activated(
        &self,
        cx: &Context<'_>,
        g: &Groups,
        job: &Product<'_>,
        act: params::Activation,
        next: (&Self, &Bank),
    ) -> Result<(), CudaError> {
        self.narrow(cx, job)?;
        let stride = line(next.1.cols());
        let per_block = if act.gate == 0 { ROWS } else { ROWS / 2 };
        let gemm = params::Gemm { x: job.narrow, y_stride: stride as u64, ..params(g, job)? };
        let params = params::Wide { gemm, y_span: stream::span(next.0.bits), act };
        run(cx, &self.activated, g, stride.div_ceil(per_block), params)
    }

    fn narrow(&self, cx: &Context<'_>, job: &Product<'_>) -> Result<(), CudaError> {
        let (rows, cols) = (job.x_rows, job.bank.cols());
        let params = params::NarrowWide { x: job.x, y: job.narrow, rows: rows as u64, cols: cols as u32 };
        cx.gpu.launch(&self.narrow, Grid::over(rows * line(cols) / 8), params)
    }
}

fn run(
    cx: &Context<'_>,
    functions: &[Function; 3],
    g: &Groups,
    blocks: usize,
    params: params::Wide,
) -> Result<(), CudaError> {
    let grid = Grid::new([blocks, g.tiles, 1], 256).shared(STAGES * g.rows * STEP * 2);
    let function = TILES.iter().zip(functions).find(|(rows, _)| **rows == g.rows);
    cx.gpu.launch(ready(function.map(|(_, f)| f))?, grid, params)
}

fn params(g: &Groups, job: &Product<'_>) -> Result<params::Gemm, CudaError> {
    Ok(params::Gemm { x_stride: line(job.bank.cols()) as u64, ..gemm(g, job)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_to_an_expert_take_the_smallest_tiles() {
        assert_eq!(rows_grouped(4096, 128, 64), 48);
        assert_eq!(rows_grouped(8192, 128, 64), 64);
        assert_eq!(rows_grouped(4096, 128, 8), 8);
        assert_eq!(rows_grouped(32768, 128, 128), 128);
    }
}
