//! How the items of a region are cut among workers, and how workers write to disjoint parts of one slice.

use std::{cell::UnsafeCell, ops::Range};

/// `0 .. n` cut into contiguous, nearly equal ranges whose inner borders are multiples of a granularity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    n: usize,
    granularity: usize,
    parts: usize,
}

impl Split {
    /// A cut into `parts` ranges. A granularity or number of parts of 0 counts as 1.
    pub fn new(n: usize, granularity: usize, parts: usize) -> Self {
        Self { n, granularity: granularity.max(1), parts: parts.max(1) }
    }

    /// Range `part`. The first ranges are the longer ones, the last ones may be empty.
    pub fn range(self, part: usize) -> Range<usize> {
        let units = self.n.div_ceil(self.granularity);
        let (each, more) = (units / self.parts, units % self.parts);
        let border = |i: usize| ((i * each + i.min(more)) * self.granularity).min(self.n);
        border(part)..border(part + 1)
    }
}

/// A mutable slice that workers write disjoint parts of.
///
/// The borrow checker cannot see that two workers touch different ranges; this type moves that promise to the call of
/// [`UnsafeSlice::range`], the one place a kernel has to argue for.
#[derive(Debug, Clone, Copy)]
pub struct UnsafeSlice<'a, T> {
    cells: &'a [UnsafeCell<T>],
}

// Elements are reached only through `range`, whose callers promise disjointness, and through `shared`, which asks for `T: Sync`.
// SAFETY: so threads never share an element that one of them writes, and `T: Send` allows sending elements between threads.
unsafe impl<T: Send> Sync for UnsafeSlice<'_, T> {}
// SAFETY: as above; the handle itself is a reference.
unsafe impl<T: Send> Send for UnsafeSlice<'_, T> {}

impl<'a, T> UnsafeSlice<'a, T> {
    /// A shared handle on an exclusive slice.
    pub fn new(slice: &'a mut [T]) -> Self {
        let cells = std::ptr::from_mut(slice) as *const [UnsafeCell<T>];
        // SAFETY: UnsafeCell<T> has the layout of T, and the exclusive borrow is held for 'a.
        Self { cells: unsafe { &*cells } }
    }

    /// The elements of `range`, to write.
    ///
    /// # Safety
    /// While the result lives, no other range that overlaps it may be taken from this slice by any thread.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        let cells = &self.cells[range];
        let first = UnsafeCell::raw_get(cells.as_ptr());
        // SAFETY: the cells are `cells.len()` initialised elements, and the caller promises exclusivity.
        unsafe { std::slice::from_raw_parts_mut(first, cells.len()) }
    }

    /// The elements of `range`, to read.
    ///
    /// # Safety
    /// While the result lives, no range that overlaps it may be taken from this slice to write by any thread.
    ///
    /// # Panics
    /// When the range is out of bounds.
    pub unsafe fn shared(&self, range: Range<usize>) -> &'a [T]
    where
        T: Sync,
    {
        let cells = &self.cells[range];
        let first = UnsafeCell::raw_get(cells.as_ptr());
        // SAFETY: the cells are `cells.len()` initialised elements, and the caller promises that nobody writes them.
        unsafe { std::slice::from_raw_parts(first, cells.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges(split: Split) -> impl Iterator<Item = Range<usize>> {
        (0..split.parts).map(move |part| split.range(part))
    }

    proptest! {
        #[test]
        fn ranges_cover_everything_once(n in 0usize..1000, g in 0usize..70, parts in 0usize..20) {
            let split = Split::new(n, g, parts);
            let mut next = 0;
            for r in ranges(split) {
                prop_assert_eq!(r.start, next);
                prop_assert!(r.end >= r.start);
                prop_assert!(r.end == n || r.end % g.max(1) == 0);
                next = r.end;
            }
            prop_assert_eq!(next, n);
            let lens: Vec<_> = ranges(split).map(|r| r.len()).collect();
            let (max, min) = (lens.iter().max().unwrap(), lens.iter().min().unwrap());
            prop_assert!(max - min <= 2 * g.max(1));
        }
    }

    #[test]
    fn disjoint_ranges_write_through() {
        let mut v = vec![0u8; 10];
        let s = UnsafeSlice::new(&mut v);
        for r in ranges(Split::new(10, 3, 3)) {
            // SAFETY: the ranges of a split are disjoint.
            unsafe { s.range(r.clone()) }.fill(r.start as u8);
        }
        assert_eq!(v, [0, 0, 0, 0, 0, 0, 6, 6, 6, 9]);
    }
}
