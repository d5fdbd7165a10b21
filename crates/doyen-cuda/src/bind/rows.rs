//! Row selection above the head.

use super::{Binder, Context, Kernel, ready};
use crate::{
    driver::{Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
};
use doyen_graph::{device::DeviceError, lowered::Extent};

struct SelectRows {
    function: Option<Function>,
}

impl Kernel for SelectRows {
    fn name(&self) -> String {
        "select_rows".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Pointwise, "select_rows", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let width = io.input_numel(0) * size_of::<f32>() / io.tokens.max(1);
        let params = params::Select {
            x: io.input(0)?,
            rows: cx.step.rows,
            y: io.output(0)?,
            words: (width / 4) as u32,
        };
        let grid = Grid::new([cx.batch.rows.len(), 1, 1], 256);
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
    }
}

/// Binds a selection; the extents before the token axis must be 1.
pub(super) fn select(b: &Binder<'_>, axis: usize) -> Result<Box<dyn Kernel>, String> {
    let x = b.float_value(0).ok_or("it selects rows of something else than floats of the step")?;
    let leading = x.dims[..axis].iter().all(|d| *d == Extent::Fixed(1));
    let tokens = matches!(x.dims.get(axis), Some(Extent::Tokens(_)));
    if leading && tokens {
        Ok(Box::new(SelectRows { function: None }))
    } else {
        Err(format!("it selects rows along axis {axis} of a value of extents {:?}", x.dims))
    }
}
