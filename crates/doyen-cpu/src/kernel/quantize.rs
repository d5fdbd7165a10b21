//! Activations laid out for a product kernel: as they are, or quantized to int8.
//!
//! Weights stay as they lie in the file, so the activations move: a [`Layout`] says what a kernel wants to find
//! beside the packed codes, [`Layout::prepare`] writes one token's row in it. Kernels with the same layout share one
//! prepared row (query, key and value projections; every expert of a bank). The layout, and every value in it, is the
//! same on every instruction set; the scalar functions here define the values, `avx2` writes the same ones faster.
//!
//! # Float activations
//! As they are; for quantized weights once more, from the next [`ROW_ALIGN`] on, by octets, for kernels whose lanes are groups of columns:
//! of eight units of 16 or 32 columns all first columns, then all second ones, ...; zero-padded to whole octets. (With octets alone,
//! products of many tokens, whose lanes are weight rows, took 5 to 10 percent longer.)
//!
//! # Int8 activations
//! Columns are quantized in groups of at most 32 ([`GROUP`]) that begin anew at each weight block, so that a group has one weight
//! scale; of at most 128 ([`WIDE_GROUP`]) where a kernel asks for that and blocks are as long. A group's scale is `max|x| / 127` and its codes are `round_half_even(x * (127 / max|x|))`. A group whose
//! largest magnitude is below [`FLUSH`] becomes zero; a group that holds an infinity or a NaN gets the scale NaN, so
//! that the damage shows in the output instead of turning into plausible numbers.
//!
//! A row is the codes, then three arrays of one number a group, zero-padded to a multiple of 8: the scales; the sums of the group's codes, as f32; and
//! minus the sums times the default zero point of the weight's width, as i32 (adding it to a dot product of codes centres the
//! weights). A token may have two such rows: the second holds what the first leaves, `x - scale * code`, quantized in the same way, so
//! that the two together are good to some 15 bits ([`super::linear::Mode::Fine`]). Codes lie by spans, the columns of 32 packed bytes of weights, zero-padded to a multiple of 256; a span plane by plane:
//! the columns that are the first code of their byte, then those that are the second, ... So plane `p` of a span meets 32 bytes of
//! weights after a shift and a mask, and four of its bytes meet a 32-bit word of them.

#[cfg(target_arch = "x86_64")]
mod avx2;

use crate::detect::Isa;
use doyen_tensor::format::Bits;

/// Most columns that share an activation scale.
pub const GROUP: usize = 32;

/// As [`GROUP`], in wide groups.
pub const WIDE_GROUP: usize = 128;

/// Groups of smaller magnitudes are zero: `127 / max|x|` would overflow.
pub const FLUSH: f32 = 1e-36;

/// Where each row of prepared activations begins: a cache line.
pub const ROW_ALIGN: usize = 64;

/// Units of an octet.
pub(crate) const OCTET: usize = 8;

/// Packed bytes of weights that a span of activations meets.
pub(crate) const SPAN_BYTES: usize = 32;

/// Codes are padded to a multiple of so many columns: eight groups of 32.
pub(crate) const PAD: usize = 8 * GROUP;

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
    /// f32 in column order, then by octets of units of so many columns (module documentation).
    Octets(usize),
    /// Int8 for weights of `bits` in blocks of `block`, in groups of at most `group`, in one or two rows (module documentation).
    Int8 { bits: Bits, block: usize, group: usize, terms: usize, isa: Isa },
}

/// Where the parts of a row of int8 activations begin, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int8Row {
    /// Numbers of each array.
    pub(crate) groups: usize,
    /// Scales, f32.
    pub(crate) scales: usize,
    /// Sums of codes, f32.
    pub(crate) sums: usize,
    /// Minus sums of codes times the default zero point, i32.
    pub(crate) centres: usize,
}

impl Int8Row {
    pub(crate) const fn new(cols: usize, block: usize, group: usize) -> Self {
        let (scales, groups) = (cols.next_multiple_of(PAD), groups(cols, block, group));
        let array = 4 * groups.next_multiple_of(8);
        Self { groups, scales, sums: scales + array, centres: scales + 2 * array }
    }

    const fn bytes(&self) -> usize {
        self.centres + self.centres - self.sums
    }
}

impl Layout {
    /// f32 in column order.
    pub const fn plain(cols: usize) -> Self {
        Self { cols, kind: Kind::Plain }
    }

    /// f32 in column order, then by octets of units of `unit` columns.
    pub(crate) const fn octets(cols: usize, unit: usize) -> Self {
        Self { cols, kind: Kind::Octets(unit) }
    }

    /// Bytes of a row before its octets.
    pub(crate) const fn octets_at(self) -> usize {
        (4 * self.cols).next_multiple_of(ROW_ALIGN)
    }

    /// Int8 in `terms` rows a token, one or two, for weights of `bits` in blocks of `block` columns.
    pub(crate) const fn int8(cols: usize, bits: Bits, block: usize, terms: usize, isa: Isa) -> Self {
        Self { cols, kind: Kind::Int8 { bits, block, group: GROUP, terms, isa } }
    }

    /// As [`Layout::int8`] with one row a token, in wide groups if blocks are long enough.
    pub(crate) const fn wide_int8(cols: usize, bits: Bits, block: usize, isa: Isa) -> Self {
        Self { cols, kind: Kind::Int8 { bits, block, group: wide_group(cols, block), terms: 1, isa } }
    }

    /// Most columns of a group.
    pub(crate) const fn group(self) -> usize {
        match self.kind {
            Kind::Plain | Kind::Octets(_) => GROUP,
            Kind::Int8 { group, .. } => group,
        }
    }

    /// Rows that a token has.
    pub(crate) const fn terms(self) -> usize {
        match self.kind {
            Kind::Plain | Kind::Octets(_) => 1,
            Kind::Int8 { terms, .. } => terms,
        }
    }

    /// Columns of a row.
    pub const fn cols(self) -> usize {
        self.cols
    }

    /// Bytes from one token's rows to the next's, a multiple of [`ROW_ALIGN`].
    pub const fn token_bytes(self) -> usize {
        self.row_bytes() * self.terms()
    }

    /// Bytes from one prepared row to the next, a multiple of [`ROW_ALIGN`].
    pub(crate) const fn row_bytes(self) -> usize {
        let bytes = match self.kind {
            Kind::Plain => 4 * self.cols,
            Kind::Octets(unit) => self.octets_at() + 4 * self.cols.next_multiple_of(OCTET * unit),
            Kind::Int8 { block, group, .. } => Int8Row::new(self.cols, block, group).bytes(),
        };
        bytes.next_multiple_of(ROW_ALIGN)
    }

    /// Bytes of `tokens` prepared rows; `None` on overflow.
    pub const fn scratch_len(self, tokens: usize) -> Option<usize> {
        self.token_bytes().checked_mul(tokens)
    }

    /// Writes the rows of a token `x` (`cols` values) into `out` ([`Layout::token_bytes`]).
    ///
    /// # Panics
    /// When a length is not the stated one.
    pub fn prepare(self, x: &[f32], out: &mut [u8]) {
        assert_eq!(x.len(), self.cols, "columns of an activation row");
        assert_eq!(out.len(), self.token_bytes(), "bytes of a prepared token");
        let (out, rest) = out.split_at_mut(self.row_bytes());
        match self.kind {
            Kind::Plain => put(out, x),
            Kind::Octets(unit) => {
                put(out, x);
                put_octets(unit, &mut out[self.octets_at()..], x);
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Int8 { bits, block, group, terms, isa }
                if isa.avx2().is_some() && aligned(block, x.len()) =>
            {
                let at = Int8Row::new(x.len(), block, group);
                let group = if block == 16 && x.len() > 16 { 16 } else { group };
                // SAFETY: the token proves that AVX2, FMA and F16C are there; the lengths were checked above.
                unsafe { avx2::int8_row(x, bits, group, &at, out, (terms > 1).then_some(rest)) }
            }
            Kind::Int8 { bits, block, group, terms, .. } => {
                int8_row(x, bits, (block, group), out, (terms > 1).then_some(rest));
            }
        }
    }
}

/// Whether groups are 16, 32 or 128 columns each, at multiples of that (the last one may be shorter).
pub(crate) const fn aligned(block: usize, cols: usize) -> bool {
    block >= cols || (block >= 16 && block.is_power_of_two())
}

/// Prepared rows of several tokens (every token's terms, one after the other), in order or picked by a list.
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
    /// When `list` names a token that is not there, this set is already picked, or tokens have several rows.
    pub fn pick(&self, list: &'a [u32]) -> Self {
        let one = self.picked.is_none() && self.layout.terms() == 1;
        assert!(one && list.iter().all(|&t| (t as usize) < self.tokens), "picked rows");
        Self { tokens: list.len(), picked: Some(list), ..*self }
    }

    /// Rows `range` of an unpicked set.
    ///
    /// # Panics
    /// When there are no such rows, or this set is picked.
    pub fn range(&self, range: std::ops::Range<usize>) -> Self {
        assert!(self.picked.is_none() && range.end <= self.tokens, "rows {range:?} of {}", self.tokens);
        let n = self.layout.token_bytes();
        Self { tokens: range.len(), bytes: &self.bytes[range.start * n..range.end * n], ..*self }
    }

    /// How the rows lie.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Number of tokens.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of rows: every token's terms.
    pub(crate) const fn rows(&self) -> usize {
        self.tokens * self.layout.terms()
    }

    /// Row `t`.
    ///
    /// # Panics
    /// When there is no such row.
    #[inline]
    pub fn row(&self, t: usize) -> &'a [u8] {
        assert!(t < self.rows(), "row {t} of {}", self.rows());
        let at = self.picked.map_or(t, |list| list[t] as usize);
        let n = self.layout.row_bytes();
        &self.bytes[at * n..(at + 1) * n]
    }
}

/// Most columns of a wide group in rows of `cols` columns in blocks of `block`.
pub(crate) const fn wide_group(cols: usize, block: usize) -> usize {
    if cols >= WIDE_GROUP && block >= WIDE_GROUP && aligned(block, cols) { WIDE_GROUP } else { GROUP }
}

/// Groups of a row: each block is cut into runs of at most `group` columns.
pub(crate) const fn groups(cols: usize, block: usize, group: usize) -> usize {
    (cols / block) * block.div_ceil(group) + (cols % block).div_ceil(group)
}

/// Quantizes one group of at most [`WIDE_GROUP`] columns and returns its scale (module documentation).
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

fn int8_row(
    x: &[f32],
    bits: Bits,
    (block, len): (usize, usize),
    out: &mut [u8],
    mut rest: Option<&mut [u8]>,
) {
    let at = Int8Row::new(x.len(), block, len);
    for row in std::iter::once(&mut *out).chain(rest.as_deref_mut()) {
        row[..at.bytes()].fill(0);
    }
    let mut g = 0;
    for (b, xs) in x.chunks(block).enumerate() {
        for (i, group) in xs.chunks(len).enumerate() {
            let place = Group { at: &at, bits, number: g, start: b * block + i * len };
            let (scale, codes) = place.quantize(group, out);
            if let Some(rest) = &mut rest {
                let mut left = [0f32; WIDE_GROUP];
                for ((l, &v), &q) in left.iter_mut().zip(group).zip(&codes) {
                    *l = leaves(v, scale, q);
                }
                place.quantize(&left[..group.len()], rest);
            }
            g += 1;
        }
    }
}

/// A group of columns in a row.
struct Group<'a> {
    at: &'a Int8Row,
    bits: Bits,
    number: usize,
    /// First column.
    start: usize,
}

impl Group<'_> {
    /// Quantizes the group's columns into its places of a row; gives scale and codes.
    fn quantize(&self, x: &[f32], row: &mut [u8]) -> (f32, [i8; WIDE_GROUP]) {
        let mut all = [0i8; WIDE_GROUP];
        let codes = &mut all[..x.len()];
        let scale = int8_group(x, codes);
        for (c, &q) in (self.start..).zip(codes.iter()) {
            row[place(self.bits, c)] = q as u8;
        }
        put_group(row, self.at, self.number, self.bits, scale, code_sum(codes));
        (scale, all)
    }
}

/// What a code leaves of a number.
#[inline(always)]
fn leaves(x: f32, scale: f32, code: i8) -> f32 {
    (-scale).mul_add(f32::from(code), x)
}

/// Where the code of a column lies in a row.
pub(crate) const fn place(bits: Bits, col: usize) -> usize {
    let planes = bits.per_byte();
    let i = col % (SPAN_BYTES * planes);
    col - i + i % planes * SPAN_BYTES + i / planes
}

/// Writes the numbers of group `g`.
#[inline]
fn put_group(out: &mut [u8], at: &Int8Row, g: usize, bits: Bits, scale: f32, sum: i32) {
    let centre = -sum * i32::from(bits.default_zero_point());
    let numbers = [scale.to_le_bytes(), (sum as f32).to_le_bytes(), centre.to_le_bytes()];
    for (start, number) in [at.scales, at.sums, at.centres].into_iter().zip(numbers) {
        out[start + 4 * g..start + 4 * g + 4].copy_from_slice(&number);
    }
}

/// Sum of a group's codes: at most `128 * 127`, so exact.
pub(crate) fn code_sum(codes: &[i8]) -> i32 {
    codes.iter().map(|&q| i32::from(q)).sum()
}

fn put_octets(unit: usize, out: &mut [u8], x: &[f32]) {
    let (columns, _) = out.as_chunks_mut::<{ 4 * OCTET }>();
    for (columns, xs) in columns.chunks_mut(unit).zip(x.chunks(OCTET * unit)) {
        for (j, column) in columns.iter_mut().enumerate() {
            for (place, i) in column.as_chunks_mut::<4>().0.iter_mut().zip(0..) {
                *place = xs.get(i * unit + j).map_or([0; 4], |v| v.to_le_bytes());
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

    /// A layout of two rows, in wide groups or not.
    fn layout(cols: usize, bits: Bits, block: usize, wide: bool, isa: Isa) -> Layout {
        let group = if wide { wide_group(cols, block) } else { GROUP };
        Layout { cols, kind: Kind::Int8 { bits, block, group, terms: 2, isa } }
    }

    #[test]
    fn groups_begin_anew_at_each_block() {
        assert_eq!(groups(128, 128, 32), 4);
        assert_eq!(groups(80, 16, 32), 5);
        assert_eq!(groups(100, 48, 32), 2 + 2 + 1);
        assert_eq!(groups(33, 1000, 32), 2);
        assert_eq!(groups(576, 256, 128), 2 + 2 + 1);
    }

    #[test]
    fn wide_groups_need_long_blocks_at_their_multiples() {
        for (cols, block, group) in
            [(127, 128, 32), (768, 64, 32), (768, 128, 128), (576, 1000, 128), (300, 200, 32)]
        {
            assert_eq!(wide_group(cols, block), group, "{cols} columns in blocks of {block}");
        }
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

    #[test]
    fn octets_hold_every_column_and_zeros() {
        for (cols, unit) in [(1, 32), (256, 32), (300, 32), (16, 16), (130, 16)] {
            let x: Vec<f32> = (1..=cols).map(|v| v as f32).collect();
            let layout = Layout::octets(cols, unit);
            let mut row = vec![0xAA; layout.token_bytes()];
            layout.prepare(&x, &mut row);
            let octets = row.split_off(layout.octets_at());
            let mut found: Vec<f32> = (0..octets.len() / 4).map(|i| f32_at(&octets, i)).collect();
            for (c, v) in x.iter().enumerate() {
                assert_eq!(f32_at(&row, c), *v, "column {c} of {cols}");
                let (octet, i) = (c / (OCTET * unit), c % (OCTET * unit));
                let place = octet * OCTET * unit + i % unit * OCTET + i / unit;
                assert_eq!(std::mem::take(&mut found[place]), *v, "column {c} of {cols}");
            }
            assert!(found.iter().all(|&v| v == 0.0), "{cols} columns in units of {unit}");
        }
    }

    proptest! {
        /// Rounding error at most half a step (and the rounding of the scale itself).
        #[test]
        fn error_is_half_a_step(x in proptest::collection::vec(-1e3f32..1e3, 1..129)) {
            let mut codes = [0i8; WIDE_GROUP];
            let s = int8_group(&x, &mut codes[..x.len()]);
            for (v, q) in x.iter().zip(codes) {
                prop_assert!((v - s * f32::from(q)).abs() <= s * 0.5001);
            }
        }

        /// Every instruction set writes the same bytes.
        #[test]
        fn vector_rows_are_the_scalar_ones(
            x in proptest::collection::vec(-4f32..4.0, 1..400),
            w in 0usize..3, log_block in 4usize..10, row_wise in any::<bool>(), wide in any::<bool>(),
        ) {
            let (bits, cols) = (Bits::ALL[w], x.len());
            let block = if row_wise { cols } else { 1 << log_block };
            let rows: Vec<Vec<u8>> = Isa::all().map(|isa| {
                let layout = layout(cols, bits, block, wide, isa);
                let mut rows = vec![0xAA; layout.token_bytes()];
                layout.prepare(&x, &mut rows);
                // Without what pads a row to whole cache lines.
                let used = Int8Row::new(cols, block, layout.group()).bytes();
                rows.chunks(layout.row_bytes()).flat_map(|row| row[..used].to_vec()).collect()
            }).collect();
            for row in &rows[1..] {
                prop_assert_eq!(row, &rows[0]);
            }
        }

        /// Codes, scales and sums of a row are those of its groups.
        #[test]
        fn rows_hold_their_groups(
            x in proptest::collection::vec(-4f32..4.0, 1..500), w in 0usize..3, block in 1usize..400,
            wide in any::<bool>(),
        ) {
            let (bits, cols) = (Bits::ALL[w], x.len());
            let layout = layout(cols, bits, block, wide, Isa::Scalar);
            let mut row = vec![0xAA; layout.token_bytes()];
            layout.prepare(&x, &mut row);
            let second = row.split_off(layout.row_bytes());
            let len = layout.group();
            let at = Int8Row::new(cols, block, len);
            let runs = (0..cols).step_by(block).flat_map(|b| {
                let end = (b + block).min(cols);
                (b..end).step_by(len).map(move |g| g..(g + len).min(end))
            });
            for (g, run) in runs.enumerate() {
                let mut codes = [0i8; WIDE_GROUP];
                let codes = &mut codes[..run.len()];
                let scale = int8_group(&x[run.clone()], codes);
                prop_assert_eq!(f32_at(&row[at.scales..], g), scale);
                prop_assert_eq!(f32_at(&row[at.sums..], g), code_sum(codes) as f32);
                let centre = i32::from_le_bytes(row[at.centres + 4 * g..][..4].try_into().unwrap());
                prop_assert_eq!(centre, -code_sum(codes) * i32::from(bits.default_zero_point()));
                let scale2 = f32_at(&second[at.scales..], g);
                for (c, &q) in run.zip(codes.iter()) {
                    prop_assert_eq!(row[place(bits, c)], q as u8);
                    // The two terms together are within half a step of the second.
                    let both = scale * f32::from(q) + scale2 * f32::from(second[place(bits, c)] as i8);
                    prop_assert!((x[c] - both).abs() <= scale2 * 0.51 + x[c].abs() * 1e-6, "{} is {}", x[c], both);
                }
            }
        }
    }

    #[test]
    fn places_meet_the_bytes_of_packed_spans() {
        for bits in Bits::ALL {
            let planes = bits.per_byte();
            for c in 0..512 {
                let (span, plane, byte) = (c / (32 * planes), c % planes, c % (32 * planes) / planes);
                assert_eq!(place(bits, c), (span * planes + plane) * 32 + byte);
            }
        }
    }
}
