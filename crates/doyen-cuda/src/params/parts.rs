//! What the kernels of parts.cu take.

use crate::driver::{Addr, Params};

/// `CopyParams` of parts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CopyRuns {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) run: u64,
    pub(crate) x_first: u64,
    pub(crate) y_first: u64,
    pub(crate) x_stride: u64,
    pub(crate) y_stride: u64,
}

/// `ReduceParams` of parts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Reduce {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) inner: u64,
    pub(crate) count: u32,
    pub(crate) kind: u32,
}

/// `TopKParams` of parts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TopK {
    pub(crate) x: Addr,
    pub(crate) values: Addr,
    pub(crate) indices: Addr,
    pub(crate) rows: u64,
    pub(crate) width: u32,
    pub(crate) k: u32,
    pub(crate) largest: u32,
}

/// `PickParams` of parts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Pick {
    pub(crate) x: Addr,
    pub(crate) indices: Addr,
    pub(crate) y: Addr,
    pub(crate) fault: Addr,
    pub(crate) n: u64,
    pub(crate) width: u32,
    pub(crate) count: u32,
    pub(crate) wide: u32,
    pub(crate) node: u32,
}

/// `ScatterParams` of parts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Scatter {
    pub(crate) x: Addr,
    pub(crate) indices: Addr,
    pub(crate) updates: Addr,
    pub(crate) y: Addr,
    pub(crate) fault: Addr,
    pub(crate) rows: u64,
    pub(crate) width: u32,
    pub(crate) count: u32,
    pub(crate) wide: u32,
    pub(crate) node: u32,
}

/// `RotateParams` of parts.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Rotate {
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) cos: Addr,
    pub(crate) sin: Addr,
    pub(crate) positions: Addr,
    pub(crate) fault: Addr,
    pub(crate) n: u64,
    pub(crate) tokens: u32,
    pub(crate) heads: u32,
    pub(crate) size: u32,
    pub(crate) half: u32,
    pub(crate) rows: u32,
    pub(crate) streams: u32,
    pub(crate) by_head: u32,
    pub(crate) interleaved: u32,
    pub(crate) cos_float: u32,
    pub(crate) sin_float: u32,
    pub(crate) node: u32,
}

super::params!(CopyRuns, Reduce, TopK, Pick, Scatter, Rotate);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_cuda_structures() {
        assert_eq!(size_of::<CopyRuns>(), 8 * 8);
        assert_eq!(size_of::<Reduce>(), 4 * 8 + 2 * 4);
        assert_eq!(size_of::<TopK>(), 4 * 8 + 3 * 4 + 4);
        assert_eq!(size_of::<Pick>(), 5 * 8 + 4 * 4);
        assert_eq!(size_of::<Scatter>(), 6 * 8 + 4 * 4);
        assert_eq!(size_of::<Rotate>(), 7 * 8 + 11 * 4 + 4);
    }
}
