//! Experts multiplied densely: the bounded fallback for what no packed kernel takes, and the reference for those there are.
//!
//! The matrices of a few experts at a time are written out as floats, under a cap, and multiplied with all rows that are routed to
//! these experts. In float32 that is exact; otherwise weights and activations are rounded to the operand type for the tensor
//! cores.

use super::{
    Context, Setting,
    products::{self, GEMM_BLOCK, Way},
    ready,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid},
    error::CudaError,
    mini::MiniBank,
    module::{Module, Operand, Width},
    params,
    weights::{Bank, Floats, optional},
};
use doyen_tensor::{ByteCount, FloatType};
use std::ops::Range;

/// A projection's matrices that can be written out.
pub(super) trait Matrices {
    fn rows(&self) -> usize;
    fn cols(&self) -> usize;
    /// Module and entry that write them.
    fn entry(&self) -> (Module, &'static str);
    /// Writes the matrices of `experts` to `to`, as floats of a `FloatKind`.
    fn expand(
        &self,
        cx: &Context<'_>,
        function: &Function,
        experts: Range<usize>,
        to: (Addr, u32),
    ) -> Result<(), CudaError>;
}

/// Runs of 16 columns, which a thread takes at a time.
fn runs(m: &dyn Matrices, matrices: usize) -> usize {
    matrices * m.rows() * m.cols().div_ceil(16)
}

impl Matrices for Bank {
    fn rows(&self) -> usize {
        Self::rows(self)
    }

    fn cols(&self) -> usize {
        Self::cols(self)
    }

    fn entry(&self) -> (Module, &'static str) {
        (Module::Expand(self.width()), "expand")
    }

    fn expand(
        &self,
        cx: &Context<'_>,
        function: &Function,
        experts: Range<usize>,
        (y, kind): (Addr, u32),
    ) -> Result<(), CudaError> {
        let runs = runs(self, experts.len());
        let params =
            params::Expand { w: self.params()?, y, first: experts.start as u64, runs: runs as u64, kind };
        cx.gpu.launch(function, Grid::over(runs), params)
    }
}

impl Matrices for MiniBank {
    fn rows(&self) -> usize {
        Self::rows(self)
    }

    fn cols(&self) -> usize {
        Self::cols(self)
    }

    fn entry(&self) -> (Module, &'static str) {
        (Module::Mini(self.code()), "mini_expand")
    }

    fn expand(
        &self,
        cx: &Context<'_>,
        function: &Function,
        experts: Range<usize>,
        (y, kind): (Addr, u32),
    ) -> Result<(), CudaError> {
        let runs = runs(self, experts.len());
        let params =
            params::MiniExpand { w: self.params()?, y, first: experts.start as u64, runs: runs as u64, kind };
        cx.gpu.launch(function, Grid::over(runs), params)
    }
}

/// Sizes of a layer of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) experts: usize,
    pub(super) k: usize,
    pub(super) hidden: usize,
    pub(super) inter: usize,
    pub(super) fc1_rows: usize,
    /// Whether the linear part has a projection of its own.
    pub(super) fc3: bool,
}

/// A projection in a step.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) matrices: &'a dyn Matrices,
    pub(super) bias: Option<&'a Floats>,
}

/// A layer in a step.
pub(super) struct Job<'a> {
    pub(super) fc1: Part<'a>,
    pub(super) fc2: Part<'a>,
    pub(super) fc3: Option<Part<'a>>,
    pub(super) act: params::Activation,
    pub(super) x: Addr,
    pub(super) ids: Addr,
    pub(super) mix: Addr,
    pub(super) y: Addr,
    pub(super) tokens: usize,
}

/// Dense products of a layer.
pub(super) struct Dense {
    shape: Shape,
    operand: Option<Operand>,
    /// Experts at a time.
    chunk: usize,
    functions: Option<Functions>,
}

struct Functions {
    expand: Vec<Function>,
    group: Function,
    slice: Function,
    activate: Function,
    combine: Function,
    products: Products,
}

enum Products {
    /// In float32: tiles of 16 rows.
    Rows(Function),
    /// On the tensor cores: tiles of 16 and of 64 rows.
    Tiles([Function; 2]),
}

/// Where a step's values lie in scratch, in bytes; `end` is the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    h1: usize,
    h3: usize,
    a: usize,
    ends: usize,
    order: usize,
    tiles: usize,
    tile_count: usize,
    own: usize,
    own_count: usize,
    dense: usize,
    end: usize,
}

/// Weight rows of a block of `dense_rows`, and rows of its tiles.
const ROWS_BLOCK: usize = 8;
const ROWS_TILE: usize = 16;

impl Dense {
    /// Plans dense products under the setting's cap.
    ///
    /// # Errors
    /// When not even one expert fits the cap, or extents overflow.
    pub(super) fn new(shape: Shape, setting: &Setting) -> Result<Self, String> {
        let operand = setting.operand;
        let largest = shape.fc1_rows.max(shape.hidden).checked_mul(shape.hidden.max(shape.inter));
        let each = largest.and_then(|n| n.checked_mul(size(operand)));
        let each = each.filter(|&n| n > 0).ok_or("an expert's extents overflow the address space")?;
        let chunk = (setting.dense / each).min(shape.experts);
        if chunk == 0 {
            return Err(format!(
                "an expert written out densely takes {}, --qmoe-scratch allows {}: give at least --qmoe-scratch {}",
                ByteCount(each as u64),
                ByteCount(setting.dense as u64),
                each.div_ceil(1 << 20)
            ));
        }
        Ok(Self { shape, operand, chunk, functions: None })
    }

    /// The name of the products for plans.
    pub(super) fn name(&self) -> String {
        match self.operand {
            Some(o) => format!("dense {o}, {} experts at a time", self.chunk),
            None => format!("dense f32, {} experts at a time", self.chunk),
        }
    }

    fn layout(&self, routes: usize) -> Option<Layout> {
        let s = &self.shape;
        let mut end = 0usize;
        let mut take = |count: usize, each: usize| {
            let start = end;
            end = count.checked_mul(each)?.checked_add(start)?.checked_next_multiple_of(256)?;
            Some(start)
        };
        let tiles = products::most_tiles(routes, s.experts, ROWS_TILE);
        let h1 = take(routes, 4 * s.fc1_rows.max(s.hidden))?;
        let h3 = take(routes, if s.fc3 { 4 * s.inter } else { 0 })?;
        let a = take(routes, 4 * s.inter)?;
        let ends = take(s.experts, 4)?;
        let order = take(routes, 4)?;
        let list = take(tiles, 8)?;
        let tile_count = take(1, 4)?;
        let own = take(tiles, 8)?;
        let own_count = take(1, 4)?;
        let widest = (s.fc1_rows * s.hidden).max(s.hidden * s.inter).max(s.inter * s.hidden);
        let dense = take(self.chunk.checked_mul(widest)?, size(self.operand))?;
        Some(Layout { h1, h3, a, ends, order, tiles: list, tile_count, own, own_count, dense, end })
    }

    /// Bytes of scratch for `routes` routes; `usize::MAX` where they overflow.
    pub(super) fn scratch(&self, routes: Option<usize>) -> usize {
        routes.and_then(|r| self.layout(r)).map_or(usize::MAX, |l| l.end)
    }

    /// Compiles kernels for the projections of a layer: FC1, FC2 and, where there is one, FC3.
    pub(super) fn load(&mut self, gpu: &Gpu, parts: &[&dyn Matrices]) -> Result<(), CudaError> {
        let expand = parts.iter().map(|m| gpu.function(m.entry().0, m.entry().1, 0));
        let products = match self.operand {
            None => Products::Rows(gpu.function(Module::Dense, "dense_rows", 0)?),
            Some(o) => {
                let gemm = Module::Gemm(Width::F16, o);
                Products::Tiles([gpu.function(gemm, "grouped_16", 0)?, gpu.function(gemm, "grouped_64", 0)?])
            }
        };
        self.functions = Some(Functions {
            expand: expand.collect::<Result<_, _>>()?,
            group: gpu.function(Module::Route, "group", 4 * self.shape.experts)?,
            slice: gpu.function(Module::Dense, "slice_tiles", 0)?,
            activate: gpu.function(Module::Route, "activate_rows", 0)?,
            combine: gpu.function(Module::Route, "combine", 0)?,
            products,
        });
        Ok(())
    }

    /// Multiplies a step.
    pub(super) fn run(&self, cx: &Context<'_>, job: &Job<'_>) -> Result<(), CudaError> {
        let (s, functions) = (&self.shape, ready(self.functions.as_ref())?);
        let routes = job.tokens * s.k;
        let at = self.layout(routes);
        let at = ready(at.as_ref())?;
        let place = |offset: usize, bytes: usize| cx.scratch.at(offset, bytes);
        let rows = match functions.products {
            Products::Rows(_) => ROWS_TILE,
            Products::Tiles(_) => products::rows_grouped(routes, s.experts, Way::Floats),
        };
        let tiles = products::most_tiles(routes, s.experts, rows);
        let group = params::Group {
            ids: job.ids,
            ends: place(at.ends, 4 * s.experts)?,
            order: place(at.order, 4 * routes)?,
            tiles: place(at.tiles, 8 * tiles)?,
            tile_count: place(at.tile_count, 4)?,
            routes: routes as u32,
            experts: s.experts as u32,
            tile_rows: rows as u32,
        };
        // Eight routes a thread, or as many threads as a block may have; some where no token has its logits wanted.
        let threads = routes.div_ceil(8).next_multiple_of(256).clamp(256, 1024) as u32;
        cx.gpu.launch(
            &functions.group,
            Grid::new([s.experts, 1, 1], threads).shared(4 * s.experts),
            group,
        )?;
        let h1 = place(at.h1, 4 * routes * s.fc1_rows.max(s.hidden))?;
        let h3 = place(at.h3, if s.fc3 { 4 * routes * s.inter } else { 0 })?;
        let a = place(at.a, 4 * routes * s.inter)?;
        let step = Step { dense: self, cx, functions, at, group: &group, rows, tiles };
        step.product(0, &job.fc1, (job.x, s.k), h1)?;
        if let Some(fc3) = &job.fc3 {
            step.product(2, fc3, (job.x, s.k), h3)?;
        }
        let n = routes * s.inter;
        let params = params::Activate { h1, h3, y: a, n: n as u64, inter: s.inter as u32, act: job.act };
        cx.gpu.launch(&functions.activate, Grid::over(n), params)?;
        // Rows of FC1 are used up.
        step.product(1, &job.fc2, (a, 0), h1)?;
        let n = job.tokens * s.hidden;
        let (mix, y) = (job.mix, job.y);
        let params =
            params::Combine { rows: h1, mix, y, n: n as u64, hidden: s.hidden as u32, k: s.k as u32 };
        cx.gpu.launch(&functions.combine, Grid::over(n), params)
    }
}

/// Bytes of a weight written out.
const fn size(operand: Option<Operand>) -> usize {
    match operand {
        None => 4,
        Some(_) => 2,
    }
}

/// What the products of a step share.
struct Step<'a> {
    dense: &'a Dense,
    cx: &'a Context<'a>,
    functions: &'a Functions,
    at: &'a Layout,
    group: &'a params::Group,
    /// Rows of a tile, and tiles at most.
    rows: usize,
    tiles: usize,
}

impl Step<'_> {
    /// `y = W x + bias` for every route, chunk by chunk of experts; `x_div` as in gemm.cu.
    fn product(
        &self,
        number: usize,
        part: &Part<'_>,
        (x, x_div): (Addr, usize),
        y: Addr,
    ) -> Result<(), CudaError> {
        let (cx, experts) = (self.cx, self.dense.shape.experts);
        let (rows, cols) = (part.matrices.rows(), part.matrices.cols());
        let (ty, width) = match self.dense.operand {
            None => (FloatType::F32, size(None)),
            Some(Operand::F16) => (FloatType::F16, 2),
            Some(Operand::Bf16) => (FloatType::BF16, 2),
        };
        let kind = crate::weights::float_kind(ty);
        let expand = ready(self.functions.expand.get(number))?;
        let own = cx.scratch.at(self.at.own, 8 * self.tiles)?;
        let own_count = cx.scratch.at(self.at.own_count, 4)?;
        for begin in (0..experts).step_by(self.dense.chunk) {
            let end = (begin + self.dense.chunk).min(experts);
            let dense = cx.scratch.at(self.at.dense, (end - begin) * rows * cols * width)?;
            part.matrices.expand(cx, expand, begin..end, (dense, kind))?;
            let slice = params::Slice {
                tiles: self.group.tiles,
                tile_count: self.group.tile_count,
                own,
                own_count,
                begin: begin as u32,
                end: end as u32,
            };
            cx.gpu.launch(&self.functions.slice, Grid::new([1, 1, 1], 256), slice)?;
            let bias = part.bias.map_or(Ok(Addr::NONE), |b| b.at(begin * rows))?;
            let params = params::Gemm {
                w: dense_weights(dense, (rows, cols), (kind, width)),
                x,
                y,
                bias,
                order: self.group.order,
                tiles: own,
                ends: cx.scratch.at(self.at.ends + 4 * begin, 4 * (end - begin))?,
                tile_count: own_count,
                x_stride: cols as u64,
                y_stride: rows as u64,
                bias_float: optional(part.bias).1,
                m: self.group.routes,
                x_div: x_div as u32,
                y_by_route: u32::from(x_div == 0),
            };
            let (f, block, threads) = match &self.functions.products {
                Products::Rows(f) => (f, ROWS_BLOCK, 256),
                Products::Tiles([small, large]) => {
                    (if self.rows == 16 { small } else { large }, GEMM_BLOCK, 128)
                }
            };
            cx.gpu.launch(f, Grid::new([rows.div_ceil(block), self.tiles, 1], threads), params)?;
        }
        Ok(())
    }
}

/// Matrices of floats one after the other.
fn dense_weights(codes: Addr, (rows, cols): (usize, usize), (kind, size): (u32, usize)) -> params::Weights {
    params::Weights {
        codes,
        scales: Addr::NONE,
        zeros: Addr::NONE,
        codes_stride: (rows * cols * size) as u64,
        scales_stride: 0,
        zeros_stride: 0,
        rows: rows as u32,
        cols: cols as u32,
        row_bytes: (cols * size) as u32,
        blocks: 1,
        block_shift: 31,
        zero_row_bytes: 0,
        zero_kind: 0,
        zero_float: 0,
        scale_float: kind,
        aligned: u32::from((cols * size).is_multiple_of(16)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { experts: 32, k: 4, hidden: 2880, inter: 2880, fc1_rows: 5760, fc3: false };

    fn setting(dense: usize) -> Setting {
        Setting {
            operand: Some(Operand::Bf16),
            kv: crate::session::KvType::Float(FloatType::BF16),
            shared: 99 << 10,
            dense,
            all_dense: false,
        }
    }

    #[test]
    fn the_cap_holds_whatever_the_model() {
        let expert = 5760 * 2880 * 2;
        for cap in [expert, expert + 1, 5 * expert, 1 << 30] {
            let dense = Dense::new(SHAPE, &setting(cap)).unwrap();
            let at = dense.layout(64).unwrap();
            assert!(at.end - at.dense <= cap.next_multiple_of(256), "{cap}");
            assert!(dense.chunk >= 1 && dense.chunk <= 32);
        }
        let error = Dense::new(SHAPE, &setting(expert - 1)).map(|_| ()).unwrap_err();
        assert!(error.contains("at least --qmoe-scratch 32"), "{error}");
    }
}
