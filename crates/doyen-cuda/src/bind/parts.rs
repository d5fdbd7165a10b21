//! Split, Concat, reductions over neighbouring axes, TopK, GatherElements and ScatterElements along the last axis, int64 as int32, and rotations
//! outside of attention. Other forms are left to the reference.

use super::{Binder, Context, Kernel, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
    weights::{Floats, optional, small},
};
use doyen_graph::{
    device::DeviceError,
    lowered::{Extent, LValue},
    ops::{
        Op,
        axes::AxesSource,
        join::{Sizes, Split},
        reduce::{Reduce, Reduction},
        scatter::{Combine, ScatterElements},
        topk::TopK,
    },
};
use doyen_tensor::DType;

/// Values that are cut into parts along an axis, or put together from them.
struct Parts {
    name: &'static str,
    /// Whether the parts are inputs, which are joined.
    join: bool,
    axis: usize,
    /// Extents of the parts along the axis.
    sizes: Vec<usize>,
    /// Words of an element.
    words: usize,
    function: Option<Function>,
}

impl Kernel for Parts {
    fn name(&self) -> String {
        self.name.into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Parts, "copy_runs", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let whole = if self.join { io.output_ref(0) } else { io.input_ref(0) };
        let dims = whole.map_or_else(Vec::new, |v| v.dims(io.tokens, io.rows));
        let outer: usize = dims[..self.axis].iter().product();
        let inner = dims[self.axis + 1..].iter().product::<usize>() * self.words;
        let total = (self.sizes.iter().sum::<usize>() * inner) as u64;
        let mut first = 0;
        for (i, size) in self.sizes.iter().enumerate() {
            let run = size * inner;
            let (x, y) =
                if self.join { (io.input(i)?, io.output(0)?) } else { (io.input(0)?, io.output(i)?) };
            let part = params::CopyRuns {
                x,
                y,
                n: (outer * run) as u64,
                run: run as u64,
                x_first: if self.join { 0 } else { first },
                y_first: if self.join { first } else { 0 },
                x_stride: if self.join { run as u64 } else { total },
                y_stride: if self.join { total } else { run as u64 },
            };
            first += run as u64;
            if y.is_some() {
                cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(outer * run), part)?;
            }
        }
        Ok(())
    }
}

/// An axis counted from the front.
fn front(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis.checked_add(i64::try_from(rank).ok()?)? } else { axis };
    usize::try_from(axis).ok().filter(|&a| a < rank)
}

/// The number that an extent is, if it is one.
fn fixed(value: &LValue, axis: usize) -> Option<usize> {
    match value.dims.get(axis) {
        Some(Extent::Fixed(n)) => Some(*n),
        _ => None,
    }
}

const fn words(dtype: DType) -> Option<usize> {
    match dtype.bits() {
        32 => Some(1),
        64 => Some(2),
        _ => None,
    }
}

/// The extents that a split cuts `along` into.
fn sizes(b: &Binder<'_>, op: &Split, along: usize) -> Result<Option<Vec<usize>>, String> {
    let parts = match &op.sizes {
        Sizes::Attribute(list) => return Ok(Some(list.clone())),
        Sizes::Input if b.operand(1).is_some() => {
            let Some(list) = b.constant(1)? else { return Ok(None) };
            let list = list.to_i64().map_err(|e| e.to_string())?;
            return Ok(list.into_iter().map(|n| usize::try_from(n).ok()).collect());
        }
        Sizes::Parts(n) => *n,
        Sizes::Input | Sizes::Equal => b.node.outputs.len(),
    };
    let chunk = along.div_ceil(parts.max(1));
    let sizes = (0..parts).map(|i| along.saturating_sub(i * chunk).min(chunk));
    Ok(Some(sizes.collect()))
}

fn split(b: &Binder<'_>, op: &Split) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(x) = b.value(0) else { return Ok(None) };
    let axis = front(op.axis, x.dims.len());
    let (Some(axis), Some(words)) = (axis, words(x.dtype)) else { return Ok(None) };
    let Some(along) = fixed(x, axis) else { return Ok(None) };
    let Some(sizes) = sizes(b, op, along)? else { return Ok(None) };
    let agree = (0..b.node.outputs.len())
        .all(|i| b.output(i).is_none_or(|y| sizes.get(i).is_some_and(|&size| fixed(y, axis) == Some(size))));
    if !agree || sizes.iter().sum::<usize>() != along {
        return Ok(None);
    }
    Ok(Some(Box::new(Parts { name: "split", join: false, axis, sizes, words, function: None })))
}

fn concat(b: &Binder<'_>, axis: i64) -> Option<Box<dyn Kernel>> {
    let y = b.output(0)?;
    let (axis, words) = (front(axis, y.dims.len())?, words(y.dtype)?);
    let size = |i: usize| b.value(i).filter(|x| x.dtype == y.dtype).and_then(|x| fixed(x, axis));
    let sizes = (0..b.node.inputs.len()).map(size).collect::<Option<Vec<_>>>()?;
    if Some(sizes.iter().sum()) != fixed(y, axis) {
        return None;
    }
    Some(Box::new(Parts { name: "concat", join: true, axis, sizes, words, function: None }))
}

struct ReduceStep {
    reduction: Reduction,
    /// Numbers that fall together, and the first axis behind theirs.
    count: usize,
    behind: usize,
    function: Option<Function>,
}

impl ReduceStep {
    /// `ReduceKind` of parts.cu.
    const fn kind(&self) -> u32 {
        match self.reduction {
            Reduction::Max => 0,
            Reduction::Mean => 1,
            Reduction::Min => 2,
            Reduction::Prod => 3,
            Reduction::Sum => 4,
            Reduction::SumSquare => 5,
            Reduction::L1 => 6,
            Reduction::L2 => 7,
        }
    }
}

impl Kernel for ReduceStep {
    fn name(&self) -> String {
        format!("reduce_{:?}", self.reduction).to_lowercase()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Parts, "reduce", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let n = io.output_numel(0);
        let params = params::Reduce {
            x: io.input(0)?,
            y: io.output(0)?,
            n: n as u64,
            inner: io.input_dims(0)[self.behind..].iter().product::<usize>() as u64,
            count: self.count as u32,
            kind: self.kind(),
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::new([n.div_ceil(4), 1, 1], 128), params)
    }
}

fn reduce(b: &Binder<'_>, op: &Reduce) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(x) = b.float_value(0) else { return Ok(None) };
    let raw = match &op.axes {
        AxesSource::Attribute(list) => list.clone().unwrap_or_default(),
        AxesSource::Input if b.operand(1).is_none() => Vec::new(),
        AxesSource::Input => match b.constant(1)? {
            Some(list) => list.to_i64().map_err(|e| e.to_string())?,
            None => return Ok(None),
        },
    };
    if raw.is_empty() && op.noop {
        return Ok(None);
    }
    let rank = x.dims.len();
    let axes: Option<Vec<usize>> = if raw.is_empty() {
        Some((0..rank).collect())
    } else {
        raw.iter().map(|&a| front(a, rank)).collect()
    };
    let Some(mut axes) = axes else { return Ok(None) };
    axes.sort_unstable();
    let (Some(&first), Some(&last)) = (axes.first(), axes.last()) else { return Ok(None) };
    let extents = axes.iter().map(|&a| fixed(x, a)).collect::<Option<Vec<_>>>();
    let count = extents.and_then(|e| e.into_iter().try_fold(1usize, usize::checked_mul));
    match count {
        Some(count) if count > 0 && last - first + 1 == axes.len() => {
            small(count, "numbers to reduce")?;
            let (reduction, behind) = (op.reduction, last + 1);
            Ok(Some(Box::new(ReduceStep { reduction, count, behind, function: None })))
        }
        _ => Ok(None),
    }
}

struct TopKStep {
    width: usize,
    k: usize,
    largest: bool,
    function: Option<Function>,
}

impl Kernel for TopKStep {
    fn name(&self) -> String {
        "top_k".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Parts, "top_k", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let rows = io.input_numel(0) / self.width;
        let params = params::TopK {
            x: io.input(0)?,
            values: io.output(0)?,
            indices: io.output(1)?,
            rows: rows as u64,
            width: self.width as u32,
            k: self.k as u32,
            largest: u32::from(self.largest),
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::new([rows.div_ceil(4), 1, 1], 128), params)
    }
}

fn top_k(b: &Binder<'_>, op: &TopK) -> Option<Box<dyn Kernel>> {
    let x = b.float_value(0)?;
    let (last, width) = (x.dims.len().checked_sub(1)?, super::cols(x)?);
    let y = b.output(0).or_else(|| b.output(1))?;
    let k = super::cols(y).filter(|&k| (1..=width).contains(&k))?;
    if front(op.axis, x.dims.len()) != Some(last) || small(width, "numbers to choose from").is_err() {
        return None;
    }
    Some(Box::new(TopKStep { width, k, largest: op.largest, function: None }))
}

/// Indices along the last axis, a row of them for each row of the data.
struct Rows {
    width: usize,
    count: usize,
    wide: bool,
}

impl Rows {
    /// Rows of a node whose inputs 0 and 1 are data and indices.
    fn new(b: &Binder<'_>, axis: i64) -> Option<Self> {
        let (x, indices) = (b.value(0)?, b.value(1)?);
        let last = x.dims.len().checked_sub(1)?;
        let (width, count) = (super::cols(x)?, super::cols(indices).filter(|&n| n > 0)?);
        let rows = x.dims[..last] == indices.dims[..indices.dims.len().checked_sub(1)?];
        let wide = match indices.dtype {
            DType::I64 => true,
            DType::I32 => false,
            _ => return None,
        };
        let takes = words(x.dtype) == Some(1) && front(axis, x.dims.len()) == Some(last) && rows;
        (takes && small(width, "numbers").is_ok()).then_some(Self { width, count, wide })
    }

    fn fault(&self) -> String {
        let n = self.width;
        format!("indices: expected -{n} to {}, found one outside", n.saturating_sub(1))
    }
}

struct Pick {
    rows: Rows,
    function: Option<Function>,
}

impl Kernel for Pick {
    fn name(&self) -> String {
        "gather_elements".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Parts, "pick", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError> {
        let n = io.output_numel(0);
        let params = params::Pick {
            x: io.input(0)?,
            indices: io.input(1)?,
            y: io.output(0)?,
            fault: cx.fault,
            n: n as u64,
            width: self.rows.width as u32,
            count: self.rows.count as u32,
            wide: u32::from(self.rows.wide),
            node: number as u32,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }

    fn fault(&self) -> String {
        self.rows.fault()
    }
}

fn pick(b: &Binder<'_>, axis: i64) -> Option<Box<dyn Kernel>> {
    Some(Box::new(Pick { rows: Rows::new(b, axis)?, function: None }))
}

struct Scatter {
    rows: Rows,
    function: Option<Function>,
}

impl Kernel for Scatter {
    fn name(&self) -> String {
        "scatter_elements".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Parts, "scatter", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError> {
        let rows = io.input_numel(1) / self.rows.count;
        let params = params::Scatter {
            x: io.input(0)?,
            indices: io.input(1)?,
            updates: io.input(2)?,
            y: io.output(0)?,
            fault: cx.fault,
            rows: rows as u64,
            width: self.rows.width as u32,
            count: self.rows.count as u32,
            wide: u32::from(self.rows.wide),
            node: number as u32,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::new([rows.div_ceil(4), 1, 1], 128), params)
    }

    fn fault(&self) -> String {
        self.rows.fault()
    }
}

fn scatter(b: &Binder<'_>, op: &ScatterElements) -> Option<Box<dyn Kernel>> {
    let rows = Rows::new(b, op.axis).filter(|_| op.combine == Combine::Replace)?;
    let (updates, indices) = (b.value(2)?, b.value(1)?);
    let fits = updates.dtype == b.value(0)?.dtype && updates.dims == indices.dims;
    fits.then(|| -> Box<dyn Kernel> { Box::new(Scatter { rows, function: None }) })
}

/// int64 as int32, of which the low words are left.
struct Narrow {
    function: Option<Function>,
}

impl Kernel for Narrow {
    fn name(&self) -> String {
        "cast".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Parts, "copy_runs", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let n = io.output_numel(0);
        let (x, y) = (io.input(0)?, io.output(0)?);
        let params =
            params::CopyRuns { x, y, n: n as u64, run: 1, x_first: 0, y_first: 0, x_stride: 2, y_stride: 1 };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }
}

fn narrow(b: &Binder<'_>) -> Option<Box<dyn Kernel>> {
    let types = (b.value(0)?.dtype, b.output(0)?.dtype);
    (types == (DType::I64, DType::I32)).then(|| -> Box<dyn Kernel> { Box::new(Narrow { function: None }) })
}

/// Cosines or sines: a constant with a row for every position, or rows of the step, one a token.
enum Angles {
    Cache(Floats),
    Rows(usize),
}

impl Angles {
    fn new(b: &Binder<'_>, i: usize) -> Result<Option<Self>, String> {
        match b.constant(i)? {
            Some(t) => Ok(Floats::of(&t).ok().map(Self::Cache)),
            None => Ok(b.float_value(i).map(|_| Self::Rows(i))),
        }
    }

    fn addr(&self, io: &Io<'_>) -> Result<(Addr, u32), CudaError> {
        match self {
            Self::Cache(floats) => Ok(optional(Some(floats))),
            Self::Rows(i) => Ok((io.input(*i)?, 0)),
        }
    }

    const fn cache(&self) -> Option<&Floats> {
        match self {
            Self::Cache(floats) => Some(floats),
            Self::Rows(_) => None,
        }
    }
}

struct Rotate {
    cos: Angles,
    sin: Angles,
    /// The input that has the positions, and how often it says them.
    positions: Option<(usize, usize)>,
    heads: usize,
    size: usize,
    half: usize,
    /// Rows of the caches.
    rows: usize,
    by_head: bool,
    interleaved: bool,
    function: Option<Function>,
}

impl Kernel for Rotate {
    fn name(&self) -> String {
        "rotary".into()
    }

    fn resident(&self) -> usize {
        [&self.cos, &self.sin].into_iter().filter_map(Angles::cache).map(Floats::bytes).sum()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        for angles in [&mut self.cos, &mut self.sin] {
            if let Angles::Cache(floats) = angles {
                floats.upload(gpu, constants)?;
            }
        }
        self.function = Some(gpu.function(Module::Parts, "rotate", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError> {
        let n = io.input_numel(0);
        let ((cos, cos_float), (sin, sin_float)) = (self.cos.addr(io)?, self.sin.addr(io)?);
        let params = params::Rotate {
            x: io.input(0)?,
            y: io.output(0)?,
            cos,
            sin,
            positions: self.positions.map_or(Ok(Addr::NONE), |(i, _)| io.input(i))?,
            fault: cx.fault,
            n: n as u64,
            tokens: (n / (self.heads * self.size)) as u32,
            heads: self.heads as u32,
            size: self.size as u32,
            half: self.half as u32,
            rows: self.rows as u32,
            streams: self.positions.map_or(0, |(_, streams)| streams as u32),
            by_head: u32::from(self.by_head),
            interleaved: u32::from(self.interleaved),
            cos_float,
            sin_float,
            node: number as u32,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }

    fn fault(&self) -> String {
        let rows = self.rows;
        format!("position_ids: expected positions below {rows} (rows of cos_cache), equal in all streams")
    }
}

/// Where the operands of a rotation are, and what its attributes say.
struct Rotation {
    positions: usize,
    cos: usize,
    sin: usize,
    heads: Option<usize>,
    interleaved: bool,
}

fn rotate(b: &Binder<'_>, op: &Rotation) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(x) = b.float_value(0) else { return Ok(None) };
    let (Some(cos), Some(sin)) = (Angles::new(b, op.cos)?, Angles::new(b, op.sin)?) else { return Ok(None) };
    let half = match &cos {
        Angles::Cache(_) => b.constant(op.cos)?.and_then(|t| t.shape().last().copied()),
        Angles::Rows(i) => b.value(*i).and_then(super::cols),
    };
    let (Some(half), Some(last)) = (half.filter(|&h| h > 0), super::cols(x)) else { return Ok(None) };
    let one = x.dims.first() == Some(&Extent::Fixed(1));
    let token = |axis: usize| x.dims.get(axis) == Some(&Extent::Tokens(1));
    let (heads, by_head) = match x.dims.len() {
        // Without a number of heads, a head is as wide as its rotation.
        3 if one && token(1) => (op.heads.unwrap_or(last / (2 * half)), false),
        4 if one && token(2) => (fixed(x, 1).unwrap_or(0), true),
        _ => return Ok(None),
    };
    let size = if by_head { last } else { last.checked_div(heads).unwrap_or(0) };
    if heads == 0 || size < 2 * half || (!by_head && heads * size != last) {
        return Ok(None);
    }
    let streams = |dims: &[Extent]| match dims {
        [Extent::Fixed(1), Extent::Tokens(1)] => Some(1),
        [Extent::Fixed(n), Extent::Fixed(1), Extent::Tokens(1)] => Some(*n),
        _ => None,
    };
    let positions = match (b.operand(op.positions), b.value(op.positions)) {
        (None, _) => None,
        (_, Some(v)) if v.dtype == DType::I64 => match streams(&v.dims) {
            Some(streams) => Some((op.positions, streams)),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    // A row for every position with positions, for every token without.
    let rows = cos.cache().map_or(0, |c| c.len() / half);
    if positions.is_some() != cos.cache().is_some()
        || cos.cache().map(Floats::len) != sin.cache().map(Floats::len)
    {
        return Ok(None);
    }
    let interleaved = op.interleaved;
    Ok(Some(Box::new(Rotate {
        cos,
        sin,
        positions,
        heads,
        size,
        half,
        rows,
        by_head,
        interleaved,
        function: None,
    })))
}

/// Binds what has a kernel.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    match op {
        Op::Split(s) => split(b, s),
        Op::Concat(c) => Ok(concat(b, c.axis)),
        Op::Reduce(r) if b.output(0).is_some_and(|y| y.dtype == DType::F32) => reduce(b, r),
        Op::TopK(t) => Ok(top_k(b, t)),
        Op::GatherElements(g) => Ok(pick(b, g.axis)),
        Op::ScatterElements(s) => Ok(scatter(b, s)),
        Op::Cast(_) => Ok(narrow(b)),
        Op::ContribRotary(r) => rotate(
            b,
            &Rotation { positions: 1, cos: 2, sin: 3, heads: r.num_heads, interleaved: r.interleaved },
        ),
        Op::OnnxRotary(r) => rotate(
            b,
            &Rotation { positions: 3, cos: 1, sin: 2, heads: r.num_heads, interleaved: r.interleaved },
        ),
        _ => Ok(None),
    }
}
