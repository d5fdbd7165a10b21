//! Which kernel a weight gets: the one table of this folder.
//!
//! Read at bind time. A new instruction set adds its rows to [`int`] and [`float`] and its layouts to [`layout`].

use super::{Columns, FloatMatrix, Format, Mode, RowClass, Weights, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx2_float};
use crate::{
    detect::Isa,
    kernel::quantize::{Layout, Prepared},
};
use doyen_tensor::{
    FloatView,
    format::{Bits, QuantMatrix},
};

/// Rows of quantized weights times prepared tokens.
pub(super) type IntFn = unsafe fn(&QuantMatrix<'_>, &Prepared<'_>, Option<FloatView<'_>>, &mut Columns<'_>);
/// Rows of float weights times prepared tokens.
pub(super) type FloatFn = unsafe fn(&FloatMatrix<'_>, &Prepared<'_>, Option<FloatView<'_>>, &mut Columns<'_>);

/// A product kernel: a function and the name plans print.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    name: &'static str,
    function: Function,
}

#[derive(Debug, Clone, Copy)]
enum Function {
    Int(IntFn),
    Float(FloatFn),
}

impl Kernel {
    /// The name: instruction set, format, mode, register tile (weight rows x tokens).
    pub const fn name(self) -> &'static str {
        self.name
    }

    pub(super) const fn int(name: &'static str, function: IntFn) -> Self {
        Self { name, function: Function::Int(function) }
    }

    pub(super) const fn float(name: &'static str, function: FloatFn) -> Self {
        Self { name, function: Function::Float(function) }
    }

    /// Runs it. The caller has checked the weight against the format this kernel was chosen for, activations and
    /// output against the weight.
    pub(super) fn run(
        self,
        weights: &Weights<'_>,
        acts: &Prepared<'_>,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        match (self.function, weights) {
            // SAFETY: the instruction set was proven by the token in the `Isa` that chose the kernel, and the weight
            // was validated and is of the format chosen for.
            (Function::Int(f), Weights::Int(w)) => unsafe { f(w, acts, bias, out) },
            // SAFETY: as above.
            (Function::Float(f), Weights::Float(w)) => unsafe { f(w, acts, bias, out) },
            _ => unreachable!("the kind of weight was checked against the kernel's format"),
        }
    }
}

/// The kernel for a format, mode, instruction set and row class.
pub fn select(format: Format, mode: Mode, isa: Isa, class: RowClass) -> Kernel {
    match format {
        Format::Int { bits, block, cols } => int(bits, block, cols, mode, isa, class),
        Format::Float { ty, orientation, .. } => match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) | Isa::Avx512(_) => avx2_float::kernel(ty, orientation, class),
            Isa::Scalar => Kernel::float("scalar-float", scalar::float),
        },
    }
}

fn int(bits: Bits, block: usize, cols: usize, mode: Mode, isa: Isa, class: RowClass) -> Kernel {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) | Isa::Avx512(_) if vector_block(block, cols) => {
            avx2::kernel(bits, block, cols, mode, class)
        }
        _ => match mode {
            Mode::Exact => Kernel::int("scalar-int-exact", scalar::exact),
            Mode::Fast => Kernel::int("scalar-int-fast", scalar::fast),
        },
    }
}

/// The activation layout that the kernels of a format, mode and instruction set share.
pub(super) fn layout(format: Format, mode: Mode, isa: Isa) -> Layout {
    #[cfg(target_arch = "x86_64")]
    let token = isa.avx2();
    match (format, isa) {
        (Format::Float { cols, .. }, _) => Layout::plain(cols),
        #[cfg(target_arch = "x86_64")]
        (Format::Int { bits, block, cols }, _)
            if let Some(token) = token
                && vector_block(block, cols) =>
        {
            match mode {
                Mode::Exact => Layout::lanes(cols, bits, token),
                Mode::Fast => Layout::int8_lanes(cols, bits, block, token),
            }
        }
        (Format::Int { block, cols, .. }, _) => match mode {
            Mode::Exact => Layout::plain(cols),
            Mode::Fast => Layout::int8(cols, block),
        },
    }
}

/// Blocks that vector kernels take: powers of two from 16 on, and the whole row. Then neither a group of activations
/// nor a 32-bit lane of packed codes (at most 16 columns) straddles a border between blocks.
#[cfg(target_arch = "x86_64")]
const fn vector_block(block: usize, cols: usize) -> bool {
    block >= cols || (block >= 16 && block.is_power_of_two())
}
