//! Quantized products with vectors: lanes are weight rows.
//!
//! With many tokens lanes are weight rows. A tile is as many consecutive rows as a vector has 32-bit lanes (times two for float
//! activations). Packed codes of the rows are transposed 32-bit word by word, so that a lane holds codes of one row, and the
//! activations of those columns are broadcast: no sum ever crosses lanes. Scales and zero points
//! of a segment of columns are widened and transposed into a panel first, which keeps their types out of the loops. With few
//! tokens lanes are groups of one row's columns, and rows follow each other (`stream`).
//!
//! * [`lanes`]: what the tiled loops ask of an instruction set; `avx2`, `vnni`, `avx512` and `neon` answer it
//! * [`panel`]: scales and zero points of a tile; [`scales`] widens them
//! * [`tile`]: rows, segments, steps and groups
//! * [`fast`]: int8 activations, [`amx`] for many tokens; [`exact`]: f32 activations
//! * [`stream`]: few tokens, of [`stream_ints`] (short rows: [`stream_stack`]) or [`stream_float`]

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]
#![allow(clippy::needless_range_loop, reason = "r, s, t and v index several arrays at once")]
#![allow(clippy::large_stack_arrays, reason = "staged tiles: at most 110 KiB, on stacks of 2 MiB and more")]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod entries;
mod exact;
mod fast;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
#[cfg_attr(not(target_arch = "x86_64"), path = "scales_portable.rs")]
mod scales;
#[cfg(target_arch = "x86_64")]
mod stream;
#[cfg(target_arch = "x86_64")]
mod stream_float;
#[cfg(target_arch = "x86_64")]
mod stream_ints;
#[cfg(target_arch = "x86_64")]
mod stream_stack;
mod tile;
#[cfg(target_arch = "x86_64")]
mod vnni;

#[cfg(target_arch = "x86_64")]
pub(super) use scales::load8;
#[cfg(target_arch = "x86_64")]
pub(super) use stream::lane_sums;
#[cfg(target_arch = "x86_64")]
pub(super) use stream_ints::pairs;
#[cfg(target_arch = "x86_64")]
pub(super) use vnni::{Avx512Vl, AvxVnni, Dpbusd};

use super::{Kernel, Mode};
use crate::{
    detect::Isa,
    kernel::quantize::{WIDE_GROUP, wide_group},
};
use doyen_tensor::format::Bits;

/// Columns that share an activation scale, and are summed exactly.
#[derive(Debug, Clone, Copy)]
enum Unit {
    C16,
    C32,
    C128,
}

impl Unit {
    /// Of rows of `cols` columns in blocks of `block`: a power of two of at least 16, or `cols`.
    fn new(block: usize, cols: usize, mode: Mode) -> Self {
        if mode == Mode::Wide && wide_group(cols, block) == WIDE_GROUP {
            Self::C128
        } else if block == 16 && cols > 16 {
            Self::C16
        } else {
            Self::C32
        }
    }
}

/// The kernel of a width, block and mode; `None` where there is none for the instruction set.
///
/// `block` is a power of two of at least 16, or `cols`.
pub(super) fn kernel(bits: Bits, block: usize, cols: usize, mode: Mode, isa: Isa) -> Option<Kernel> {
    let unit = Unit::new(block, cols, mode);
    match isa {
        Isa::Scalar => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => Some(avx2::kernel(bits, unit, mode)),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni(_) => Some(vnni::kernel(bits, unit, mode)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => Some(avx512::kernel(bits, unit, mode)),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx(_) => Some(amx::kernel(bits, unit, mode)),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon(_) => Some(neon::kernel(bits, unit, mode)),
    }
}

/// Kernels made of the loops of instruction sets that this machine need not have, with other instructions that it has.
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) fn stand_ins(bits: Bits, block: usize, cols: usize, mode: Mode) -> Vec<Kernel> {
    let unit = Unit::new(block, cols, mode);
    if crate::detect::Avx512::detect().is_none() {
        eprintln!("without AVX-512 the loops of AVX-VNNI and AMX are not tested here");
        return Vec::new();
    }
    vec![vnni::on_avx512::kernel(bits, unit, mode), amx::emulated::kernel(bits, unit, mode)]
}
