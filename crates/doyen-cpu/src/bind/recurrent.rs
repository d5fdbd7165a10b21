//! Nodes with a state of fixed size: linear attention and causal convolution.

use super::{Binder, Context, Kernel, cols};
use crate::{
    kernel::recurrent::{
        CausalConv as ConvKernel, ConvParams, LinearAttention as LinearKernel, LinearParams, Operands, States,
    },
    session::{cast_mut, io::Io},
};
use doyen_graph::{
    device::Limits,
    lowered::{CausalConv, LinearAttention},
};

struct Convolution {
    kernel: ConvKernel,
    op: CausalConv,
    /// `[taps, channels]`.
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Kernel for Convolution {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let params = ConvParams {
            weight: &self.weight,
            bias: self.bias.as_deref(),
            channels: self.op.channels,
            taps: self.op.taps,
            dilation: self.op.dilation,
            silu: self.op.silu,
        };
        let (memory, size) = cx.states.all(self.op.state)?;
        let states = States::new(memory, size, cx.batch.sequences, cx.batch.states);
        let states = states.map_err(|e| e.to_string())?;
        let x = io.input::<f32>(0);
        self.kernel.run(cx.pool, &params, &states, x, io.output(0));
        Ok(())
    }

    fn name(&self) -> String {
        "causal_conv".into()
    }
}

/// Binds a convolution.
pub(super) fn convolution(b: &mut Binder<'_>, op: &CausalConv) -> Result<Box<dyn Kernel>, String> {
    let mut floats = |i: usize, expected: usize, what: &str| {
        let Some(t) = b.constant(i)? else { return Ok(None) };
        let values = t.to_f32().map_err(|e| e.to_string())?;
        if values.len() != expected {
            return Err(format!("input {what}: expected {expected} values, found {}", t.shape()));
        }
        b.resident += 4 * values.len();
        Ok(Some(values))
    };
    let size = op.channels.checked_mul(op.taps).ok_or("its weight overflows the address space")?;
    let stored = floats(1, size, "weight")?.ok_or("input weight must be a constant")?;
    let bias = floats(2, op.channels, "bias")?;
    if b.value(2).is_some() {
        return Err("input bias must be a constant".into());
    }
    let mut weight = vec![0.0; size];
    for (i, w) in stored.into_iter().enumerate() {
        weight[i % op.taps * op.channels + i / op.taps] = w;
    }
    Ok(Box::new(Convolution { kernel: ConvKernel::new(b.isa), op: op.clone(), weight, bias }))
}

struct Attention {
    kernel: LinearKernel,
    op: LinearAttention,
    params: LinearParams,
    threads: usize,
}

impl Kernel for Attention {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let operands = Operands {
            query: io.input(0),
            key: io.input(1),
            value: io.input(2),
            decay: self.op.rule.decays().then(|| io.input(3)),
            beta: self.op.rule.corrects().then(|| io.input(4)),
        };
        let (memory, size) = cx.states.all(self.op.state)?;
        let states = States::new(memory, size, cx.batch.sequences, cx.batch.states);
        let states = states.map_err(|e| e.to_string())?;
        let scratch = &mut cx.scratch[..4 * self.threads * self.params.scratch()];
        let out = (cast_mut(scratch), io.output::<f32>(0));
        self.kernel.run(cx.pool, &self.params, &states, &operands, out);
        Ok(())
    }

    fn name(&self) -> String {
        "linear_attention".into()
    }

    fn scratch(&self, _: &Limits) -> usize {
        self.params.scratch().saturating_mul(4 * self.threads)
    }
}

/// Binds linear attention.
pub(super) fn attention(b: &Binder<'_>, op: &LinearAttention) -> Result<Box<dyn Kernel>, String> {
    let widths = [
        ("query", op.q_heads.checked_mul(op.key_size), true),
        ("key", op.key_heads.checked_mul(op.key_size), true),
        ("value", op.kv_heads.checked_mul(op.value_size), true),
        ("decay", Some(op.decay_width()), op.rule.decays()),
        ("beta", Some(if op.shared_beta { 1 } else { op.kv_heads }), op.rule.corrects()),
    ];
    for (i, (name, width, _)) in widths.into_iter().enumerate().filter(|(_, (.., needed))| *needed) {
        let found = b.value(i).ok_or_else(|| format!("input {name} must be a value of the step"))?;
        if cols(found) != width {
            return Err(format!("input {name}: expected {width:?} channels, found {:?}", found.dims));
        }
    }
    let params = LinearParams {
        q_heads: op.q_heads,
        key_heads: op.key_heads,
        kv_heads: op.kv_heads,
        key_size: op.key_size,
        value_size: op.value_size,
        scale: op.scale,
    };
    let kernel = LinearKernel::new(b.isa);
    Ok(Box::new(Attention { kernel, op: op.clone(), params, threads: b.threads }))
}
