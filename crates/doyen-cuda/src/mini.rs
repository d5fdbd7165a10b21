//! Banks of matrices of small floats (MXFP4, NVFP4, FP8): where they lie in the package, and on the card once they are uploaded.

use crate::{
    driver::{Addr, Buffer, Gpu, Grid, Uploads},
    error::CudaError,
    module::{Module, Small},
    params,
    weights::{Source, float_kind, small},
};
use doyen_graph::device::DeviceError;
use doyen_tensor::{
    Tensor,
    format::{Element, MiniMatrix, MiniScales},
};

/// A bank of matrices of one format. Lines of 4-bit codes that hold columns are turned round on the card once.
#[derive(Debug)]
pub(crate) struct MiniBank {
    code: Small,
    codes: Source,
    scales: Option<Source>,
    globals: Option<Source>,
    /// Everything but the addresses.
    shape: params::Mini,
    matrices: usize,
    transposed: bool,
    turned: Option<Buffer>,
    /// No value is larger, NaN apart.
    largest: f64,
}

/// `ScaleKind` of mini.cu.
const fn scale_kind(scales: &MiniScales<'_>) -> u32 {
    match scales {
        MiniScales::None => 0,
        MiniScales::E8M0(_) => 1,
        MiniScales::E4M3(_) => 2,
        MiniScales::Tiles { .. } => 3,
    }
}

impl MiniBank {
    /// `first` is the first of `matrices` that lie one after the other in the tensors; `globals` has a factor of each.
    ///
    /// # Errors
    /// When an extent is none that kernels take, or a tensor is too short.
    pub(crate) fn new(
        first: &MiniMatrix<'_>,
        matrices: usize,
        codes: &Tensor,
        scales: Option<&Tensor>,
        globals: Option<&Tensor>,
    ) -> Result<Self, String> {
        let m = first;
        m.validate().map_err(|e| e.to_string())?;
        let code = Small::of(m.element);
        let row_bytes = m.cols.div_ceil(m.element.per_byte());
        let (block, tile, scale_float, scale_size) = match m.scales {
            MiniScales::None => (m.cols, 1, 0, 0),
            MiniScales::E8M0(_) | MiniScales::E4M3(_) => (m.scales.block(m.cols), 1, 0, 1),
            MiniScales::Tiles { values, tile } => {
                (tile, tile, float_kind(values.float_type()), values.float_type().size())
            }
        };
        // A run of 16 columns has one scale.
        if m.blocks() > 1 && !block.is_multiple_of(16) {
            return Err(format!("blocks of {block} columns; a multiple of 16 is needed"));
        }
        if m.transposed && !(m.rows.is_multiple_of(2) && m.cols.is_multiple_of(2)) {
            return Err(format!("transposed codes of {} rows and {} columns", m.rows, m.cols));
        }
        let scales_stride = if scale_size == 0 { 0 } else { m.rows.div_ceil(tile) * m.blocks() };
        let holds = |what: &str, found: usize, each: usize| match each.checked_mul(matrices) {
            Some(need) if need <= found => Ok(()),
            _ => Err(format!("{what}: {found} bytes for {matrices} x {each}")),
        };
        holds("codes", codes.bytes().len(), m.rows * row_bytes)?;
        let scales = scales.filter(|_| scale_size > 0);
        holds("scales", scales.map_or(0, |s| s.bytes().len()), scales_stride * scale_size)?;
        if let Some(g) = globals {
            holds("global scales", g.bytes().len(), size_of::<f32>())?;
        }
        let shape = params::Mini {
            codes: Addr::NONE,
            scales: Addr::NONE,
            globals: Addr::NONE,
            codes_stride: (m.rows * row_bytes) as u64,
            scales_stride: scales_stride as u64,
            rows: small(m.rows, "rows")?,
            cols: small(m.cols, "columns")?,
            row_bytes: small(row_bytes, "bytes a row")?,
            blocks: small(m.blocks(), "blocks")?,
            block: small(block, "columns of a block")?.max(1),
            tile: small(tile, "rows of a tile")?.max(1),
            scale_kind: scale_kind(&m.scales),
            scale_float,
            aligned: u32::from(row_bytes.is_multiple_of(2 * code.bits())),
        };
        let source = |t: &Tensor| Source::new(t.shared_bytes().clone());
        Ok(Self {
            code,
            codes: source(codes),
            largest: largest(m, scales, globals)?,
            scales: scales.map(source),
            globals: globals.map(source),
            shape,
            matrices,
            transposed: m.transposed,
            turned: None,
        })
    }

    pub(crate) const fn code(&self) -> Small {
        self.code
    }

    pub(crate) const fn rows(&self) -> usize {
        self.shape.rows as usize
    }

    pub(crate) const fn cols(&self) -> usize {
        self.shape.cols as usize
    }

    /// The largest absolute value that its codes and scales can make.
    pub(crate) const fn largest(&self) -> f64 {
        self.largest
    }

    /// Bytes on the card.
    pub(crate) fn bytes(&self) -> usize {
        let sources = [Some(&self.codes), self.scales.as_ref(), self.globals.as_ref()];
        sources.into_iter().flatten().map(|s| s.bytes().len()).sum()
    }

    /// Brings the bytes to the card.
    pub(crate) fn upload(&mut self, gpu: &Gpu, uploads: &mut Uploads) -> Result<(), DeviceError> {
        if self.transposed {
            self.turned = Some(self.turn(gpu)?);
        } else {
            self.codes.upload(gpu, uploads)?;
        }
        for source in [self.scales.as_mut(), self.globals.as_mut()].into_iter().flatten() {
            source.upload(gpu, uploads)?;
        }
        Ok(())
    }

    /// The codes turned round; the copy as stored is freed.
    fn turn(&self, gpu: &Gpu) -> Result<Buffer, DeviceError> {
        let function = gpu.function(Module::Mini(self.code), "mini_turn", 0)?;
        let bytes = self.codes.bytes();
        let mut stored = Buffer::new(gpu, bytes.len(), "codes to turn round")?;
        stored.write(gpu, 0, bytes)?;
        let turned = Buffer::new(gpu, bytes.len(), "weights")?;
        let pairs = self.matrices * (self.rows() / 2) * (self.cols() / 2);
        let params = params::MiniTurn {
            x: stored.start(),
            y: turned.start(),
            pairs: pairs as u64,
            rows: self.shape.rows,
            cols: self.shape.cols,
        };
        gpu.launch(&function, Grid::over(pairs), params)?;
        gpu.wait()?;
        Ok(turned)
    }

    /// The structure that kernels take.
    ///
    /// # Errors
    /// Before the upload.
    pub(crate) fn params(&self) -> Result<params::Mini, CudaError> {
        let codes = self.turned.as_ref().map_or_else(|| self.codes.addr(), Buffer::start);
        if codes == Addr::NONE {
            let reason = "they were not brought to the card".to_owned();
            return Err(CudaError::Driver { what: "weights".into(), reason });
        }
        let addr = |s: Option<&Source>| s.map_or(Addr::NONE, Source::addr);
        Ok(params::Mini {
            codes,
            scales: addr(self.scales.as_ref()),
            globals: addr(self.globals.as_ref()),
            aligned: u32::from(self.shape.aligned != 0 && codes.is_aligned(16)),
            ..self.shape
        })
    }
}

/// The largest code times the largest scales; of scales that are codes the largest there is, so that no tensor is read.
fn largest(m: &MiniMatrix<'_>, scales: Option<&Tensor>, globals: Option<&Tensor>) -> Result<f64, String> {
    let most = |t: &Tensor| -> Result<f64, String> {
        let values = t.to_f32().map_err(|e| e.to_string())?;
        Ok(values.iter().fold(0.0, |m: f64, v| m.max(f64::from(v.abs()))))
    };
    let code = match m.element {
        Element::E2M1 => 6.0,
        Element::E4M3 => 448.0,
    };
    let scale = match (m.scales, scales) {
        (MiniScales::E8M0(_), Some(t)) => {
            // The last code is NaN.
            let most = t.bytes().iter().map(|&b| if b == 255 { 0 } else { b }).max().unwrap_or(0);
            (f64::from(most) - 127.0).exp2()
        }
        (MiniScales::E4M3(_), Some(_)) => 448.0,
        (MiniScales::Tiles { .. }, Some(t)) => most(t)?,
        _ => 1.0,
    };
    Ok(code * scale * globals.map_or(Ok(1.0), most)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::DType;

    #[test]
    fn banks_count_strides_and_know_their_largest_value() {
        let codes = Tensor::from_slice([3, 2, 32], &[0u8; 192]).unwrap();
        let scales = Tensor::from_bytes(DType::F8E8M0, [3, 2, 2], vec![128u8; 12].into()).unwrap();
        let globals = Tensor::from_slice([3], &[1.0f32, -3.0, 2.0]).unwrap();
        let m = MiniMatrix {
            rows: 2,
            cols: 64,
            element: Element::E2M1,
            codes: &codes.bytes()[..64],
            transposed: false,
            scales: MiniScales::E8M0(&scales.bytes()[..4]),
            global: 1.0,
        };
        let bank = MiniBank::new(&m, 3, &codes, Some(&scales), Some(&globals)).unwrap();
        assert_eq!((bank.shape.codes_stride, bank.shape.scales_stride), (64, 4));
        assert_eq!((bank.shape.block, bank.shape.tile, bank.shape.aligned), (32, 1, 1));
        assert_eq!(bank.bytes(), 192 + 12 + 12);
        assert_eq!(bank.largest(), 6.0 * 2.0 * 3.0);
        assert!(bank.params().is_err());
        let error = MiniBank::new(&m, 4, &codes, Some(&scales), None).unwrap_err();
        assert!(error.contains("codes"), "{error}");
    }
}
