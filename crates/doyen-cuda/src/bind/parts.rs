//! Values cut into parts along an axis or put together from them: Split, Concat, int64 as int32. Other forms are left to the
//! reference.

use super::{Binder, Context, Kernel, fixed, front, ready, words};
use crate::{
    driver::{Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
};
use doyen_graph::{
    device::DeviceError,
    ops::{
        Op,
        join::{Sizes, Split},
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

/// Binds what has a kernel.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    match op {
        Op::Split(s) => split(b, s),
        Op::Concat(c) => Ok(concat(b, c.axis)),
        Op::Cast(_) => Ok(narrow(b)),
        _ => Ok(None),
    }
}
