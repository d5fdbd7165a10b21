//! Typed parts of one byte buffer.

use crate::kernel::quantize::ROW_ALIGN;

/// A type that any bytes are a value of.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for f32 {}

/// Bytes that [`Scratch::take`] uses up at most for `n` values.
pub(super) const fn bytes_for(n: usize, size: usize) -> Option<usize> {
    match n.checked_mul(size) {
        Some(bytes) => match bytes.checked_next_multiple_of(ROW_ALIGN) {
            Some(bytes) => bytes.checked_add(ROW_ALIGN),
            None => None,
        },
        None => None,
    }
}

/// What is left of the buffer.
pub(super) struct Scratch<'s>(pub(super) &'s mut [u8]);

impl<'s> Scratch<'s> {
    /// Takes `n` values, aligned to a cache line, from the front. They hold whatever the buffer held.
    ///
    /// # Panics
    /// When less than [`bytes_for`] is left.
    pub(super) fn take<T: Plain>(&mut self, n: usize) -> &'s mut [T] {
        let all = std::mem::take(&mut self.0);
        let skip = all.as_ptr().align_offset(ROW_ALIGN).min(all.len());
        let (part, left) = all[skip..].split_at_mut(n * size_of::<T>());
        self.0 = left;
        // SAFETY: the part is aligned to a cache line, `n` values long, exclusively borrowed, and any bytes are a `T`.
        unsafe { std::slice::from_raw_parts_mut(part.as_mut_ptr().cast(), n) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_disjoint() {
        let mut bytes = vec![7u8; bytes_for(3, 4).unwrap() + bytes_for(5, 4).unwrap() + 1];
        let mut rest = Scratch(&mut bytes[1..]);
        let (a, b) = (rest.take::<f32>(3), rest.take::<u32>(5));
        a.fill(1.0);
        b.fill(2);
        assert_eq!(a, [1.0; 3]);
        assert_eq!(a.as_ptr().align_offset(ROW_ALIGN) + b.as_ptr().align_offset(ROW_ALIGN), 0);
        assert_eq!(bytes_for(usize::MAX, 4), None);
    }
}
