//! The instruction sets kernels are written for.
//!
//! [`Isa::detect`] is asked once, when steps are bound; kernels never look at it per call. A variant above
//! [`Isa::Scalar`] carries a token that only detection hands out, so holding one proves that its instructions exist
//! on this machine: that proof is what the `// SAFETY:` lines of the vector kernels refer to.

use std::fmt;

/// An instruction set that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable Rust; the reference for the others.
    Scalar,
    /// AVX2 with FMA and F16C (x86-64-v3).
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

/// Proof that AVX2, FMA and F16C are there.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The proof, on machines that have the three.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

impl Isa {
    /// The best instruction set of this machine.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(token) = Avx2::detect() {
            return Self::Avx2(token);
        }
        Self::Scalar
    }

    /// Every instruction set of this machine, weakest first: what tests go through.
    pub fn all() -> impl Iterator<Item = Self> {
        let best = Self::detect();
        std::iter::once(Self::Scalar).chain((best != Self::Scalar).then_some(best))
    }

    /// The name printed in plans and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_starts_scalar_and_ends_with_the_best() {
        let all: Vec<_> = Isa::all().collect();
        assert_eq!(all[0], Isa::Scalar);
        assert_eq!(all.last(), Some(&Isa::detect()));
    }
}
