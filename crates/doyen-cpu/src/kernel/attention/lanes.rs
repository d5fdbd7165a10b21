//! Vectors of f32, one implementation per instruction set: what the loops over keys and values are written in.
//!
//! The sum of a vector's lanes has one order per implementation, whether one vector is summed or four at once.
//! `element` says how stored rows become vectors, `panel` has the loops.

/// Vectors of one instruction set.
///
/// Implementations inline into functions that enable the instructions they use.
pub(super) trait Lanes {
    /// A vector.
    type V: Copy;
    /// Its numbers.
    const LANES: usize;
    /// Rows of queries (or weights) that a register tile has room for, beside four vectors of keys (or values).
    const ROWS: usize;

    /// Zeros.
    ///
    /// # Safety
    /// As for all functions here: the machine has the instruction set, and pointers lead to `LANES` numbers.
    unsafe fn zero() -> Self::V;
    /// `x` in every lane.
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The sum of the lanes.
    unsafe fn sum(v: Self::V) -> f32;
    /// The sums of four vectors, as [`Lanes::sum`] has them, to `out [4]`.
    unsafe fn sum4(v: [Self::V; 4], out: *mut f32);
    /// Widens f16.
    unsafe fn f16(p: *const u8) -> Self::V;
    /// Widens bf16.
    unsafe fn bf16(p: *const u8) -> Self::V;
    /// Signed bytes as numbers.
    unsafe fn int8(p: *const u8) -> Self::V;
    /// Nibbles less 8 as numbers, low nibble first.
    unsafe fn int4(p: *const u8) -> Self::V;
    /// Asks for a cache line in the second level, which has more misses under way than the first (23 GB/s of scattered
    /// pages on one core against 12); any address will do.
    fn prefetch(p: *const u8);
}

/// Arrays of eight: for machines without any of the other sets, and what the compiler makes of it.
pub(super) struct Portable;

const WIDTH: usize = 8;

impl Lanes for Portable {
    type V = [f32; WIDTH];
    const LANES: usize = WIDTH;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; WIDTH]
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; WIDTH]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: eight numbers, as the trait asks for.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: room for eight numbers, as the trait asks for.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, mut c: Self::V) -> Self::V {
        for (c, (a, b)) in c.iter_mut().zip(a.iter().zip(b)) {
            *c += a * b;
        }
        c
    }

    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        let four = |i: usize| (v[i] + v[i + 2]) + (v[i + 1] + v[i + 3]);
        four(0) + four(4)
    }

    #[inline(always)]
    unsafe fn sum4(v: [Self::V; 4], out: *mut f32) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: room for four numbers, as the trait asks for.
            unsafe { out.add(i).write(Self::sum(v)) }
        }
    }

    #[inline(always)]
    unsafe fn f16(p: *const u8) -> Self::V {
        // SAFETY: eight numbers of two bytes, as the trait asks for.
        unsafe { p.cast::<[[u8; 2]; WIDTH]>().read() }.map(|b| half::f16::from_le_bytes(b).to_f32())
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> Self::V {
        // SAFETY: eight numbers of two bytes, as the trait asks for.
        unsafe { p.cast::<[[u8; 2]; WIDTH]>().read() }.map(|b| half::bf16::from_le_bytes(b).to_f32())
    }

    #[inline(always)]
    unsafe fn int8(p: *const u8) -> Self::V {
        // SAFETY: eight bytes, as the trait asks for.
        unsafe { p.cast::<[i8; WIDTH]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn int4(p: *const u8) -> Self::V {
        // SAFETY: eight nibbles, as the trait asks for.
        let bytes = unsafe { p.cast::<[u8; WIDTH / 2]>().read() };
        let mut out = [0.0; WIDTH];
        for (o, b) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
            *o = [f32::from(i16::from(b & 15) - 8), f32::from(i16::from(b >> 4) - 8)];
        }
        out
    }

    #[inline(always)]
    fn prefetch(_: *const u8) {}
}
