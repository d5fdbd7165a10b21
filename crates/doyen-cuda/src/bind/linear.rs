//! Products with constant weights: MatMulNBits and MatMul.

use super::{
    Binder, Context, Kernel, cols,
    products::{self, FEW, Groups, Kernels, Product, Way},
    ready, rows_at, stream, wide,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::{Module, Operand},
    params,
    session::io::Io,
    weights::{Bank, Floats, optional},
};
use doyen_graph::{
    device::{DeviceError, Limits},
    ir::Constant,
    lowered::{LValue, Operand as Input},
    ops::matmul_nbits::MatMulNBits,
};
use doyen_tensor::Tensor;

/// `y = x W^T + bias`.
pub(crate) struct Linear {
    pub(super) bank: Bank,
    pub(super) bias: Option<Floats>,
    operand: Option<Operand>,
    x: LValue,
    /// Kernels in float32 for 1, 2 and up to 4 rows.
    exact: Option<[Function; 3]>,
    pub(super) kernels: Option<Kernels>,
}

/// Weight rows of a block of the kernels in float32.
const GEMV_BLOCK: usize = 8;

impl Linear {
    /// Rows of a tile on the tensor cores; none where the float32 kernels run.
    pub(super) fn tile(&self, m: usize) -> Option<usize> {
        match (self.operand, products::way(&self.bank)) {
            (None, _) | (_, None) => None,
            // Floats of few rows lose nothing in float32, nor does a product of too few tiles to keep a card busy.
            (_, Some(Way::Floats)) if m <= FEW || products::float_tiles(self.bank.rows(), m) <= 8 => None,
            (_, Some(way)) => Some(products::rows_alone(m, way)),
        }
    }

    /// Bytes of `m` rows of narrowed activations.
    pub(super) fn narrow(&self, m: usize) -> usize {
        if self.operand.is_some() && products::way(&self.bank) == Some(Way::Codes) {
            m.saturating_mul(2 * wide::line(self.bank.cols()))
        } else {
            0
        }
    }

    fn exact(&self, cx: &Context<'_>, (x, y, m): (Addr, Addr, usize)) -> Result<(), CudaError> {
        let [one, two, four] = ready(self.exact.as_ref())?;
        let (rows, cols) = (self.bank.rows(), self.bank.cols());
        let (bias, bias_float) = optional(self.bias.as_ref());
        let params = params::Gemv {
            w: self.bank.params()?,
            x,
            y,
            bias,
            x_stride: cols as u64,
            y_stride: rows as u64,
            bias_float,
            m: m as u32,
        };
        let (f, lot) = match m {
            0 | 1 => (one, 1),
            2 => (two, 2),
            _ => (four, 4),
        };
        cx.gpu.launch(f, Grid::new([rows.div_ceil(GEMV_BLOCK), m.div_ceil(lot), 1], 128), params)
    }
}

impl Kernel for Linear {
    fn name(&self) -> String {
        let bits = self.bank.width().bits();
        match (self.operand, products::way(&self.bank)) {
            (Some(o), Some(Way::Codes)) => format!("matmul_{bits}b {o} tensor cores"),
            (Some(o), Some(Way::Floats)) => format!("matmul_{bits}b f32 / {o} tensor cores"),
            _ => format!("matmul_{bits}b f32"),
        }
    }

    fn linear(&self) -> Option<&Linear> {
        Some(self)
    }

    /// Narrowed activations.
    fn scratch(&self, limits: &Limits) -> usize {
        self.narrow(rows_at(&self.x, limits))
    }

    fn resident(&self) -> usize {
        self.bank.bytes() + self.bias.as_ref().map_or(0, Floats::bytes)
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.bank.upload(gpu, constants)?;
        if let Some(b) = &mut self.bias {
            b.upload(gpu, constants)?;
        }
        let exact = |entry| gpu.function(Module::Gemv(self.bank.width()), entry, 0);
        self.exact = Some([exact("gemv_1")?, exact("gemv_2")?, exact("gemv_4")?]);
        self.kernels = match self.operand {
            Some(o) => Kernels::load(gpu, &self.bank, o)?,
            None => None,
        };
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let m = io.input_numel(0) / self.bank.cols().max(1);
        let (x, y) = (io.input(0)?, io.output(0)?);
        let Some(rows) = self.tile(m) else { return self.exact(cx, (x, y, m)) };
        let kernels = ready(self.kernels.as_ref())?;
        let flow = kernels.flow().filter(|f| m <= FEW && f.fills(cx.gpu, self.bank.rows()));
        if let Some(flow) = flow {
            let bias = self.bias.as_ref();
            let job =
                Product { bank: &self.bank, bias, x, x_rows: m, x_div: 0, y, narrow: Addr::NONE, act: None };
            return flow.product(cx, &Groups::none(m, FEW), &job, false);
        }
        if let Some(stream) = kernels.stream().filter(|_| stream::takes(&self.bank, m)) {
            return stream.product(cx, &stream::Job { bank: &self.bank, bias: self.bias.as_ref(), x, y }, m);
        }
        let narrow = if m > 1 { cx.scratch.at(0, self.narrow(m))? } else { Addr::NONE };
        let job = Product {
            bank: &self.bank,
            bias: self.bias.as_ref(),
            x,
            x_rows: m,
            x_div: 0,
            y,
            narrow,
            act: None,
        };
        products::launch(cx, kernels, &Groups::none(m, rows), &job)
    }
}

fn product(b: &Binder<'_>, bank: Bank, bias: Option<Floats>) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(x) = b.float_value(0) else { return Ok(None) };
    if cols(x) != Some(bank.cols()) {
        return Err(format!("its input has extents {:?}, the weight {} columns", x.dims, bank.cols()));
    }
    if bias.as_ref().is_some_and(|b| b.len() != bank.rows()) {
        return Err(format!("bias: expected {} numbers", bank.rows()));
    }
    let (operand, x) = (b.setting.operand, x.clone());
    Ok(Some(Box::new(Linear { bank, bias, operand, x, exact: None, kernels: None })))
}

/// MatMulNBits. Its own `g_idx` permutations of scales are left to the reference.
pub(super) fn nbits(b: &Binder<'_>, op: &MatMulNBits) -> Result<Option<Box<dyn Kernel>>, String> {
    let tensors = b.constants(1)?;
    let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    let operands = op.operands(&refs).map_err(|e| e.to_string())?;
    if operands.groups.is_some() {
        return Ok(None);
    }
    let (Some(codes), Some(scales)) = (refs[0], refs[1]) else {
        return Err("weights or scales are absent".into());
    };
    let zeros = refs.get(2).copied().flatten();
    let bank = Bank::quantized(&operands.matrix, 1, codes, scales, zeros)?;
    let bias = refs.get(4).copied().flatten().map(Floats::of).transpose().map_err(|e| e.to_string())?;
    product(b, bank, bias)
}

/// MatMul with a constant matrix `[K,N]` on the right; anything else is left to the reference.
pub(super) fn matmul(b: &Binder<'_>) -> Result<Option<Box<dyn Kernel>>, String> {
    let (Some(x), Some(Input::Const(c))) = (b.float_value(0), b.operand(1)) else { return Ok(None) };
    let [k, _] = b.graph.constant(c).data.shape()[..] else { return Ok(None) };
    if cols(x) != Some(k) || x.dims.len() < 2 {
        return Ok(None);
    }
    match float_matrix(b, 1)? {
        Some(bank) => product(b, bank, None),
        None => Ok(None),
    }
}

/// Operand `i` as a constant matrix `[K,N]` of floats; `None` when it is something else.
pub(super) fn float_matrix(b: &Binder<'_>, i: usize) -> Result<Option<Bank>, String> {
    let Some(Input::Const(c)) = b.operand(i) else { return Ok(None) };
    let constant = &b.graph.constant(c).data;
    let [k, n] = constant.shape()[..] else { return Ok(None) };
    if k == 0 || n == 0 {
        return Ok(None);
    }
    if let Some(rows) = transposed(constant, n, k)? {
        return Ok(Some(rows));
    }
    match b.constant(i)? {
        Some(t) if t.float_view().is_ok() => Bank::turned(&t, (n, k)).map(Some),
        _ => Ok(None),
    }
}

/// A constant that is the whole-row Transpose of contiguous `[N,K]` rows, read where it lies.
fn transposed(constant: &Constant, n: usize, k: usize) -> Result<Option<Bank>, String> {
    let [part] = constant.parts() else { return Ok(None) };
    if part.strides[0] != 1 || part.strides[1] < k || constant.as_tensor().is_some() {
        return Ok(None);
    }
    let size = constant.dtype().bits() / 8;
    let stride = part.strides[1];
    let end = part.offset + (n - 1) * stride + k;
    let bytes = part.bytes.slice(part.offset * size..end * size);
    let flat = Tensor::from_bytes(constant.dtype(), [end - part.offset], bytes).map_err(|e| e.to_string())?;
    if flat.float_view().is_err() {
        return Ok(None);
    }
    Bank::floats(&flat, 1, (n, k), stride).map(Some)
}
