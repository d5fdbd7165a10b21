//! The instruction sets kernels are written for.
//!
//! [`Isa::detect`] is asked once, when steps are bound; kernels never look at it per call. A variant above
//! [`Isa::Scalar`] carries a token that only detection hands out, so holding one proves that its instructions exist
//! on this machine: that proof is what the `// SAFETY:` lines of the vector kernels refer to. Most kernels are written
//! for AVX2 at most and ask for [`Isa::avx2`], which every stronger x86 set gives.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::fmt;

/// The environment variable that forces an instruction set, for tests and comparisons.
pub const VARIABLE: &str = "DOYEN_CPU";

/// Every [`Isa::name`], of whatever machine, weakest first.
const NAMES: [&str; 6] = ["scalar", "avx2", "avxvnni", "avx512", "amx", "neon"];

/// [`VARIABLE`] names an instruction set that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchIsa {
    /// There are no kernels for any such.
    #[error("{VARIABLE}={name}: unknown instruction set; known are {}, and this machine has {here}", NAMES.join(", "))]
    Unknown {
        /// What the variable says.
        name: String,
        /// Those of this machine.
        here: String,
    },
    /// This machine does not have it.
    #[error("{VARIABLE}={name}: this machine does not have it; it has {here}")]
    NotHere {
        /// What the variable says.
        name: String,
        /// Those of this machine.
        here: String,
    },
}

/// An instruction set that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable Rust; the reference for the others.
    Scalar,
    /// AVX2 with FMA and F16C (x86-64-v3).
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX2 with FMA and F16C, and dot products of bytes in its vectors (AVX-VNNI).
    #[cfg(target_arch = "x86_64")]
    AvxVnni(AvxVnni),
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// The same, and AMX with INT8.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// NEON with dot products of bytes (Armv8.2 and later).
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
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

/// Proof that AVX-VNNI is there, and what [`Avx2`] proves.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AvxVnni(Avx2);

#[cfg(target_arch = "x86_64")]
impl AvxVnni {
    /// The proof, on machines that have it.
    pub fn detect() -> Option<Self> {
        is_x86_feature_detected!("avxvnni").then(Avx2::detect).flatten().map(Self)
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

/// Proof that AMX-TILE and AMX-INT8 are there and that the system lets this process use them, and what [`Avx512`] proves.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Amx(Avx512);

#[cfg(target_arch = "x86_64")]
impl Amx {
    /// The proof, on machines that have both and systems that permit it.
    pub fn detect() -> Option<Self> {
        // Leaf 7: AMX-TILE is bit 24 of EDX, AMX-INT8 bit 25.
        let wanted = 0b11 << 24;
        (__cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & wanted == wanted && may_use_tiles())
            .then(Avx512::detect)
            .flatten()
            .map(Self)
    }
}

/// Asks the kernel of the system for the tile registers; what it grants, every thread of the process has.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    // Documentation/arch/x86/xstate.rst: the request, and the number of the tiles' state component.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
const fn may_use_tiles() -> bool {
    false
}

/// Proof that NEON and its dot products of bytes are there.
#[cfg(target_arch = "aarch64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Neon(());

#[cfg(target_arch = "aarch64")]
impl Neon {
    /// The proof, on machines that have both.
    pub fn detect() -> Option<Self> {
        use std::arch::is_aarch64_feature_detected;
        (is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")).then_some(Self(()))
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
                Self::from_name(&name).ok_or_else(|| {
                    let here = Self::all().map(Self::name).collect::<Vec<_>>().join(", ");
                    let (known, name) = (NAMES.contains(&&*name), name.to_string());
                    if known { NoSuchIsa::NotHere { name, here } } else { NoSuchIsa::Unknown { name, here } }
                })
            }
        }
    }

    /// Every instruction set of this machine, weakest first: what tests go through.
    pub fn all() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let vector = [
            Avx2::detect().map(Self::Avx2),
            AvxVnni::detect().map(Self::AvxVnni),
            Avx512::detect().map(Self::Avx512),
            Amx::detect().map(Self::Amx),
        ];
        #[cfg(target_arch = "aarch64")]
        let vector = [Neon::detect().map(Self::Neon)];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
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
            Self::AvxVnni(_) => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
        }
    }

    /// The proof that AVX2, FMA and F16C may be used.
    #[cfg(target_arch = "x86_64")]
    pub const fn avx2(self) -> Option<Avx2> {
        match self {
            Self::Scalar => None,
            Self::Avx2(token)
            | Self::AvxVnni(AvxVnni(token))
            | Self::Avx512(Avx512(token))
            | Self::Amx(Amx(Avx512(token))) => Some(token),
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
            assert!(NAMES.contains(&isa.name()));
        }
        assert_eq!(Isa::from_name("avx9"), None);
    }
}
