//! The element types of GGUF tensors: their numbers, their blocks, and what their codes mean.
//!
//! Every quantized type that is read comes down to integer codes with a scale for each group of 16 or 32 columns, and for
//! some a minimum: `value = scale * code + min`. [`GgmlType::codes`] says which codes, `block` unpacks them.

use std::fmt;

/// A type of the GGUF registry, known by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    F64,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    MXFP4,
    /// A type of known size whose values are not read.
    Unread(Unread),
}

/// A type that is skipped over: name and block are all that is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unread {
    name: &'static str,
    values: usize,
    bytes: usize,
}

/// The codes of a quantized type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codes {
    /// Columns that share a scale.
    pub group: usize,
    /// Smallest and largest code.
    pub range: (i8, i8),
    /// Whether groups have a minimum beside the scale.
    pub minimum: bool,
    /// Whether groups have an integer zero point: `value = scale * (code - zero_point)`. Codes are unsigned then, held in
    /// the bits of their signed type.
    pub zero_points: bool,
}

impl Codes {
    /// Unsigned codes with zero points.
    pub const fn unsigned(bits: u8, group: usize) -> Self {
        let range = match bits {
            2 => (0, 3),
            4 => (0, 15),
            _ => (-128, 127),
        };
        Self { group, range, minimum: false, zero_points: true }
    }
}

/// Values of a block of the types with one scale.
const SMALL: usize = 32;
/// Values of a block of the types with scales of their own quantization.
const SUPER: usize = 256;

const fn unread(name: &'static str, values: usize, bytes: usize) -> GgmlType {
    GgmlType::Unread(Unread { name, values, bytes })
}

/// Number, type. Numbers that are missing were withdrawn.
const REGISTRY: [(u32, GgmlType); 33] = [
    (0, GgmlType::F32),
    (1, GgmlType::F16),
    (2, GgmlType::Q4_0),
    (3, GgmlType::Q4_1),
    (6, GgmlType::Q5_0),
    (7, GgmlType::Q5_1),
    (8, GgmlType::Q8_0),
    (9, unread("Q8_1", SMALL, 36)),
    (10, GgmlType::Q2K),
    (11, GgmlType::Q3K),
    (12, GgmlType::Q4K),
    (13, GgmlType::Q5K),
    (14, GgmlType::Q6K),
    (15, unread("Q8_K", SUPER, 292)),
    (16, unread("IQ2_XXS", SUPER, 66)),
    (17, unread("IQ2_XS", SUPER, 74)),
    (18, unread("IQ3_XXS", SUPER, 98)),
    (19, unread("IQ1_S", SUPER, 50)),
    (20, GgmlType::IQ4NL),
    (21, unread("IQ3_S", SUPER, 110)),
    (22, unread("IQ2_S", SUPER, 82)),
    (23, GgmlType::IQ4XS),
    (24, unread("I8", 1, 1)),
    (25, unread("I16", 1, 2)),
    (26, unread("I32", 1, 4)),
    (27, unread("I64", 1, 8)),
    (28, GgmlType::F64),
    (29, unread("IQ1_M", SUPER, 56)),
    (30, GgmlType::BF16),
    (34, unread("TQ1_0", SUPER, 54)),
    (35, unread("TQ2_0", SUPER, 66)),
    (39, GgmlType::MXFP4),
    (40, unread("NVFP4", 64, 36)),
];

impl GgmlType {
    /// The type of this number.
    pub fn new(number: u32) -> Option<Self> {
        REGISTRY.iter().find(|(n, _)| *n == number).map(|(_, t)| *t)
    }

    /// The number in files.
    pub fn number(self) -> u32 {
        REGISTRY.iter().find(|(_, t)| *t == self).map_or(u32::MAX, |(n, _)| *n)
    }

    /// Every type whose values are read.
    pub fn read() -> impl Iterator<Item = Self> {
        REGISTRY.iter().map(|(_, t)| *t).filter(|t| !matches!(t, Self::Unread(_)))
    }

    /// Values and bytes of a block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::F64 => (1, 8),
            Self::Q4_0 | Self::IQ4NL => (SMALL, 18),
            Self::Q4_1 => (SMALL, 20),
            Self::Q5_0 => (SMALL, 22),
            Self::Q5_1 => (SMALL, 24),
            Self::Q8_0 => (SMALL, 34),
            Self::MXFP4 => (SMALL, 17),
            Self::Q2K => (SUPER, 84),
            Self::Q3K => (SUPER, 110),
            Self::Q4K => (SUPER, 144),
            Self::Q5K => (SUPER, 176),
            Self::Q6K => (SUPER, 210),
            Self::IQ4XS => (SUPER, 136),
            Self::Unread(u) => (u.values, u.bytes),
        }
    }

    /// Bytes of a row of `cols` values; `None` when blocks do not divide it, or on overflow.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (values, bytes) = self.block();
        cols.is_multiple_of(values).then(|| (cols / values).checked_mul(bytes)).flatten()
    }

    /// The codes of a quantized type that is read.
    pub const fn codes(self) -> Option<Codes> {
        let (group, range, minimum) = match self {
            Self::Q4_0 => (32, (-8, 7), false),
            Self::Q4_1 | Self::Q4K => (32, (0, 15), true),
            Self::Q5_0 => (32, (-16, 15), false),
            Self::Q5_1 | Self::Q5K => (32, (0, 31), true),
            Self::Q8_0 => (32, (-128, 127), false),
            Self::Q2K => (16, (0, 3), true),
            Self::Q3K => (16, (-4, 3), false),
            Self::Q6K => (16, (-32, 31), false),
            Self::IQ4NL | Self::IQ4XS => (32, (-127, 113), false),
            Self::MXFP4 => (32, (-12, 12), false),
            Self::F32 | Self::F16 | Self::BF16 | Self::F64 | Self::Unread(_) => return None,
        };
        Some(Codes { group, range, minimum, zero_points: false })
    }

    /// Whether every scale (and minimum) of the type is a float16; others are products of a float16 and an integer, or
    /// powers of two.
    pub const fn has_f16_scales(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4NL)
    }

    /// The name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F64 => "F64",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::IQ4NL => "IQ4_NL",
            Self::IQ4XS => "IQ4_XS",
            Self::MXFP4 => "MXFP4",
            Self::Unread(u) => u.name,
        }
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_blocks_whole() {
        for (number, ty) in REGISTRY {
            assert_eq!(GgmlType::new(number), Some(ty), "{ty}");
            assert_eq!(ty.number(), number, "{ty}");
            if let Some(codes) = ty.codes() {
                assert!(ty.block().0.is_multiple_of(codes.group), "{ty}");
            }
        }
        assert_eq!(GgmlType::new(4), None);
        assert_eq!(GgmlType::Q6K.row_bytes(512), Some(420));
        assert_eq!(GgmlType::Q6K.row_bytes(500), None);
    }
}
