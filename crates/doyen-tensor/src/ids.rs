//! Newtypes for the numbers that must not be mixed up.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The number as an index.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// A token of the vocabulary.
    TokenId
);
id!(
    /// An expert within its layer's bank.
    ExpertId
);
id!(
    /// A decoder layer.
    LayerId
);
id!(
    /// A page of a KV cache group.
    PageId
);

/// A number of bytes; prints in binary units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ByteCount(pub u64);

impl std::ops::Add for ByteCount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::ops::AddAssign for ByteCount {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for ByteCount {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), |a, b| a + b)
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: f64 = 1024.0;
        let b = self.0 as f64;
        if b < KIB {
            write!(f, "{} B", self.0)
        } else if b < KIB * KIB {
            write!(f, "{:.1} KiB", b / KIB)
        } else if b < KIB * KIB * KIB {
            write!(f, "{:.1} MiB", b / (KIB * KIB))
        } else {
            write!(f, "{:.2} GiB", b / (KIB * KIB * KIB))
        }
    }
}
