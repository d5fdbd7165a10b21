//! What the kernels of state.cu and gated.cu take.

use crate::driver::{Addr, Params};

/// `Spans` of state.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Spans {
    pub(crate) token_sequence: Addr,
    pub(crate) first: Addr,
    pub(crate) len: Addr,
    pub(crate) reads: Addr,
    pub(crate) writes: Addr,
    pub(crate) states: Addr,
    pub(crate) size: u64,
    pub(crate) tokens: u32,
    pub(crate) sequences: u32,
}

/// `ConvParams` of state.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Conv {
    pub(crate) at: Spans,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) weight: Addr,
    pub(crate) bias: Addr,
    pub(crate) weight_float: u32,
    pub(crate) bias_float: u32,
    pub(crate) channels: u32,
    pub(crate) taps: u32,
    pub(crate) dilation: u32,
    pub(crate) silu: u32,
}

/// `LinearParams` of state.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Linear {
    pub(crate) at: Spans,
    pub(crate) query: Addr,
    pub(crate) key: Addr,
    pub(crate) value: Addr,
    pub(crate) decay: Addr,
    pub(crate) beta: Addr,
    pub(crate) y: Addr,
    pub(crate) q_heads: u32,
    pub(crate) key_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) heads: u32,
    pub(crate) key_size: u32,
    pub(crate) value_size: u32,
    pub(crate) decay_per_key: u32,
    pub(crate) betas: u32,
    pub(crate) scale: f32,
}

/// `GatedNormParams` of gated.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GatedNorm {
    pub(crate) x: Addr,
    pub(crate) gate: Addr,
    pub(crate) gamma: Addr,
    pub(crate) y: Addr,
    pub(crate) groups: u64,
    pub(crate) width: u32,
    pub(crate) gamma_float: u32,
    pub(crate) silu: u32,
    pub(crate) eps: f32,
}

/// `GatedAddParams` of gated.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GatedAdd {
    pub(crate) a: Addr,
    pub(crate) b: Addr,
    pub(crate) gate: Addr,
    pub(crate) y: Addr,
    pub(crate) n: u64,
    pub(crate) width: u32,
}

/// `GatesParams` of gated.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Gates {
    pub(crate) a: Addr,
    pub(crate) b: Addr,
    pub(crate) bias: Addr,
    pub(crate) scale: Addr,
    pub(crate) decay: Addr,
    pub(crate) beta: Addr,
    pub(crate) n: u64,
    pub(crate) heads: u32,
    pub(crate) bias_float: u32,
    pub(crate) scale_float: u32,
}

super::params!(Conv, Linear, GatedNorm, GatedAdd, Gates);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_cuda_structures() {
        assert_eq!(size_of::<Spans>(), 7 * 8 + 2 * 4);
        assert_eq!(size_of::<Conv>(), 64 + 4 * 8 + 6 * 4);
        assert_eq!(size_of::<Linear>(), 64 + 6 * 8 + 9 * 4 + 4);
        assert_eq!(size_of::<GatedNorm>(), 5 * 8 + 4 * 4);
        assert_eq!(size_of::<GatedAdd>(), 5 * 8 + 4 + 4);
        assert_eq!(size_of::<Gates>(), 7 * 8 + 3 * 4 + 4);
    }
}
