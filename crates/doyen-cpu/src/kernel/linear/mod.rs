//! Matrix products with stored weights: `y[t, n] = sum_k x[t, k] * W[n, k] + bias[n]`.
//!
//! Weights are read as they lie in the file (2/4/8-bit blocks, floats of 4 and 8 bits (`mini`), f32, f16, bf16); activations are laid out to meet them
//! ([`super::quantize`]). Used by dense products, the head, the router and, expert by expert, by [`super::experts`].
//!
//! # Use
//! * [`Linear::new`] chooses a kernel for a [`Format`], a [`Mode`] and an [`Isa`] when a step is bound: a value with a name
//!   ([`Linear::kernel`]).
//! * [`Linear::run`] does the whole product over a pool: it prepares the activations into the caller's scratch
//!   ([`Linear::scratch_len`] bytes) and splits the rows of the weight over the threads, if it is large enough to be worth waking them.
//! * Callers that split work themselves prepare rows with [`Linear::layout`], and call [`Linear::rows`] for ranges of
//!   weight rows. [`Output`] is the shared result; [`Output::columns`] hands out disjoint column ranges.
//!
//! # Numerics, and the canonical order
//! Columns are taken in groups of 32 (of 16 where blocks are, of 128 with [`Mode::Wide`]; at most so many and anew at each block in
//! general), ascending. An element of the result has eight accumulators from zero; group `g` goes to `acc = lane[g % 8]`:
//! * [`Mode::Fast`]: activations are int8 codes with an f32 scale a group ([`super::quantize`]); `dot` is the exact integer sum of
//!   (code - default zero point) times activation code, in f32; `value = fma(-(zero point - default), sum of activation codes, dot)`;
//!   `acc = fma(value, scale_w * scale_a, acc)`.
//! * [`Mode::Fine`]: as fast, for each of two terms of the activations; the second sum is added to the first and the bias.
//! * [`Mode::Exact`]: `part` is the chain, from zero over ascending columns, of `fma(code - zero point, x, part)`; then
//!   `acc = fma(part, scale_w, acc)`.
//!
//! Then the lanes are added (i and i + 4, then i and i + 2, then the last two), and the bias. Quantized products give these same bits on every instruction set, whatever the number of tokens, the
//! range of rows or the threads. Float weights have one numerics only: f32 products of the widened weights, in an order of
//! the instruction set's own; there too an element depends on its own row of `x` and of `W` only.

#[cfg(target_arch = "x86_64")]
mod avx2_float;
mod format;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod int;
mod mini;
mod output;
mod scalar;
mod select;
#[cfg(test)]
mod tests;

pub use format::{FloatMatrix, Format, Orientation, Weights};
pub use output::{Columns, Output};
pub use select::{Kernel, select};

use super::{
    quantize::{Layout, Prepared},
    rows::for_rows,
};
use crate::{detect::Isa, pool::Pool, pool::UnsafeSlice};
use doyen_tensor::{FloatView, TensorError};
use std::ops::Range;

/// Bytes of weights times tokens below which the caller does a product alone: a core takes 48 KiB in some 3 us, and a region
/// costs 1 to 2 us.
const MIN_BYTES: usize = 48 << 10;
/// Packed bytes that a thread takes at a time: at most, and at least.
const CHUNK_BYTES: usize = 128 << 10;
const MIN_CHUNK_BYTES: usize = 16 << 10;
/// Chunks of a thread's share, when that leaves them large enough: threads begin a region some hundred nanoseconds apart.
const SHARE_CHUNKS: usize = 4;
/// What chunks of rows are a multiple of.
const CHUNK_ROWS: usize = 16;

/// Accumulators of an element: one kernel adds eight groups of one row at a time, another one group of many rows.
const LANES: usize = 8;

/// Numerics of products with quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Float activations.
    Exact,
    /// Int8 activations.
    Fast,
    /// As fast, with one activation scale for up to 128 columns where blocks are as long: two thirds of the arithmetic. Experts, whose
    /// errors average out over those of a token, lose 0.001 nats a token by it (the trained model of the tests with blocks of 128 and of
    /// whole rows), a dense model four times as much (SmolLM2).
    Wide,
    /// Int8 activations in two terms, the second for what the first leaves: some 15 bits, at twice the arithmetic and the same
    /// bytes of weights.
    Fine,
}

/// A product bound to a weight format: the layout of its activations and its kernel.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    format: Format,
    layout: Layout,
    kernel: Kernel,
}

impl Linear {
    /// Chooses the kernel.
    pub fn new(format: Format, mode: Mode, isa: Isa) -> Self {
        Self { format, layout: select::layout(format, mode, isa), kernel: select(format, mode, isa) }
    }

    /// The weight format this was made for.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// How activations have to lie.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// The kernel.
    pub const fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Bytes of scratch that [`Linear::run`] needs; `None` on overflow.
    pub const fn scratch_len(&self, tokens: usize) -> Option<usize> {
        self.layout.scratch_len(tokens)
    }

    /// Checks that a weight is valid and of the format this was made for.
    ///
    /// # Errors
    /// Names what differs.
    pub fn check(&self, weights: &Weights<'_>) -> Result<(), TensorError> {
        weights.validate()?;
        let found = weights.format();
        if found == self.format {
            Ok(())
        } else {
            Err(TensorError::Format(format!("kernel for {} given {found}", self.format)))
        }
    }

    /// The columns of `out` (weight rows `out.range()`) for every prepared token.
    ///
    /// # Panics
    /// When the weight fails [`Linear::check`], or activations, bias or output are not of its shape.
    pub fn rows(
        &self,
        weights: &Weights<'_>,
        acts: &Prepared<'_>,
        bias: Option<FloatView<'_>>,
        out: &mut Columns<'_>,
    ) {
        if let Err(e) = self.check(weights) {
            panic!("{e}");
        }
        assert_eq!(acts.layout(), self.layout, "layout of the activations");
        assert_eq!(acts.tokens(), out.tokens(), "tokens of activations and output");
        assert!(out.range().end <= weights.rows(), "rows {:?} of {}", out.range(), weights.rows());
        assert!(bias.is_none_or(|b| b.len() >= weights.rows()), "bias shorter than {} rows", weights.rows());
        if acts.tokens() > 0 && !out.range().is_empty() {
            // SAFETY: all of it was checked above.
            unsafe { self.kernel.run(weights, acts, bias, out) };
        }
    }

    /// The whole product over the pool. `x` is `[tokens, cols]`, `y` has at least `tokens` rows and the weight's rows
    /// as columns; `scratch` has [`Linear::scratch_len`] bytes.
    ///
    /// # Panics
    /// As [`Linear::rows`], or when `x` or `scratch` is too short.
    pub fn run(
        &self,
        pool: &Pool,
        weights: &Weights<'_>,
        x: &[f32],
        bias: Option<FloatView<'_>>,
        y: &mut Output<'_>,
        scratch: &mut [u8],
    ) {
        let width = y.width();
        let y = y.window(0..width);
        run_all(pool, &[Some(Part { linear: self, weights: *weights, bias, y })], x, scratch);
    }
}

/// One of the products that share their activations.
#[derive(Debug)]
pub struct Part<'a> {
    /// The product.
    pub linear: &'a Linear,
    /// Its weight.
    pub weights: Weights<'a>,
    /// A number a row of the weight.
    pub bias: Option<FloatView<'a>>,
    /// Its result, with the tokens of the others.
    pub y: Output<'a>,
}

/// Products of the same activations `x [tokens, cols]` in the same layout, over the pool: they are prepared once, and all parts are
/// one region. `scratch` has [`Linear::scratch_len`] bytes.
///
/// # Panics
/// As [`Linear::rows`]; or when layouts or tokens differ, or `x` or `scratch` is too short.
pub fn run_all(pool: &Pool, parts: &[Option<Part<'_>>], x: &[f32], scratch: &mut [u8]) {
    let parts = || parts.iter().flatten();
    let Some(first) = parts().next() else { return };
    let tokens = first.y.tokens();
    let acts = prepare(pool, first.linear.layout, x, tokens, scratch);
    let some_rows = |part: &Part<'_>, rows: Range<usize>| {
        // SAFETY: each range of rows of each part is taken once below, and parts own their results.
        let mut columns = unsafe { part.y.columns(rows) };
        part.linear.rows(&part.weights, &acts, part.bias, &mut columns);
    };
    let bytes: usize = parts().map(|p| p.weights.bytes()).sum();
    if bytes.saturating_mul(tokens) < MIN_BYTES {
        return parts().for_each(|p| some_rows(p, 0..p.weights.rows()));
    }
    let rows: usize = parts().map(|p| p.weights.rows()).sum();
    let together = parts().map(|p| p.linear.format.rows_together()).max().unwrap_or(1);
    let chunk = chunk_rows(pool, rows, bytes / rows.max(1), together);
    let chunks = |p: &Part<'_>| p.weights.rows().div_ceil(chunk);
    pool.for_each_dynamic(parts().map(chunks).sum(), &|item| {
        let mut i = item;
        for part in parts() {
            if i < chunks(part) {
                return some_rows(part, i * chunk..((i + 1) * chunk).min(part.weights.rows()));
            }
            i -= chunks(part);
        }
    });
}

/// Rows of a matrix that a thread takes at a time, out of `rows` of `row_bytes` in all: enough bytes to amortise taking them, few
/// enough for threads to finish together; whole tiles and whole cache lines of output. At least `together`
/// ([`Format::rows_together`]), unless threads would have none then.
pub(crate) fn chunk_rows(pool: &Pool, rows: usize, row_bytes: usize, together: usize) -> usize {
    let of_bytes = |bytes: usize| (bytes / row_bytes.max(1)).max(1);
    let by_share = rows.div_ceil(SHARE_CHUNKS * pool.threads());
    let chunk = by_share.clamp(of_bytes(MIN_CHUNK_BYTES), of_bytes(CHUNK_BYTES));
    chunk.max(together.min(rows / pool.threads())).next_multiple_of(CHUNK_ROWS)
}

/// Prepares `tokens` rows of `x` into `scratch`, by the pool when they are enough.
///
/// # Panics
/// When `x` or `scratch` is too short.
pub fn prepare<'s>(
    pool: &Pool,
    layout: Layout,
    x: &[f32],
    tokens: usize,
    scratch: &'s mut [u8],
) -> Prepared<'s> {
    let (cols, n) = (layout.cols(), layout.token_bytes());
    let rows = UnsafeSlice::new(&mut *scratch);
    for_rows(pool, tokens, cols, &|tokens| {
        for t in tokens {
            // SAFETY: every token has its own range.
            let out = unsafe { rows.range(t * n..(t + 1) * n) };
            layout.prepare(&x[t * cols..(t + 1) * cols], out);
        }
    });
    Prepared::new(layout, tokens, scratch)
}

/// Whole ranges in steps: `(start, len)` with `len <= step`.
fn tiles(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step).map(move |i| i..(i + step).min(range.end))
}
