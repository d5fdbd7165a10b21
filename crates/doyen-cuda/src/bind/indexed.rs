//! Elements picked and replaced by indices along the last axis: GatherElements and ScatterElements. Other forms are left to the
//! reference.

use super::{Binder, Context, Kernel, cols, front, ready, words};
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
        scatter::{Combine, ScatterElements},
    },
};
use doyen_tensor::DType;

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
        let (width, count) = (cols(x)?, cols(indices).filter(|&n| n > 0)?);
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

/// Binds what has a kernel.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Option<Box<dyn Kernel>> {
    match op {
        Op::GatherElements(g) => pick(b, g.axis),
        Op::ScatterElements(s) => scatter(b, s),
        _ => None,
    }
}
