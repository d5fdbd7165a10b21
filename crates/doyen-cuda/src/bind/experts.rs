//! Routing and experts.
//!
//! In float32 every route reads its expert's rows as they lie, FC1 with the activation and FC2 with the weighted sum in one
//! launch each. On the tensor cores routes are put into the experts' order on the card (one token's need none), every
//! expert's rows are read once for all that is routed to it, and the rows of a token are summed in the order of its
//! routes.

use super::{
    Binder, Context, Kernel, cols,
    linear::{FEW, FEW_BLOCK},
    ready, rows_at,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::{Module, Operand},
    params,
    session::io::Io,
    weights::{Bank, Floats, optional},
};
use doyen_graph::{
    device::{DeviceError, Limits},
    lowered::{Experts, LValue, Route},
    ops::{Op, activation as theirs, moe::Moe, qmoe},
};
use doyen_tensor::{ExpertId, Tensor};

struct RouteKernel {
    route: Route,
    /// `WeightingKind` of route.cu.
    weighting: u32,
    function: Option<Function>,
}

impl RouteKernel {
    /// The weights and a byte for every expert.
    const fn shared(&self) -> usize {
        4 * self.route.k + self.route.experts
    }
}

impl Kernel for RouteKernel {
    fn name(&self) -> String {
        format!("route top-{} of {}", self.route.k, self.route.experts)
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Route, "route", self.shared())?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let Route { experts, k, .. } = self.route;
        let params = params::Route {
            logits: io.input(0)?,
            given: io.input(1)?,
            ids: io.output(0)?,
            weights: io.output(1)?,
            experts: experts as u32,
            k: k as u32,
            weighting: self.weighting,
        };
        let grid = Grid::new([io.input_numel(0) / experts.max(1), 1, 1], 32).shared(self.shared());
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
    }
}

pub(super) fn route(b: &Binder<'_>, r: &Route) -> Result<Box<dyn Kernel>, String> {
    let given = b.operand(1).is_some();
    if given && b.float_value(1).is_none() {
        return Err("its router weights are a constant".into());
    }
    let weighting = match (r.sparse_mixer, given, r.normalize) {
        (true, true, _) => return Err("router weights together with a sparse mixer have no meaning".into()),
        (true, false, _) => 4,
        (false, true, true) => 3,
        (false, true, false) => 2,
        (false, false, true) => 1,
        (false, false, false) => 0,
    };
    if r.k == 0 || r.k > r.experts {
        return Err(format!("{} experts a token out of {}", r.k, r.experts));
    }
    if b.output(0).is_none() || b.output(1).is_none() {
        return Err("nobody wants its routes".into());
    }
    let kernel = RouteKernel { route: r.clone(), weighting, function: None };
    if kernel.shared() > b.setting.shared {
        return Err(format!("{} experts are more than a block's shared memory holds", r.experts));
    }
    Ok(Box::new(kernel))
}

/// One projection of all experts.
struct Projection {
    bank: Bank,
    bias: Option<Floats>,
    functions: Option<ProjectionFunctions>,
}

struct ProjectionFunctions {
    routed: Function,
    activated: Function,
    sum: Function,
    /// Plain and with the activation.
    few: Option<[Function; 2]>,
    grouped: Option<[Function; 2]>,
}

impl Projection {
    fn load(
        &mut self,
        gpu: &Gpu,
        constants: &mut Uploads,
        operand: Option<Operand>,
        sum_shared: usize,
    ) -> Result<(), DeviceError> {
        self.bank.upload(gpu, constants)?;
        if let Some(b) = &mut self.bias {
            b.upload(gpu, constants)?;
        }
        let few = Module::Gemv(self.bank.width());
        let grouped = operand.map(|o| {
            let many = Module::Gemm(self.bank.width(), o);
            Ok::<_, CudaError>([gpu.function(many, "grouped_16", 0)?, gpu.function(many, "grouped_64", 0)?])
        });
        let tile = self.bank.few().zip(operand).map(|(bits, o)| {
            let module = Module::Few(bits, o);
            Ok::<_, CudaError>([gpu.function(module, "few", 0)?, gpu.function(module, "few_activated", 0)?])
        });
        self.functions = Some(ProjectionFunctions {
            few: tile.transpose()?,
            routed: gpu.function(few, "routed", 0)?,
            activated: gpu.function(few, "routed_activated", 0)?,
            sum: gpu.function(few, "routed_sum", sum_shared)?,
            grouped: grouped.transpose()?,
        });
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.bank.bytes() + self.bias.as_ref().map_or(0, Floats::bytes)
    }
}

struct ExpertsKernel {
    fc1: Projection,
    fc2: Projection,
    fc3: Option<Projection>,
    act: params::Activation,
    experts: usize,
    k: usize,
    inter: usize,
    operand: Option<Operand>,
    x: LValue,
    functions: Option<Shared>,
}

/// Kernels that no projection owns.
struct Shared {
    count: Function,
    place: Function,
    activate: Function,
    combine: Function,
}

/// Where a step's intermediate values lie in scratch, in bytes; `end` is the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// FC1 rows of every route; rows of FC2 once they are used up.
    h1: usize,
    h3: usize,
    /// Activated rows.
    a: usize,
    counts: usize,
    ends: usize,
    order: usize,
    tiles: usize,
    tile_count: usize,
    end: usize,
}

/// Rows of tiles of the grouped products. An expert's last tile is rarely full, so few routes to an expert take small ones.
const fn tile_rows(routes: usize, experts: usize, few: bool) -> usize {
    if few && routes <= FEW * experts {
        FEW
    } else if routes < 32 * experts {
        16
    } else {
        64
    }
}

/// Tiles that `routes` routes to `experts` experts have at most.
const fn most_tiles(routes: usize, experts: usize, rows: usize) -> usize {
    let full = routes / rows;
    full + if routes < experts { routes } else { experts }
}

impl ExpertsKernel {
    fn layout(&self, routes: usize) -> Option<Layout> {
        let hidden = self.fc2.bank.rows();
        let mut end = 0usize;
        let mut take = |numbers: usize, times: usize| {
            let start = end;
            end = numbers
                .checked_mul(times)?
                .checked_mul(4)?
                .checked_add(start)?
                .checked_next_multiple_of(256)?;
            Some(start)
        };
        let h1 = take(routes, self.fc1.bank.rows().max(hidden))?;
        let h3 = take(routes, if self.fc3.is_some() { self.inter } else { 0 })?;
        let a = take(routes, self.inter)?;
        let counts = take(self.experts, 1)?;
        let ends = take(self.experts, 1)?;
        let order = take(routes, 1)?;
        let tiles = take(most_tiles(routes, self.experts, FEW), 2)?;
        let tile_count = take(1, 1)?;
        Some(Layout { h1, h3, a, counts, ends, order, tiles, tile_count, end })
    }

    /// Products of routes one by one, in float32.
    fn exact(&self, io: &Io<'_>, cx: &Context<'_>, (tokens, at): (usize, Layout)) -> Result<(), CudaError> {
        let routes = tokens * self.k;
        let place = |offset: usize, numbers: usize| cx.scratch.at(offset, 4 * numbers);
        let a = place(at.a, routes * self.inter)?;
        let params = |p: &Projection, x: Addr, y: Addr, x_div: usize| -> Result<params::Routed, CudaError> {
            let (bias, bias_float) = optional(p.bias.as_ref());
            Ok(params::Routed {
                w: p.bank.params()?,
                x,
                y,
                bias,
                experts: io.input(1)?,
                mix: io.input(2)?,
                bias_float,
                x_div: x_div as u32,
                routes: routes as u32,
                k: self.k as u32,
                act: self.act,
            })
        };
        let x = io.input(0)?;
        let f1 = ready(self.fc1.functions.as_ref())?;
        if let Some(fc3) = &self.fc3 {
            let (h1, h3) = (place(at.h1, routes * self.inter)?, place(at.h3, routes * self.inter)?);
            for (p, h) in [(&self.fc1, h1), (fc3, h3)] {
                let grid = Grid::new([p.bank.rows().div_ceil(8), routes, 1], 128);
                cx.gpu.launch(&ready(p.functions.as_ref())?.routed, grid, params(p, x, h, self.k)?)?;
            }
            self.activate(cx, routes, (h1, h3, a))?;
        } else {
            let grid = Grid::new([self.inter.div_ceil(4), routes, 1], 128);
            cx.gpu.launch(&f1.activated, grid, params(&self.fc1, x, a, self.k)?)?;
        }
        let grid = Grid::new([self.fc2.bank.rows().div_ceil(2), tokens, 1], 256).shared(self.sum_shared());
        cx.gpu.launch(&ready(self.fc2.functions.as_ref())?.sum, grid, params(&self.fc2, a, io.output(0)?, 1)?)
    }

    /// Two numbers a route of a token.
    const fn sum_shared(&self) -> usize {
        8 * self.k
    }

    fn activate(
        &self,
        cx: &Context<'_>,
        routes: usize,
        (h1, h3, y): (Addr, Addr, Addr),
    ) -> Result<(), CudaError> {
        let n = routes * self.inter;
        let params = params::Activate { h1, h3, y, n: n as u64, inter: self.inter as u32, act: self.act };
        cx.gpu.launch(&ready(self.functions.as_ref())?.activate, Grid::over(n), params)
    }

    /// Products expert by expert on the tensor cores.
    fn grouped(&self, io: &Io<'_>, cx: &Context<'_>, (tokens, at): (usize, Layout)) -> Result<(), CudaError> {
        let routes = tokens * self.k;
        let hidden = self.fc2.bank.rows();
        let place = |offset: usize, numbers: usize| cx.scratch.at(offset, 4 * numbers);
        let groups = self.group(io, cx, (tokens, at))?;
        let x = io.input(0)?;
        let h1 = place(at.h1, routes * self.fc1.bank.rows().max(hidden))?;
        let h3 = place(at.h3, if self.fc3.is_some() { routes * self.inter } else { 0 })?;
        let a = place(at.a, routes * self.inter)?;
        if groups.rows == FEW && self.fc3.is_none() {
            self.product(cx, &groups, Product { p: &self.fc1, x, y: a, x_div: self.k, activated: true })?;
        } else {
            self.product(cx, &groups, Product { p: &self.fc1, x, y: h1, x_div: self.k, activated: false })?;
            if let Some(fc3) = &self.fc3 {
                self.product(cx, &groups, Product { p: fc3, x, y: h3, x_div: self.k, activated: false })?;
            }
            self.activate(cx, routes, (h1, h3, a))?;
        }
        self.product(cx, &groups, Product { p: &self.fc2, x: a, y: h1, x_div: 0, activated: false })?;
        let params = params::Combine {
            rows: h1,
            mix: io.input(2)?,
            y: io.output(0)?,
            n: (tokens * hidden) as u64,
            hidden: hidden as u32,
            k: self.k as u32,
        };
        cx.gpu.launch(&ready(self.functions.as_ref())?.combine, Grid::over(tokens * hidden), params)
    }

    /// Whether the kernels for few rows read every projection.
    fn all_few(&self) -> bool {
        let all = [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()];
        all.into_iter().flatten().all(|p| p.bank.few().is_some())
    }

    /// Puts the routes into the experts' order. One token's routes are tiles as they are.
    fn group(
        &self,
        io: &Io<'_>,
        cx: &Context<'_>,
        (tokens, at): (usize, Layout),
    ) -> Result<Groups, CudaError> {
        let (routes, experts) = (tokens * self.k, self.experts);
        let rows = tile_rows(routes, experts, self.all_few());
        let ids = io.input(1)?;
        if rows == FEW && tokens == 1 {
            let none = Addr::NONE;
            return Ok(Groups {
                rows,
                tiles: routes,
                routes,
                experts: ids,
                order: none,
                list: none,
                ends: none,
                count: none,
            });
        }
        let tiles = most_tiles(routes, experts, rows);
        let place = |offset: usize, numbers: usize| cx.scratch.at(offset, 4 * numbers);
        let group = params::Group {
            ids,
            counts: place(at.counts, experts)?,
            ends: place(at.ends, experts)?,
            order: place(at.order, routes)?,
            tiles: place(at.tiles, 2 * tiles)?,
            tile_count: place(at.tile_count, 1)?,
            routes: routes as u32,
            experts: experts as u32,
            tile_rows: rows as u32,
        };
        let shared = ready(self.functions.as_ref())?;
        cx.gpu.launch(&shared.count, Grid::new([experts, 1, 1], 256), group)?;
        cx.gpu.launch(&shared.place, Grid::new([experts, 1, 1], 256), group)?;
        Ok(Groups {
            rows,
            tiles,
            routes,
            experts: Addr::NONE,
            order: group.order,
            list: group.tiles,
            ends: group.ends,
            count: group.tile_count,
        })
    }

    fn product(&self, cx: &Context<'_>, g: &Groups, job: Product<'_>) -> Result<(), CudaError> {
        let Product { p, x, y, x_div, activated } = job;
        let functions = ready(p.functions.as_ref())?;
        let (bias, bias_float) = optional(p.bias.as_ref());
        let w = p.bank.params()?;
        let (x_stride, m) = (p.bank.cols() as u64, g.routes as u32);
        // What reads in the experts' order (FC2) writes rows by route; FC1 the other way round.
        let y_by_route = u32::from(x_div == 0);
        if g.rows == FEW {
            let [plain, with_activation] = ready(functions.few.as_ref())?;
            let (values, per_block, f) = match (activated, self.act.gate) {
                (false, _) => (p.bank.rows(), FEW_BLOCK, plain),
                (true, NONE) => (self.inter, FEW_BLOCK, with_activation),
                (true, _) => (self.inter, FEW_BLOCK / 2, with_activation),
            };
            let params = params::Few {
                w,
                x,
                y,
                bias,
                experts: g.experts,
                order: g.order,
                tiles: g.list,
                ends: g.ends,
                tile_count: g.count,
                x_stride,
                y_stride: values as u64,
                bias_float,
                m,
                x_div: x_div as u32,
                y_by_route,
                act: self.act,
            };
            return cx.gpu.launch(f, Grid::new([values.div_ceil(per_block), g.tiles, 1], 256), params);
        }
        let [small, large] = ready(functions.grouped.as_ref())?;
        let params = params::Gemm {
            w,
            x,
            y,
            bias,
            order: g.order,
            tiles: g.list,
            ends: g.ends,
            tile_count: g.count,
            x_stride,
            y_stride: p.bank.rows() as u64,
            bias_float,
            m,
            x_div: x_div as u32,
            y_by_route,
        };
        let grid = Grid::new([p.bank.rows().div_ceil(64), g.tiles, 1], 128);
        cx.gpu.launch(if g.rows == 16 { small } else { large }, grid, params)
    }
}

/// The routes of a step by expert.
struct Groups {
    /// Rows of a tile.
    rows: usize,
    /// Tiles there are at most.
    tiles: usize,
    routes: usize,
    /// The expert of each route, where every route is a tile of its own; otherwise the others.
    experts: Addr,
    order: Addr,
    list: Addr,
    ends: Addr,
    count: Addr,
}

/// One grouped product.
#[derive(Clone, Copy)]
struct Product<'a> {
    p: &'a Projection,
    x: Addr,
    y: Addr,
    /// Routes that share a row of `x`; 0 where `x` is in the experts' order.
    x_div: usize,
    activated: bool,
}

impl Kernel for ExpertsKernel {
    fn name(&self) -> String {
        let bits = |p: &Projection| p.bank.width().bits();
        let how = self.operand.map_or_else(|| "f32".into(), |o| format!("{o} tensor cores"));
        format!("experts {}b / {}b {how}", bits(&self.fc1), bits(&self.fc2))
    }

    fn scratch(&self, limits: &Limits) -> usize {
        let routes = rows_at(&self.x, limits).checked_mul(self.k);
        routes.and_then(|r| self.layout(r)).map_or(usize::MAX, |l| l.end)
    }

    fn resident(&self) -> usize {
        self.fc1.bytes() + self.fc2.bytes() + self.fc3.as_ref().map_or(0, Projection::bytes)
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        let shared = self.sum_shared();
        for p in [Some(&mut self.fc1), Some(&mut self.fc2), self.fc3.as_mut()].into_iter().flatten() {
            p.load(gpu, constants, self.operand, shared)?;
        }
        let function = |entry| gpu.function(Module::Route, entry, 0);
        self.functions = Some(Shared {
            count: function("group_count")?,
            place: function("group_place")?,
            activate: function("activate_rows")?,
            combine: function("combine")?,
        });
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let tokens = io.input_numel(0) / self.fc2.bank.rows().max(1);
        let layout = tokens.checked_mul(self.k).and_then(|r| self.layout(r));
        let layout = ready(layout.as_ref())?;
        if self.operand.is_some() {
            self.grouped(io, cx, (tokens, *layout))
        } else {
            self.exact(io, cx, (tokens, *layout))
        }
    }
}

/// The three projections as the operators count them.
const STORED: [qmoe::Projection; 3] = [qmoe::Projection::Fc1, qmoe::Projection::Fc2, qmoe::Projection::Fc3];

pub(super) fn bind(b: &Binder<'_>, e: &Experts) -> Result<Box<dyn Kernel>, String> {
    let x = b.float_value(0).ok_or("its input is a constant")?.clone();
    let tensors = b.constants(3)?;
    let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    let ([fc1, fc2, fc3], activation) = match &e.op {
        Op::QMoe(op) => (quantized(op, &refs)?, op.activation),
        Op::Moe(op) => (float(op, &refs)?, op.activation),
        other => return Err(format!("{other:?} is not a bank of experts")),
    };
    let (Some(fc1), Some(fc2)) = (fc1, fc2) else { return Err("it has no experts".into()) };
    if cols(&x) != Some(fc2.bank.rows()) || fc1.bank.cols() != fc2.bank.rows() {
        let hidden = fc2.bank.rows();
        return Err(format!("its input has extents {:?}, the experts take {hidden}", x.dims));
    }
    let inter = fc2.bank.cols();
    let act = activation_of(activation, fc3.is_some());
    // FC1 rows per intermediate value, by the gate's layout.
    let per_value = if matches!(act.gate, INTERLEAVED | CONCATENATED) { 2 } else { 1 };
    if fc1.bank.rows() != per_value * inter || fc3.as_ref().is_some_and(|p| p.bank.rows() != inter) {
        return Err(format!("FC1 has {} rows for {inter} intermediate values", fc1.bank.rows()));
    }
    for p in [Some(&fc1), Some(&fc2), fc3.as_ref()].into_iter().flatten() {
        if p.bias.as_ref().is_some_and(|bias| bias.len() != e.experts * p.bank.rows()) {
            return Err(format!("bias: expected {} x {} numbers", e.experts, p.bank.rows()));
        }
    }
    let operand = b.setting.operand;
    let (experts, k) = (e.experts, e.k);
    // A launch has 65535 blocks along the second axis.
    Ok(Box::new(ExpertsKernel { fc1, fc2, fc3, act, experts, k, inter, operand, x, functions: None }))
}

/// `GateKind` of doyen.cuh.
const NONE: u32 = 0;
const INTERLEAVED: u32 = 1;
const CONCATENATED: u32 = 2;
const SEPARATE: u32 = 3;

/// The kernels' form of the operator's activation.
fn activation_of(a: theirs::Activation, has_fc3: bool) -> params::Activation {
    let gate = if has_fc3 { SEPARATE } else { NONE };
    let plain = |kind| params::Activation { kind, gate, alpha: 1.0, beta: 0.0, limit: f32::INFINITY };
    match a {
        theirs::Activation::Identity => plain(0),
        theirs::Activation::Relu => plain(1),
        theirs::Activation::Gelu => plain(2),
        theirs::Activation::Silu => plain(3),
        theirs::Activation::Swiglu(s) => {
            let gate = match s.fusion.resolve(has_fc3) {
                theirs::Fusion::Separate => SEPARATE,
                theirs::Fusion::Interleaved => INTERLEAVED,
                theirs::Fusion::Concatenated => CONCATENATED,
            };
            params::Activation { kind: 4, gate, alpha: s.alpha, beta: s.beta, limit: s.limit }
        }
    }
}

type Projections = [Option<Projection>; 3];

/// QMoE's operands from its index 2 on: weights, scales and bias of each projection, then their zero points.
fn quantized(op: &qmoe::QMoe, refs: &[Option<&Tensor>]) -> Result<Projections, String> {
    let operands = op.operands(refs).map_err(|e| e.to_string())?;
    let at = |i: usize| refs.get(i).copied().flatten();
    let mut found = [const { None }; 3];
    for (i, (slot, p)) in found.iter_mut().zip(STORED).enumerate() {
        let (Some(codes), Some(scales)) = (at(3 * i), at(3 * i + 1)) else { continue };
        let Some(first) = operands.matrix(p, ExpertId(0)) else { continue };
        let bank = Bank::quantized(&first, operands.experts, codes, scales, at(9 + i))?;
        let bias = at(3 * i + 2).map(Floats::of).transpose().map_err(|e| e.to_string())?;
        *slot = Some(Projection { bank, bias, functions: None });
    }
    Ok(found)
}

/// MoE's operands from its index 2 on: weights and bias of each projection.
fn float(op: &Moe, refs: &[Option<&Tensor>]) -> Result<Projections, String> {
    let operands = op.operands(refs).map_err(|e| e.to_string())?;
    let at = |i: usize| refs.get(i).copied().flatten();
    let mut found = [const { None }; 3];
    for (i, (slot, p)) in found.iter_mut().zip(STORED).enumerate() {
        let (Some(values), Some(first)) = (at(2 * i), operands.matrix(p, ExpertId(0))) else { continue };
        let bank = Bank::floats(values, operands.experts, (first.rows, first.cols), first.cols)?;
        let bias = at(2 * i + 1).map(Floats::of).transpose().map_err(|e| e.to_string())?;
        *slot = Some(Projection { bank, bias, functions: None });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the routes of each expert, the tiles fit.
    #[test]
    fn tiles_fit_every_distribution() {
        for counts in [vec![1; 7], vec![17, 0, 1, 16], vec![64, 65, 1], vec![0, 0, 0], vec![1000]] {
            let (routes, experts) = (counts.iter().sum::<usize>(), counts.len());
            for rows in [8, 16, 64] {
                let tiles: usize = counts.iter().map(|c: &usize| c.div_ceil(rows)).sum();
                assert!(tiles <= most_tiles(routes, experts, rows), "{counts:?} in tiles of {rows}");
            }
            assert!(most_tiles(routes, experts, 64) <= most_tiles(routes, experts, 16));
            assert!(most_tiles(routes, experts, 16) <= most_tiles(routes, experts, FEW));
        }
    }
}
