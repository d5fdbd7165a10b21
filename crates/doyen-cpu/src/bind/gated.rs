//! The gated operators of hybrid models, where their parameters are constants and their values of one shape; others are
//! left to the reference.

use super::{Binder, Context, Kernel, cols};
use crate::{kernel::gated::Gated, session::io::Io};
use doyen_graph::{
    lowered::LValue,
    ops::{Op, gated::GateActivation},
};
use doyen_tensor::DType;

struct GatedNorm {
    kernel: Gated,
    scale: Vec<f32>,
    epsilon: f32,
    silu: bool,
}

impl Kernel for GatedNorm {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let (x, gate) = (io.input(0), io.input(2));
        self.kernel.norm(cx.pool, [x, gate, &self.scale], (self.epsilon, self.silu), io.output(0));
        Ok(())
    }

    fn name(&self) -> String {
        "gated_rms_norm".into()
    }
}

struct GatedAdd {
    kernel: Gated,
}

impl Kernel for GatedAdd {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let values = [io.input(0), io.input(1), io.input(2)];
        self.kernel.add(cx.pool, values, io.output(0));
        Ok(())
    }

    fn name(&self) -> String {
        "gated_add".into()
    }
}

struct Gates {
    kernel: Gated,
    bias: Vec<f32>,
    scale: Vec<f32>,
    with_beta: bool,
}

impl Kernel for Gates {
    fn run(&self, io: &mut Io<'_>, _: &mut Context<'_>) -> Result<(), String> {
        let a = io.input(0);
        let b = self.with_beta.then(|| io.input(3));
        let (decay, beta) = io.output_pair::<f32, f32>(0, 1);
        self.kernel.decay(a, (&self.bias, &self.scale), decay);
        if let (Some(b), Some(beta)) = (b, beta) {
            self.kernel.beta(b, beta);
        }
        Ok(())
    }

    fn name(&self) -> String {
        "linear_attention_gate".into()
    }
}

/// Binds what has a kernel.
pub(super) fn bind(b: &mut Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    let kernel = Gated::new(b.isa);
    let value = |b: &Binder<'_>, i: usize| {
        b.value(i).filter(|v| v.dtype == DType::F32).map(|v: &LValue| v.dims.clone())
    };
    Ok(match op {
        Op::GatedRmsNorm(n) => {
            let (x, gate, scale) = (value(b, 0), value(b, 2), floats(b, 1)?);
            let last = b.value(0).and_then(cols);
            match scale.filter(|s| last.is_some_and(|n| !s.is_empty() && n.is_multiple_of(s.len()))) {
                Some(scale) if x.is_some() && x == gate => {
                    let silu = n.activation == GateActivation::Silu;
                    Some(Box::new(GatedNorm { kernel, scale, epsilon: n.epsilon, silu }))
                }
                _ => None,
            }
        }
        Op::GatedAdd(_) => {
            let (x, y, gate) = (value(b, 0), value(b, 1), value(b, 2));
            let fits = x.is_some() && x == y && gate.is_some() && b.value(2).and_then(cols) == Some(1);
            fits.then(|| -> Box<dyn Kernel> { Box::new(GatedAdd { kernel }) })
        }
        Op::LinearAttentionGate(_) => {
            let (bias, scale) = (floats(b, 1)?, floats(b, 2)?);
            let with_beta = b.operand(3).is_some();
            let heads = b.value(0).and_then(cols);
            match (bias, scale, value(b, 0)) {
                (Some(bias), Some(scale), Some(a))
                    if bias.len() == scale.len()
                        && !bias.is_empty()
                        && heads == Some(bias.len())
                        && (!with_beta || value(b, 3).as_ref() == Some(&a)) =>
                {
                    Some(Box::new(Gates { kernel, bias, scale, with_beta }))
                }
                _ => None,
            }
        }
        _ => None,
    })
}

/// A constant operand, widened.
fn floats(b: &mut Binder<'_>, i: usize) -> Result<Option<Vec<f32>>, String> {
    let Some(t) = b.constant(i)? else { return Ok(None) };
    let values = t.to_f32().map_err(|e| e.to_string())?;
    b.resident += 4 * values.len();
    Ok(Some(values))
}
