//! `ai.onnx::LpNormalization`: divides by the L1 or L2 norm along an axis.

use super::args::floats;
use super::util::{FLOATS, at_most, check_type, normalize_axis, output_of, required, wrap_axis};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor};

/// `x / ||x||_p`; zero where the norm is zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LpNorm {
    /// The axis, as written (may be negative).
    pub axis: i64,
    /// Which norm.
    pub p: Lp,
}

/// A norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lp {
    /// Sum of magnitudes.
    L1,
    /// Root of the sum of squares.
    L2,
}

impl OpDef for LpNorm {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let p = match attrs.int("p")?.unwrap_or(2) {
            1 => Lp::L1,
            2 => Lp::L2,
            v => return Err(OpError::attribute("p", "1 or 2", v)),
        };
        Ok(Self { axis: attrs.int("axis")?.unwrap_or(-1), p })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let x = required(inputs, 0, "input")?;
        check_type("input", x, FLOATS)?;
        if let Some(rank) = x.rank() {
            normalize_axis("axis", self.axis, rank)?;
        }
        Ok(vec![Fact { constant: None, ..x.clone() }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let mut x = floats("input", required(inputs, 0, "input")?)?;
        let axis = normalize_axis("axis", self.axis, shape.len())?;
        let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        for chunk in x.chunks_mut((n * inner).max(1)) {
            for j in 0..inner {
                let along = (0..n).map(|i| chunk[i * inner + j]);
                let norm = match self.p {
                    Lp::L1 => along.map(f64::abs).sum::<f64>(),
                    Lp::L2 => along.map(|v| v * v).sum::<f64>().sqrt(),
                };
                for i in 0..n {
                    chunk[i * inner + j] /= if norm == 0.0 { 1.0 } else { norm };
                }
            }
        }
        Ok(vec![Tensor::from_f64(dtype, shape, &x)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        let axis = wrap_axis(self.axis, rank).ok_or("its axis is out of range")?;
        Ok(vec![token_axis::off_axes(inputs.first(), &[axis], false)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_norms_along_an_inner_axis() {
        let x = Tensor::from_slice([2, 2], &[3f32, 0.0, -4.0, 0.0]).unwrap();
        let run = |p| LpNorm { axis: 0, p }.eval(&[Some(&x)], 1).unwrap()[0].to_f32().unwrap();
        assert_eq!(run(Lp::L2), [0.6, 0.0, -0.8, 0.0]);
        assert_eq!(run(Lp::L1), [3.0 / 7.0, 0.0, -4.0 / 7.0, 0.0]);
    }
}
