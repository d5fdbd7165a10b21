//! Routing and experts.
//!
//! In float32 every route reads its expert's rows as they lie, FC1 with the activation and FC2 with the weighted sum in one
//! launch each. On the tensor cores routes are put into the experts' order on the card (one token's need none), every
//! expert's rows are read once for all that is routed to it, and the rows of a token are summed in the order of its
//! routes.

use super::{
    Binder, Context, Kernel, cols,
    dense::{Dense, Job, Matrices, Part, Shape},
    linear::Linear,
    mini,
    products::{self, FEW, Groups, Kernels, Product, Way},
    ready, rows_at,
    stream::{self, Stream},
    wide,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::{Module, Operand, Width},
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

/// Warps of a block of `router`, and its dynamic shared memory at most.
const ROUTER_WARPS: usize = 8;
const ROUTER_SHARED: usize = 44 << 10;

/// Experts whose logits a warp keeps in registers: 32 x `KEPT` of route.cu.
const KEPT_EXPERTS: usize = 256;

/// The first `WeightingKind` of route.cu that more than the logits go into.
const GIVEN: u32 = 2;

pub(crate) struct RouteKernel {
    route: Route,
    /// `WeightingKind` of route.cu.
    weighting: u32,
    function: Option<Function>,
    router: Option<Function>,
}

impl RouteKernel {
    /// The weights and a byte for every expert.
    const fn shared(&self) -> usize {
        4 * self.route.k + self.route.experts
    }

    fn params(&self, io: &Io<'_>) -> Result<params::Route, CudaError> {
        Ok(params::Route {
            logits: io.input(0)?,
            given: io.input(1)?,
            ids: io.output(0)?,
            weights: io.output(1)?,
            experts: self.route.experts as u32,
            k: self.route.k as u32,
            weighting: self.weighting,
        })
    }

    /// Routes of `m` rows that `norm` makes, whose logits are products with the floats of `linear`, in one launch. False, and
    /// nothing launched, where there is no kernel for it.
    ///
    /// # Errors
    /// When the launch fails.
    pub(super) fn router(
        &self,
        cx: &Context<'_>,
        (norm, m): (params::Norm, usize),
        (linear, logits): (&Linear, Addr),
        io: &Io<'_>,
    ) -> Result<bool, CudaError> {
        let (w, shared) = (linear.bank.params()?, 4 * norm.width as usize);
        let floats = matches!(linear.bank.width(), Width::F16 | Width::F32);
        let by_fours = w.codes.is_aligned(16) && w.row_bytes.is_multiple_of(16);
        let selected = self.route.experts <= KEPT_EXPERTS && self.route.k <= 32 && self.weighting < GIVEN;
        if !(floats
            && by_fours
            && selected
            && shared <= ROUTER_SHARED
            && linear.bank.rows() == self.route.experts)
        {
            return Ok(false);
        }
        let (bias, bias_float) = optional(linear.bias.as_ref());
        let (route, arrived) = (self.params(io)?, cx.arrived);
        let params = params::Router { norm, w, route, bias, logits, arrived, bias_float, m: m as u32 };
        let blocks = self.route.experts.div_ceil(ROUTER_WARPS);
        let grid = Grid::new([blocks, m, 1], 32 * ROUTER_WARPS as u32).shared(shared);
        cx.gpu.launch(ready(self.router.as_ref())?, grid, params)?;
        Ok(true)
    }
}

impl Kernel for RouteKernel {
    fn name(&self) -> String {
        format!("route top-{} of {}", self.route.k, self.route.experts)
    }

    fn route(&self) -> Option<&RouteKernel> {
        Some(self)
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Route, "route", self.shared())?);
        self.router = Some(gpu.function(Module::Route, "router", ROUTER_SHARED)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let (experts, params) = (self.route.experts, self.params(io)?);
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
        return Err(format!("expected 1 to {} experts a token, found {}", r.experts, r.k));
    }
    if b.output(0).is_none() || b.output(1).is_none() {
        return Err("nobody wants its routes".into());
    }
    let logits = b.float_value(0).ok_or("its logits are a constant")?;
    if cols(logits) != Some(r.experts) {
        return Err(format!(
            "its logits have extents {:?}, expected {} experts last",
            logits.dims, r.experts
        ));
    }
    let kernel = RouteKernel { route: r.clone(), weighting, function: None, router: None };
    // Grouping keeps a count of every expert.
    let shared = kernel.shared().max(r.experts.saturating_mul(4));
    if shared > b.setting.shared {
        let most = b.setting.shared;
        return Err(format!(
            "{} experts take {shared} bytes of shared memory, a block has {most}",
            r.experts
        ));
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
    kernels: Option<Kernels>,
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
        let exact = Module::Gemv(self.bank.width());
        self.functions = Some(ProjectionFunctions {
            routed: gpu.function(exact, "routed", 0)?,
            activated: gpu.function(exact, "routed_activated", 0)?,
            sum: gpu.function(exact, "routed_sum", sum_shared)?,
            kernels: match operand {
                Some(o) => Kernels::load(gpu, &self.bank, o)?,
                None => None,
            },
        });
        Ok(())
    }

    /// Its kernels on the tensor cores.
    fn kernels(&self) -> Result<&Kernels, CudaError> {
        ready(ready(self.functions.as_ref())?.kernels.as_ref())
    }

    /// Its kernels of decode.
    fn stream(&self) -> Result<&Stream, CudaError> {
        ready(self.kernels()?.stream())
    }

    fn bytes(&self) -> usize {
        self.bank.bytes() + self.bias.as_ref().map_or(0, Floats::bytes)
    }

    fn part(&self) -> Part<'_> {
        Part { matrices: &self.bank, bias: self.bias.as_ref() }
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
    /// For what no packed kernel takes on the tensor cores, or for everything.
    dense: Option<Dense>,
    all_dense: bool,
    functions: Option<Shared>,
}

/// Routes to an expert, on average, from which on matrices that no packed kernel takes are written out once for all of them.
const MANY: usize = 8;

/// Kernels that no projection owns.
struct Shared {
    group: Function,
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
    /// Narrowed activations of one product at a time.
    narrow: usize,
    ends: usize,
    order: usize,
    tiles: usize,
    tile_count: usize,
    end: usize,
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
        let a = take(routes, wide::line(self.inter))?;
        // Two bytes a number; FC1 reads fewer rows than there are routes.
        let narrow = take(routes.checked_mul(wide::line(hidden.max(self.inter)))?.div_ceil(2), 1)?;
        let ends = take(self.experts, 1)?;
        let order = take(routes, 1)?;
        let tiles = take(products::most_tiles(routes, self.experts, FEW), 2)?;
        let tile_count = take(1, 1)?;
        Some(Layout { h1, h3, a, narrow, ends, order, tiles, tile_count, end })
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

    /// How all projections are multiplied on the tensor cores; none where one of them cannot be, or not as the others.
    fn way(&self) -> Option<Way> {
        let mut all = [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()].into_iter().flatten();
        let first = products::way(&all.next()?.bank)?;
        all.all(|p| products::way(&p.bank) == Some(first)).then_some(first)
    }

    /// Dense products, where `tokens` tokens are multiplied so.
    fn densely(&self, tokens: usize) -> Option<&Dense> {
        let many = tokens.saturating_mul(self.k) > MANY * self.experts;
        self.dense.as_ref().filter(|_| many || self.all_dense)
    }

    /// Whether `tokens` tokens are few enough that routes are read one by one: most of them go to experts of their own. Grouped
    /// codes that flow are faster from half as many on.
    fn streams(&self, tokens: usize) -> bool {
        let flows = |p: &Projection| p.kernels().is_ok_and(|k| k.flow().is_some());
        let share = if flows(&self.fc1) && flows(&self.fc2) { 4 } else { 2 };
        self.fc3.is_none()
            && share * tokens * self.k <= self.experts.max(share * self.k)
            && stream::takes_experts(&self.fc1.bank, &self.fc2.bank, self.k)
    }

    /// Products of few tokens on the tensor cores, in two launches.
    fn stream(&self, io: &Io<'_>, cx: &Context<'_>, (tokens, at): (usize, Layout)) -> Result<(), CudaError> {
        let routes = stream::Routes { experts: io.input(1)?, mix: io.input(2)?, tokens, k: self.k };
        let a = cx.scratch.at(at.a, 2 * tokens * self.k * self.inter)?;
        let fc1 = stream::Job { bank: &self.fc1.bank, bias: self.fc1.bias.as_ref(), x: io.input(0)?, y: a };
        let fc2 = stream::Job { bank: &self.fc2.bank, bias: self.fc2.bias.as_ref(), x: a, y: io.output(0)? };
        self.fc1.stream()?.activated(cx, &fc1, routes, self.act, &self.fc2.bank)?;
        self.fc2.stream()?.sum(cx, &fc2, routes)
    }

    /// Products expert by expert on the tensor cores.
    fn grouped<'a>(
        &'a self,
        io: &Io<'_>,
        cx: &Context<'_>,
        (tokens, at): (usize, Layout),
        way: Way,
    ) -> Result<(), CudaError> {
        let routes = tokens * self.k;
        let hidden = self.fc2.bank.rows();
        let place = |offset: usize, numbers: usize| cx.scratch.at(offset, 4 * numbers);
        let groups = self.group(io, cx, (tokens, at), way)?;
        let x = io.input(0)?;
        let h1 = place(at.h1, routes * self.fc1.bank.rows().max(hidden))?;
        let h3 = place(at.h3, if self.fc3.is_some() { routes * self.inter } else { 0 })?;
        let a = place(at.a, routes * self.inter)?;
        let narrow = place(at.narrow, (routes * wide::line(hidden.max(self.inter))).div_ceil(2))?;
        let job = |p: &'a Projection, x: Addr, y: Addr, act: Option<params::Activation>| {
            // FC2 reads what FC1 left in the experts' order.
            let (x_rows, x_div) = if x == a { (routes, 0) } else { (tokens, self.k) };
            let (bank, bias) = (&p.bank, p.bias.as_ref());
            Product { bank, bias, x, x_rows, x_div, y, narrow, act }
        };
        let product = |p: &'a Projection, x: Addr, y: Addr, act: Option<params::Activation>| {
            products::launch(cx, p.kernels()?, &groups, &job(p, x, y, act))
        };
        let wide = (self.fc1.kernels()?.wide(), self.fc2.kernels()?.wide());
        let eight = (self.fc1.kernels()?.eight(), self.fc2.kernels()?.eight());
        let flow = (self.fc1.kernels()?.flow(), self.fc2.kernels()?.flow());
        let in_order = groups.rows == FEW && !groups.experts.is_some() && self.fc3.is_none();
        if let (Some(wide1), Some(wide2), None, true) = (wide.0, wide.1, &self.fc3, groups.rows > FEW) {
            let next = (wide2, &self.fc2.bank);
            wide1.activated(cx, &groups, &job(&self.fc1, x, a, None), self.act, next)?;
            wide2.launch(cx, &groups, &job(&self.fc2, a, h1, None))?;
        } else if let (Some(flow1), Some(flow2), true) = (flow.0, flow.1, in_order) {
            flow1.activated(cx, &groups, &job(&self.fc1, x, a, None), self.act)?;
            flow2.product(cx, &groups, &job(&self.fc2, a, h1, None), true)?;
        } else if let (Some(eight1), Some(eight2), true) = (eight.0, eight.1, in_order) {
            eight1.activated(cx, &groups, &job(&self.fc1, x, a, None), self.act, eight2)?;
            eight2.product(cx, &groups, &job(&self.fc2, a, h1, None), true)?;
        } else {
            if groups.rows == FEW && self.fc3.is_none() {
                product(&self.fc1, x, a, Some(self.act))?;
            } else {
                product(&self.fc1, x, h1, None)?;
                if let Some(fc3) = &self.fc3 {
                    product(fc3, x, h3, None)?;
                }
                self.activate(cx, routes, (h1, h3, a))?;
            }
            product(&self.fc2, a, h1, None)?;
        }
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

    /// Puts the routes into the experts' order. One token's routes are tiles as they are.
    fn group(
        &self,
        io: &Io<'_>,
        cx: &Context<'_>,
        (tokens, at): (usize, Layout),
        way: Way,
    ) -> Result<Groups, CudaError> {
        let (routes, experts) = (tokens * self.k, self.experts);
        let wide = self.fc1.kernels()?.wide().is_some() && self.fc2.kernels()?.wide().is_some();
        let rows = match products::rows_grouped(routes, experts, way) {
            rows if wide => wide::rows_grouped(routes, experts, rows),
            rows => rows,
        };
        let ids = io.input(1)?;
        if rows == FEW && tokens == 1 {
            return Ok(Groups { experts: ids, tiles: routes, ..Groups::none(routes, rows) });
        }
        let tiles = products::most_tiles(routes, experts, rows);
        let place = |offset: usize, numbers: usize| cx.scratch.at(offset, 4 * numbers);
        let group = params::Group {
            ids,
            ends: place(at.ends, experts)?,
            order: place(at.order, routes)?,
            tiles: place(at.tiles, 2 * tiles)?,
            tile_count: place(at.tile_count, 1)?,
            routes: routes as u32,
            experts: experts as u32,
            tile_rows: rows as u32,
        };
        let shared = ready(self.functions.as_ref())?;
        // Eight routes a thread, or as many threads as a block may have; some where no token has its logits wanted.
        let threads = routes.div_ceil(8).next_multiple_of(256).clamp(256, 1024) as u32;
        cx.gpu.launch(&shared.group, Grid::new([experts, 1, 1], threads).shared(4 * experts), group)?;
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
}

impl Kernel for ExpertsKernel {
    fn name(&self) -> String {
        let bits = |p: &Projection| p.bank.width().bits();
        let how = match (&self.dense, self.operand, self.way()) {
            (Some(dense), ..) if self.all_dense => dense.name(),
            (Some(dense), ..) => format!("f32 / {}", dense.name()),
            (_, Some(o), Some(_)) => format!("{o} tensor cores"),
            _ => "f32".into(),
        };
        format!("experts {}b / {}b {how}", bits(&self.fc1), bits(&self.fc2))
    }

    fn scratch(&self, limits: &Limits) -> usize {
        let tokens = rows_at(&self.x, limits);
        let routes = tokens.checked_mul(self.k);
        let dense = self.densely(tokens).map_or(0, |d| d.scratch(routes));
        routes.and_then(|r| self.layout(r)).map_or(usize::MAX, |l| l.end).max(dense)
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
            group: gpu.function(Module::Route, "group", 4 * self.experts)?,
            activate: function("activate_rows")?,
            combine: function("combine")?,
        });
        let parts = [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()];
        let banks: Vec<&dyn Matrices> =
            parts.into_iter().flatten().map(|p| -> &dyn Matrices { &p.bank }).collect();
        if let Some(dense) = &mut self.dense {
            dense.load(gpu, &banks)?;
        }
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let tokens = io.input_numel(0) / self.fc2.bank.rows().max(1);
        if let Some(dense) = self.densely(tokens) {
            let job = Job {
                fc1: self.fc1.part(),
                fc2: self.fc2.part(),
                fc3: self.fc3.as_ref().map(Projection::part),
                act: self.act,
                x: io.input(0)?,
                ids: io.input(1)?,
                mix: io.input(2)?,
                y: io.output(0)?,
                tokens,
            };
            return dense.run(cx, &job);
        }
        let layout = tokens.checked_mul(self.k).and_then(|r| self.layout(r));
        let layout = ready(layout.as_ref())?;
        match self.way().filter(|_| self.operand.is_some()) {
            Some(Way::Codes) if self.streams(tokens) => self.stream(io, cx, (tokens, *layout)),
            Some(way) => self.grouped(io, cx, (tokens, *layout), way),
            None => self.exact(io, cx, (tokens, *layout)),
        }
    }
}

/// The three projections as the operators count them.
pub(super) const STORED: [qmoe::Projection; 3] =
    [qmoe::Projection::Fc1, qmoe::Projection::Fc2, qmoe::Projection::Fc3];

pub(super) fn bind(b: &Binder<'_>, e: &Experts) -> Result<Box<dyn Kernel>, String> {
    let x = b.float_value(0).ok_or("its input is a constant")?.clone();
    let tensors = b.constants(3)?;
    let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    let ([fc1, fc2, fc3], activation) = match &e.op {
        Op::QMoe(op) if op.kind != qmoe::Kind::Int => return mini::bind(b, e, op),
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
    check_rows(&act, (fc1.bank.rows(), fc3.as_ref().map(|p| p.bank.rows())), inter)?;
    for p in [Some(&fc1), Some(&fc2), fc3.as_ref()].into_iter().flatten() {
        if p.bias.as_ref().is_some_and(|bias| bias.len() != e.experts * p.bank.rows()) {
            return Err(format!("bias: expected {} x {} numbers", e.experts, p.bank.rows()));
        }
    }
    let (operand, all_dense) = (b.setting.operand, b.setting.all_dense);
    let (experts, k) = (e.experts, e.k);
    let (hidden, fc1_rows) = (fc2.bank.rows(), fc1.bank.rows());
    let shape = Shape { experts, k, hidden, inter, fc1_rows, fc3: fc3.is_some() };
    let mut kernel = ExpertsKernel {
        fc1,
        fc2,
        fc3,
        act,
        experts,
        k,
        inter,
        operand,
        x,
        dense: None,
        all_dense,
        functions: None,
    };
    if all_dense || (operand.is_some() && kernel.way().is_none()) {
        kernel.dense = Some(Dense::new(shape, &b.setting)?);
    }
    Ok(Box::new(kernel))
}

/// Checks the rows of FC1 and, where there is one, of FC3.
pub(super) fn check_rows(
    act: &params::Activation,
    (fc1, fc3): (usize, Option<usize>),
    inter: usize,
) -> Result<(), String> {
    // FC1 rows per intermediate value, by the gate's layout.
    let per_value = if matches!(act.gate, INTERLEAVED | CONCATENATED) { 2 } else { 1 };
    if fc1 != per_value * inter || fc3.is_some_and(|rows| rows != inter) {
        return Err(format!("FC1 has {fc1} rows for {inter} intermediate values"));
    }
    Ok(())
}

/// `GateKind` of doyen.cuh.
const NONE: u32 = 0;
const INTERLEAVED: u32 = 1;
const CONCATENATED: u32 = 2;
const SEPARATE: u32 = 3;

/// The kernels' form of the operator's activation.
pub(super) fn activation_of(a: theirs::Activation, has_fc3: bool) -> params::Activation {
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
