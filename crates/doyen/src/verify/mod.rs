//! Is the fast path right? Against the reference interpreter on the package's own graph, or against recorded logits.

pub mod golden;
pub mod reference;

use doyen_tensor::TokenId;

/// How two sets of logits differ, row by row `[rows, vocab]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Difference {
    /// Largest absolute difference.
    pub max_abs: f64,
    /// `|got - want| / |want|` over all numbers (Frobenius norms).
    pub relative: f64,
    /// Rows compared.
    pub rows: usize,
    /// Rows whose largest logit is at the same token.
    pub top1: usize,
}

/// Compares rows of logits. NaN on either side counts as infinitely far.
///
/// # Panics
/// When the lengths differ or are not whole rows.
pub fn difference(got: &[f32], want: &[f32], vocab: usize) -> Difference {
    assert_eq!(got.len(), want.len(), "numbers on both sides");
    let (max_abs, relative) = distance(got, want);
    let rows = got.chunks_exact(vocab).zip(want.chunks_exact(vocab));
    let top = |row: &[f32]| doyen_runtime::sample::argmax(row);
    let top1 = rows.clone().filter(|(g, w)| top(g) == top(w)).count();
    Difference { max_abs, relative, rows: rows.count(), top1 }
}

/// Largest absolute difference, and the relative one over all numbers.
pub fn distance(got: &[f32], want: &[f32]) -> (f64, f64) {
    let (mut max, mut error, mut norm) = (0f64, 0f64, 0f64);
    for (&g, &w) in got.iter().zip(want) {
        let d = if g == w { 0.0 } else { f64::from(g) - f64::from(w) };
        let d = if d.is_nan() { f64::INFINITY } else { d };
        max = max.max(d.abs());
        error += d * d;
        norm += f64::from(w) * f64::from(w);
    }
    let relative = if error == 0.0 { 0.0 } else { (error / norm.max(f64::MIN_POSITIVE)).sqrt() };
    (max, relative)
}

/// Token ids as the file formats hold them.
///
/// # Errors
/// Names the id that is no token.
pub fn token_ids(ids: &[i64]) -> anyhow::Result<Vec<TokenId>> {
    ids.iter()
        .map(|&i| u32::try_from(i).map(TokenId).map_err(|_| anyhow::anyhow!("{i} is not a token id")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_seen() {
        let want = [1.0, 2.0, 3.0, 0.0];
        let d = difference(&[1.0, 2.0, 3.0, 4.0], &want, 2);
        assert_eq!((d.max_abs, d.rows, d.top1), (4.0, 2, 1));
        assert!((d.relative - 4.0 / 14f64.sqrt()).abs() < 1e-12);
        assert_eq!(difference(&want, &want, 2).relative, 0.0);
        assert_eq!(distance(&[f32::NAN], &[1.0]).0, f64::INFINITY);
        assert_eq!(distance(&[f32::NEG_INFINITY], &[f32::NEG_INFINITY]).0, 0.0);
    }
}
