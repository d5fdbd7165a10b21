//! What the kernels of latent.cu and absorb.cu take.

use super::{Batch, Weights};
use crate::driver::{Addr, Params};

/// `LatentParams` of latent.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Latent {
    pub(crate) batch: Batch,
    pub(crate) rows: Addr,
    pub(crate) own: Addr,
    pub(crate) shared: Addr,
    pub(crate) q: Addr,
    pub(crate) y: Addr,
    pub(crate) part: Addr,
    pub(crate) kind: u32,
    pub(crate) rank: u32,
    pub(crate) rope: u32,
    pub(crate) heads: u32,
    pub(crate) window: u32,
    pub(crate) causal: u32,
    pub(crate) splits: u32,
    pub(crate) split_keys: u32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
}

/// `AbsorbParams` of absorb.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Absorb {
    pub(crate) w: Weights,
    pub(crate) x: Addr,
    pub(crate) y: Addr,
    pub(crate) tokens: u32,
    pub(crate) heads: u32,
    pub(crate) nope: u32,
    pub(crate) rope: u32,
    pub(crate) v: u32,
}

super::params!(Latent, Absorb);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_cuda_structures() {
        assert_eq!(size_of::<Latent>(), 56 + 6 * 8 + 10 * 4);
        assert_eq!(size_of::<Absorb>(), 88 + 2 * 8 + 5 * 4 + 4);
    }
}
