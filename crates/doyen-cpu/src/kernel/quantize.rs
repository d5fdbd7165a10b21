//! Activations laid out for a product kernel: as they are, permuted to fit packed weights, or quantized to int8.
//!
//! Weights stay as they lie in the file, so the activations move: a [`Layout`] says what a kernel wants to find
//! beside the packed codes, [`Layout::prepare`] writes one token's row in it. Kernels with the same layout share one
//! prepared row (query, key and value projections; every expert of a bank). The vector version of the int8 and the
//! permuted layouts is in `avx2`; the scalar functions here define the values, which are the same on every path.
//!
//! # Int8 activations
//! Columns are quantized in groups of at most 32 that begin anew at each weight block, so that a group has one weight
//! scale. A group's scale is `max|x| / 127` and its codes are `round_half_even(x * (127 / max|x|))`. A group whose
//! largest magnitude is below [`FLUSH`] becomes zero; a group that holds an infinity or a NaN gets the scale NaN, so
//! that the damage shows in the output instead of turning into plausible numbers.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;

#[cfg(target_arch = "x86_64")]
use crate::detect::Avx2;
use doyen_tensor::format::Bits;

/// Most columns that share an activation scale.
pub const GROUP: usize = 32;

/// Groups of smaller magnitudes are zero: `127 / max|x|` would overflow.
pub const FLUSH: f32 = 1e-36;

/// Where each row of prepared activations begins: a cache line.
pub const ROW_ALIGN: usize = 64;

/// Bytes of packed codes a vector kernel takes at a time.
pub(crate) const SPAN_BYTES: usize = 32;

/// How one token's activations lie for a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    cols: usize,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// f32 in column order.
    Plain,
    /// Int8 in column order (`cols` bytes, padded to 4), then a scale a group, then a sum a block.
    Int8 { block: usize },
    /// f32 permuted by spans of `span` columns, zero-padded: value `8 i + j` of a span is column `j * span / 8 + i`,
    /// so that vector `i` meets code `i` of each 32-bit lane of packed weights.
    #[cfg(target_arch = "x86_64")]
    Lanes { span: usize, isa: Avx2 },
    /// Int8 by spans, zero-padded. A span is `span` codes, plane after plane (all columns that are the first code of
    /// their byte, then the second, ...), and eight f32: the activation scale of each 32-bit lane. The sums of
    /// the blocks follow, zero-padded to a multiple of 8 and 8 more, which lets kernels read eight from any block.
    #[cfg(target_arch = "x86_64")]
    Int8Lanes { bits: Bits, block: usize, isa: Avx2 },
}

impl Layout {
    /// f32 in column order.
    pub const fn plain(cols: usize) -> Self {
        Self { cols, kind: Kind::Plain }
    }

    /// Int8 in column order for weight blocks of `block` columns.
    pub(crate) const fn int8(cols: usize, block: usize) -> Self {
        Self { cols, kind: Kind::Int8 { block } }
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn lanes(cols: usize, bits: Bits, isa: Avx2) -> Self {
        Self { cols, kind: Kind::Lanes { span: SPAN_BYTES * bits.per_byte(), isa } }
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn int8_lanes(cols: usize, bits: Bits, block: usize, isa: Avx2) -> Self {
        Self { cols, kind: Kind::Int8Lanes { bits, block, isa } }
    }

    /// Columns of a row.
    pub const fn cols(self) -> usize {
        self.cols
    }

    /// Whether a prepared row is the row itself, so that preparing can be left out.
    pub const fn is_plain(self) -> bool {
        matches!(self.kind, Kind::Plain)
    }

    /// Bytes from one prepared row to the next, a multiple of [`ROW_ALIGN`].
    pub const fn row_bytes(self) -> usize {
        let bytes = match self.kind {
            Kind::Plain => 4 * self.cols,
            Kind::Int8 { block } => {
                self.cols.next_multiple_of(4) + 4 * (groups(self.cols, block) + self.cols.div_ceil(block))
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Lanes { span, .. } => 4 * self.cols.next_multiple_of(span),
            #[cfg(target_arch = "x86_64")]
            Kind::Int8Lanes { bits, block, .. } => {
                let span = SPAN_BYTES * bits.per_byte();
                self.cols.div_ceil(span) * (span + 32)
                    + 4 * (self.cols.div_ceil(block).next_multiple_of(8) + 8)
            }
        };
        bytes.next_multiple_of(ROW_ALIGN)
    }

    /// Bytes of `tokens` prepared rows; `None` on overflow.
    pub const fn scratch_len(self, tokens: usize) -> Option<usize> {
        self.row_bytes().checked_mul(tokens)
    }

    /// Writes the row `x` (`cols` values) into `out` (`row_bytes` bytes).
    ///
    /// # Panics
    /// When a length is not the stated one.
    pub fn prepare(self, x: &[f32], out: &mut [u8]) {
        assert_eq!(x.len(), self.cols, "columns of an activation row");
        assert_eq!(out.len(), self.row_bytes(), "bytes of a prepared row");
        match self.kind {
            Kind::Plain => put(out, x),
            Kind::Int8 { block } => int8_row(x, block, out),
            #[cfg(target_arch = "x86_64")]
            Kind::Lanes { span, .. } => lanes_row(x, span, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves that AVX2, FMA and F16C are there; the lengths were checked above.
            Kind::Int8Lanes { bits, block, isa: _ } => unsafe { avx2::int8_row(x, bits, block, out) },
        }
    }
}

/// Prepared rows of several tokens, in order or picked by a list.
#[derive(Debug, Clone, Copy)]
pub struct Prepared<'a> {
    layout: Layout,
    tokens: usize,
    bytes: &'a [u8],
    picked: Option<&'a [u32]>,
}

impl<'a> Prepared<'a> {
    /// `tokens` rows that [`Layout::prepare`] wrote, `row_bytes` apart.
    ///
    /// # Panics
    /// When `bytes` is too short.
    pub fn new(layout: Layout, tokens: usize, bytes: &'a [u8]) -> Self {
        let need = layout.scratch_len(tokens);
        assert!(need.is_some_and(|n| n <= bytes.len()), "{tokens} prepared rows in {} bytes", bytes.len());
        Self { layout, tokens, bytes, picked: None }
    }

    /// The rows that `list` names, in its order.
    ///
    /// # Panics
    /// When `list` names a row that is not there, or this set is already picked.
    pub fn pick(&self, list: &'a [u32]) -> Self {
        assert!(self.picked.is_none() && list.iter().all(|&t| (t as usize) < self.tokens), "picked rows");
        Self { tokens: list.len(), picked: Some(list), ..*self }
    }

    /// Rows `range` of an unpicked set.
    ///
    /// # Panics
    /// When there are no such rows, or this set is picked.
    pub fn range(&self, range: std::ops::Range<usize>) -> Self {
        assert!(self.picked.is_none() && range.end <= self.tokens, "rows {range:?} of {}", self.tokens);
        let n = self.layout.row_bytes();
        Self { tokens: range.len(), bytes: &self.bytes[range.start * n..range.end * n], ..*self }
    }

    /// How the rows lie.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Number of rows.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Row `t`.
    ///
    /// # Panics
    /// When there is no such row.
    #[inline]
    pub fn row(&self, t: usize) -> &'a [u8] {
        assert!(t < self.tokens, "row {t} of {}", self.tokens);
        let at = self.picked.map_or(t, |list| list[t] as usize);
        let n = self.layout.row_bytes();
        &self.bytes[at * n..(at + 1) * n]
    }
}

/// Groups of a row: each block is cut into runs of at most [`GROUP`] columns.
pub(crate) const fn groups(cols: usize, block: usize) -> usize {
    (cols / block) * block.div_ceil(GROUP) + (cols % block).div_ceil(GROUP)
}

/// Quantizes one group of at most [`GROUP`] columns and returns its scale (module documentation).
pub(crate) fn int8_group(x: &[f32], codes: &mut [i8]) -> f32 {
    let mut amax = 0f32;
    let mut finite = true;
    for &v in x {
        finite &= v.is_finite();
        amax = amax.max(v.abs());
    }
    if !finite || amax < FLUSH {
        codes.fill(0);
        return if finite { 0.0 } else { f32::NAN };
    }
    let inv = 127.0 / amax;
    for (q, &v) in codes.iter_mut().zip(x) {
        *q = (v * inv).round_ties_even() as i8;
    }
    amax / 127.0
}

fn int8_row(x: &[f32], block: usize, out: &mut [u8]) {
    let cols = x.len();
    let (code_bytes, rest) = out.split_at_mut(cols.next_multiple_of(4));
    let (scales, sums) = rest.split_at_mut(4 * groups(cols, block));
    let mut g = 0;
    for (b, xs) in x.chunks(block).enumerate() {
        let mut sum = 0f32;
        for (i, group) in xs.chunks(GROUP).enumerate() {
            let mut codes = [0i8; GROUP];
            let scale = int8_group(group, &mut codes[..group.len()]);
            let start = b * block + i * GROUP;
            for (o, &q) in code_bytes[start..start + group.len()].iter_mut().zip(&codes) {
                *o = q as u8;
            }
            sum += scale * code_sum(&codes[..group.len()]) as f32;
            scales[4 * g..4 * g + 4].copy_from_slice(&scale.to_le_bytes());
            g += 1;
        }
        sums[4 * b..4 * b + 4].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Sum of a group's codes: at most `32 * 127`, so exact.
pub(crate) fn code_sum(codes: &[i8]) -> i32 {
    codes.iter().map(|&q| i32::from(q)).sum()
}

#[cfg(target_arch = "x86_64")]
fn lanes_row(x: &[f32], span: usize, out: &mut [u8]) {
    let per_lane = span / 8;
    for (xs, o) in x.chunks(span).zip(out.chunks_mut(4 * span)) {
        if xs.len() < span {
            o.fill(0);
        }
        for (j, lane) in xs.chunks(per_lane).enumerate() {
            for (i, v) in lane.iter().enumerate() {
                let at = 4 * (8 * i + j);
                o[at..at + 4].copy_from_slice(&v.to_le_bytes());
            }
        }
    }
}

fn put(out: &mut [u8], x: &[f32]) {
    for (o, v) in out.chunks_exact_mut(4).zip(x) {
        o.copy_from_slice(&v.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn f32_at(bytes: &[u8], i: usize) -> f32 {
        f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap())
    }

    #[test]
    fn groups_begin_anew_at_each_block() {
        assert_eq!(groups(128, 128), 4);
        assert_eq!(groups(80, 16), 5);
        assert_eq!(groups(100, 48), 2 + 2 + 1);
        assert_eq!(groups(33, 1000), 2);
    }

    #[test]
    fn zeros_small_and_non_finite_groups() {
        let mut codes = [1i8; 3];
        assert_eq!(int8_group(&[0.0; 3], &mut codes), 0.0);
        assert_eq!(codes, [0; 3]);
        assert_eq!(int8_group(&[1e-37, 0.0, -1e-38], &mut codes), 0.0);
        assert!(int8_group(&[1.0, f32::INFINITY, 0.0], &mut codes).is_nan());
        assert!(int8_group(&[1.0, f32::NAN, 0.0], &mut codes).is_nan());
        assert_eq!(int8_group(&[-127.0, 0.5, 1.5], &mut codes), 1.0);
        assert_eq!(codes, [-127, 0, 2]);
    }

    proptest! {
        /// Rounding error at most half a step (and the rounding of the scale itself).
        #[test]
        fn error_is_half_a_step(x in proptest::collection::vec(-1e3f32..1e3, 1..33)) {
            let mut codes = [0i8; GROUP];
            let s = int8_group(&x, &mut codes[..x.len()]);
            for (v, q) in x.iter().zip(codes) {
                prop_assert!((v - s * f32::from(q)).abs() <= s * 0.5001);
            }
        }

        /// The vector layout holds the same codes, scales and sums as the plain one, in its own places.
        #[test]
        #[cfg(target_arch = "x86_64")]
        fn lanes_hold_the_scalar_values(
            x in proptest::collection::vec(-4f32..4.0, 1..400),
            w in 0usize..3, log_block in 4usize..10, row_wise in any::<bool>(),
        ) {
            let Some(isa) = Avx2::detect() else { return Ok(()) };
            let (bits, cols) = (Bits::ALL[w], x.len());
            let block = if row_wise { cols } else { 1 << log_block };
            let (plain, lanes) = (Layout::int8(cols, block), Layout::int8_lanes(cols, bits, block, isa));
            let (mut a, mut b) = (vec![0xAA; plain.row_bytes()], vec![0xAA; lanes.row_bytes()]);
            plain.prepare(&x, &mut a);
            lanes.prepare(&x, &mut b);
            let p = bits.per_byte();
            let span = 32 * p;
            let scales = &a[cols.next_multiple_of(4)..];
            let sums = &scales[4 * groups(cols, block)..];
            let per_block = block.div_ceil(GROUP);
            for c in 0..cols.next_multiple_of(span) {
                let record = &b[(c / span) * (span + 32)..];
                let code = record[(c % p) * 32 + (c % span) / p];
                prop_assert_eq!(code, if c < cols { a[c] } else { 0 }, "code {}", c);
                let scale = f32_at(&record[span..], (c % span) / (span / 8));
                if c < cols {
                    let group = (c / block) * per_block + (c % block) / GROUP;
                    prop_assert_eq!(scale, f32_at(scales, group), "scale {}", c);
                }
                prop_assert!(scale.is_finite());
            }
            let vector_sums = &b[cols.div_ceil(span) * (span + 32)..];
            let blocks = cols.div_ceil(block);
            for i in 0..blocks.next_multiple_of(8) + 8 {
                prop_assert_eq!(f32_at(vector_sums, i), if i < blocks { f32_at(sums, i) } else { 0.0 });
            }
        }
    }
}
