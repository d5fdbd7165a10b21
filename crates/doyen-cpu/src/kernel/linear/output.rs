//! The result matrix that threads write disjoint columns of.

use crate::pool::UnsafeSlice;
use std::ops::Range;

/// A row-major result `[tokens, width]`, rows `stride` apart, that several threads fill.
///
/// Not `Clone`: who holds it knows that no other handle writes the same numbers.
#[derive(Debug)]
pub struct Output<'a> {
    cells: UnsafeSlice<'a, f32>,
    first: usize,
    tokens: usize,
    width: usize,
    stride: usize,
}

impl<'a> Output<'a> {
    /// A result whose rows follow each other.
    ///
    /// # Panics
    /// When `y` is shorter than `tokens * width`.
    pub fn new(y: &'a mut [f32], tokens: usize, width: usize) -> Self {
        let need = tokens.checked_mul(width);
        assert!(need.is_some_and(|n| n <= y.len()), "{tokens} rows of {width} in {} values", y.len());
        Self { cells: UnsafeSlice::new(y), first: 0, tokens, width, stride: width }
    }

    /// Number of rows.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of columns.
    pub const fn width(&self) -> usize {
        self.width
    }

    /// Columns `range` as an output of their own, numbered from 0.
    ///
    /// # Panics
    /// When there are no such columns.
    pub fn window(&mut self, range: Range<usize>) -> Output<'_> {
        // SAFETY: this output is borrowed for as long as the window lives.
        unsafe { self.shared_window(range) }
    }

    /// As [`Output::window`], of an output that others hold as well.
    ///
    /// # Safety
    /// As [`Output::part`], for every part of the window.
    ///
    /// # Panics
    /// When there are no such columns.
    pub(crate) unsafe fn shared_window(&self, range: Range<usize>) -> Output<'a> {
        assert!(range.start <= range.end && range.end <= self.width, "columns {range:?} of {}", self.width);
        Output {
            cells: self.cells,
            first: self.first + range.start,
            tokens: self.tokens,
            width: range.len(),
            stride: self.stride,
        }
    }

    /// Columns `range` of rows `tokens`, to write.
    ///
    /// # Safety
    /// While the result lives, no other overlapping part of this output may be in use.
    ///
    /// # Panics
    /// When the part is out of bounds.
    pub unsafe fn part(&self, tokens: Range<usize>, range: Range<usize>) -> Columns<'a> {
        assert!(
            tokens.start <= tokens.end && tokens.end <= self.tokens,
            "rows {tokens:?} of {}",
            self.tokens
        );
        assert!(range.start <= range.end && range.end <= self.width, "columns {range:?} of {}", self.width);
        Columns { cells: self.cells, first: self.first, stride: self.stride, tokens, range }
    }

    /// Columns `range` of every row, to write.
    ///
    /// # Safety
    /// As [`Output::part`].
    ///
    /// # Panics
    /// As [`Output::part`].
    pub unsafe fn columns(&self, range: Range<usize>) -> Columns<'a> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.part(0..self.tokens, range) }
    }
}

/// Some columns of some rows of an [`Output`], exclusively held.
#[derive(Debug)]
pub struct Columns<'a> {
    cells: UnsafeSlice<'a, f32>,
    first: usize,
    stride: usize,
    tokens: Range<usize>,
    range: Range<usize>,
}

impl Columns<'_> {
    /// Number of rows.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The columns, in the numbering of the whole output.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Columns `range` (numbered as in the whole output) of row `t` (counted from the first row held).
    ///
    /// # Panics
    /// When they are not held.
    #[inline]
    pub fn row(&mut self, t: usize, range: Range<usize>) -> &mut [f32] {
        assert!(t < self.tokens.len() && self.range.start <= range.start && range.end <= self.range.end);
        let start = self.first + (self.tokens.start + t) * self.stride;
        // SAFETY: the elements are inside the part that this value holds exclusively, and it is borrowed mutably.
        unsafe { self.cells.range(start + range.start..start + range.end) }
    }

    /// Writes columns `range` of a token, or adds to them: `term` counts the terms of all tokens, `terms` a token, and all but a token's
    /// first are added.
    ///
    /// # Panics
    /// When the columns are not held.
    #[inline]
    pub(super) fn put(&mut self, term: usize, terms: usize, range: Range<usize>, values: &[f32]) {
        let y = self.row(term / terms, range);
        if term.is_multiple_of(terms) {
            y.copy_from_slice(&values[..y.len()]);
        } else {
            for (y, v) in y.iter_mut().zip(values) {
                *y += v;
            }
        }
    }

    /// Writes one element, as [`Columns::row`] numbers it.
    ///
    /// # Panics
    /// When it is not held.
    #[inline]
    pub fn set(&mut self, t: usize, n: usize, value: f32) {
        self.row(t, n..n + 1)[0] = value;
    }
}
