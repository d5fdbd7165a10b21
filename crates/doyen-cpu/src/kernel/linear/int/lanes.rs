//! What the product loops ask of an instruction set: vectors with a 32-bit lane for each row of a tile.
//!
//! Implementations are zero-sized types whose functions compile to one or a few instructions. Every function is unsafe
//! for the same two reasons, stated once here: the instruction set has to be there, and the code has to be inlined into a
//! function that enables it. Pointers have to be good for what the function says it reads or writes.

/// Most rows of any vector.
pub(super) const MAX_ROWS: usize = 16;

/// Vectors of codes that a group of 32 columns has.
pub(super) const RUN: usize = 8;

/// Where vector `v` of a group's codes finds its activations, from the place of the group's first column.
pub(super) const fn offset(bits: usize, v: usize) -> usize {
    let planes = 8 / bits;
    let span = planes * RUN;
    v / span * planes * 32 + v % span % planes * 32 + v % span / planes * 4
}

/// Vectors of `ROWS` lanes.
pub(super) trait Lanes {
    /// Lanes: rows of a tile.
    const ROWS: usize;
    /// Integers, or packed codes.
    type Int: Copy;
    /// f32.
    type Float: Copy;

    /// Zeros.
    unsafe fn zero() -> Self::Float;
    /// Reads `ROWS` numbers.
    unsafe fn load(p: *const f32) -> Self::Float;
    /// Writes `ROWS` numbers.
    unsafe fn store(p: *mut f32, v: Self::Float);
    /// One number in every lane.
    unsafe fn splat(p: *const f32) -> Self::Float;
    /// `a + b`
    unsafe fn add(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a - b`
    unsafe fn sub(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b`
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b + c`, rounded once.
    unsafe fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `c - a * b`, rounded once.
    unsafe fn neg_mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// i32 to f32.
    unsafe fn to_float(v: Self::Int) -> Self::Float;

    /// Writes a vector.
    unsafe fn store_int(p: *mut u8, v: Self::Int);
    /// 16 bytes of each row, rows `stride` bytes apart, as four vectors: word `i` of every row.
    unsafe fn transpose(base: *const u8, stride: usize) -> [Self::Int; 4];
    /// Bytes shifted right by `n < 8` bits and masked; `mask` has no bit above `7 - n`.
    unsafe fn plane(v: Self::Int, n: i32, mask: u8) -> Self::Int;
    /// Words shifted right by `n` bits and masked.
    unsafe fn code(v: Self::Int, n: i32, mask: i32) -> Self::Int;
    /// Transposes `rows` of numbers: `out[b * ROWS + r] = rows[r * stride + b]` for `b < len` and every lane `r`.
    ///
    /// `rows` is good for eight numbers from each `r * stride + b` with `b` a multiple of 8 below `len`, and `out` for as many
    /// blocks.
    unsafe fn transpose_floats(rows: *const f32, stride: usize, len: usize, out: *mut f32);
}

/// Vectors that f32 activations meet, two at a time.
pub(super) trait FloatLanes: Lanes {
    /// Tokens of a register tile: 6 or 8.
    const TOKENS: usize;
}

/// Vectors that int8 activations meet.
pub(super) trait ByteLanes: Lanes {
    /// Tokens of a register tile: 4 or 8.
    const TOKENS: usize;

    /// 8-bit codes as [`ByteLanes::dots`] wants them.
    unsafe fn code8(v: Self::Int) -> Self::Int;

    /// For each of `T` tokens, in each lane: the codes of `4 V` columns times theirs of `acts[t]`, summed, and centred.
    ///
    /// `w` points to `V` vectors of codes (8-bit ones from [`ByteLanes::code8`]), `acts` to the place of the first column;
    /// `centre[t]` is what centres the sum (see [`crate::kernel::quantize`]).
    unsafe fn dots<const BITS: usize, const V: usize, const T: usize>(
        w: *const u8,
        acts: [*const u8; T],
        centre: [*const i32; T],
    ) -> [Self::Int; T];
}
