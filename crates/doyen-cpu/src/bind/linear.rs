//! Products with constant weights: MatMulNBits and MatMul.

use super::{
    Binder, Context, Feeds, Kernel, cols, rows_at,
    weights::{Floats, OwnedQuant, OwnedWeights},
};
use crate::{
    kernel::linear::{Linear, Mode, Orientation, Output, Part, run_all},
    session::io::Io,
};
use doyen_graph::{
    device::{Limits, Numerics},
    ir::Constant,
    lowered::{LValue, Operand},
    ops::matmul_nbits::MatMulNBits,
};
use doyen_tensor::Tensor;

/// Bytes of a head that comes from memory in every step, so that a second term of activations costs no time while tokens are decoded. (On
/// SmolLM2-135M in 4 bits, fast mode cost 0.0042 nats a token with one term everywhere, 0.0036 with two for attention, 0.0019 with two
/// for the head as well.)
const STREAMED_HEAD: usize = 4 << 20;

/// `y = x W^T + bias`.
pub(crate) struct Product {
    linear: Linear,
    weights: OwnedWeights,
    bias: Option<Floats>,
    x: LValue,
}

impl Kernel for Product {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let x = io.input::<f32>(0);
        let weights = self.weights.view();
        let (rows, tokens) = (weights.rows(), x.len() / weights.cols().max(1));
        let mut y = Output::new(io.output(0), tokens, rows);
        let bias = self.bias.as_ref().map(Floats::view);
        self.linear.run(cx.pool, &weights, x, bias, &mut y, cx.scratch);
        Ok(())
    }

    fn name(&self) -> String {
        self.linear.kernel().to_string()
    }

    fn scratch(&self, limits: &Limits) -> usize {
        self.linear.scratch_len(rows_at(&self.x, limits)).unwrap_or(usize::MAX)
    }

    fn product(&self) -> Option<&Product> {
        Some(self)
    }
}

/// Products in a row of the same activations (query, key and value; gate and up): they are prepared once, and threads are woken once.
pub(crate) struct Products(Vec<Box<dyn Kernel>>);

/// Products taken together at most.
pub(crate) const MOST: usize = 4;

impl Products {
    /// Whether kernels are products that want their activations the same way.
    pub(crate) fn fit<'k>(kernels: impl Iterator<Item = &'k dyn Kernel>) -> bool {
        let mut layouts = kernels.map(|k| k.product().map(|p| p.linear.layout()));
        let first = layouts.next().flatten();
        first.is_some() && layouts.all(|layout| layout == first)
    }

    /// Takes products together that [`Products::fit`].
    pub(crate) fn new(kernels: Vec<Box<dyn Kernel>>) -> Self {
        Self(kernels)
    }
}

impl Kernel for Products {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let x = io.input::<f32>(0);
        let mut parts = [const { None }; MOST];
        for ((part, kernel), y) in parts.iter_mut().zip(&self.0).zip(io.all_outputs::<f32, MOST>()) {
            let (Some(p), Some(y)) = (kernel.product(), y) else { continue };
            let weights = p.weights.view();
            let y = Output::new(y, x.len() / weights.cols().max(1), weights.rows());
            *part = Some(Part { linear: &p.linear, weights, bias: p.bias.as_ref().map(Floats::view), y });
        }
        run_all(cx.pool, &parts, x, cx.scratch);
        Ok(())
    }

    fn name(&self) -> String {
        self.0.iter().map(|k| k.name()).collect::<Vec<_>>().join(" + ")
    }
}

fn product(
    b: &Binder<'_>,
    weights: OwnedWeights,
    bias: Option<Floats>,
    mode: Mode,
) -> Result<Box<dyn Kernel>, String> {
    let view = weights.view();
    view.validate().map_err(|e| e.to_string())?;
    let linear = Linear::new(view.format(), mode, b.isa);
    let x = b.value(0).ok_or("its activations are a constant")?.clone();
    Ok(Box::new(Product { linear, weights, bias, x }))
}

/// MatMulNBits. Its own `g_idx` permutations of scales are left to the reference.
pub(super) fn nbits(b: &mut Binder<'_>, op: &MatMulNBits) -> Result<Option<Box<dyn Kernel>>, String> {
    let tensors = b.constants(1)?;
    let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    let operands = op.operands(&refs).map_err(|e| e.to_string())?;
    if operands.groups.is_some() {
        return Ok(None);
    }
    let (Some(codes), Some(scales)) = (refs[0], refs[1]) else {
        return Err("weights or scales are absent".into());
    };
    let zero_points = refs.get(2).copied().flatten();
    let weights = OwnedWeights::Int(OwnedQuant::new(&operands.matrix, codes, scales, zero_points));
    let bias = refs.get(4).copied().flatten().map(Floats::of).transpose().map_err(|e| e.to_string())?;
    let mut mode = b.mode(op.accuracy_level.permits_int8());
    if mode == Mode::Fast && b.numerics == Numerics::Fast {
        mode = match b.feeds() {
            Some(Feeds::Attention) => Mode::Fine,
            Some(Feeds::Output) if weights.view().bytes() >= STREAMED_HEAD => Mode::Fine,
            _ => mode,
        };
    }
    product(b, weights, bias, mode).map(Some)
}

/// MatMul with a constant matrix `[K,N]` on the right; anything else is left to the reference.
pub(super) fn matmul(b: &mut Binder<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(x), Some(Operand::Const(c))) = (b.value(0), b.operand(1)) else { return Ok(None) };
    let [k, _] = b.graph.constant(c).data.shape()[..] else { return Ok(None) };
    if cols(x) != Some(k) || x.dims.len() < 2 || x.dtype != doyen_tensor::DType::F32 {
        return Ok(None);
    }
    let Some(weights) = float_matrix(b, 1)? else { return Ok(None) };
    product(b, weights, None, Mode::Exact).map(Some)
}

/// Operand `i` as a constant matrix `[K,N]`; `None` when it is something else.
pub(super) fn float_matrix(b: &mut Binder<'_>, i: usize) -> Result<Option<OwnedWeights>, String> {
    let Some(Operand::Const(c)) = b.operand(i) else { return Ok(None) };
    let constant = &b.graph.constant(c).data;
    let [k, n] = constant.shape()[..] else { return Ok(None) };
    if k == 0 {
        return Ok(None);
    }
    if let Some(w) = transposed(constant, n, k)? {
        return Ok(Some(w));
    }
    let Some(t) = b.constant(i)? else { return Ok(None) };
    let values = Floats::of(&t).map_err(|e| e.to_string())?;
    let orientation = Orientation::ColumnMajor;
    Ok(Some(OwnedWeights::Float { rows: n, cols: k, orientation, stride: n, values }))
}

/// A constant that is the whole-row Transpose of contiguous `[N,K]` rows, read where it lies.
fn transposed(constant: &Constant, n: usize, k: usize) -> Result<Option<OwnedWeights>, String> {
    let [part] = constant.parts() else { return Ok(None) };
    if n == 0 || part.strides[0] != 1 || part.strides[1] < k || constant.as_tensor().is_some() {
        return Ok(None);
    }
    let size = constant.dtype().bits() / 8;
    let stride = part.strides[1];
    let end = part.offset + (n - 1) * stride + k;
    let bytes = part.bytes.slice(part.offset * size..end * size);
    let flat = Tensor::from_bytes(constant.dtype(), [end - part.offset], bytes).map_err(|e| e.to_string())?;
    let values = Floats::of(&flat).map_err(|e| e.to_string())?;
    Ok(Some(OwnedWeights::Float { rows: n, cols: k, orientation: Orientation::RowMajor, stride, values }))
}
