//! Nodes with a state of fixed size: linear attention and causal convolution.

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
    lowered::{CausalConv, LinearAttention, StateId},
};

/// The sequences of a step and the slots of a state.
fn spans(cx: &Context<'_>, state: StateId, tokens: usize) -> Result<params::Spans, CudaError> {
    let (states, size) = cx.states.all(state)?;
    Ok(params::Spans {
        token_sequence: cx.step.token_sequence,
        first: cx.step.first,
        len: cx.step.len,
        reads: cx.step.reads,
        writes: cx.step.writes,
        states,
        size: size as u64,
        tokens: tokens as u32,
        sequences: cx.step.sequences as u32,
    })
}

struct Convolution {
    op: CausalConv,
    weight: Floats,
    bias: Option<Floats>,
    function: Option<Function>,
}

impl Kernel for Convolution {
    fn name(&self) -> String {
        "causal_conv".into()
    }

    fn resident(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, Floats::bytes)
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.weight.upload(gpu, constants)?;
        if let Some(bias) = &mut self.bias {
            bias.upload(gpu, constants)?;
        }
        self.function = Some(gpu.function(Module::State, "causal_conv", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let (weight, weight_float) = optional(Some(&self.weight));
        let (bias, bias_float) = optional(self.bias.as_ref());
        let params = params::Conv {
            at: spans(cx, self.op.state, io.tokens)?,
            x: io.input(0)?,
            y: io.output(0)?,
            weight,
            bias,
            weight_float,
            bias_float,
            channels: self.op.channels as u32,
            taps: self.op.taps as u32,
            dilation: self.op.dilation as u32,
            silu: u32::from(self.op.silu),
        };
        // Rows beyond a grid's are taken in turns.
        let rows = (io.tokens + cx.step.sequences * self.op.held()).min(MOST_ROWS);
        let grid = Grid::new([self.op.channels.div_ceil(256), rows, 1], 256);
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
    }
}

/// Blocks along the second axis of a grid.
const MOST_ROWS: usize = 65535;

/// Binds a convolution.
pub(super) fn convolution(b: &Binder<'_>, op: &CausalConv) -> Result<Box<dyn Kernel>, String> {
    let x = b.float_value(0).ok_or("its input is no float value of the step")?;
    if cols(x) != Some(op.channels) {
        return Err(format!("its input has extents {:?}, the state {} channels", x.dims, op.channels));
    }
    let floats = |i: usize, expected: usize, what: &str| -> Result<Option<Floats>, String> {
        if b.value(i).is_some() {
            return Err(format!("input {what} must be a constant"));
        }
        let Some(t) = b.constant(i)? else { return Ok(None) };
        let found = Floats::of(&t).map_err(|e| format!("input {what}: {e}"))?;
        if found.len() != expected {
            return Err(format!("input {what}: expected {expected} values, found {}", t.shape()));
        }
        Ok(Some(found))
    };
    let size = op.channels.checked_mul(op.taps).ok_or("its weight overflows the address space")?;
    let weight = floats(1, size, "weight")?.ok_or("input weight must be a constant")?;
    let bias = floats(2, op.channels, "bias")?;
    Ok(Box::new(Convolution { op: op.clone(), weight, bias, function: None }))
}

struct Attention {
    op: LinearAttention,
    function: Option<Function>,
}

/// Warps of a block of state.cu, each with value channels of its own.
const WARPS: usize = 4;

impl Attention {
    /// Entry for the key channels, and value channels of a warp.
    const fn entry(&self) -> (&'static str, usize) {
        match self.op.key_size {
            0..=64 => ("linear_64", 4),
            65..=128 => ("linear_128", 4),
            129..=256 => ("linear_256", 2),
            257..=512 => ("linear_512", 1),
            _ => ("linear_any", 1),
        }
    }
}

impl Kernel for Attention {
    fn name(&self) -> String {
        self.entry().0.replace("linear", "linear_attention")
    }

    fn load(&mut self, gpu: &Gpu, _: &mut Uploads) -> Result<(), DeviceError> {
        self.function = Some(gpu.function(Module::State, self.entry().0, 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let op = &self.op;
        let given = |i: usize, is: bool| if is { io.input(i) } else { Ok(Addr::NONE) };
        let params = params::Linear {
            at: spans(cx, op.state, io.tokens)?,
            query: io.input(0)?,
            key: io.input(1)?,
            value: io.input(2)?,
            decay: given(3, op.rule.decays())?,
            beta: given(4, op.rule.corrects())?,
            y: io.output(0)?,
            q_heads: op.q_heads as u32,
            key_heads: op.key_heads as u32,
            kv_heads: op.kv_heads as u32,
            heads: op.heads() as u32,
            key_size: op.key_size as u32,
            value_size: op.value_size as u32,
            decay_per_key: u32::from(op.decay_per_key),
            betas: if op.shared_beta { 1 } else { op.kv_heads as u32 },
            scale: op.scale,
        };
        let blocks = op.value_size.div_ceil(WARPS * self.entry().1);
        let grid = Grid::new([blocks, op.kv_heads, cx.step.sequences], 32 * WARPS as u32);
        cx.gpu.launch(ready(self.function.as_ref())?, grid, params)
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
        let found = b.float_value(i).ok_or_else(|| format!("input {name} must be a value of the step"))?;
        if cols(found) != width {
            return Err(format!("input {name}: expected {width:?} channels, found {:?}", found.dims));
        }
    }
    Ok(Box::new(Attention { op: op.clone(), function: None }))
}
