//! Embeddings: rows of a constant table, quantized or float.

use super::{Binder, Context, Kernel, ready};
use crate::{
    driver::{Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
    weights::Bank,
};
use doyen_graph::{device::DeviceError, ops::gather_block_quantized::GatherBlockQuantized};
use doyen_tensor::{DType, Tensor};

struct Embed {
    table: Bank,
    /// Indices outside the table are an error instead of rows of zeros.
    strict: bool,
    wide: bool,
    function: Option<Function>,
}

impl Kernel for Embed {
    fn name(&self) -> String {
        format!("gather_{}b", self.table.width().bits())
    }

    fn resident(&self) -> usize {
        self.table.bytes()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.table.upload(gpu, constants)?;
        self.function = Some(gpu.function(Module::Pointwise, "embed", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError> {
        let params = params::Embed {
            w: self.table.params()?,
            indices: io.input(1)?,
            y: io.output(0)?,
            fault: cx.fault,
            bits: self.table.width().bits(),
            wide: u32::from(self.wide),
            strict: u32::from(self.strict),
            node: number as u32,
        };
        let grid = Grid::new([io.input_numel(1), 1, 1], 128);
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
    }

    fn fault(&self) -> String {
        let n = self.table.rows();
        format!("indices: expected -{n} to {}, found one outside", n.saturating_sub(1))
    }
}

fn embed(b: &Binder<'_>, table: Bank, strict: bool) -> Result<Option<Box<dyn Kernel>>, String> {
    let indices = b.value(1).ok_or("its indices are a constant")?;
    let wide = match indices.dtype {
        DType::I64 => true,
        DType::I32 => false,
        other => return Err(format!("indices: expected int32 or int64, found {other}")),
    };
    Ok(Some(Box::new(Embed { table, strict, wide, function: None })))
}

/// GatherBlockQuantized from a uint8 table gathered by row; other forms are left to the reference.
pub(super) fn quantized(
    b: &Binder<'_>,
    op: &GatherBlockQuantized,
) -> Result<Option<Box<dyn Kernel>>, String> {
    if b.value(1).is_none() {
        return Ok(None);
    }
    let (data, scales, zeros) = (b.constant(0)?, b.constant(2)?, b.constant(3)?);
    let (Some(data), Some(scales)) = (data, scales) else { return Ok(None) };
    // The form of the table does not depend on the indices; any will do for the check.
    let index = Tensor::scalar(0i64);
    let refs = [Some(&data), Some(&index), Some(&scales), zeros.as_ref()];
    let Ok(m) = op.matrix(&refs) else { return Ok(None) };
    embed(b, Bank::quantized(&m, 1, &data, &scales, zeros.as_ref())?, false)
}

/// Gather of rows of a float table of rank 2; other forms are left to the reference.
pub(super) fn float(b: &Binder<'_>, axis: i64) -> Result<Option<Box<dyn Kernel>>, String> {
    if b.value(1).is_none() || axis != 0 {
        return Ok(None);
    }
    let Some(data) = b.constant(0)? else { return Ok(None) };
    let [rows, cols] = data.shape()[..] else { return Ok(None) };
    if data.float_view().is_err() {
        return Ok(None);
    }
    embed(b, Bank::floats(&data, 1, (rows, cols), cols)?, true)
}
