//! Elementary functions in f32, written so that loops over them vectorise.
//!
//! The standard library's versions are calls, one number at a time. These are branch-free, and used by every kernel,
//! so that a softmax, an activation and attention agree on what `exp` is. `FMA` says whether the instruction set
//! fuses multiplication and addition; both variants meet the stated errors, which the tests measure against f64.

/// `a * b + c`, fused where that is one instruction.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
