//! Integer block quantization at 2, 4 and 8 bits.
//!
//! Codes are unsigned and packed least-significant bits first along K: with `p = 8 / bits` codes per byte,
//! `byte = sum_i code[p * j + i] << (bits * i)`. A value is `(code - zero_point) * scale`; an absent zero point
//! is `2^(bits-1)`. Scales are signed. (Operator contract, section 0.)

use crate::{FloatView, TensorError};

/// Width of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Bits {
    B2,
    B4,
    B8,
}

impl Bits {
    /// All widths, narrowest first.
    pub const ALL: [Self; 3] = [Self::B2, Self::B4, Self::B8];

    /// The width from its number; `None` for anything but 2, 4 and 8.
    pub const fn new(bits: i64) -> Option<Self> {
        match bits {
            2 => Some(Self::B2),
            4 => Some(Self::B4),
            8 => Some(Self::B8),
            _ => None,
        }
    }

    /// Bits of one code.
    #[inline]
    pub const fn get(self) -> usize {
        match self {
            Self::B2 => 2,
            Self::B4 => 4,
            Self::B8 => 8,
        }
    }

    /// Codes in one byte.
    #[inline]
    pub const fn per_byte(self) -> usize {
        8 / self.get()
    }

    /// Largest code.
    #[inline]
    pub const fn max_code(self) -> u8 {
        match self {
            Self::B2 => 3,
            Self::B4 => 15,
            Self::B8 => 255,
        }
    }

    /// The zero point when the tensor is absent: `2^(bits-1)`.
    #[inline]
    pub const fn default_zero_point(self) -> u8 {
        1 << (self.get() - 1)
    }

    /// Code `i` of a packed row.
    ///
    /// # Panics
    /// When the row is too short.
    #[inline]
    pub fn code(self, row: &[u8], i: usize) -> u8 {
        let p = self.per_byte();
        (row[i / p] >> (self.get() * (i % p))) & self.max_code()
    }

    /// Bytes of `n` packed codes.
    #[inline]
    pub const fn packed_len(self, n: usize) -> usize {
        n.div_ceil(self.per_byte())
    }

    /// Packs codes least-significant bits first; pad bits of the last byte are zero.
    pub fn pack(self, codes: &[u8]) -> Vec<u8> {
        let p = self.per_byte();
        codes
            .chunks(p)
            .map(|c| {
                c.iter().enumerate().fold(0u8, |b, (i, &q)| b | (q & self.max_code()) << (self.get() * i))
            })
            .collect()
    }
}

/// Where the zero points of a matrix lie.
#[derive(Debug, Clone, Copy)]
pub enum ZeroPoints<'a> {
    /// Every zero point is [`Bits::default_zero_point`].
    Default,
    /// Packed along the block axis; each row starts on a new byte, `row_bytes` apart.
    PerBlock {
        /// Packed codes.
        packed: &'a [u8],
        /// Bytes from one row to the next.
        row_bytes: usize,
    },
    /// One zero point a row, packed across rows (row-wise QMoE).
    AcrossRows(&'a [u8]),
    /// Float zero points `[rows, blocks]`, used without rounding.
    Float(FloatView<'a>),
}

/// A quantized matrix `[rows, cols]` in its stored layout, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct QuantMatrix<'a> {
    /// Output rows N.
    pub rows: usize,
    /// Input columns K.
    pub cols: usize,
    /// Code width.
    pub bits: Bits,
    /// Columns that share a scale; equal to `cols` for row-wise scales.
    pub block: usize,
    /// Packed codes, `row_bytes` a row.
    pub codes: &'a [u8],
    /// Bytes from one row of codes to the next.
    pub row_bytes: usize,
    /// Scales `[rows, blocks]`.
    pub scales: FloatView<'a>,
    /// Zero points.
    pub zero_points: ZeroPoints<'a>,
}

impl QuantMatrix<'_> {
    /// Blocks of a row: `ceil(cols / block)`.
    #[inline]
    pub const fn blocks(&self) -> usize {
        self.cols.div_ceil(self.block)
    }

    /// Checks that every slice is long enough for the described matrix. Kernels rely on this.
    ///
    /// # Errors
    /// Names the part that is too short, with expected and found lengths.
    pub fn validate(&self) -> Result<(), TensorError> {
        let need = |what: &str, expected: Option<usize>, found: usize| match expected {
            Some(e) if e <= found => Ok(()),
            Some(e) => Err(TensorError::Format(format!("{what}: expected at least {e}, found {found}"))),
            None => Err(TensorError::Overflow(vec![self.rows, self.cols])),
        };
        if self.block == 0 || self.cols == 0 {
            return Err(TensorError::Format(format!("block {} over {} columns", self.block, self.cols)));
        }
        need("row bytes", Some(self.bits.packed_len(self.cols)), self.row_bytes)?;
        need("bytes of codes", self.rows.checked_mul(self.row_bytes), self.codes.len())?;
        let blocks = self.blocks();
        need("scales", self.rows.checked_mul(blocks), self.scales.len())?;
        match self.zero_points {
            ZeroPoints::Default => Ok(()),
            ZeroPoints::PerBlock { packed, row_bytes } => {
                need("zero point row bytes", Some(self.bits.packed_len(blocks)), row_bytes)?;
                need("bytes of zero points", self.rows.checked_mul(row_bytes), packed.len())
            }
            ZeroPoints::AcrossRows(packed) => {
                need("blocks for row-wise zero points", Some(blocks), 1)?;
                need("bytes of zero points", Some(self.bits.packed_len(self.rows)), packed.len())
            }
            ZeroPoints::Float(v) => need("float zero points", self.rows.checked_mul(blocks), v.len()),
        }
    }

    /// The packed codes of row `n`.
    ///
    /// # Panics
    /// When the matrix is not valid for row `n`.
    #[inline]
    pub fn row(&self, n: usize) -> &[u8] {
        &self.codes[n * self.row_bytes..(n + 1) * self.row_bytes]
    }

    /// Scale of block `b` of row `n`.
    ///
    /// # Panics
    /// When out of range.
    #[inline]
    pub fn scale(&self, n: usize, b: usize) -> f32 {
        self.scales.get(n * self.blocks() + b)
    }

    /// Zero point of block `b` of row `n`, in code units.
    ///
    /// # Panics
    /// When out of range.
    #[inline]
    pub fn zero_point(&self, n: usize, b: usize) -> f32 {
        match self.zero_points {
            ZeroPoints::Default => f32::from(self.bits.default_zero_point()),
            ZeroPoints::PerBlock { packed, row_bytes } => {
                f32::from(self.bits.code(&packed[n * row_bytes..], b))
            }
            ZeroPoints::AcrossRows(packed) => f32::from(self.bits.code(packed, n)),
            ZeroPoints::Float(v) => v.get(n * self.blocks() + b),
        }
    }

    /// Reference dequantization of row `n` into `out` (`cols` values): `(code - zero_point) * scale`.
    ///
    /// # Panics
    /// When out of range or `out` is shorter than `cols`.
    pub fn dequantize_row(&self, n: usize, out: &mut [f32]) {
        let row = self.row(n);
        for (c, o) in out[..self.cols].iter_mut().enumerate() {
            let b = c / self.block;
            *o = (f32::from(self.bits.code(row, c)) - self.zero_point(n, b)) * self.scale(n, b);
        }
    }

    /// Reference product of row `n` with `x` (`cols` values), accumulated in f64.
    ///
    /// # Panics
    /// When out of range.
    pub fn dot_row(&self, n: usize, x: &[f32]) -> f64 {
        let row = self.row(n);
        (0..self.cols)
            .map(|c| {
                let b = c / self.block;
                let w = (f64::from(self.bits.code(row, c)) - f64::from(self.zero_point(n, b)))
                    * f64::from(self.scale(n, b));
                w * f64::from(x[c])
            })
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FloatType;
    use proptest::prelude::*;

    #[test]
    fn worked_packing_examples() {
        assert_eq!(Bits::B2.pack(&[0, 1, 2, 3]), [0xE4]);
        assert_eq!(Bits::B4.pack(&[1, 10]), [0xA1]);
        assert_eq!(Bits::B8.pack(&[7]), [7]);
        assert_eq!(Bits::B2.pack(&[1, 2, 3, 0, 2]), [0x39, 0x02]);
        assert_eq!(Bits::B4.pack(&[1, 2, 3, 0, 2]), [0x21, 0x03, 0x02]);
    }

    /// Contract section 0: K=80, block 16, codes 3, scales 1, zero points [1,2,3,0,2], x = ones: 112 at every width,
    /// whatever the pad bits hold.
    #[test]
    fn worked_dot_example() {
        let scales: Vec<u8> = [1f32; 5].iter().flat_map(|s| s.to_le_bytes()).collect();
        for bits in Bits::ALL {
            let codes = bits.pack(&[3; 80]);
            let mut zp = bits.pack(&[1, 2, 3, 0, 2]);
            for pad in [false, true] {
                if pad && bits != Bits::B8 {
                    *zp.last_mut().unwrap() |= !bits.max_code();
                    if bits == Bits::B2 {
                        assert_eq!(zp, [0x39, 0xFE]);
                    }
                }
                let m = QuantMatrix {
                    rows: 1,
                    cols: 80,
                    bits,
                    block: 16,
                    codes: &codes,
                    row_bytes: codes.len(),
                    scales: FloatView::new(FloatType::F32, &scales).unwrap(),
                    zero_points: ZeroPoints::PerBlock { packed: &zp, row_bytes: zp.len() },
                };
                m.validate().unwrap();
                assert_eq!(m.dot_row(0, &[1.0; 80]), 112.0);
            }
        }
    }

    proptest! {
        #[test]
        fn unpack_inverts_pack(codes in proptest::collection::vec(any::<u8>(), 0..70), w in 0usize..3) {
            let bits = Bits::ALL[w];
            let packed = bits.pack(&codes);
            prop_assert_eq!(packed.len(), bits.packed_len(codes.len()));
            for (i, &q) in codes.iter().enumerate() {
                prop_assert_eq!(bits.code(&packed, i), q & bits.max_code());
            }
        }
    }
}
