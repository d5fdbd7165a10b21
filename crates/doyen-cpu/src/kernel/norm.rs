//! RMS and layer normalisation over the last axis, with the residual addition that comes before them.
//!
//! Formulas: contract section 3.4; `y = x * gamma / sqrt(mean(x^2) + eps)`, and with the mean removed and `beta` added
//! for layer normalisation. Statistics are f32, summed in one order per row (32 interleaved partial sums, then
//! pairwise), so a row's result does not depend on its neighbours. Called by bound steps; weights arrive widened.

use super::{math::fma, multiversion::multiversion, rows::for_rows};
use crate::{
    detect::Isa,
    pool::{Pool, UnsafeSlice},
};

/// What is added to a row before it is normalised.
#[derive(Debug, Clone, Copy)]
pub struct Residual<'a> {
    /// `[rows, width]`.
    pub skip: &'a [f32],
    /// `[width]`, added too.
    pub bias: Option<&'a [f32]>,
}

/// The trained part of a normalisation.
#[derive(Debug, Clone, Copy)]
pub struct Affine<'a> {
    /// `[width]`.
    pub gamma: &'a [f32],
    /// `[width]`; layer normalisation only.
    pub beta: Option<&'a [f32]>,
    /// Added to the mean square (the variance) before the root.
    pub eps: f32,
}

/// What a normalisation writes.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// The normalised rows, `[rows, width]`.
    pub y: &'a mut [f32],
    /// The rows as they were normalised (input + skip + bias), `[rows, width]`.
    pub sum: Option<&'a mut [f32]>,
    /// Mean of each row, `[rows]`; 0 for RMS normalisation.
    pub mean: Option<&'a mut [f32]>,
    /// `1 / sqrt(mean square + eps)` of each row, `[rows]`.
    pub inv_std: Option<&'a mut [f32]>,
}

/// Mean (0 for RMS) and inverse standard deviation of a row.
type Stats = (f32, f32);

/// `add(x, skip, bias, sum)`.
type Add = fn(&[f32], &[f32], Option<&[f32]>, &mut [f32]);

/// Normalisation kernels of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    add: Add,
    rms: fn(&[f32], f32) -> f32,
    layer: fn(&[f32], f32) -> Stats,
    apply: fn(&[f32], Stats, Affine<'_>, &mut [f32]),
    scale: fn(&mut [f32], f32, &[f32]),
}

impl Norm {
    /// The kernels for `isa`.
    pub fn new(isa: Isa) -> Self {
        Self { add: add(isa), rms: rms(isa), layer: layer(isa), apply: apply(isa), scale: scale(isa) }
    }

    /// RMS normalisation of the rows of `x [rows, width]`, `width` being the length of gamma.
    ///
    /// # Panics
    /// When lengths do not agree, or `beta` is given.
    pub fn rms(
        &self,
        pool: &Pool,
        x: &[f32],
        residual: Option<Residual<'_>>,
        affine: Affine<'_>,
        out: Outputs<'_>,
    ) {
        assert!(affine.beta.is_none(), "RMS normalisation has no beta");
        let stats = self.rms;
        self.rows(pool, x, residual, affine, out, &|row, eps| (0.0, stats(row, eps)));
    }

    /// Layer normalisation of the rows of `x [rows, width]`, `width` being the length of gamma.
    ///
    /// # Panics
    /// When lengths do not agree.
    pub fn layer(
        &self,
        pool: &Pool,
        x: &[f32],
        residual: Option<Residual<'_>>,
        affine: Affine<'_>,
        out: Outputs<'_>,
    ) {
        self.rows(pool, x, residual, affine, out, &self.layer);
    }

    /// RMS normalisation in place of each head of `x`, whose token `t` has its heads side by side from
    /// `t * token_stride` on; `gamma [head_size]` is shared by the heads. The query and key norms of attention.
    ///
    /// # Panics
    /// When `x` does not hold `tokens` tokens of `heads` heads.
    pub fn rms_heads(
        &self,
        pool: &Pool,
        x: &mut [f32],
        (tokens, token_stride, heads): (usize, usize, usize),
        gamma: &[f32],
        eps: f32,
    ) {
        let width = heads * gamma.len();
        assert!(
            width <= token_stride || tokens <= 1,
            "heads overlap: {width} channels, stride {token_stride}"
        );
        let x = UnsafeSlice::new(x);
        for_rows(pool, tokens, width, &|range| {
            for t in range {
                // SAFETY: tokens are at least `width` apart, and each token belongs to one worker.
                let heads = unsafe { x.range(t * token_stride..t * token_stride + width) };
                for head in heads.chunks_exact_mut(gamma.len().max(1)) {
                    let inv = (self.rms)(head, eps);
                    (self.scale)(head, inv, gamma);
                }
            }
        });
    }

    fn rows(
        &self,
        pool: &Pool,
        x: &[f32],
        residual: Option<Residual<'_>>,
        affine: Affine<'_>,
        out: Outputs<'_>,
        stats: &(dyn Fn(&[f32], f32) -> Stats + Sync),
    ) {
        let width = affine.gamma.len();
        if width == 0 {
            return assert!(x.is_empty(), "gamma is empty and x is not");
        }
        let rows = x.len() / width;
        let fits = |len: usize, expected: usize, what: &str| assert_eq!(len, expected, "length of {what}");
        fits(x.len(), rows * width, "x");
        fits(out.y.len(), x.len(), "y");
        affine.beta.inspect(|b| fits(b.len(), width, "beta"));
        out.sum.as_ref().inspect(|s| fits(s.len(), x.len(), "sum"));
        out.mean.as_ref().inspect(|s| fits(s.len(), rows, "mean"));
        out.inv_std.as_ref().inspect(|s| fits(s.len(), rows, "inv_std"));
        residual.inspect(|r| fits(r.skip.len(), x.len(), "skip"));
        residual.and_then(|r| r.bias).inspect(|b| fits(b.len(), width, "bias"));

        let y = UnsafeSlice::new(out.y);
        let sum = out.sum.map(UnsafeSlice::new);
        let mean = out.mean.map(UnsafeSlice::new);
        let inv_std = out.inv_std.map(UnsafeSlice::new);
        for_rows(pool, rows, width, &|range| {
            for r in range {
                let span = r * width..(r + 1) * width;
                // SAFETY: rows are disjoint, and each row belongs to one worker.
                let y = unsafe { y.range(span.clone()) };
                // SAFETY: as above.
                let sum = sum.map(|s| unsafe { s.range(span.clone()) });
                let x = &x[span.clone()];
                let stats = match (residual, sum) {
                    (None, None) => self.row(x, affine, y, stats),
                    (None, Some(sum)) => {
                        sum.copy_from_slice(x);
                        self.row(x, affine, y, stats)
                    }
                    (Some(residual), Some(sum)) => {
                        (self.add)(x, &residual.skip[span], residual.bias, sum);
                        self.row(sum, affine, y, stats)
                    }
                    (Some(residual), None) => {
                        (self.add)(x, &residual.skip[span], residual.bias, y);
                        self.row_in_place(y, affine, stats)
                    }
                };
                // SAFETY: as above.
                mean.inspect(|m| unsafe { m.range(r..r + 1) }[0] = stats.0);
                // SAFETY: as above.
                inv_std.inspect(|s| unsafe { s.range(r..r + 1) }[0] = stats.1);
            }
        });
    }

    fn row(
        &self,
        x: &[f32],
        affine: Affine<'_>,
        y: &mut [f32],
        stats: &dyn Fn(&[f32], f32) -> Stats,
    ) -> Stats {
        let stats = stats(x, affine.eps);
        (self.apply)(x, stats, affine, y);
        stats
    }

    /// As [`Norm::row`] on a row that nobody needs afterwards.
    fn row_in_place(&self, y: &mut [f32], affine: Affine<'_>, stats: &dyn Fn(&[f32], f32) -> Stats) -> Stats {
        let stats = stats(y, affine.eps);
        if stats.0 == 0.0 && affine.beta.is_none() {
            (self.scale)(y, stats.1, affine.gamma);
        } else {
            for (i, v) in y.iter_mut().enumerate() {
                let beta = affine.beta.map_or(0.0, |b| b[i]);
                *v = (*v - stats.0) * stats.1 * affine.gamma[i] + beta;
            }
        }
        stats
    }
}

multiversion! {
    fn add(x: &[f32], skip: &[f32], bias: Option<&[f32]>, sum: &mut [f32]) = add_body;
}
multiversion! {
    fn rms(x: &[f32], eps: f32) -> f32 = rms_body;
}
multiversion! {
    fn layer(x: &[f32], eps: f32) -> Stats = layer_body;
}
multiversion! {
    fn apply(x: &[f32], stats: Stats, affine: Affine<'_>, y: &mut [f32]) = apply_body;
}
multiversion! {
    fn scale(x: &mut [f32], inv: f32, gamma: &[f32]) = scale_body;
}

/// Partial sums of a reduction: four 8-lane registers, enough to hide the latency of the addition.
const LANES: usize = 32;

/// The partial sums, pairwise.
#[inline(always)]
fn reduce(mut acc: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            acc[i] += acc[i + n];
        }
        n /= 2;
    }
    acc[0]
}

/// `sum((x - shift)^2)`.
#[inline(always)]
fn sum_squares<const FMA: bool>(x: &[f32], shift: f32) -> f32 {
    let mut acc = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (a, &v) in acc.iter_mut().zip(chunk) {
            let v = v - shift;
            *a = fma::<FMA>(v, v, *a);
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        let v = v - shift;
        *a = fma::<FMA>(v, v, *a);
    }
    reduce(acc)
}

#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (a, &v) in acc.iter_mut().zip(chunk) {
            *a += v;
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        *a += v;
    }
    reduce(acc)
}

#[inline(always)]
fn add_body<const FMA: bool>(x: &[f32], skip: &[f32], bias: Option<&[f32]>, sum: &mut [f32]) {
    if let Some(bias) = bias {
        for (((s, &x), &k), &b) in sum.iter_mut().zip(x).zip(skip).zip(bias) {
            *s = x + k + b;
        }
    } else {
        for ((s, &x), &k) in sum.iter_mut().zip(x).zip(skip) {
            *s = x + k;
        }
    }
}

#[inline(always)]
fn rms_body<const FMA: bool>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares::<FMA>(x, 0.0) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn layer_body<const FMA: bool>(x: &[f32], eps: f32) -> Stats {
    let n = x.len() as f32;
    let mean = sum(x) / n;
    (mean, 1.0 / (sum_squares::<FMA>(x, mean) / n + eps).sqrt())
}

#[inline(always)]
fn apply_body<const FMA: bool>(x: &[f32], (mean, inv): Stats, affine: Affine<'_>, y: &mut [f32]) {
    if let Some(beta) = affine.beta {
        for (((y, &x), &g), &b) in y.iter_mut().zip(x).zip(affine.gamma).zip(beta) {
            *y = (x - mean) * inv * g + b;
        }
    } else {
        for ((y, &x), &g) in y.iter_mut().zip(x).zip(affine.gamma) {
            *y = (x - mean) * inv * g;
        }
    }
}

#[inline(always)]
fn scale_body<const FMA: bool>(x: &mut [f32], inv: f32, gamma: &[f32]) {
    for (x, &g) in x.iter_mut().zip(gamma) {
        *x = *x * inv * g;
    }
}

#[cfg(test)]
#[path = "norm_tests.rs"]
mod tests;
