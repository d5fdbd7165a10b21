//! The gated operators of hybrid models, where their parameters are constants and their values of one shape; others are
//! left to the reference.

use super::{Binder, Context, Kernel, cols, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
    weights::{Floats, optional},
};
use doyen_graph::{
    device::DeviceError,
    lowered::Extent,
    ops::{Op, gated::GateActivation},
};

struct GatedNorm {
    gamma: Floats,
    epsilon: f32,
    silu: bool,
    function: Option<Function>,
}

impl Kernel for GatedNorm {
    fn name(&self) -> String {
        "gated_rms_norm".into()
    }

    fn resident(&self) -> usize {
        self.gamma.bytes()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.gamma.upload(gpu, constants)?;
        self.function = Some(gpu.function(Module::Gated, "gated_norm", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let (gamma, gamma_float) = optional(Some(&self.gamma));
        let groups = io.input_numel(0) / self.gamma.len().max(1);
        let params = params::GatedNorm {
            x: io.input(0)?,
            gate: io.input(2)?,
            gamma,
            y: io.output(0)?,
            groups: groups as u64,
            width: self.gamma.len() as u32,
            gamma_float,
            silu: u32::from(self.silu),
            eps: self.epsilon,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::new([groups.div_ceil(4), 1, 1], 128), params)
    }
}

struct GatedAdd {
    width: usize,
    function: Option<Function>,
}

impl Kernel for GatedAdd {
    fn name(&self) -> String {
        "gated_add".into()
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::Gated, "gated_add", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let n = io.output_numel(0);
        let params = params::GatedAdd {
            a: io.input(0)?,
            b: io.input(1)?,
            gate: io.input(2)?,
            y: io.output(0)?,
            n: n as u64,
            width: self.width as u32,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }
}

struct Gates {
    bias: Floats,
    scale: Floats,
    function: Option<Function>,
}

impl Kernel for Gates {
    fn name(&self) -> String {
        "linear_attention_gate".into()
    }

    fn resident(&self) -> usize {
        self.bias.bytes() + self.scale.bytes()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.bias.upload(gpu, constants)?;
        self.scale.upload(gpu, constants)?;
        self.function = Some(gpu.function(Module::Gated, "gates", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let (bias, bias_float) = optional(Some(&self.bias));
        let (scale, scale_float) = optional(Some(&self.scale));
        let (n, b) = (io.input_numel(0), io.input(3)?);
        let params = params::Gates {
            a: io.input(0)?,
            b,
            bias,
            scale,
            decay: io.output(0)?,
            beta: if b.is_some() { io.output(1)? } else { Addr::NONE },
            n: n as u64,
            heads: self.bias.len() as u32,
            bias_float,
            scale_float,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }
}

/// A constant operand of floats.
fn floats(b: &Binder<'_>, i: usize) -> Result<Option<Floats>, String> {
    let t = b.constant(i)?;
    t.as_ref().map(Floats::of).transpose().map_err(|e| e.to_string())
}

/// Binds what has a kernel.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    let dims = |i: usize| -> Option<Vec<Extent>> { b.float_value(i).map(|v| v.dims.clone()) };
    let last = |i: usize| b.float_value(i).and_then(cols);
    let (x, width) = (dims(0), last(0));
    Ok(match op {
        Op::GatedRmsNorm(n) => {
            let whole = |s: &Floats| width.is_some_and(|w| s.len() > 0 && w.is_multiple_of(s.len()));
            match floats(b, 1)?.filter(whole) {
                Some(gamma) if x.is_some() && x == dims(2) => {
                    let silu = n.activation == GateActivation::Silu;
                    Some(Box::new(GatedNorm { gamma, epsilon: n.epsilon, silu, function: None }))
                }
                _ => None,
            }
        }
        Op::GatedAdd(_) => match width {
            Some(width) if width > 0 && x == dims(1) && last(2) == Some(1) => {
                Some(Box::new(GatedAdd { width, function: None }))
            }
            _ => None,
        },
        Op::LinearAttentionGate(_) => match (floats(b, 1)?, floats(b, 2)?) {
            (Some(bias), Some(scale))
                if bias.len() == scale.len()
                    && bias.len() > 0
                    && width == Some(bias.len())
                    && (b.operand(3).is_none() || dims(3) == x) =>
            {
                Some(Box::new(Gates { bias, scale, function: None }))
            }
            _ => None,
        },
        _ => None,
    })
}
