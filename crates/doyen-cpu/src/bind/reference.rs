//! Operators without a kernel of their own: the scalar reference, on copies of the step's values.
//!
//! Right but slow, and it allocates; plans name it, so that nobody meets it unawares.

use super::{Binder, Context, Kernel};
use crate::session::io::Io;
use doyen_graph::ops::Op;
use doyen_tensor::{DType, Tensor};

struct Reference {
    op: Op,
    name: String,
    constants: Vec<Option<Tensor>>,
}

impl Kernel for Reference {
    fn run(&self, io: &mut Io<'_>, _: &mut Context<'_>) -> Result<(), String> {
        let values: Vec<Option<Tensor>> =
            (0..self.constants.len()).map(|i| io.input_tensor(i)).collect::<Result<_, _>>()?;
        let inputs: Vec<Option<&Tensor>> =
            values.iter().zip(&self.constants).map(|(v, c)| v.as_ref().or(c.as_ref())).collect();
        let results = self.op.eval(&inputs, io.outputs()).map_err(|e| e.to_string())?;
        for i in (0..io.outputs()).filter(|&i| io.has_output(i)).collect::<Vec<_>>() {
            let result = results.get(i).ok_or_else(|| format!("output {i} was not computed"))?;
            let out = io.output_bytes(i);
            if out.len() != result.bytes().len() {
                return Err(format!("output {i}: {} bytes planned, {result:?} computed", out.len()));
            }
            out.copy_from_slice(result.bytes());
        }
        Ok(())
    }

    fn name(&self) -> String {
        format!("reference {}", self.name)
    }
}

/// Binds any operator; float constants are widened to the compute type once.
pub(super) fn bind(b: &mut Binder<'_>, op: &Op) -> Result<Box<dyn Kernel>, String> {
    let mut constants = Vec::new();
    for i in 0..b.node.inputs.len() {
        let t = b.constant(i)?;
        constants.push(match t {
            Some(t) if matches!(t.dtype(), DType::F16 | DType::BF16 | DType::F64) => {
                let values = t.to_f32().map_err(|e| e.to_string())?;
                b.resident += values.len() * 4;
                Some(Tensor::from_slice(t.shape().clone(), &values).map_err(|e| e.to_string())?)
            }
            other => other,
        });
    }
    Ok(Box::new(Reference { op: op.clone(), name: b.node.name.clone(), constants }))
}
