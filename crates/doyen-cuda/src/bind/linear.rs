//! Products with constant weights: MatMulNBits and MatMul.

use super::{Binder, Context, Kernel, cols, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::{Module, Operand},
    params,
    session::io::Io,
    weights::{Bank, Floats, optional},
};
use doyen_graph::{
    device::DeviceError, ir::Constant, lowered::Operand as Input, ops::matmul_nbits::MatMulNBits,
};
use doyen_tensor::Tensor;

/// Rows of activations of a tile of the kernels for few rows: `TOKENS` of few.cu.
pub(super) const FEW: usize = 8;

/// `y = x W^T + bias`.
struct Product {
    bank: Bank,
    bias: Option<Floats>,
    operand: Option<Operand>,
    functions: Option<Functions>,
}

/// Kernels in float32 for 1, 2 and up to 4 rows; on the tensor cores for up to [`FEW`], up to 16, and more.
struct Functions {
    exact: [Function; 3],
    few: Option<Function>,
    many: Option<[Function; 2]>,
}

/// Weight rows of a block of the kernels in float32, of those for few rows, and of those for many.
const GEMV_BLOCK: usize = 8;
pub(super) const FEW_BLOCK: usize = 16;
const GEMM_BLOCK: usize = 64;

impl Kernel for Product {
    fn name(&self) -> String {
        let bits = self.bank.width().bits();
        match self.operand {
            None => format!("matmul_{bits}b f32"),
            Some(o) => format!("matmul_{bits}b {o} tensor cores"),
        }
    }

    fn resident(&self) -> usize {
        self.bank.bytes() + self.bias.as_ref().map_or(0, Floats::bytes)
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.bank.upload(gpu, constants)?;
        if let Some(b) = &mut self.bias {
            b.upload(gpu, constants)?;
        }
        let exact = Module::Gemv(self.bank.width());
        let exact = |entry| gpu.function(exact, entry, 0);
        let few = self.bank.few().zip(self.operand);
        let few = few.map(|(bits, o)| gpu.function(Module::Few(bits, o), "few", 0)).transpose()?;
        let many = self.operand.map(|o| Module::Gemm(self.bank.width(), o));
        let many = many
            .map(|m| Ok::<_, CudaError>([gpu.function(m, "gemm_16", 0)?, gpu.function(m, "gemm_64", 0)?]));
        self.functions = Some(Functions {
            exact: [exact("gemv_1")?, exact("gemv_2")?, exact("gemv_4")?],
            few,
            many: many.transpose()?,
        });
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let functions = ready(self.functions.as_ref())?;
        let w = self.bank.params()?;
        let (rows, cols) = (self.bank.rows(), self.bank.cols());
        let m = io.input_numel(0) / cols.max(1);
        let (x, y) = (io.input(0)?, io.output(0)?);
        let (bias, bias_float) = optional(self.bias.as_ref());
        let (x_stride, y_stride) = (cols as u64, rows as u64);
        let none = Addr::NONE;
        match (&functions.few, &functions.many) {
            (_, Some([small, large])) if m > FEW => {
                let params = params::Gemm {
                    w,
                    x,
                    y,
                    bias,
                    order: none,
                    tiles: none,
                    ends: none,
                    tile_count: none,
                    x_stride,
                    y_stride,
                    bias_float,
                    m: m as u32,
                    x_div: 0,
                    y_by_route: 0,
                };
                let (f, tile) = if m <= 16 { (small, 16) } else { (large, 64) };
                let grid = Grid::new([rows.div_ceil(GEMM_BLOCK), m.div_ceil(tile), 1], 128);
                cx.gpu.launch(f, grid, params)
            }
            (Some(f), _) => {
                let params = params::Few {
                    w,
                    x,
                    y,
                    bias,
                    experts: none,
                    order: none,
                    tiles: none,
                    ends: none,
                    tile_count: none,
                    x_stride,
                    y_stride,
                    bias_float,
                    m: m as u32,
                    x_div: 0,
                    y_by_route: 0,
                    act: params::Activation::IDENTITY,
                };
                let grid = Grid::new([rows.div_ceil(FEW_BLOCK), m.div_ceil(FEW), 1], 256);
                cx.gpu.launch(f, grid, params)
            }
            _ => {
                let params = params::Gemv { w, x, y, bias, x_stride, y_stride, bias_float, m: m as u32 };
                let (f, lot) = match m {
                    0 | 1 => (&functions.exact[0], 1),
                    2 => (&functions.exact[1], 2),
                    _ => (&functions.exact[2], 4),
                };
                let grid = Grid::new([rows.div_ceil(GEMV_BLOCK), m.div_ceil(lot), 1], 128);
                cx.gpu.launch(f, grid, params)
            }
        }
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
    Ok(Some(Box::new(Product { bank, bias, operand: b.setting.operand, functions: None })))
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
    let constant = &b.graph.constant(c).data;
    let [k, n] = constant.shape()[..] else { return Ok(None) };
    if k == 0 || n == 0 || cols(x) != Some(k) || x.dims.len() < 2 {
        return Ok(None);
    }
    let bank = if let Some(rows) = transposed(constant, n, k)? {
        rows
    } else {
        let Some(t) = b.constant(1)? else { return Ok(None) };
        if t.float_view().is_err() {
            return Ok(None);
        }
        Bank::turned(&t, (n, k))?
    };
    product(b, bank, None)
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
