//! Constant operands: where they lie in the package, and on the card once they are uploaded.

use crate::{
    driver::{Addr, Buffer, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::{Module, Parts, Width},
    params::{self, Transpose},
};
use bytes::Bytes;
use doyen_graph::device::DeviceError;
use doyen_tensor::{
    FloatType, Tensor, TensorError,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use std::sync::Arc;

/// `FloatKind` of doyen.cuh.
pub(crate) const fn float_kind(ty: FloatType) -> u32 {
    match ty {
        FloatType::F32 => 0,
        FloatType::F16 => 1,
        FloatType::BF16 => 2,
    }
}

/// Bytes of the package, and of the card once uploaded.
#[derive(Debug)]
pub(crate) struct Source {
    bytes: Bytes,
    on_card: Option<Arc<Buffer>>,
}

impl Source {
    pub(crate) const fn new(bytes: Bytes) -> Self {
        Self { bytes, on_card: None }
    }

    pub(crate) const fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub(crate) fn upload(&mut self, gpu: &Gpu, uploads: &mut Uploads) -> Result<(), DeviceError> {
        self.on_card = Some(uploads.get(gpu, &self.bytes, "weights")?);
        Ok(())
    }

    /// The first byte on the card; nothing before the upload.
    pub(crate) fn addr(&self) -> Addr {
        self.on_card.as_ref().map_or(Addr::NONE, |b| b.start())
    }
}

/// Floats that a node reads, in their stored type.
#[derive(Debug)]
pub(crate) struct Floats {
    source: Source,
    ty: FloatType,
    len: usize,
}

impl Floats {
    /// All numbers of a float tensor.
    ///
    /// # Errors
    /// When it is of another type.
    pub(crate) fn of(t: &Tensor) -> Result<Self, TensorError> {
        let view = t.float_view()?;
        Ok(Self { source: Source::new(t.shared_bytes().clone()), ty: view.float_type(), len: view.len() })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn float_type(&self) -> FloatType {
        self.ty
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.len * self.ty.size()
    }

    pub(crate) fn upload(&mut self, gpu: &Gpu, uploads: &mut Uploads) -> Result<(), DeviceError> {
        self.source.upload(gpu, uploads)
    }

    pub(crate) fn addr(&self) -> Addr {
        self.source.addr()
    }

    /// The address of a number.
    ///
    /// # Errors
    /// Before the upload, and past the last one.
    pub(crate) fn at(&self, first: usize) -> Result<Addr, CudaError> {
        if let Some(buffer) = &self.source.on_card {
            return buffer.at(first * self.ty.size(), 0);
        }
        let reason = "they were not brought to the card".to_owned();
        Err(CudaError::Driver { what: "weights".into(), reason })
    }
}

/// Address and `FloatKind` of floats that may be absent.
pub(crate) fn optional(floats: Option<&Floats>) -> (Addr, u32) {
    floats.map_or((Addr::NONE, 0), |f| (f.addr(), float_kind(f.ty)))
}

/// A bank of `matrices` matrices of one format, as they lie in the package.
#[derive(Debug)]
pub(crate) struct Bank {
    width: Width,
    codes: Source,
    scales: Option<Source>,
    zeros: Option<Source>,
    /// Everything but the addresses.
    shape: params::Weights,
    /// Columns and rows of a float matrix stored `[cols, rows]`, which is turned round on the card once.
    turn: Option<Turn>,
}

#[derive(Debug)]
struct Turn {
    turned: Option<Buffer>,
}

/// The log2 of a block size in columns; 31 where a row is one block.
fn block_shift(m: &QuantMatrix<'_>) -> Result<u32, String> {
    if m.blocks() == 1 {
        return Ok(31);
    }
    if m.block.is_power_of_two() && m.block >= 16 {
        return Ok(m.block.trailing_zeros());
    }
    Err(format!("blocks of {} columns; a power of two of at least 16 is needed", m.block))
}

pub(crate) fn small(n: usize, what: &str) -> Result<u32, String> {
    // Kernels count in 32 bits and add up to a tile past the end.
    u32::try_from(n).ok().filter(|&n| n < 1 << 30).ok_or_else(|| format!("{n} {what} are too many"))
}

impl Bank {
    /// Quantized matrices: `first` is the first of `matrices` that lie one after the other in the tensors.
    ///
    /// # Errors
    /// When the block size or an extent is none that kernels take, or a tensor is too short.
    pub(crate) fn quantized(
        first: &QuantMatrix<'_>,
        matrices: usize,
        codes: &Tensor,
        scales: &Tensor,
        zeros: Option<&Tensor>,
    ) -> Result<Self, String> {
        let m = first;
        m.validate().map_err(|e| e.to_string())?;
        let blocks = m.blocks();
        let (zero_kind, zero_row_bytes, zeros_stride, zero_float, zero_bytes) = match m.zero_points {
            ZeroPoints::Default => (0, 0, 0, 0, 0),
            ZeroPoints::PerBlock { row_bytes, .. } => {
                (1, row_bytes, m.rows * row_bytes, 0, m.rows * row_bytes)
            }
            ZeroPoints::AcrossRows(_) => {
                let len = m.bits.packed_len(m.rows);
                (2, 0, len, 0, len)
            }
            ZeroPoints::Float(v) => {
                let n = m.rows * blocks;
                (3, 0, n, float_kind(v.float_type()), n * v.float_type().size())
            }
        };
        let zeros = if zero_kind == 0 { None } else { zeros };
        let scale_type = m.scales.float_type();
        let holds = |what: &str, len: usize, each: usize| match each.checked_mul(matrices) {
            Some(need) if need <= len => Ok(()),
            _ => Err(format!("{what}: {len} bytes for {matrices} x {each}")),
        };
        holds("codes", codes.bytes().len(), m.rows * m.row_bytes)?;
        holds("scales", scales.bytes().len(), m.rows * blocks * scale_type.size())?;
        if let Some(z) = zeros {
            holds("zero points", z.bytes().len(), zero_bytes)?;
        }
        let width = Width::of_bits(m.bits);
        let shape = params::Weights {
            codes: Addr::NONE,
            scales: Addr::NONE,
            zeros: Addr::NONE,
            codes_stride: (m.rows * m.row_bytes) as u64,
            scales_stride: (m.rows * blocks) as u64,
            zeros_stride: zeros_stride as u64,
            rows: small(m.rows, "rows")?,
            cols: small(m.cols, "columns")?,
            row_bytes: small(m.row_bytes, "bytes a row")?,
            blocks: small(blocks, "blocks")?,
            block_shift: block_shift(m)?,
            zero_row_bytes: small(zero_row_bytes, "bytes of zero points")?,
            zero_kind,
            zero_float,
            scale_float: float_kind(scale_type),
            aligned: u32::from(m.row_bytes.is_multiple_of(2 * m.bits.get())),
        };
        Ok(Self {
            width,
            codes: Source::new(codes.shared_bytes().clone()),
            scales: Some(Source::new(scales.shared_bytes().clone())),
            zeros: zeros.map(|z| Source::new(z.shared_bytes().clone())),
            shape,
            turn: None,
        })
    }

    /// Float matrices `[rows, cols]`, `stride` elements from one row to the next.
    ///
    /// # Errors
    /// When an extent is none that kernels take, or the tensor is too short.
    pub(crate) fn floats(
        values: &Tensor,
        matrices: usize,
        (rows, cols): (usize, usize),
        stride: usize,
    ) -> Result<Self, String> {
        let ty = values.float_view().map_err(|e| e.to_string())?.float_type();
        let row_bytes = stride * ty.size();
        let need = (rows * matrices)
            .checked_sub(1)
            .map_or(Some(0), |n| n.checked_mul(row_bytes)?.checked_add(cols * ty.size()));
        if need.is_none_or(|need| values.bytes().len() < need) || stride < cols {
            return Err(format!(
                "{} bytes for {matrices} x {rows} rows {row_bytes} bytes apart",
                values.bytes().len()
            ));
        }
        let width = Width::of_float(ty);
        let shape = params::Weights {
            codes: Addr::NONE,
            scales: Addr::NONE,
            zeros: Addr::NONE,
            codes_stride: (rows * row_bytes) as u64,
            scales_stride: 0,
            zeros_stride: 0,
            rows: small(rows, "rows")?,
            cols: small(cols, "columns")?,
            row_bytes: small(row_bytes, "bytes a row")?,
            blocks: 1,
            block_shift: 31,
            zero_row_bytes: 0,
            zero_kind: 0,
            zero_float: 0,
            scale_float: float_kind(ty),
            aligned: u32::from(row_bytes.is_multiple_of(16)),
        };
        let codes = Source::new(values.shared_bytes().clone());
        Ok(Self { width, codes, scales: None, zeros: None, shape, turn: None })
    }

    /// A float matrix stored `[cols, rows]`, as MatMul's right operand is.
    ///
    /// # Errors
    /// As [`Bank::floats`].
    pub(crate) fn turned(values: &Tensor, (rows, cols): (usize, usize)) -> Result<Self, String> {
        let bank = Self::floats(values, 1, (rows, cols), cols)?;
        Ok(Self { turn: Some(Turn { turned: None }), ..bank })
    }

    pub(crate) const fn width(&self) -> Width {
        self.width
    }

    /// The code width, where the kernels for few rows can read the codes: whole aligned runs of 16, zero points that are
    /// codes.
    pub(crate) fn few(&self) -> Option<Bits> {
        let bits = match self.width {
            Width::B2 => Bits::B2,
            Width::B4 => Bits::B4,
            Width::B8 => Bits::B8,
            Width::F16 | Width::F32 => return None,
        };
        let s = &self.shape;
        (s.aligned != 0 && s.cols.is_multiple_of(16) && s.zero_kind != 3).then_some(bits)
    }

    /// Width and blocks of a segment, where the kernels of decode can read the codes: as [`Bank::few`], and whole runs of 16
    /// bytes of a row in one block.
    pub(crate) fn stream(&self) -> Option<(Bits, Parts)> {
        let bits = self.few()?;
        let s = &self.shape;
        // log2 of the columns of a segment of 64 bytes.
        let whole = 9 - bits.get().trailing_zeros();
        let parts = match whole.saturating_sub(s.block_shift) {
            0 => Parts::One,
            1 => Parts::Two,
            2 => Parts::Four,
            _ => return None,
        };
        s.row_bytes.is_multiple_of(16).then_some((bits, parts))
    }

    /// The code width, where the kernels for up to 8 rows that read 16 bytes a lane can: as [`Bank::few`], whole runs of 16
    /// bytes of a row in one block, and a matrix within 32 bits.
    pub(crate) fn eight(&self) -> Option<Bits> {
        let bits = self.few()?;
        let s = &self.shape;
        // log2 of the columns of 16 bytes.
        let whole = 7 - bits.get().trailing_zeros();
        let small = s.codes_stride < 1 << 32 && s.scales_stride < 1 << 32;
        (s.row_bytes.is_multiple_of(16) && s.block_shift >= whole && small).then_some(bits)
    }

    /// The code width, and the bytes and scales of a row, where codes can flow through shared memory: as [`Bank::eight`], default zero
    /// points, scales of two bytes, groups of 16 whole rows, and blocks that whole words of 4 lanes fill.
    pub(crate) fn flow(&self) -> Option<(Bits, usize, usize)> {
        let bits = self.eight()?;
        let s = &self.shape;
        let shortest = if bits == Bits::B2 { 6 } else { 5 };
        let plain = s.zero_kind == 0 && s.scale_float != 0 && s.block_shift >= shortest;
        (plain && s.rows.is_multiple_of(16)).then_some((bits, s.row_bytes as usize, s.blocks as usize))
    }

    /// log2 of the columns that share a scale; 31 where a row has one.
    pub(crate) const fn block_shift(&self) -> u32 {
        self.shape.block_shift
    }

    pub(crate) const fn rows(&self) -> usize {
        self.shape.rows as usize
    }

    pub(crate) const fn cols(&self) -> usize {
        self.shape.cols as usize
    }

    /// Bytes on the card.
    pub(crate) fn bytes(&self) -> usize {
        let sources = [Some(&self.codes), self.scales.as_ref(), self.zeros.as_ref()];
        sources.into_iter().flatten().map(|s| s.bytes.len()).sum()
    }

    /// Brings the bytes to the card; a matrix that lies the wrong way round is turned there, its second copy freed.
    pub(crate) fn upload(&mut self, gpu: &Gpu, uploads: &mut Uploads) -> Result<(), DeviceError> {
        if self.turn.is_some() {
            return self.upload_turned(gpu);
        }
        for source in [Some(&mut self.codes), self.scales.as_mut(), self.zeros.as_mut()].into_iter().flatten()
        {
            source.upload(gpu, uploads)?;
        }
        Ok(())
    }

    fn upload_turned(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        let function: Function = gpu.function(Module::Pointwise, "transpose", 0)?;
        let len = self.codes.bytes.len();
        let mut stored = Buffer::new(gpu, len, "a weight to turn round")?;
        stored.write(gpu, 0, &self.codes.bytes)?;
        let turned = Buffer::new(gpu, len, "weights")?;
        let (k, n) = (self.cols(), self.rows());
        let params = Transpose {
            x: stored.start(),
            y: turned.start(),
            k: k as u32,
            n: n as u32,
            wide: u32::from(self.width == Width::F32),
        };
        // A grid has 65535 blocks along the second axis: 2 million columns of a weight.
        let grid =
            Grid { blocks: [n.div_ceil(32), k.div_ceil(32), 1], threads: [32, 8], shared: 0, cluster: false };
        gpu.launch(&function, grid, params)?;
        gpu.wait()?;
        self.turn = Some(Turn { turned: Some(turned) });
        Ok(())
    }

    /// The structure that kernels take.
    ///
    /// # Errors
    /// Before the upload.
    pub(crate) fn params(&self) -> Result<params::Weights, CudaError> {
        let codes = match &self.turn {
            Some(t) => t.turned.as_ref().map_or(Addr::NONE, Buffer::start),
            None => self.codes.addr(),
        };
        if codes == Addr::NONE {
            let reason = "they were not brought to the card".to_owned();
            return Err(CudaError::Driver { what: "weights".into(), reason });
        }
        let addr = |s: Option<&Source>| s.map_or(Addr::NONE, Source::addr);
        let aligned = self.shape.aligned != 0 && codes.is_aligned(16);
        Ok(params::Weights {
            codes,
            scales: addr(self.scales.as_ref()),
            zeros: addr(self.zeros.as_ref()),
            aligned: u32::from(aligned),
            ..self.shape
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::FloatView;

    fn matrix<'a>(codes: &'a [u8], scales: &'a [u8], block: usize) -> QuantMatrix<'a> {
        QuantMatrix {
            rows: 2,
            cols: 64,
            bits: Bits::B4,
            block,
            codes,
            row_bytes: 32,
            scales: FloatView::new(FloatType::F32, scales).unwrap(),
            zero_points: ZeroPoints::Default,
        }
    }

    #[test]
    fn banks_count_strides_and_refuse_what_is_too_short() {
        let codes = Tensor::from_slice([3, 2, 32], &[0u8; 192]).unwrap();
        let scales = Tensor::from_slice([3, 2, 2], &[1f32; 12]).unwrap();
        let m = matrix(codes.bytes(), scales.bytes(), 32);
        let bank = Bank::quantized(&m, 3, &codes, &scales, None).unwrap();
        assert_eq!((bank.shape.codes_stride, bank.shape.scales_stride), (64, 4));
        assert_eq!((bank.shape.blocks, bank.shape.block_shift, bank.shape.aligned), (2, 5, 1));
        assert_eq!(bank.bytes(), 192 + 48);
        assert_eq!(bank.few(), Some(Bits::B4));
        assert!(bank.params().is_err());
        let error = Bank::quantized(&m, 4, &codes, &scales, None).unwrap_err();
        assert!(error.contains("codes"), "{error}");
        let odd = matrix(codes.bytes(), scales.bytes(), 24);
        assert!(Bank::quantized(&odd, 1, &codes, &scales, None).is_err());
    }

    #[test]
    fn one_block_a_row_may_have_any_size() {
        let codes = Tensor::from_slice([2, 32], &[0u8; 64]).unwrap();
        let scales = Tensor::from_slice([2], &[1f32; 2]).unwrap();
        let bank =
            Bank::quantized(&matrix(codes.bytes(), scales.bytes(), 64), 1, &codes, &scales, None).unwrap();
        assert_eq!((bank.shape.blocks, bank.shape.block_shift), (1, 31));
    }
}
