//! Reductions over neighbouring axes, and the largest or smallest along the last one. Other forms are left to the reference.

use super::{Binder, Context, Kernel, cols, fixed, front, ready};
use crate::{
    driver::{Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
    weights::small,
};
use doyen_graph::{
    device::DeviceError,
    ops::{
        Op,
        axes::AxesSource,
        reduce::{Reduce, Reduction},
        topk::TopK,
    },
};
use doyen_tensor::DType;

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
    let (last, width) = (x.dims.len().checked_sub(1)?, cols(x)?);
    let y = b.output(0).or_else(|| b.output(1))?;
    let k = cols(y).filter(|&k| (1..=width).contains(&k))?;
    if front(op.axis, x.dims.len()) != Some(last) || small(width, "numbers to choose from").is_err() {
        return None;
    }
    Some(Box::new(TopKStep { width, k, largest: op.largest, function: None }))
}

/// Binds what has a kernel.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    match op {
        Op::Reduce(r) if b.output(0).is_some_and(|y| y.dtype == DType::F32) => reduce(b, r),
        Op::TopK(t) => Ok(top_k(b, t)),
        _ => Ok(None),
    }
}
