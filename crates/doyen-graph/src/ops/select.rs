//! Where: one of two values per element.

use super::strided::{Offsets, cells, from_cells};
use super::util::{
    BOOL, at_most, broadcast_facts, buffer, check_type, common_type, fact, output_of, required,
};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor};

/// `X` where the condition holds, `Y` elsewhere, all three broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Where;

impl OpDef for Where {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let condition = ("condition", required(inputs, 0, "condition")?);
        let (x, y) = (("X", required(inputs, 1, "X")?), ("Y", required(inputs, 2, "Y")?));
        check_type(condition.0, condition.1, BOOL)?;
        Ok(vec![fact(common_type([x, y])?, broadcast_facts(&[condition, x, y])?)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let condition = required(inputs, 0, "condition")?;
        let (x, y) = (required(inputs, 1, "X")?, required(inputs, 2, "Y")?);
        let ((xs, size), (ys, _)) = (cells(x), cells(y));
        let mut out = buffer(&shape, size)?;
        let at_x = Offsets::broadcast(x.shape(), &shape);
        let at_y = Offsets::broadcast(y.shape(), &shape);
        let holds = Offsets::broadcast(condition.shape(), &shape).map(|c| condition.bytes()[c] != 0);
        for ((i, j), holds) in at_x.zip(at_y).zip(holds) {
            let cell = if holds { &xs[i * size..(i + 1) * size] } else { &ys[j * size..(j + 1) * size] };
            out.extend_from_slice(cell);
        }
        Ok(vec![from_cells(dtype, shape, out)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        Ok(vec![token_axis::pointwise(inputs, outputs.first().ok_or("it has no output")?)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_and_broadcasts() {
        let c = Tensor::from_slice([2, 1], &[true, false]).unwrap();
        let x = Tensor::from_slice([2], &[1f32, 2.0]).unwrap();
        let y = Tensor::scalar(f32::NEG_INFINITY);
        let z = Where.eval(&[Some(&c), Some(&x), Some(&y)], 1).unwrap();
        let inf = f32::NEG_INFINITY;
        assert_eq!(z[0].to_f32().unwrap(), [1.0, 2.0, inf, inf]);
        let e = Where.eval(&[Some(&c), Some(&x), Some(&Tensor::scalar(0i32))], 1).unwrap_err();
        assert_eq!(e.to_string(), "input Y: expected float32, the type of X, found int32");
        assert!(Where.eval(&[Some(&x), Some(&x), Some(&x)], 1).is_err());
    }
}
