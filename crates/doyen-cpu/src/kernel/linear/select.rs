//! Which kernel a weight gets: the one table of this folder.
//!
//! Read at bind time. A new instruction set adds its rows to [`int::kernel`] and [`float`].

#[cfg(target_arch = "x86_64")]
use super::avx2_float;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::int;
use super::{Columns, FloatMatrix, Format, Mode, Orientation, Weights, mini, scalar};
use crate::{
    detect::Isa,
    kernel::quantize::{GROUP, Layout, Prepared, aligned},
};
use doyen_tensor::{
    FloatType, FloatView,
    format::{Bits, MiniMatrix, QuantMatrix},
};
use std::fmt;

/// Rows of quantized weights times prepared tokens.
pub(super) type IntFn = unsafe fn(&QuantMatrix<'_>, &Prepared<'_>, Option<FloatView<'_>>, &mut Columns<'_>);
/// Rows of weights of small floats times prepared tokens.
pub(super) type MiniFn = unsafe fn(&MiniMatrix<'_>, &Prepared<'_>, Option<FloatView<'_>>, &mut Columns<'_>);
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
    Int(IntFn, Mode),
    Mini(MiniFn),
    Float(FloatFn),
}

impl Kernel {
    pub(super) const fn int(name: &'static str, mode: Mode, function: IntFn) -> Self {
        Self { name, function: Function::Int(function, mode) }
    }

    pub(super) const fn mini(name: &'static str, function: MiniFn) -> Self {
        Self { name, function: Function::Mini(function) }
    }

    pub(super) const fn float(name: &'static str, function: FloatFn) -> Self {
        Self { name, function: Function::Float(function) }
    }

    /// Runs it.
    ///
    /// # Safety
    /// The weight is validated and of the format this kernel was chosen for; activations are of its layout, output and bias of its rows.
    pub(super) unsafe fn run(
        self,
        weights: &Weights<'_>,
        acts: &Prepared<'_>,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        match (self.function, weights) {
            // SAFETY: the instruction set was proven by the token in the `Isa` that chose the kernel; the rest is the caller's promise.
            (Function::Int(f, _), Weights::Int(w)) => unsafe { f(w, acts, bias, out) },
            // SAFETY: as above.
            (Function::Mini(f), Weights::Mini(w)) => unsafe { f(w, acts, bias, out) },
            // SAFETY: as above.
            (Function::Float(f), Weights::Float(w)) => unsafe { f(w, acts, bias, out) },
            _ => unreachable!("the kind of weight was checked against the kernel's format"),
        }
    }
}

/// The name: instruction set, format, and the mode where there is a choice.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.function {
            Function::Int(_, Mode::Fast | Mode::Wide) => write!(f, "{}-fast", self.name),
            Function::Int(_, Mode::Fine) => write!(f, "{}-fine", self.name),
            Function::Int(_, Mode::Exact) => write!(f, "{}-exact", self.name),
            Function::Mini(_) | Function::Float(_) => f.write_str(self.name),
        }
    }
}

/// The kernel for a format, mode and instruction set.
pub fn select(format: Format, mode: Mode, isa: Isa) -> Kernel {
    match format {
        Format::Int { bits, block, cols } => quantized(bits, block, cols, mode, isa),
        Format::Mini { element, .. } => mini::kernel(element, mode, isa),
        Format::Float { ty, orientation, .. } => float(ty, orientation, isa),
    }
}

fn quantized(bits: Bits, block: usize, cols: usize, mode: Mode, isa: Isa) -> Kernel {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if aligned(block, cols)
        && let Some(kernel) = int::kernel(bits, block, cols, mode, isa)
    {
        return kernel;
    }
    let _ = (bits, block, cols, isa);
    match mode {
        Mode::Exact => Kernel::int("scalar-int", mode, scalar::exact),
        Mode::Fast | Mode::Wide | Mode::Fine => Kernel::int("scalar-int", mode, scalar::fast),
    }
}

fn float(ty: FloatType, orientation: Orientation, isa: Isa) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if isa.avx2().is_some() {
        return avx2_float::kernel(ty, orientation);
    }
    let _ = (ty, orientation, isa);
    Kernel::float("scalar-float", scalar::float)
}

/// The activation layout of a format and mode.
pub(super) const fn layout(format: Format, mode: Mode, isa: Isa) -> Layout {
    match (format, mode) {
        (Format::Int { block, cols, .. }, Mode::Exact) if aligned(block, cols) => {
            Layout::octets(cols, if block == 16 && cols > 16 { 16 } else { GROUP })
        }
        (Format::Float { cols, .. }, _)
        | (Format::Int { cols, .. } | Format::Mini { cols, .. }, Mode::Exact) => Layout::plain(cols),
        (Format::Int { bits, block, cols }, Mode::Fast) => Layout::int8(cols, bits, block, 1, isa),
        (Format::Int { bits, block, cols }, Mode::Wide) => Layout::wide_int8(cols, bits, block, isa),
        (Format::Int { bits, block, cols }, Mode::Fine) => Layout::int8(cols, bits, block, 2, isa),
        (Format::Mini { element, block, cols }, mode) if mini::takes_int8(element) => {
            let terms = if matches!(mode, Mode::Fine) { 2 } else { 1 };
            Layout::int8(cols, Bits::B4, block, terms, isa)
        }
        (Format::Mini { cols, .. }, _) => Layout::plain(cols),
    }
}
