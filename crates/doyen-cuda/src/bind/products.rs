//! How a bank of weights is multiplied on the tensor cores: which kernels it takes, and their launches. Shared by products of
//! a node and by experts.

use super::{Context, eight::Eight, flow::Flow, stream::Stream, wide::Wide};
use crate::{
    driver::{Addr, Function, Gpu, Grid},
    error::CudaError,
    module::{Module, Operand, Width},
    params,
    weights::{Bank, Floats, optional},
};
use doyen_tensor::format::Bits;

/// Rows of activations of a tile of the kernels for few rows: `TOKENS` of few.cu.
pub(super) const FEW: usize = 8;
/// Weight rows of a warp or its group, and warps of a block, of few.cu.
const FEW_BLOCK: usize = 16;
const FEW_WARPS: usize = 8;
/// Weight rows of a block of gemm.cu and of tile.cu.
pub(super) const GEMM_BLOCK: usize = 64;
const TILE_BLOCK: usize = 128;

/// Which kernels multiply a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Packed codes: few.cu and tile.cu.
    Codes,
    /// Floats: gemm.cu.
    Floats,
}

/// The way of a bank; none where only the float32 kernels read it.
pub(super) fn way(bank: &Bank) -> Option<Way> {
    match bank.width() {
        Width::F16 | Width::F32 => Some(Way::Floats),
        Width::B2 | Width::B4 | Width::B8 => bank.few().map(|_| Way::Codes),
    }
}

/// Kernels of a bank.
pub(super) enum Kernels {
    Codes(Box<CodeKernels>),
    Floats {
        /// Tiles of 16 and of 64 rows.
        tiles: [Function; 2],
        grouped: [Function; 2],
    },
}

pub(super) struct CodeKernels {
    few: Function,
    few_activated: Function,
    narrow: Function,
    tiles: Tiles,
    stream: Option<Stream>,
    eight: Option<Eight>,
    flow: Option<Flow>,
}

/// Kernels of many rows, in tiles of 64 and of 128.
enum Tiles {
    /// tile.cu.
    Mma {
        tiles: [Function; 2],
        grouped: [Function; 2],
    },
    Wide(Wide),
}

impl Tiles {
    fn load(gpu: &Gpu, bits: Bits, operand: Operand) -> Result<Self, CudaError> {
        if let Some(wide) = Wide::load(gpu, bits, operand)? {
            return Ok(Self::Wide(wide));
        }
        let of = |entry, rows| gpu.function(Module::Tile(bits, operand), entry, tile_shared(rows));
        Ok(Self::Mma {
            tiles: [of("tile_64", 64)?, of("tile_128", 128)?],
            grouped: [of("grouped_64", 64)?, of("grouped_128", 128)?],
        })
    }
}

/// Dynamic shared memory of tile.cu: three stages of activations, two of weights, of 64 columns of 2 bytes.
const fn tile_shared(rows: usize) -> usize {
    (3 * rows + 2 * TILE_BLOCK) * 64 * 2
}

impl Kernels {
    /// # Errors
    /// When they cannot be compiled.
    pub(super) fn load(gpu: &Gpu, bank: &Bank, operand: Operand) -> Result<Option<Self>, CudaError> {
        Ok(match (way(bank), bank.few()) {
            (Some(Way::Codes), Some(bits)) => {
                let few = Module::Few(bits, operand);
                Some(Self::Codes(Box::new(CodeKernels {
                    few: gpu.function(few, "few", 0)?,
                    few_activated: gpu.function(few, "few_activated", 0)?,
                    narrow: gpu.function(few, "narrow", 0)?,
                    tiles: Tiles::load(gpu, bits, operand)?,
                    stream: Stream::load(gpu, bank, operand)?,
                    eight: Eight::load(gpu, bank, operand)?,
                    flow: Flow::load(gpu, bank, operand)?,
                })))
            }
            (Some(Way::Floats), _) => {
                let gemm = Module::Gemm(bank.width(), operand);
                Some(Self::Floats {
                    tiles: [gpu.function(gemm, "gemm_16", 0)?, gpu.function(gemm, "gemm_64", 0)?],
                    grouped: [gpu.function(gemm, "grouped_16", 0)?, gpu.function(gemm, "grouped_64", 0)?],
                })
            }
            _ => None,
        })
    }
}

impl Kernels {
    /// The kernels of decode, where the bank has them.
    pub(super) fn stream(&self) -> Option<&Stream> {
        match self {
            Self::Codes(k) => k.stream.as_ref(),
            Self::Floats { .. } => None,
        }
    }

    /// The kernels of up to 8 rows that read 16 bytes a lane, where the bank has them.
    pub(super) fn eight(&self) -> Option<&Eight> {
        match self {
            Self::Codes(k) => k.eight.as_ref(),
            Self::Floats { .. } => None,
        }
    }

    /// The kernels of up to 8 rows whose codes flow through shared memory, where the bank has them.
    pub(super) fn flow(&self) -> Option<&Flow> {
        match self {
            Self::Codes(k) => k.flow.as_ref(),
            Self::Floats { .. } => None,
        }
    }

    /// The kernels of many rows on Hopper.
    pub(super) fn wide(&self) -> Option<&Wide> {
        match self {
            Self::Codes(k) => match &k.tiles {
                Tiles::Wide(wide) => Some(wide),
                Tiles::Mma { .. } => None,
            },
            Self::Floats { .. } => None,
        }
    }
}

/// Rows of activations by the expert they go to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    /// Rows of a tile.
    pub(super) rows: usize,
    /// Tiles there are at most.
    pub(super) tiles: usize,
    /// Rows of all tiles.
    pub(super) routes: usize,
    /// The expert of each route, where every route is a tile of its own; otherwise the others.
    pub(super) experts: Addr,
    pub(super) order: Addr,
    pub(super) list: Addr,
    pub(super) ends: Addr,
    pub(super) count: Addr,
}

impl Groups {
    /// One matrix for all `m` rows, in tiles of `rows`.
    pub(super) const fn none(m: usize, rows: usize) -> Self {
        let none = Addr::NONE;
        Self {
            rows,
            tiles: m.div_ceil(rows),
            routes: m,
            experts: none,
            order: none,
            list: none,
            ends: none,
            count: none,
        }
    }

    pub(super) const fn is_grouped(&self) -> bool {
        self.list.is_some()
    }
}

/// A product: rows `x` of activations with a bank.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) bank: &'a Bank,
    pub(super) bias: Option<&'a Floats>,
    pub(super) x: Addr,
    /// Rows of `x`.
    pub(super) x_rows: usize,
    /// Routes that share a row of `x`; 0 where `x` is in the experts' order.
    pub(super) x_div: usize,
    pub(super) y: Addr,
    /// Where activations are narrowed to, two bytes each; none where there is one row.
    pub(super) narrow: Addr,
    /// Applied to the rows of FC1 (few rows alone).
    pub(super) act: Option<params::Activation>,
}

/// Launches a product.
///
/// # Errors
/// When a launch fails.
pub(super) fn launch(
    cx: &Context<'_>,
    kernels: &Kernels,
    g: &Groups,
    job: &Product<'_>,
) -> Result<(), CudaError> {
    match kernels {
        Kernels::Codes(k) if g.rows == FEW => match &k.eight {
            // Tiles that are routes as they lie are few.cu's.
            Some(eight) if job.act.is_none() && !g.experts.is_some() => eight.product(cx, g, job, false),
            _ => few(cx, k, g, job),
        },
        Kernels::Codes(k) => tile(cx, k, g, job),
        Kernels::Floats { tiles, grouped } => {
            let [small, large] = if g.is_grouped() { grouped } else { tiles };
            let grid = Grid::new([job.bank.rows().div_ceil(GEMM_BLOCK), g.tiles, 1], 128);
            cx.gpu.launch(if g.rows == 16 { small } else { large }, grid, gemm(g, job)?)
        }
    }
}

fn few(cx: &Context<'_>, k: &CodeKernels, g: &Groups, job: &Product<'_>) -> Result<(), CudaError> {
    let (bias, bias_float) = optional(job.bias);
    let rows = job.bank.rows();
    // A gate and its linear row give one value.
    let (values, per_block) = match job.act {
        Some(act) if act.gate != 0 => (rows / 2, FEW_BLOCK / 2),
        _ => (rows, FEW_BLOCK),
    };
    // One row a tile is as well read as it is.
    let narrowed = job.narrow.is_some() && !g.experts.is_some();
    if narrowed {
        narrow(cx, k, job, job.bank.block_shift())?;
    }
    let groups = values.div_ceil(per_block);
    let split = few_split(groups * g.tiles, job.bank.cols());
    let params = params::Few {
        w: job.bank.params()?,
        x: if narrowed { job.narrow } else { job.x },
        y: job.y,
        bias,
        experts: g.experts,
        order: g.order,
        tiles: g.list,
        ends: g.ends,
        tile_count: g.count,
        x_stride: job.bank.cols() as u64,
        y_stride: values as u64,
        bias_float,
        m: g.routes as u32,
        x_div: job.x_div as u32,
        y_by_route: u32::from(job.x_div == 0),
        narrowed: u32::from(narrowed),
        split: split as u32,
        act: job.act.unwrap_or(params::Activation::IDENTITY),
    };
    let f = if job.act.is_some() { &k.few_activated } else { &k.few };
    cx.gpu.launch(f, Grid::new([groups.div_ceil(FEW_WARPS / split), g.tiles, 1], 256), params)
}

/// Warps that share the columns of 16 rows, `groups` of them in all: as many as keep a large card busy, each with 64 columns
/// at least.
const fn few_split(groups: usize, cols: usize) -> usize {
    let mut split = 1;
    while split < FEW_WARPS && groups * split < 2048 && 64 * split < cols {
        split *= 2;
    }
    split
}

/// Activations in the operand type, in the order of the codes they will meet.
fn narrow(cx: &Context<'_>, k: &CodeKernels, job: &Product<'_>, block_shift: u32) -> Result<(), CudaError> {
    let runs = job.x_rows * job.bank.cols() / 16;
    let params = params::Narrow { x: job.x, y: job.narrow, runs: runs as u64, block_shift };
    cx.gpu.launch(&k.narrow, Grid::over(runs), params)
}

/// What every kernel of tiles is told: rows of x and y follow each other.
pub(super) fn gemm(g: &Groups, job: &Product<'_>) -> Result<params::Gemm, CudaError> {
    let (bias, bias_float) = optional(job.bias);
    Ok(params::Gemm {
        w: job.bank.params()?,
        x: job.x,
        y: job.y,
        bias,
        order: g.order,
        tiles: g.list,
        ends: g.ends,
        tile_count: g.count,
        x_stride: job.bank.cols() as u64,
        y_stride: job.bank.rows() as u64,
        bias_float,
        m: g.routes as u32,
        x_div: job.x_div as u32,
        y_by_route: u32::from(job.x_div == 0),
    })
}

fn tile(cx: &Context<'_>, k: &CodeKernels, g: &Groups, job: &Product<'_>) -> Result<(), CudaError> {
    let (tiles, grouped) = match &k.tiles {
        Tiles::Wide(wide) => return wide.product(cx, g, job),
        Tiles::Mma { tiles, grouped } => (tiles, grouped),
    };
    // The order of blocks of 64 and more, which a tile takes for all.
    narrow(cx, k, job, 31)?;
    let [small, large] = if g.is_grouped() { grouped } else { tiles };
    let params = params::Gemm { x: job.narrow, ..gemm(g, job)? };
    let grid = Grid::new([job.bank.rows().div_ceil(TILE_BLOCK), g.tiles, 1], 256);
    let f = if g.rows == 64 { small } else { large };
    cx.gpu.launch(f, grid.shared(tile_shared(g.rows)), params)
}

/// Rows of a tile of `m` rows of activations that share a matrix.
pub(super) const fn rows_alone(m: usize, way: Way) -> usize {
    match way {
        // Two tiles of few rows still read codes faster than a tile is filled.
        Way::Codes if m <= 2 * FEW => FEW,
        Way::Codes if m <= 512 => 64,
        Way::Codes => 128,
        Way::Floats if m <= 16 => 16,
        Way::Floats => 64,
    }
}

/// Tiles of 64 rows of gemm.cu for a bank of `rows` rows of floats.
pub(super) const fn float_tiles(rows: usize, m: usize) -> usize {
    rows.div_ceil(GEMM_BLOCK) * m.div_ceil(64)
}

/// Rows of a tile of `routes` routes to `experts` experts. An expert's last tile is rarely full, so few routes to an expert
/// take small ones.
pub(super) const fn rows_grouped(routes: usize, experts: usize, way: Way) -> usize {
    match way {
        Way::Codes if routes <= FEW * experts => FEW,
        Way::Codes if routes < 96 * experts => 64,
        Way::Codes => 128,
        Way::Floats if routes < 32 * experts => 16,
        Way::Floats => 64,
    }
}

/// Tiles that `routes` routes to `experts` experts have at most.
pub(super) const fn most_tiles(routes: usize, experts: usize, rows: usize) -> usize {
    routes / rows + if routes < experts { routes } else { experts }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_shared_where_rows_are_few() {
        assert_eq!(few_split(9496, 2048), 1);
        assert_eq!(few_split(96 * 8, 2048), 4);
        assert_eq!(few_split(16, 2048), 8);
        assert_eq!(few_split(16, 64), 1);
    }

    /// Whatever the routes of each expert, the tiles fit.
    #[test]
    fn tiles_fit_every_distribution() {
        for counts in [vec![1; 7], vec![17, 0, 1, 16], vec![64, 65, 1], vec![0, 0, 0], vec![1000]] {
            let (routes, experts) = (counts.iter().sum::<usize>(), counts.len());
            for rows in [FEW, 16, 64, 128] {
                let tiles: usize = counts.iter().map(|c: &usize| c.div_ceil(rows)).sum();
                assert!(tiles <= most_tiles(routes, experts, rows), "{counts:?} in tiles of {rows}");
            }
            // The list is as long as the smallest tiles need.
            assert!(most_tiles(routes, experts, 16) <= most_tiles(routes, experts, FEW));
        }
    }
}
