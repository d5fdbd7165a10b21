//! Normalisation over the last axis, alone or after the residual addition.

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
    ops::{Op, norm::Statistics},
};

pub(crate) struct NormKernel {
    statistics: Statistics,
    gamma: Floats,
    beta: Option<Floats>,
    /// Added with the skip.
    bias: Option<Floats>,
    eps: f32,
    /// Whether input 1 is added first.
    skip: bool,
    function: Option<Function>,
}

impl NormKernel {
    /// What the kernel is told.
    ///
    /// # Errors
    /// When a value is not in the arena.
    pub(super) fn params(&self, io: &Io<'_>) -> Result<params::Norm, CudaError> {
        let (gamma, gamma_float) = optional(Some(&self.gamma));
        let (beta, beta_float) = optional(self.beta.as_ref());
        let (bias, bias_float) = optional(self.bias.as_ref());
        Ok(params::Norm {
            x: io.input(0)?,
            skip: if self.skip { io.input(1)? } else { Addr::NONE },
            bias,
            gamma,
            beta,
            y: io.output(0)?,
            // The sum is the fourth output of the operators with a skip.
            sum: io.output(3)?,
            width: self.gamma.len() as u32,
            bias_float,
            gamma_float,
            beta_float,
            layer: u32::from(self.statistics == Statistics::MeanVariance),
            eps: self.eps,
        })
    }

    /// Whether its weights can be read four at a time.
    pub(super) fn by_fours(&self) -> bool {
        let all = [Some(&self.gamma), self.beta.as_ref(), self.bias.as_ref()];
        let aligned = |f: &Floats| optional(Some(f)).0.is_aligned(16);
        self.gamma.len().is_multiple_of(4) && all.into_iter().flatten().all(aligned)
    }

    /// Rows that it normalises in a step.
    pub(super) fn rows(&self, io: &Io<'_>) -> usize {
        io.input_numel(0) / self.gamma.len().max(1)
    }

    fn shared(&self) -> usize {
        4 * self.gamma.len()
    }
}

impl Kernel for NormKernel {
    fn name(&self) -> String {
        let kind = match self.statistics {
            Statistics::Rms => "rms_norm",
            Statistics::MeanVariance => "layer_norm",
        };
        if self.skip { format!("skip_{kind}") } else { kind.into() }
    }

    fn norm(&self) -> Option<&NormKernel> {
        Some(self)
    }

    fn resident(&self) -> usize {
        let all = [Some(&self.gamma), self.beta.as_ref(), self.bias.as_ref()];
        all.into_iter().flatten().map(Floats::bytes).sum()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        let all = [Some(&mut self.gamma), self.beta.as_mut(), self.bias.as_mut()];
        for floats in all.into_iter().flatten() {
            floats.upload(gpu, constants)?;
        }
        self.function = Some(gpu.function(Module::Pointwise, "normalize", self.shared())?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let (width, params) = (self.gamma.len(), self.params(io)?);
        // Four numbers a thread where a block has that many threads.
        let threads = width.div_ceil(4).next_multiple_of(32).clamp(32, 512) as u32;
        let grid = Grid::new([self.rows(io), 1, 1], threads).shared(self.shared());
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
    }
}

/// Binds the normalisations whose statistics nobody wants; others are left to the reference.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    let (statistics, eps, gamma_at, beta_at, bias_at) = match op {
        Op::Norm(n) => {
            let last = b.value(0).map(|x| x.dims.len() as i64 - 1);
            if n.axis != -1 && Some(n.axis) != last {
                return Ok(None);
            }
            (n.statistics, n.epsilon, 1, Some(2), None)
        }
        Op::SkipNorm(n) => (n.statistics, n.epsilon, 2, n.beta(), Some(n.bias())),
        _ => return Ok(None),
    };
    let Some(x) = b.float_value(0) else { return Ok(None) };
    let skip = bias_at.is_some();
    if skip && b.float_value(1).is_none_or(|s| s.dims != x.dims) {
        return Ok(None);
    }
    // Outputs beside Y and the sum are statistics, which have no kernel.
    if (1..b.node.outputs.len()).any(|i| (i != 3 || !skip) && b.output(i).is_some()) {
        return Ok(None);
    }
    let operand = |i: Option<usize>| -> Result<Option<Floats>, String> {
        let t = i.map(|i| b.constant(i)).transpose()?.flatten();
        t.as_ref().map(Floats::of).transpose().map_err(|e| e.to_string())
    };
    let Some(gamma) = operand(Some(gamma_at))? else { return Ok(None) };
    let (beta, bias) = (operand(beta_at)?, operand(bias_at)?);
    let width = cols(x);
    let fits = |v: Option<&Floats>| v.is_none_or(|v| Some(v.len()) == width);
    let computed = |i: Option<usize>| i.is_some_and(|i| b.value(i).is_some());
    if !fits(Some(&gamma))
        || !fits(beta.as_ref())
        || !fits(bias.as_ref())
        || computed(beta_at)
        || computed(bias_at)
    {
        return Ok(None);
    }
    let kernel = NormKernel { statistics, gamma, beta, bias, eps, skip, function: None };
    Ok((kernel.shared() <= b.setting.shared).then(|| Box::new(kernel) as Box<dyn Kernel>))
}
