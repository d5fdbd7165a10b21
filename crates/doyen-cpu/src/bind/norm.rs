//! Normalisation over the last axis, alone or after the residual addition.

use super::{Binder, Context, Kernel, cols};
use crate::{
    kernel::norm::{Affine, Norm, Outputs, Residual},
    session::io::Io,
};
use doyen_graph::ops::{Op, norm::Statistics};

struct NormKernel {
    norm: Norm,
    statistics: Statistics,
    gamma: Vec<f32>,
    beta: Option<Vec<f32>>,
    eps: f32,
    /// Whether input 1 is added first.
    skip: bool,
    /// Added with the skip.
    bias: Option<Vec<f32>>,
}

impl Kernel for NormKernel {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let x = io.input::<f32>(0);
        let residual = self.skip.then(|| Residual { skip: io.input(1), bias: self.bias.as_deref() });
        let affine = Affine { gamma: &self.gamma, beta: self.beta.as_deref(), eps: self.eps };
        // The sum is the fourth output of the operators with a skip; the statistics nobody asked for at bind time.
        let (y, sum) = io.output_pair::<f32, f32>(0, 3);
        let out = Outputs { y, sum, mean: None, inv_std: None };
        match self.statistics {
            Statistics::Rms => self.norm.rms(cx.pool, x, residual, affine, out),
            Statistics::MeanVariance => self.norm.layer(cx.pool, x, residual, affine, out),
        }
        Ok(())
    }

    fn name(&self) -> String {
        let kind = match self.statistics {
            Statistics::Rms => "rms_norm",
            Statistics::MeanVariance => "layer_norm",
        };
        if self.skip { format!("skip_{kind}") } else { kind.into() }
    }
}

/// Binds the normalisations whose statistics nobody wants; others are left to the reference.
pub(super) fn bind(b: &mut Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
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
    let Some(x) = b.value(0) else { return Ok(None) };
    let with_skip = bias_at.is_some();
    if with_skip && b.value(1).is_none_or(|skip| skip.dims != x.dims) {
        return Ok(None);
    }
    // Outputs beside Y and the sum are statistics, which have no kernel.
    let wants_statistics = (1..b.node.outputs.len()).any(|i| (i != 3 || !with_skip) && b.output(i).is_some());
    if wants_statistics {
        return Ok(None);
    }
    let width = cols(x);
    let widened = |b: &mut Binder<'_>, i: Option<usize>| -> Result<Option<Vec<f32>>, String> {
        let Some(t) = i.map(|i| b.constant(i)).transpose()?.flatten() else { return Ok(None) };
        let v = t.to_f32().map_err(|e| e.to_string())?;
        b.resident += 4 * v.len();
        Ok(Some(v))
    };
    let Some(gamma) = widened(b, Some(gamma_at))? else { return Ok(None) };
    let beta = widened(b, beta_at)?;
    let bias = widened(b, bias_at)?;
    let fits = |v: &Option<Vec<f32>>| v.as_ref().is_none_or(|v| Some(v.len()) == width);
    if Some(gamma.len()) != width || !fits(&beta) || !fits(&bias) {
        return Ok(None);
    }
    Ok(Some(Box::new(NormKernel {
        norm: Norm::new(b.isa),
        statistics,
        gamma,
        beta,
        eps,
        skip: with_skip,
        bias,
    })))
}
