//! Element-wise operators on f32 values, comparisons and choices between them, and softmax over the last axis. Other types and axes are left to the
//! reference.

use super::{Binder, Context, Kernel, cols, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params::{self, MAX_RANK},
    session::io::Io,
    weights::{Floats, optional},
};
use doyen_graph::{
    device::DeviceError,
    ops::{Op, arith, clip::Clip, compare::Compare, unary},
};
use doyen_tensor::DType;

struct UnaryStep {
    name: String,
    kind: u32,
    /// What the kind takes.
    parameters: [f32; 2],
    function: Option<Function>,
}

impl Kernel for UnaryStep {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Pointwise, "unary", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let n = io.input_numel(0);
        let params = params::Unary {
            x: io.input(0)?,
            y: io.output(0)?,
            n: n as u64,
            kind: self.kind,
            alpha: self.parameters[0],
            beta: self.parameters[1],
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }
}

/// A constant operand.
struct Fixed {
    dims: Vec<usize>,
    values: Floats,
}

struct BinaryStep {
    name: &'static str,
    kind: u32,
    constants: [Option<Fixed>; 2],
    function: Option<Function>,
}

/// Strides of an operand of extents `dims` broadcast to `out`, 0 where it repeats.
///
/// # Errors
/// When it does not broadcast.
fn strides(dims: &[usize], out: &[usize]) -> Result<[u64; MAX_RANK], CudaError> {
    let mut strides = [0; MAX_RANK];
    let lead = out.len().checked_sub(dims.len());
    let mut stride = 1u64;
    for (i, &d) in dims.iter().enumerate().rev() {
        match lead.map(|l| l + i) {
            Some(at) if d == out[at] => strides[at] = stride,
            Some(_) if d == 1 => {}
            _ => {
                let reason = format!("{dims:?} does not broadcast to {out:?}");
                return Err(CudaError::Driver { what: "operand".into(), reason });
            }
        }
        stride *= d as u64;
    }
    Ok(strides)
}

/// Address, `FloatKind` and extents of operand `i`, which is `fixed` or a value of the step.
fn operand(fixed: Option<&Fixed>, io: &Io<'_>, i: usize) -> Result<(Addr, u32, Vec<usize>), CudaError> {
    match fixed {
        Some(c) => {
            let (addr, float) = optional(Some(&c.values));
            Ok((addr, float, c.dims.clone()))
        }
        None => Ok((io.input(i)?, 0, io.input_dims(i))),
    }
}

/// Extents as kernels take them.
fn extents(out: &[usize]) -> [u32; MAX_RANK] {
    let mut dims = [1; MAX_RANK];
    dims.iter_mut().zip(out).for_each(|(d, &o)| *d = o as u32);
    dims
}

impl Kernel for BinaryStep {
    fn name(&self) -> String {
        self.name.into()
    }

    fn resident(&self) -> usize {
        self.constants.iter().flatten().map(|c| c.values.bytes()).sum()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        for c in self.constants.iter_mut().flatten() {
            c.values.upload(gpu, constants)?;
        }
        self.function = Some(gpu.function(Module::Pointwise, "binary", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let [first, second] = &self.constants;
        let (a, a_float, a_dims) = operand(first.as_ref(), io, 0)?;
        let (b, b_float, b_dims) = operand(second.as_ref(), io, 1)?;
        let out = io.output_ref(0).map_or_else(Vec::new, |v| v.dims(io.tokens, io.rows));
        let n = io.output_numel(0);
        let plain = a_dims == out && b_dims == out;
        let params = params::Binary {
            a,
            b,
            y: io.output(0)?,
            n: n as u64,
            a_stride: strides(&a_dims, &out)?,
            b_stride: strides(&b_dims, &out)?,
            dims: extents(&out),
            rank: if plain { 0 } else { out.len() as u32 },
            kind: self.kind,
            a_float,
            b_float,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }
}

struct ChooseStep {
    constants: [Option<Fixed>; 2],
    function: Option<Function>,
}

impl Kernel for ChooseStep {
    fn name(&self) -> String {
        "where".into()
    }

    fn resident(&self) -> usize {
        self.constants.iter().flatten().map(|c| c.values.bytes()).sum()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        for c in self.constants.iter_mut().flatten() {
            c.values.upload(gpu, constants)?;
        }
        self.function = Some(gpu.function(Module::Pointwise, "choose", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let [first, second] = &self.constants;
        let (a, a_float, a_dims) = operand(first.as_ref(), io, 1)?;
        let (b, b_float, b_dims) = operand(second.as_ref(), io, 2)?;
        let out = io.output_ref(0).map_or_else(Vec::new, |v| v.dims(io.tokens, io.rows));
        let n = io.output_numel(0);
        let params = params::Choose {
            which: io.input(0)?,
            a,
            b,
            y: io.output(0)?,
            n: n as u64,
            which_stride: strides(&io.input_dims(0), &out)?,
            a_stride: strides(&a_dims, &out)?,
            b_stride: strides(&b_dims, &out)?,
            dims: extents(&out),
            rank: out.len() as u32,
            a_float,
            b_float,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }
}

struct SoftmaxStep {
    width: usize,
    log: bool,
    function: Option<Function>,
}

impl Kernel for SoftmaxStep {
    fn name(&self) -> String {
        "softmax".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Pointwise, "softmax", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let params = params::Softmax {
            x: io.input(0)?,
            y: io.output(0)?,
            width: self.width as u32,
            log: u32::from(self.log),
        };
        let grid = Grid::new([io.input_numel(0) / self.width.max(1), 1, 1], 256);
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
    }
}

pub(super) fn silu_mul(b: &Binder<'_>) -> Result<Box<dyn Kernel>, String> {
    match (b.float_value(0), b.float_value(1)) {
        (Some(g), Some(u)) if g.dims == u.dims => {
            Ok(Box::new(BinaryStep { name: "silu_mul", kind: 4, constants: [None, None], function: None }))
        }
        _ => Err("gate and up are not two step values of one shape".into()),
    }
}

/// Binds what has a kernel.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    match op {
        Op::Unary(u) => Ok(unary_kind(*u).filter(|_| b.float_value(0).is_some()).map(
            |(kind, alpha)| -> Box<dyn Kernel> {
                let name = format!("{u:?}").to_lowercase();
                Box::new(UnaryStep { name, kind, parameters: [alpha, 0.0], function: None })
            },
        )),
        Op::Binary(o) => match o {
            arith::Binary::Add => binary(b, 0, "add"),
            arith::Binary::Sub => binary(b, 1, "sub"),
            arith::Binary::Mul => binary(b, 2, "mul"),
            arith::Binary::Div => binary(b, 3, "div"),
            arith::Binary::Pow | arith::Binary::Mod { .. } => Ok(None),
        },
        Op::Variadic(v) if b.node.inputs.len() == 2 => match v {
            arith::Variadic::Sum => binary(b, 0, "add"),
            arith::Variadic::Min => binary(b, 5, "min"),
            arith::Variadic::Max => binary(b, 6, "max"),
            arith::Variadic::Mean => Ok(None),
        },
        Op::Where(_) => choose(b),
        Op::Clip(c) => clip(b, *c),
        Op::Softmax(s) => {
            let Some(x) = b.float_value(0) else { return Ok(None) };
            let last = x.dims.len() as i64 - 1;
            let (Some(width), true) = (cols(x), s.axis == -1 || s.axis == last) else { return Ok(None) };
            Ok(Some(Box::new(SoftmaxStep { width, log: s.log, function: None })))
        }
        _ => Ok(None),
    }
}

/// `UnaryKind` of limits.
const CLIP: u32 = 20;

fn clip(b: &Binder<'_>, op: Clip) -> Result<Option<Box<dyn Kernel>>, String> {
    if b.float_value(0).is_none() || b.value(1).is_some() || b.value(2).is_some() {
        return Ok(None);
    }
    let bound = |i: usize, without: f32| -> Result<f32, String> {
        let values = b.constant(i)?.map(|t| t.to_f32()).transpose().map_err(|e| e.to_string())?;
        Ok(values.and_then(|v| v.first().copied()).unwrap_or(without))
    };
    let parameters = match op {
        Clip::Attributes { min, max } => [min, max],
        Clip::Inputs => [bound(1, f32::NEG_INFINITY)?, bound(2, f32::INFINITY)?],
    };
    Ok(Some(Box::new(UnaryStep { name: "clip".into(), kind: CLIP, parameters, function: None })))
}

/// Binds comparisons of numbers, whose results are bytes.
pub(super) fn compare(b: &Binder<'_>, op: Compare) -> Result<Option<Box<dyn Kernel>>, String> {
    match op {
        Compare::Equal => binary(b, 7, "equal"),
        Compare::Greater => binary(b, 8, "greater"),
        Compare::GreaterOrEqual => binary(b, 9, "greater_or_equal"),
        Compare::Less => binary(b, 10, "less"),
        Compare::LessOrEqual => binary(b, 11, "less_or_equal"),
        Compare::And | Compare::Or | Compare::Xor => Ok(None),
    }
}

/// Operands `first` and the one behind it, the constants among them; `None` where one is no float.
fn pair(b: &Binder<'_>, first: usize) -> Result<Option<[Option<Fixed>; 2]>, String> {
    if b.output(0).is_none_or(|y| y.dims.len() > MAX_RANK) {
        return Ok(None);
    }
    let mut constants = [None, None];
    for (i, slot) in constants.iter_mut().enumerate() {
        if b.float_value(first + i).is_some() {
            continue;
        }
        let Some(t) = b.constant(first + i)? else { return Ok(None) };
        let Ok(values) = Floats::of(&t) else { return Ok(None) };
        *slot = Some(Fixed { dims: t.shape().to_vec(), values });
    }
    Ok(Some(constants))
}

/// `kind` is a `BinaryKind` of pointwise.cu.
fn binary(b: &Binder<'_>, kind: u32, name: &'static str) -> Result<Option<Box<dyn Kernel>>, String> {
    Ok(pair(b, 0)?.map(|constants| -> Box<dyn Kernel> {
        Box::new(BinaryStep { name, kind, constants, function: None })
    }))
}

fn choose(b: &Binder<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    if b.value(0).is_none_or(|v| v.dtype != DType::Bool) {
        return Ok(None);
    }
    Ok(pair(b, 1)?.map(|constants| -> Box<dyn Kernel> { Box::new(ChooseStep { constants, function: None }) }))
}

/// `UnaryKind` of pointwise.cu, and its parameter.
const fn unary_kind(op: unary::Unary) -> Option<(u32, f32)> {
    use unary::Unary as U;
    Some(match op {
        U::Abs => (0, 0.0),
        U::Ceil => (1, 0.0),
        U::Cos => (2, 0.0),
        U::Erf => (3, 0.0),
        U::Exp => (4, 0.0),
        U::Floor => (5, 0.0),
        U::Gelu => (6, 0.0),
        U::GeluTanh => (7, 0.0),
        U::Log => (8, 0.0),
        U::Neg => (9, 0.0),
        U::Reciprocal => (10, 0.0),
        U::Relu => (11, 0.0),
        U::Round => (12, 0.0),
        U::Sigmoid => (13, 0.0),
        U::Sign => (14, 0.0),
        U::Sin => (15, 0.0),
        U::Softplus => (16, 0.0),
        U::Sqrt => (17, 0.0),
        U::Swish { alpha } => (18, alpha),
        U::Tanh => (19, 0.0),
        U::IsInf { .. } | U::IsNaN | U::Not => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_of_broadcast_operands() {
        let padded = |s: &[u64]| {
            let mut all = [0; MAX_RANK];
            all[..s.len()].copy_from_slice(s);
            all
        };
        assert_eq!(strides(&[2, 3], &[2, 3]).unwrap(), padded(&[3, 1]));
        assert_eq!(strides(&[3], &[2, 3]).unwrap(), padded(&[0, 1]));
        assert_eq!(strides(&[2, 1], &[2, 3]).unwrap(), padded(&[1, 0]));
        assert_eq!(strides(&[], &[2, 3]).unwrap(), padded(&[]));
        assert!(strides(&[4], &[2, 3]).is_err());
        assert!(strides(&[1, 2, 3], &[2, 3]).is_err());
    }
}
