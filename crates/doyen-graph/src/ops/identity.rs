//! `ai.onnx::Identity`: passes its input on.

use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor};

/// `Y = X`.
#[derive(Debug, Clone, PartialEq)]
pub struct Identity;

impl OpDef for Identity {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        match inputs {
            [Some(x)] => Ok(vec![(*x).clone()]),
            _ => Err(OpError::input("input", "one value", inputs.len())),
        }
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        match inputs {
            [Some(x)] => Ok(vec![(*x).clone()]),
            _ => Err(OpError::input("input", "one value", inputs.len())),
        }
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(inputs.iter().flatten().map(|t| t.trace).collect())
    }
}
