//! How the numbers of a stored row become vectors, per storage type.

use super::lanes::Lanes;
use half::{bf16, f16};

/// A storage type of keys and values.
pub(super) trait Element {
    /// Bits of a number.
    const BITS: usize;

    /// The numbers at `p` as a vector; of codes, without their scale.
    ///
    /// # Safety
    /// The machine has the instruction set of `L`, and there are `L::LANES` numbers at `p`.
    unsafe fn load<L: Lanes>(p: *const u8) -> L::V;

    /// Number `i` of a row.
    fn get(row: &[u8], i: usize) -> f32;

    /// Bytes of `n` numbers.
    #[inline(always)]
    fn bytes(n: usize) -> usize {
        n * Self::BITS / 8
    }
}

macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident, $bits:literal, $load:ident, |$row:ident, $i:ident| $get:expr;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl Element for $name {
            const BITS: usize = $bits;

            #[inline(always)]
            unsafe fn load<L: Lanes>(p: *const u8) -> L::V {
                // SAFETY: the caller's promise.
                unsafe { L::$load(p.cast()) }
            }

            #[inline(always)]
            fn get($row: &[u8], $i: usize) -> f32 {
                $get
            }
        }
    )*};
}

elements! {
    F32, 32, load, |row, i| f32::from_le_bytes(row.as_chunks::<4>().0[i]);
    F16, 16, f16, |row, i| f16::from_le_bytes(row.as_chunks::<2>().0[i]).to_f32();
    BF16, 16, bf16, |row, i| bf16::from_le_bytes(row.as_chunks::<2>().0[i]).to_f32();
    /// One signed code a byte.
    Int8, 8, int8, |row, i| f32::from(row[i] as i8);
    /// Code plus 8 in a nibble, the even channel in the low one.
    Int4, 4, int4, |row, i| f32::from(i16::from(row[i / 2] >> (4 * (i % 2)) & 15) - 8);
}
