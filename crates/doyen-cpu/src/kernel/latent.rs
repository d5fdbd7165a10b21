//! What latent attention does to queries and results, so that it attends over the cached rows as they are.
//!
//! Head `h` of the up-projection has `nope` rows `U_h` for its keys, then `v_head_size` rows `V_h` for its values. A query
//! meets `U_h c` as `(U_h^T q) . c`, and the sum of values is `V_h` times the sum of rows: [`Absorb::queries`] and
//! [`Absorb::values`]. The projection is read as it lies, quantized or not, each of its rows (or lines of columns) once for
//! all tokens of a step; sums run over ascending rows and columns, whatever the tokens.

use super::{
    linear::{FloatMatrix, Orientation, Weights},
    multiversion::multiversion,
};
use crate::{
    detect::Isa,
    pool::{Pool, UnsafeSlice},
};
use doyen_tensor::{
    FloatType, FloatView, TensorError,
    format::{Bits, QuantMatrix},
};
use std::ops::Range;

/// Numbers that are decoded at a time.
const CHUNK: usize = 512;

/// Extents of a latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentShape {
    /// Heads.
    pub heads: usize,
    /// Channels of a latent row.
    pub rank: usize,
    /// Channels of a query that meet the latent row.
    pub nope: usize,
    /// Channels of a query that meet the shared ones.
    pub rope: usize,
    /// Channels of a value head.
    pub v_head_size: usize,
}

impl LatentShape {
    /// Channels of a cached row.
    pub const fn width(&self) -> usize {
        self.rank + self.rope
    }

    /// Rows of the up-projection that belong to a head.
    const fn head_rows(&self) -> usize {
        self.nope + self.v_head_size
    }
}

/// The products of one instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Absorb {
    queries: HeadFn,
    values: HeadFn,
}

/// Does one head for all tokens: `(weights, shape, head, tokens, from, to)`.
type HeadFn = fn(&Weights<'_>, LatentShape, usize, usize, &[f32], UnsafeSlice<'_, f32>);

impl Absorb {
    /// The products for `isa`.
    pub fn new(isa: Isa) -> Self {
        Self { queries: queries(isa), values: values(isa) }
    }

    /// Checks an up-projection; for the time a model is loaded.
    ///
    /// # Errors
    /// Names what differs.
    pub fn check(weights: &Weights<'_>, shape: LatentShape) -> Result<(), TensorError> {
        weights.validate()?;
        let expected = (shape.heads * shape.head_rows(), shape.rank);
        let found = (weights.rows(), weights.cols());
        let known = match weights {
            // A decoded chunk begins at a whole byte and block.
            Weights::Int(m) => m.block >= m.cols || m.block.is_power_of_two() && m.block >= 8,
            Weights::Float(_) => true,
            Weights::Mini(_) => false,
        };
        if found == expected && known {
            return Ok(());
        }
        Err(TensorError::Format(format!(
            "up-projection: expected {expected:?}, found {found:?} of {}",
            weights.format()
        )))
    }

    /// `to[t, h] = [U_h^T q, shared]`: `q [tokens, heads * (nope + rope)]`, `to [tokens, heads * (rank + rope)]`.
    ///
    /// # Panics
    /// When a length is not the stated one, or the weights fail [`Absorb::check`].
    pub fn queries(&self, pool: &Pool, weights: &Weights<'_>, shape: LatentShape, q: &[f32], to: &mut [f32]) {
        let tokens = q.len() / (shape.heads * (shape.nope + shape.rope)).max(1);
        assert_eq!(to.len(), tokens * shape.heads * shape.width(), "absorbed queries");
        let to = UnsafeSlice::new(to);
        pool.for_each_dynamic(shape.heads, &|h| (self.queries)(weights, shape, h, tokens, q, to));
    }

    /// `to[t, h] = V_h from[t, h]`: `from [tokens, heads * (rank + rope)]`, whose last channels are not used, `to
    /// [tokens, heads * v_head_size]`.
    ///
    /// # Panics
    /// As [`Absorb::queries`].
    pub fn values(
        &self,
        pool: &Pool,
        weights: &Weights<'_>,
        shape: LatentShape,
        from: &[f32],
        to: &mut [f32],
    ) {
        let tokens = from.len() / (shape.heads * shape.width()).max(1);
        assert_eq!(to.len(), tokens * shape.heads * shape.v_head_size, "expanded values");
        let to = UnsafeSlice::new(to);
        pool.for_each_dynamic(shape.heads, &|h| (self.values)(weights, shape, h, tokens, from, to));
    }
}

multiversion! {
    fn queries(
        w: &Weights<'_>, s: LatentShape, h: usize, tokens: usize, q: &[f32], to: UnsafeSlice<'_, f32>,
    ) = queries_body;
}

multiversion! {
    fn values(
        w: &Weights<'_>, s: LatentShape, h: usize, tokens: usize, from: &[f32], to: UnsafeSlice<'_, f32>,
    ) = values_body;
}

#[inline(always)]
fn queries_body<const FMA: bool>(
    w: &Weights<'_>,
    s: LatentShape,
    h: usize,
    tokens: usize,
    q: &[f32],
    to: UnsafeSlice<'_, f32>,
) {
    let query = |t: usize| &q[(t * s.heads + h) * (s.nope + s.rope)..][..s.nope + s.rope];
    let place = |t: usize, channels: Range<usize>| {
        let start = (t * s.heads + h) * s.width();
        // SAFETY: a head of a token belongs to the one thread that does the head, which holds one part at a time.
        unsafe { to.range(start + channels.start..start + channels.end) }
    };
    for t in 0..tokens {
        place(t, 0..s.rank).fill(0.0);
        place(t, s.rank..s.width()).copy_from_slice(&query(t)[s.nope..]);
    }
    let first = h * s.head_rows();
    let mut buffer = [0f32; CHUNK];
    if let Some(m) = columns(w) {
        for r in 0..s.rank {
            for rows in chunks(s.nope) {
                let line = widened(m.values, r * m.stride + first + rows.start, rows.len(), &mut buffer);
                for t in 0..tokens {
                    place(t, r..r + 1)[0] += dot::<FMA>(line, &query(t)[rows.clone()]);
                }
            }
        }
        return;
    }
    for cols in chunks(s.rank) {
        for i in 0..s.nope {
            let row = decoded(w, first + i, cols.clone(), &mut buffer);
            for t in 0..tokens {
                add::<FMA>(query(t)[i], row, place(t, cols.clone()));
            }
        }
    }
}

#[inline(always)]
fn values_body<const FMA: bool>(
    w: &Weights<'_>,
    s: LatentShape,
    h: usize,
    tokens: usize,
    from: &[f32],
    to: UnsafeSlice<'_, f32>,
) {
    let sum = |t: usize| &from[(t * s.heads + h) * s.width()..][..s.rank];
    let place = |t: usize, channels: Range<usize>| {
        let start = (t * s.heads + h) * s.v_head_size;
        // SAFETY: a head of a token belongs to the one thread that does the head, which holds one part at a time.
        unsafe { to.range(start + channels.start..start + channels.end) }
    };
    for t in 0..tokens {
        place(t, 0..s.v_head_size).fill(0.0);
    }
    let first = h * s.head_rows() + s.nope;
    let mut buffer = [0f32; CHUNK];
    if let Some(m) = columns(w) {
        for r in 0..s.rank {
            for rows in chunks(s.v_head_size) {
                let line = widened(m.values, r * m.stride + first + rows.start, rows.len(), &mut buffer);
                for t in 0..tokens {
                    add::<FMA>(sum(t)[r], line, place(t, rows.clone()));
                }
            }
        }
        return;
    }
    for j in 0..s.v_head_size {
        for cols in chunks(s.rank) {
            let row = decoded(w, first + j, cols.clone(), &mut buffer);
            for t in 0..tokens {
                place(t, j..j + 1)[0] += dot::<FMA>(row, &sum(t)[cols.clone()]);
            }
        }
    }
}

fn chunks(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(CHUNK).map(move |start| start..(start + CHUNK).min(n))
}

/// The matrix, where lines of it hold columns.
fn columns<'a>(w: &Weights<'a>) -> Option<FloatMatrix<'a>> {
    match w {
        Weights::Float(m) if m.orientation == Orientation::ColumnMajor => Some(*m),
        _ => None,
    }
}

/// Some columns of a row.
#[inline(always)]
fn decoded<'b>(w: &Weights<'_>, n: usize, cols: Range<usize>, buffer: &'b mut [f32; CHUNK]) -> &'b [f32] {
    match w {
        Weights::Float(m) => widened(m.values, n * m.stride + cols.start, cols.len(), buffer),
        Weights::Int(m) => {
            let out = &mut buffer[..cols.len()];
            match m.bits {
                Bits::B2 => unpack::<2>(m, n, cols, out),
                Bits::B4 => unpack::<4>(m, n, cols, out),
                Bits::B8 => unpack::<8>(m, n, cols, out),
            }
            out
        }
        Weights::Mini(_) => unreachable!("refused when the node was bound"),
    }
}

#[inline(always)]
fn widened<'b>(values: FloatView<'_>, start: usize, len: usize, buffer: &'b mut [f32; CHUNK]) -> &'b [f32] {
    let view = values.slice(start, len);
    let out = &mut buffer[..len];
    match view.float_type() {
        FloatType::F32 => {
            for (o, b) in out.iter_mut().zip(view.bytes().as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        FloatType::BF16 => {
            for (o, b) in out.iter_mut().zip(view.bytes().as_chunks::<2>().0) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        FloatType::F16 => out.iter_mut().enumerate().for_each(|(i, o)| *o = view.get(i)),
    }
    out
}

/// Decodes block by block.
#[inline(always)]
fn unpack<const BITS: usize>(m: &QuantMatrix<'_>, n: usize, cols: Range<usize>, out: &mut [f32]) {
    let (per_byte, mask) = (8 / BITS, (1u16 << BITS) - 1);
    let row = m.row(n);
    let mut start = cols.start;
    while start < cols.end {
        let b = start / m.block;
        let end = ((b + 1) * m.block).min(cols.end);
        let (scale, zero) = (m.scale(n, b), m.zero_point(n, b));
        let block = &mut out[start - cols.start..end - cols.start];
        for (codes, &byte) in block.chunks_mut(per_byte).zip(&row[start / per_byte..]) {
            for (i, o) in codes.iter_mut().enumerate() {
                *o = (f32::from(u16::from(byte) >> (BITS * i) & mask) - zero) * scale;
            }
        }
        start = end;
    }
}

#[inline(always)]
fn fused<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `y += a x`.
#[inline(always)]
fn add<const FMA: bool>(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = fused::<FMA>(a, x, *y);
    }
}

/// `x . y` over sixteen lanes, which are then added one after the other.
#[inline(always)]
fn dot<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut acc = [0f32; LANES];
    let ((xs, x), (ys, y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            acc[i] = fused::<FMA>(x[i], y[i], acc[i]);
        }
    }
    for ((a, &x), &y) in acc.iter_mut().zip(x).zip(y) {
        *a = fused::<FMA>(x, y, *a);
    }
    acc.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_data::{noise, stored};
    use doyen_tensor::format::ZeroPoints;
    use proptest::prelude::*;

    /// `W[n, k]` of any kind of weights.
    fn number(w: &Weights<'_>, n: usize, k: usize) -> f64 {
        match w {
            Weights::Float(m) => f64::from(m.get(n, k)),
            Weights::Int(m) => {
                let mut row = vec![0f32; m.cols];
                m.dequantize_row(n, &mut row);
                f64::from(row[k])
            }
            Weights::Mini(_) => f64::NAN,
        }
    }

    fn check(w: &Weights<'_>, s: LatentShape, tokens: usize) -> Result<(), TestCaseError> {
        Absorb::check(w, s).unwrap();
        let pool = Pool::new(std::num::NonZeroUsize::new(2).unwrap(), false).unwrap();
        let q = noise(5, tokens * s.heads * (s.nope + s.rope));
        let from = noise(6, tokens * s.heads * s.width());
        for isa in Isa::all() {
            let absorb = Absorb::new(isa);
            let mut queries = vec![f32::NAN; tokens * s.heads * s.width()];
            absorb.queries(&pool, w, s, &q, &mut queries);
            let mut values = vec![f32::NAN; tokens * s.heads * s.v_head_size];
            absorb.values(&pool, w, s, &from, &mut values);
            for (th, own) in queries.chunks(s.width()).enumerate() {
                let (h, q) = (th % s.heads, &q[th * (s.nope + s.rope)..][..s.nope + s.rope]);
                for (r, &got) in own[..s.rank].iter().enumerate() {
                    let want: f64 =
                        (0..s.nope).map(|i| number(w, h * s.head_rows() + i, r) * f64::from(q[i])).sum();
                    prop_assert!((f64::from(got) - want).abs() < 1e-4, "query {got} {want}");
                }
                prop_assert_eq!(&own[s.rank..], &q[s.nope..]);
                for (j, &got) in values[th * s.v_head_size..][..s.v_head_size].iter().enumerate() {
                    let row = h * s.head_rows() + s.nope + j;
                    let x = &from[th * s.width()..];
                    let want: f64 = (0..s.rank).map(|r| number(w, row, r) * f64::from(x[r])).sum();
                    prop_assert!((f64::from(got) - want).abs() < 1e-4, "value {got} {want}");
                }
            }
            // A token alone.
            let mut alone = vec![f32::NAN; s.heads * s.width()];
            absorb.queries(&pool, w, s, &q[..s.heads * (s.nope + s.rope)], &mut alone);
            prop_assert_eq!(&alone[..], &queries[..s.heads * s.width()]);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn absorbing_is_the_projection(
            heads in 1usize..4, blocks in 1usize..5, nope in 1usize..20, rope in 0usize..9, v_head_size in 1usize..20,
            tokens in 1usize..4, kind in 0usize..6,
        ) {
            let rank = 16 * blocks;
            let s = LatentShape { heads, rank, nope, rope, v_head_size };
            let rows = heads * s.head_rows();
            let ty = [FloatType::F32, FloatType::BF16, FloatType::F16][kind % 3];
            let bytes = stored(ty, &noise(3, rows * rank));
            let values = FloatView::new(ty, &bytes).unwrap();
            let (orientation, stride) =
                if kind < 3 { (Orientation::RowMajor, rank) } else { (Orientation::ColumnMajor, rows) };
            check(&Weights::Float(FloatMatrix { rows, cols: rank, orientation, stride, values }), s, tokens)?;
            let bits = Bits::ALL[kind % 3];
            let codes: Vec<u8> = noise(4, rows * rank).iter().map(|v| (v * 99.0) as i8 as u8).collect();
            let block = if kind < 3 { 16 } else { rank };
            let scales = stored(FloatType::F32, &noise(8, rows * rank.div_ceil(block)).iter().map(|v| v * 0.01).collect::<Vec<_>>());
            let m = QuantMatrix {
                rows, cols: rank, bits, block, codes: &codes, row_bytes: bits.packed_len(rank),
                scales: FloatView::new(FloatType::F32, &scales).unwrap(), zero_points: ZeroPoints::Default,
            };
            check(&Weights::Int(m), s, tokens)?;
        }
    }
}
