//! Rows of an embedding table, widened to f32 (Gather over a float table, GatherBlockQuantized).
//!
//! A negative index counts from the end; an index outside of the table gives zeros (operator contract, 2.2).

use crate::pool::{Pool, UnsafeSlice};
use doyen_tensor::{
    FloatView, TensorError,
    format::{Bits, QuantMatrix, ZeroPoints},
};

/// How the codes of a quantized table are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CodeType {
    /// Codes packed in uint8; an absent zero point is `2^(bits-1)`.
    Packed,
    /// The uint4 tensor type; an absent zero point is 0.
    Uint4,
    /// The int4 tensor type: codes and zero points are two's complement, an absent zero point is 0.
    Int4,
}

/// A table of `rows` rows and `cols` columns, borrowed and checked.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    rows: usize,
    cols: usize,
    store: Store<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Store<'a> {
    Float(FloatView<'a>),
    Int(QuantMatrix<'a>, CodeType),
}

impl<'a> Table<'a> {
    /// A float table.
    ///
    /// # Errors
    /// When `values` has fewer than `rows * cols` numbers.
    pub fn float(values: FloatView<'a>, rows: usize, cols: usize) -> Result<Self, TensorError> {
        let need = rows.checked_mul(cols).ok_or_else(|| TensorError::Overflow(vec![rows, cols]))?;
        if values.len() < need {
            let found = values.len();
            return Err(TensorError::Format(format!(
                "table: expected at least {need} numbers, found {found}"
            )));
        }
        Ok(Self { rows, cols, store: Store::Float(values) })
    }

    /// A quantized table.
    ///
    /// # Errors
    /// When the matrix is not valid, or the code type does not go with its width or zero points.
    pub fn quantized(matrix: QuantMatrix<'a>, codes: CodeType) -> Result<Self, TensorError> {
        matrix.validate()?;
        let four_bit_type = codes != CodeType::Packed;
        if four_bit_type && (matrix.bits != Bits::B4 || matches!(matrix.zero_points, ZeroPoints::Float(_))) {
            return Err(TensorError::Format(format!(
                "table of type {codes:?}: expected 4-bit codes and zero points, found {} bits",
                matrix.bits.get()
            )));
        }
        Ok(Self { rows: matrix.rows, cols: matrix.cols, store: Store::Int(matrix, codes) })
    }

    /// Columns of a row.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Row `index` into `out` (`cols` values); zeros when there is no such row.
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn row(&self, index: i64, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "columns of a table row");
        let from_end = if index < 0 { self.rows as i64 } else { 0 };
        match usize::try_from(index.saturating_add(from_end)) {
            Ok(n) if n < self.rows => match &self.store {
                Store::Float(values) => float_row(values.slice(n * self.cols, self.cols), out),
                Store::Int(matrix, codes) => int_row(matrix, *codes, n, out),
            },
            _ => out.fill(0.0),
        }
    }

    /// `out[i] = row(index(i))` for `n` rows, over the pool.
    ///
    /// # Panics
    /// When `out` is not `n` rows long.
    pub fn gather(&self, pool: &Pool, n: usize, index: impl Fn(usize) -> i64 + Sync, out: &mut [f32]) {
        assert_eq!(Some(out.len()), n.checked_mul(self.cols), "values of {n} gathered rows");
        let rows = UnsafeSlice::new(out);
        pool.for_each(n, &|i| {
            // SAFETY: every index has its own range.
            self.row(index(i), unsafe { rows.range(i * self.cols..(i + 1) * self.cols) });
        });
    }
}

fn float_row(values: FloatView<'_>, out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate() {
        *o = values.get(i);
    }
}

fn int_row(m: &QuantMatrix<'_>, codes: CodeType, n: usize, out: &mut [f32]) {
    let row = m.row(n);
    // Flipping the sign bit of a two's complement code gives the code plus 8; so for codes and zero points alike, and
    // the difference stays.
    let flip = if codes == CodeType::Int4 { 8 } else { 0 };
    for (b, block) in out.chunks_mut(m.block).enumerate() {
        let zero = match (m.zero_points, codes) {
            (ZeroPoints::Default, CodeType::Packed) => f32::from(m.bits.default_zero_point()),
            (ZeroPoints::Default, _) => f32::from(flip),
            (_, CodeType::Int4) => f32::from(m.zero_point(n, b) as u8 ^ flip),
            _ => m.zero_point(n, b),
        };
        let scale = m.scale(n, b);
        for (i, o) in block.iter_mut().enumerate() {
            *o = (f32::from(m.bits.code(row, b * m.block + i) ^ flip) - zero) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::FloatType;
    use half::bf16;
    use proptest::prelude::*;

    fn scales(n: usize) -> Vec<u8> {
        (0..n).flat_map(|i| (0.5 - i as f32).to_le_bytes()).collect()
    }

    fn int4_table<'a>(codes: &'a [u8], scales: &'a [u8], zero: ZeroPoints<'a>) -> QuantMatrix<'a> {
        QuantMatrix {
            rows: 2,
            cols: 4,
            bits: Bits::B4,
            block: 2,
            codes,
            row_bytes: 2,
            scales: FloatView::new(FloatType::F32, scales).unwrap(),
            zero_points: zero,
        }
    }

    #[test]
    fn indices_wrap_once_and_miss_with_zeros() {
        let values: Vec<u8> = (0..6).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
        let table = Table::float(FloatView::new(FloatType::BF16, &values).unwrap(), 3, 2).unwrap();
        let get = |i| {
            let mut out = [9.0; 2];
            table.row(i, &mut out);
            out
        };
        assert_eq!(get(2), [4.0, 5.0]);
        assert_eq!(get(-1), [4.0, 5.0]);
        assert_eq!(get(-3), [0.0, 1.0]);
        for miss in [3, -4, i64::MAX, i64::MIN] {
            assert_eq!(get(miss), [0.0; 2]);
        }
        let pool = Pool::new(std::num::NonZeroUsize::MIN, false).unwrap();
        let mut out = [0.0; 4];
        table.gather(&pool, 2, |i| i as i64 - 1, &mut out);
        assert_eq!(out, [4.0, 5.0, 0.0, 1.0]);
        assert!(Table::float(FloatView::new(FloatType::BF16, &values).unwrap(), 3, 3).is_err());
    }

    /// Codes 1, 10 | 15, 8 in blocks of two, scales 0.5 and -0.5.
    #[test]
    fn four_bit_types() {
        let codes = [0xA1, 0x8F, 0, 0];
        let (scales, zeros) = (scales(4), [0x93, 0]);
        let row = |zero, ty| {
            let mut out = [0.0; 4];
            Table::quantized(int4_table(&codes, &scales, zero), ty).unwrap().row(0, &mut out);
            out
        };
        let packed = ZeroPoints::PerBlock { packed: &zeros, row_bytes: 1 };
        assert_eq!(row(ZeroPoints::Default, CodeType::Packed), [-3.5, 1.0, -3.5, 0.0]);
        assert_eq!(row(ZeroPoints::Default, CodeType::Uint4), [0.5, 5.0, -7.5, -4.0]);
        assert_eq!(row(ZeroPoints::Default, CodeType::Int4), [0.5, -3.0, 0.5, 4.0]);
        assert_eq!(row(packed, CodeType::Uint4), [-1.0, 3.5, -3.0, 0.5]);
        // Zero points 3 and -7.
        assert_eq!(row(packed, CodeType::Int4), [-1.0, -4.5, -3.0, 0.5]);
        let eight =
            QuantMatrix { bits: Bits::B8, cols: 2, ..int4_table(&codes, &scales, ZeroPoints::Default) };
        assert!(Table::quantized(eight, CodeType::Int4).is_err());
    }

    proptest! {
        #[test]
        fn rows_are_the_reference_dequantization(
            codes in proptest::collection::vec(any::<u8>(), 60), w in 0usize..3, block in 1usize..40,
        ) {
            let bits = Bits::ALL[w];
            let cols = 30 * bits.per_byte() - 1;
            let scales = scales(2 * cols.div_ceil(block));
            let m = QuantMatrix {
                rows: 2, cols, bits, block, codes: &codes, row_bytes: 30,
                scales: FloatView::new(FloatType::F32, &scales).unwrap(),
                zero_points: ZeroPoints::Default,
            };
            let table = Table::quantized(m, CodeType::Packed).unwrap();
            let (mut found, mut expected) = (vec![0.0; cols], vec![0.0; cols]);
            for n in 0..2 {
                table.row(n as i64, &mut found);
                m.dequantize_row(n, &mut expected);
                prop_assert_eq!(&found, &expected);
            }
        }
    }
}
