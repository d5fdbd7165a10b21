//! Scales and zero points of a segment, widened to f32, in portable Rust: what `scales` does with AVX2.

use doyen_tensor::{FloatView, format::QuantMatrix};

/// Widens `len` numbers from `start` on into `out`, and eight zeros behind them.
///
/// # Panics
/// When the view is too short, or `out` is shorter than `len + 8`.
pub(super) fn widen(view: FloatView<'_>, start: usize, len: usize, out: &mut [f32]) {
    let (numbers, behind) = out[..len + 8].split_at_mut(len);
    for (o, i) in numbers.iter_mut().zip(start..) {
        *o = view.get(i);
    }
    behind.fill(0.0);
}

/// Zero points of blocks `start .. start + len` of row `n` into `out`, and zeros up to eight behind them.
///
/// # Panics
/// When the matrix is not valid for them, or `out` is shorter than `len + 8`.
pub(super) fn zero_points(w: &QuantMatrix<'_>, n: usize, start: usize, len: usize, out: &mut [f32]) {
    let (numbers, behind) = out[..len + 8].split_at_mut(len);
    for (o, b) in numbers.iter_mut().zip(start..) {
        *o = w.zero_point(n, b);
    }
    behind.fill(0.0);
}

/// Zero points of all blocks of rows `first .. first + rows`, row after row.
///
/// # Panics
/// When the matrix is not valid for them, or `out` is shorter than eight more.
pub(super) fn zero_points_of_rows(w: &QuantMatrix<'_>, first: usize, rows: usize, out: &mut [f32]) {
    let blocks = w.blocks();
    for r in 0..rows {
        zero_points(w, first + r, 0, blocks, &mut out[r * blocks..]);
    }
}
