//! Operators without a kernel: the scalar reference on the host, on copies of the step's values.
//!
//! Right but slow: the card waits for it. Plans name it, and programs say so, so that nobody meets it unawares.

use super::{Binder, Context, Kernel};
use crate::{
    driver::{Gpu, Uploads},
    error::CudaError,
    session::io::Io,
};
use doyen_graph::{device::DeviceError, ops::Op};
use doyen_tensor::{DType, Tensor};

/// How the names of such kernels begin.
pub const HOST_REFERENCE: &str = "host reference";

struct Reference {
    op: Op,
    name: String,
    constants: Vec<Option<Tensor>>,
}

fn failed(reason: impl std::fmt::Display) -> CudaError {
    CudaError::Driver { what: HOST_REFERENCE.into(), reason: reason.to_string() }
}

impl Kernel for Reference {
    fn name(&self) -> String {
        format!("{HOST_REFERENCE} {}", self.name)
    }

    fn launches(&self) -> bool {
        false
    }

    fn load(&mut self, _: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let (tokens, rows) = (io.tokens, io.rows);
        let read = |i: usize| -> Result<Option<Tensor>, CudaError> {
            let Some(v) = io.input_ref(i) else { return Ok(None) };
            let mut bytes = vec![0; v.bytes(tokens, rows)];
            io.arena.read(cx.gpu, v.offset, &mut bytes)?;
            Tensor::from_bytes(v.dtype, v.dims(tokens, rows), bytes.into()).map(Some).map_err(failed)
        };
        let values = (0..self.constants.len()).map(read).collect::<Result<Vec<_>, _>>()?;
        let inputs: Vec<Option<&Tensor>> =
            values.iter().zip(&self.constants).map(|(v, c)| v.as_ref().or(c.as_ref())).collect();
        let results = self.op.eval(&inputs, io.outputs()).map_err(failed)?;
        for i in 0..io.outputs() {
            let Some((offset, planned)) = io.output_ref(i).map(|v| (v.offset, v.bytes(tokens, rows))) else {
                continue;
            };
            let result = results.get(i).ok_or_else(|| failed(format!("output {i} was not computed")))?;
            if planned != result.bytes().len() {
                return Err(failed(format!("output {i}: {planned} bytes planned, {result:?} computed")));
            }
            io.arena.write(cx.gpu, offset, result.bytes())?;
        }
        Ok(())
    }
}

/// Binds any operator; float constants are widened to the compute type once.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Box<dyn Kernel>, String> {
    let mut constants = Vec::new();
    for i in 0..b.node.inputs.len() {
        constants.push(match b.constant(i)? {
            Some(t) if matches!(t.dtype(), DType::F16 | DType::BF16 | DType::F64) => {
                let values = t.to_f32().map_err(|e| e.to_string())?;
                Some(Tensor::from_slice(t.shape().clone(), &values).map_err(|e| e.to_string())?)
            }
            other => other,
        });
    }
    Ok(Box::new(Reference { op: op.clone(), name: b.node.name.clone(), constants }))
}
