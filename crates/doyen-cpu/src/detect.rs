//! The instruction sets kernels are written for.
//!
//! [`Isa::detect`] is asked once, when steps are bound; kernels never look at it per call. A variant above
//! [`Isa::Scalar`] carries a token that only detection hands out, so holding one proves that its instructions exist
//! on this machine: that proof is what the `// SAFETY:` lines of the vector kernels refer to. Most kernels are written
//! for AVX2 at most and ask for [`Isa::avx2`], which every stronger x86 set gives.

use std::fmt;

/// The environment variable that forces an instruction set, for tests and comparisons.
pub const VARIABLE: &str = "DOYEN_CPU";

/// [`VARIABLE`] names an instruction set that is unknown or not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{VARIABLE}={0}: this machine has no such instruction set; it has {1}")]
pub struct NoSuchIsa(String, String);

/// An instruction set that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable Rust; the reference for the others.
    Scalar,
    /// AVX2 with FMA and F16C (x86-64-v3).
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
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

/// Proof that AVX-512 F, BW, DQ, VL and VNNI are there, and what [`Avx2`] proves.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Avx512(Avx2);

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// The proof, on machines that have all of them.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni"))
        .then(Avx2::detect)
        .flatten()
        .map(Self)
    }
}

impl Isa {
    /// The best instruction set of this machine.
    pub fn detect() -> Self {
        Self::all().last().unwrap_or(Self::Scalar)
    }

    /// The instruction set that [`VARIABLE`] names, or the best of this machine.
    ///
    /// # Errors
    /// When the variable names one that is unknown or not there; lists those that are.
    pub fn chosen() -> Result<Self, NoSuchIsa> {
        match std::env::var_os(VARIABLE).filter(|name| !name.is_empty()) {
            None => Ok(Self::detect()),
            Some(name) => {
                let name = name.to_string_lossy();
                let there = || Self::all().map(Self::name).collect::<Vec<_>>().join(", ");
                Self::from_name(&name).ok_or_else(|| NoSuchIsa(name.to_string(), there()))
            }
        }
    }

    /// Every instruction set of this machine, weakest first: what tests go through.
    pub fn all() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let vector = [Avx2::detect().map(Self::Avx2), Avx512::detect().map(Self::Avx512)];
        #[cfg(not(target_arch = "x86_64"))]
        let vector = [None];
        std::iter::once(Self::Scalar).chain(vector.into_iter().flatten())
    }

    /// The instruction set of this machine with that [`Isa::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|isa| isa.name() == name)
    }

    /// The name printed in plans and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
        }
    }

    /// The proof that AVX2, FMA and F16C may be used.
    #[cfg(target_arch = "x86_64")]
    pub const fn avx2(self) -> Option<Avx2> {
        match self {
            Self::Scalar => None,
            Self::Avx2(token) | Self::Avx512(Avx512(token)) => Some(token),
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

    #[test]
    fn names_lead_back() {
        for isa in Isa::all() {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
        }
        assert_eq!(Isa::from_name("avx9"), None);
    }
}
