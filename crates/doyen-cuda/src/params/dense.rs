//! What the kernels of mini.cu, expand.cu, dense.cu and peak.cu take. The products of dense.cu take a [`Gemm`](super::Gemm).

use super::{Activation, Weights};
use crate::driver::{Addr, Params};

/// `Mini` of mini.cu: a bank of matrices of small floats.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mini {
    pub(crate) codes: Addr,
    pub(crate) scales: Addr,
    pub(crate) globals: Addr,
    pub(crate) codes_stride: u64,
    pub(crate) scales_stride: u64,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) row_bytes: u32,
    pub(crate) blocks: u32,
    pub(crate) block: u32,
    pub(crate) tile: u32,
    pub(crate) scale_kind: u32,
    pub(crate) scale_float: u32,
    pub(crate) aligned: u32,
}

/// `MiniRoutedParams` of mini.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MiniRouted {
    pub(crate) w: Mini,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) bias: Addr,
    pub(crate) experts: Addr,
    pub(crate) mix: Addr,
    pub(crate) bias_float: u32,
    pub(crate) x_div: u32,
    pub(crate) k: u32,
    pub(crate) act: Activation,
}

/// `MiniExpandParams` of mini.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MiniExpand {
    pub(crate) w: Mini,
    pub(crate) y: Addr,
    pub(crate) first: u64,
    pub(crate) runs: u64,
    pub(crate) kind: u32,
}

/// `MiniTurnParams` of mini.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MiniTurn {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) pairs: u64,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
}

/// `ExpandParams` of expand.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Expand {
    pub(crate) w: Weights,
    pub(crate) y: Addr,
    pub(crate) first: u64,
    pub(crate) runs: u64,
    pub(crate) kind: u32,
}

/// `SliceParams` of dense.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Slice {
    pub(crate) tiles: Addr,
    pub(crate) tile_count: Addr,
    pub(crate) own: Addr,
    pub(crate) own_count: Addr,
    pub(crate) begin: u32,
    pub(crate) end: u32,
}

/// `PeakParams` of peak.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Peak {
    pub(crate) y: Addr,
    pub(crate) rounds: u32,
}

super::params!(MiniRouted, MiniExpand, MiniTurn, Expand, Slice, Peak);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_cuda_structures() {
        assert_eq!(size_of::<Mini>(), 5 * 8 + 9 * 4 + 4);
        assert_eq!(size_of::<MiniRouted>(), 80 + 5 * 8 + 3 * 4 + 20);
        assert_eq!(size_of::<MiniExpand>(), 80 + 3 * 8 + 4 + 4);
        assert_eq!(size_of::<MiniTurn>(), 3 * 8 + 2 * 4);
        assert_eq!(size_of::<Expand>(), 88 + 3 * 8 + 4 + 4);
        assert_eq!(size_of::<Slice>(), 4 * 8 + 2 * 4);
        assert_eq!(size_of::<Peak>(), 8 + 4 + 4);
    }
}
