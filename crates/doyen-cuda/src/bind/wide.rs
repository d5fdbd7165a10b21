//! Products of many rows of activations with packed codes on Hopper: launches of `wide.cu`.

use super::{
    Context,
    normed::{Job, parts},
    products::{Groups, Product, gemm},
    ready, stream,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand},
    params,
    weights::Bank,
};
use doyen_tensor::format::Bits;

/// Weight rows of a block of two warpgroups, and of one of four.
const ROWS: usize = 128;
const TALL_ROWS: usize = 256;
/// Columns of a step.
const STEP: usize = 64;
/// Blocks of a cluster at most.
const CLUSTER: usize = 8;
/// Steps of activations in shared memory.
const STAGES: usize = 8;
/// Threads of a block beside those that multiply: they bring activations.
const BRINGING: u32 = 128;

/// Numbers of a row of narrowed activations: whole steps.
pub(super) const fn line(cols: usize) -> usize {
    cols.next_multiple_of(STEP)
}

/// Rows of activations of the tiles there are kernels for.
const TILES: [usize; 3] = [48, 64, 96];

/// Rows of a tile whose columns blocks share.
pub(super) const SPLIT: usize = 64;

/// Dynamic shared memory of a block.
const fn shared(rows: usize) -> usize {
    STAGES * rows * STEP * 2
}

/// Rows of a tile of `routes` routes to `experts` experts, of which tiles of `rows` are the best that other cards have: most
/// experts with a share of 36 rows or fewer have no more than 48.
pub(super) const fn rows_grouped(routes: usize, experts: usize, rows: usize) -> usize {
    match rows {
        64 if routes <= 36 * experts => TILES[0],
        128 => TILES[2],
        _ => rows,
    }
}

/// The kernels of a bank, by the rows of a tile.
pub(super) struct Wide {
    bits: Bits,
    products: Entries,
    /// Blocks of a cluster share the columns of a tile of [`SPLIT`] rows.
    split: Function,
    activated: Entries,
    narrow: Function,
}

/// A kernel by the rows of a tile: blocks of two warpgroups, and of four for all tiles but the smallest.
struct Entries {
    low: [Function; 3],
    tall: [Function; 2],
}

impl Wide {
    /// # Errors
    /// When they cannot be compiled.
    pub(super) fn load(gpu: &Gpu, bits: Bits, operand: Operand) -> Result<Option<Self>, CudaError> {
        let module = Module::Wide(bits, operand);
        if !module.is_for(gpu.arch()) {
            return Ok(None);
        }
        let of = |entry: &str, rows: usize| gpu.function(module, entry, shared(rows));
        let entries = |low: &str, tall: &str| -> Result<Entries, CudaError> {
            let entry = |name: &str, rows: usize| of(&format!("{name}_{rows}"), rows);
            let [least, tiles @ ..] = TILES;
            Ok(Entries {
                low: [entry(low, least)?, entry(low, tiles[0])?, entry(low, tiles[1])?],
                tall: [entry(tall, tiles[0])?, entry(tall, tiles[1])?],
            })
        };
        Ok(Some(Self {
            bits,
            products: entries("wide", "tall")?,
            activated: entries("wide_activated", "tall_activated")?,
            split: of("wide_split", SPLIT)?,
            narrow: gpu.function(module, "narrow_wide", 0)?,
        }))
    }

    /// A product; activations are narrowed first.
    ///
    /// # Errors
    /// When a launch fails.
    pub(super) fn product(&self, cx: &Context<'_>, g: &Groups, job: &Product<'_>) -> Result<(), CudaError> {
        self.narrow(cx, (job.x, job.narrow), (job.x_rows, job.bank.cols()))?;
        self.launch(cx, g, &Product { x: job.narrow, ..*job })
    }

    /// A product of activations that are narrowed already.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn launch(&self, cx: &Context<'_>, g: &Groups, job: &Product<'_>) -> Result<(), CudaError> {
        let rows = job.bank.rows();
        if g.rows == SPLIT && !g.is_grouped() {
            let jobs = [(job.bank, job.bias, job.y)];
            if let Some(split) = self.split(cx, &jobs, g.routes)? {
                return split.launch(cx, job.x);
            }
        }
        let params = params::Wide { gemm: params(g, job)?, y_span: 0, act: params::Activation::IDENTITY };
        // A matrix that fills the card with larger tiles reads its activations less often.
        let large = Groups::none(g.routes, TILES[2]);
        let enlarged = !g.is_grouped() && (g.rows > SPLIT || g.routes > SPLIT && is_tall(cx, &large, rows));
        let g = if enlarged { &large } else { g };
        run(cx, &self.products, g, rows, params)
    }

    /// How blocks that share columns multiply `m` rows; `None` where they fill the card no better. Activations come with the
    /// launch.
    ///
    /// # Errors
    /// When a bank is not on the card.
    pub(super) fn split(
        &self,
        cx: &Context<'_>,
        jobs: &[Job<'_>],
        m: usize,
    ) -> Result<Option<Split<'_>>, CudaError> {
        let Some((parts, count)) = parts(jobs, ROWS)? else { return Ok(None) };
        let (blocks, tiles, cols) =
            (parts[count - 1].end as usize, m.div_ceil(SPLIT), parts[0].w.cols as usize);
        let split = split(blocks * tiles, cols.div_ceil(STEP), cx.gpu.multiprocessors());
        let x_stride = line(cols) as u64;
        let params = params::Split { parts, x: Addr::NONE, x_stride, count: count as u32, m: m as u32 };
        let grid =
            Grid::new([blocks, tiles, split], 2 * ROWS as u32 + BRINGING).shared(shared(SPLIT)).cluster();
        Ok((split > 1).then_some(Split { function: &self.split, params, grid }))
    }

    /// Narrows `rows` rows of `cols` activations.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn narrow(
        &self,
        cx: &Context<'_>,
        (x, y): (Addr, Addr),
        (rows, cols): (usize, usize),
    ) -> Result<(), CudaError> {
        let params = params::NarrowWide { x, y, rows: rows as u64, cols: cols as u32 };
        cx.gpu.launch(&self.narrow, Grid::over(rows * line(cols) / 8), params)
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
        self.narrow(cx, (job.x, job.narrow), (job.x_rows, job.bank.cols()))?;
        let stride = line(next.1.cols());
        let rows = if act.gate == 0 { stride } else { 2 * stride };
        let gemm = params::Gemm { x: job.narrow, y_stride: stride as u64, ..params(g, job)? };
        let params = params::Wide { gemm, y_span: stream::span(next.0.bits), act };
        run(cx, &self.activated, g, rows, params)
    }
}

/// Products whose columns blocks share.
pub(super) struct Split<'a> {
    function: &'a Function,
    params: params::Split,
    grid: Grid,
}

impl Split<'_> {
    /// Multiplies narrowed activations.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn launch(&self, cx: &Context<'_>, x: Addr) -> Result<(), CudaError> {
        cx.gpu.launch(self.function, self.grid, params::Split { x, ..self.params })
    }
}

/// Whether blocks of four warpgroups for `rows` weight rows fill the card: an eighth may be idle.
fn is_tall(cx: &Context<'_>, g: &Groups, rows: usize) -> bool {
    g.rows > TILES[0] && 8 * rows.div_ceil(TALL_ROWS) * g.tiles >= 7 * cx.gpu.multiprocessors()
}

fn run(
    cx: &Context<'_>,
    entries: &Entries,
    g: &Groups,
    rows: usize,
    params: params::Wide,
) -> Result<(), CudaError> {
    let tall = is_tall(cx, g, rows);
    let (functions, tiles, height): (&[Function], _, _) =
        if tall { (&entries.tall, &TILES[1..], TALL_ROWS) } else { (&entries.low, &TILES[..], ROWS) };
    let threads = 2 * height as u32 + BRINGING;
    let grid = Grid::new([rows.div_ceil(height), g.tiles, 1], threads).shared(shared(g.rows));
    let function = tiles.iter().zip(functions).find(|(rows, _)| **rows == g.rows);
    cx.gpu.launch(ready(function.map(|(_, f)| f))?, grid, params)
}

/// Blocks that share the columns of the same rows: as many as the card runs at once, each with four steps at least.
const fn split(blocks: usize, steps: usize, multiprocessors: usize) -> usize {
    let mut split = 1;
    while split < CLUSTER && blocks * split * 2 <= 2 * multiprocessors && split * 8 <= steps {
        split *= 2;
    }
    split
}

fn params(g: &Groups, job: &Product<'_>) -> Result<params::Gemm, CudaError> {
    Ok(params::Gemm { x_stride: line(job.bank.cols()) as u64, ..gemm(g, job)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_shared_until_the_card_is_full() {
        assert_eq!((split(32, 32, 132), split(4, 32, 132), split(16, 64, 132)), (8, 8, 8));
        assert_eq!((split(1187, 32, 132), split(256, 32, 132), split(4, 4, 132)), (1, 1, 1));
        assert_eq!((split(128, 64, 132), split(4, 16, 132)), (2, 4));
    }

    #[test]
    fn few_rows_to_an_expert_take_the_smallest_tiles() {
        assert_eq!(rows_grouped(4096, 128, 64), 48);
        assert_eq!(rows_grouped(8192, 128, 64), 64);
        assert_eq!(rows_grouped(4096, 128, 8), 8);
        assert_eq!(rows_grouped(32768, 128, 128), 96);
    }
}
