//! Element-wise operators on f32 values, and softmax over the last axis. Other types and axes are left to the
//! reference.

use super::{Binder, Context, Kernel};
use crate::{
    kernel::{
        elementwise::{Binary, BinaryKernel, Broadcast, Unary, UnaryKernel, silu_mul as silu_mul_kernel},
        rows::for_rows,
        softmax::Softmax,
    },
    pool::UnsafeSlice,
    session::io::Io,
};
use doyen_graph::ops::{Op, arith, unary};
use doyen_tensor::{DType, Shape};

/// Elements a worker takes at least; a region of the pool costs about as much as this many.
const GRAIN: usize = 4096;
/// Extents of an operand computed in the step; the reference takes what has more.
const MAX_RANK: usize = 8;

struct UnaryStep {
    kernel: UnaryKernel,
    op: unary::Unary,
}

impl Kernel for UnaryStep {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let x = io.input::<f32>(0);
        self.kernel.run(cx.pool, x, io.output(0));
        Ok(())
    }

    fn name(&self) -> String {
        format!("{:?}", self.op).to_lowercase()
    }
}

/// A constant operand, widened.
struct Widened {
    shape: Shape,
    values: Vec<f32>,
}

struct BinaryStep {
    kernel: BinaryKernel,
    op: arith::Binary,
    constants: [Option<Widened>; 2],
}

impl BinaryStep {
    fn operand<'a>(
        &'a self,
        io: &Io<'a>,
        i: usize,
        dims: &'a mut [usize; MAX_RANK],
    ) -> (&'a [usize], &'a [f32]) {
        match &self.constants[i] {
            Some(c) => (&c.shape, &c.values),
            None => (io.input_dims(i, dims), io.input(i)),
        }
    }
}

impl Kernel for BinaryStep {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let mut dims = [[0; MAX_RANK]; 2];
        let [a_dims, b_dims] = &mut dims;
        let ((a_shape, a), (b_shape, b)) = (self.operand(io, 0, a_dims), self.operand(io, 1, b_dims));
        let shape = Broadcast::new(a_shape, b_shape).map_err(|e| e.to_string())?;
        self.kernel.run(cx.pool, &shape, a, b, io.output(0));
        Ok(())
    }

    fn name(&self) -> String {
        format!("{:?}", self.op).to_lowercase()
    }
}

struct SoftmaxStep {
    kernel: Softmax,
    width: usize,
}

impl Kernel for SoftmaxStep {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let x = io.input::<f32>(0);
        self.kernel.rows(cx.pool, x, self.width, io.output(0));
        Ok(())
    }

    fn name(&self) -> String {
        "softmax".into()
    }
}

struct SiluMul(fn(&[f32], &[f32], &mut [f32]));

impl Kernel for SiluMul {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let (gate, up) = (io.input::<f32>(0), io.input::<f32>(1));
        let y = UnsafeSlice::new(io.output(0));
        for_rows(cx.pool, gate.len().div_ceil(GRAIN), GRAIN, &|grains| {
            let range = grains.start * GRAIN..(grains.end * GRAIN).min(gate.len());
            // SAFETY: every run of grains has its own range.
            (self.0)(&gate[range.clone()], &up[range.clone()], unsafe { y.range(range) });
        });
        Ok(())
    }

    fn name(&self) -> String {
        "silu_mul".into()
    }
}

pub(super) fn silu_mul(b: &Binder<'_>) -> Result<Box<dyn Kernel>, String> {
    match (b.value(0), b.value(1)) {
        (Some(g), Some(u)) if g.dims == u.dims => Ok(Box::new(SiluMul(silu_mul_kernel(b.isa)))),
        _ => Err("gate and up are not two step values of one shape".into()),
    }
}

/// Binds what has a kernel.
pub(super) fn bind(b: &mut Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    let f32_output = b.output(0).is_some_and(|y| y.dtype == DType::F32);
    if !f32_output {
        return Ok(None);
    }
    match op {
        Op::Unary(u) => {
            Ok(unary_kernel(*u).filter(|_| b.value(0).is_some_and(|x| x.dtype == DType::F32)).map(
                |k| -> Box<dyn Kernel> { Box::new(UnaryStep { kernel: UnaryKernel::new(b.isa, k), op: *u }) },
            ))
        }
        Op::Binary(o) => binary(b, *o),
        Op::Softmax(s) => {
            let Some(x) = b.value(0) else { return Ok(None) };
            let last = x.dims.len() as i64 - 1;
            let (Some(width), true) = (super::cols(x), s.axis == -1 || s.axis == last) else {
                return Ok(None);
            };
            Ok(Some(Box::new(SoftmaxStep { kernel: Softmax::new(b.isa, s.log), width })))
        }
        _ => Ok(None),
    }
}

fn binary(b: &mut Binder<'_>, op: arith::Binary) -> Result<Option<Box<dyn Kernel>>, String> {
    let kernel = match op {
        arith::Binary::Add => Binary::Add,
        arith::Binary::Sub => Binary::Sub,
        arith::Binary::Mul => Binary::Mul,
        arith::Binary::Div => Binary::Div,
        arith::Binary::Pow | arith::Binary::Mod { .. } => return Ok(None),
    };
    let mut constants = [None, None];
    for (i, slot) in constants.iter_mut().enumerate() {
        match b.value(i) {
            Some(v) if v.dtype == DType::F32 && v.dims.len() <= MAX_RANK => {}
            Some(_) => return Ok(None),
            None => {
                let Some(t) = b.constant(i)? else { return Ok(None) };
                let values = t.to_f32().map_err(|e| e.to_string())?;
                b.resident += 4 * values.len();
                *slot = Some(Widened { shape: t.shape().clone(), values });
            }
        }
    }
    Ok(Some(Box::new(BinaryStep { kernel: BinaryKernel::new(b.isa, kernel), op, constants })))
}

const fn unary_kernel(op: unary::Unary) -> Option<Unary> {
    use unary::Unary as U;
    Some(match op {
        U::Abs => Unary::Abs,
        U::Ceil => Unary::Ceil,
        U::Cos => Unary::Cos,
        U::Erf => Unary::Erf,
        U::Exp => Unary::Exp,
        U::Floor => Unary::Floor,
        U::Gelu => Unary::Gelu,
        U::GeluTanh => Unary::GeluTanh,
        U::Log => Unary::Log,
        U::Neg => Unary::Neg,
        U::Reciprocal => Unary::Reciprocal,
        U::Relu => Unary::Relu,
        U::Round => Unary::Round,
        U::Sigmoid => Unary::Sigmoid,
        U::Sign => Unary::Sign,
        U::Sin => Unary::Sin,
        U::Softplus => Unary::Softplus,
        U::Sqrt => Unary::Sqrt,
        U::Swish { alpha } => Unary::Swish { alpha },
        U::Tanh => Unary::Tanh,
        U::IsInf { .. } | U::IsNaN | U::Not => return None,
    })
}
