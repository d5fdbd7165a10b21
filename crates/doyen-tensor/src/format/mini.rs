//! Matrices of floats of 4 and 8 bits with scales of blocks: MXFP4, NVFP4 and FP8.
//!
//! Elements: E2M1 (sign, two bits of exponent, one of mantissa) two a byte, or E4M3FN, one a byte. A value is
//! `element * scale * global`. (Operator contract, section 1.12; OCP Microscaling Formats and 8-bit Floating Point.)

use crate::{FloatView, TensorError};

/// What a code of a matrix is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    E2M1,
    /// 8 bits, up to 448, with NaN and without infinities.
    E4M3,
}

/// Twice the value of each code of [`Element::E2M1`]: integers.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The value of a code of E4M3FN.
#[inline]
pub const fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Units of 2^-9.
        (0, m) => m as f32 * (1.0 / 512.0),
        (e, m) => f32::from_bits((e + 120) << 23 | m << 20),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of a code of E8M0: a power of two, or NaN.
#[inline]
pub const fn e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        e => f32::from_bits((e as u32) << 23),
    }
}

impl Element {
    /// Codes in one byte.
    #[inline]
    pub const fn per_byte(self) -> usize {
        match self {
            Self::E2M1 => 2,
            Self::E4M3 => 1,
        }
    }

    /// Code `i` of a packed line, low bits first.
    ///
    /// # Panics
    /// When the line is too short.
    #[inline]
    pub fn code(self, line: &[u8], i: usize) -> u8 {
        match self {
            Self::E2M1 => line[i / 2] >> (4 * (i % 2)) & 15,
            Self::E4M3 => line[i],
        }
    }

    /// The value of a code.
    #[inline]
    pub fn value(self, code: u8) -> f32 {
        match self {
            Self::E2M1 => f32::from(E2M1_DOUBLED[usize::from(code & 15)]) * 0.5,
            Self::E4M3 => e4m3(code),
        }
    }
}

/// Scales of a matrix.
#[derive(Debug, Clone, Copy)]
pub enum MiniScales<'a> {
    /// None beside the global one.
    None,
    /// E8M0 codes `[rows, cols / 32]`.
    E8M0(&'a [u8]),
    /// E4M3FN codes `[rows, cols / 16]`.
    E4M3(&'a [u8]),
    /// One number for each square of `tile` rows and columns, `[ceil(rows / tile), ceil(cols / tile)]`.
    Tiles {
        /// The numbers.
        values: FloatView<'a>,
        /// Rows and columns of a tile.
        tile: usize,
    },
}

impl MiniScales<'_> {
    /// Columns that share a scale, in a row of `cols`.
    #[inline]
    pub const fn block(&self, cols: usize) -> usize {
        match self {
            Self::None => cols,
            Self::E8M0(_) => 32,
            Self::E4M3(_) => 16,
            Self::Tiles { tile, .. } => *tile,
        }
    }
}

/// A matrix `[rows, cols]` in its stored layout, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct MiniMatrix<'a> {
    /// Output rows N.
    pub rows: usize,
    /// Input columns K.
    pub cols: usize,
    /// What a code is.
    pub element: Element,
    /// Packed codes: lines of a row's columns, or with `transposed` of a column's rows.
    pub codes: &'a [u8],
    /// Whether lines hold columns, `[K, N/2]`, rather than rows, `[N, K/2]`.
    pub transposed: bool,
    /// Scales of blocks.
    pub scales: MiniScales<'a>,
    /// Factor of all values.
    pub global: f32,
}

impl MiniMatrix<'_> {
    /// Bytes of a line of codes.
    #[inline]
    pub const fn line_bytes(&self) -> usize {
        let n = if self.transposed { self.rows } else { self.cols };
        n.div_ceil(self.element.per_byte())
    }

    /// Scales of a row.
    #[inline]
    pub const fn blocks(&self) -> usize {
        self.cols.div_ceil(self.scales.block(self.cols))
    }

    /// Bytes of the scales.
    pub const fn scale_bytes(&self) -> usize {
        match self.scales {
            MiniScales::None => 0,
            MiniScales::E8M0(s) | MiniScales::E4M3(s) => s.len(),
            MiniScales::Tiles { values, .. } => values.len() * values.float_type().size(),
        }
    }

    /// Checks that every slice is as long as the described matrix needs. Kernels rely on this.
    ///
    /// # Errors
    /// Names the part that is too short, with expected and found lengths.
    pub fn validate(&self) -> Result<(), TensorError> {
        let need = |what: &str, expected: Option<usize>, found: usize| match expected {
            Some(e) if e <= found => Ok(()),
            Some(e) => Err(TensorError::Format(format!("{what}: expected at least {e}, found {found}"))),
            None => Err(TensorError::Overflow(vec![self.rows, self.cols])),
        };
        let block = self.scales.block(self.cols);
        // A scale is for 16 columns or more in every format; kernels have room for no more of them.
        if self.cols == 0 || block < 16.min(self.cols) {
            return Err(TensorError::Format(format!("block {block} over {} columns", self.cols)));
        }
        let lines = if self.transposed { self.cols } else { self.rows };
        need("bytes of codes", lines.checked_mul(self.line_bytes()), self.codes.len())?;
        match self.scales {
            MiniScales::None => Ok(()),
            MiniScales::E8M0(s) | MiniScales::E4M3(s) => {
                need("bytes of scales", self.rows.checked_mul(self.blocks()), s.len())
            }
            MiniScales::Tiles { values, tile } => {
                need("scales", self.rows.div_ceil(tile).checked_mul(self.blocks()), values.len())
            }
        }
    }

    /// Code of row `n` and column `k`.
    ///
    /// # Panics
    /// When out of range.
    #[inline]
    pub fn code(&self, n: usize, k: usize) -> u8 {
        let (line, i) = if self.transposed { (k, n) } else { (n, k) };
        self.element.code(&self.codes[line * self.line_bytes()..], i)
    }

    /// Scale of block `b` of row `n`, without the global one.
    ///
    /// # Panics
    /// When out of range.
    #[inline]
    pub fn scale(&self, n: usize, b: usize) -> f32 {
        match self.scales {
            MiniScales::None => 1.0,
            MiniScales::E8M0(s) => e8m0(s[n * self.blocks() + b]),
            MiniScales::E4M3(s) => e4m3(s[n * self.blocks() + b]),
            MiniScales::Tiles { values, tile } => values.get(n / tile * self.blocks() + b),
        }
    }

    /// Reference dequantization of row `n` into `out` (`cols` values), in f64: exact.
    ///
    /// # Panics
    /// When out of range or `out` is shorter than `cols`.
    pub fn dequantize_row(&self, n: usize, out: &mut [f64]) {
        let block = self.scales.block(self.cols);
        for (b, chunk) in out[..self.cols].chunks_mut(block).enumerate() {
            let scale = f64::from(self.scale(n, b)) * f64::from(self.global);
            for (o, k) in chunk.iter_mut().zip(b * block..) {
                *o = f64::from(self.element.value(self.code(n, k))) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Contract, section 1.12: byte 0xA1, scale byte 128, global 0.5.
    #[test]
    fn worked_example() {
        let mut codes = [0u8; 16];
        codes[0] = 0xA1;
        let m = MiniMatrix {
            rows: 1,
            cols: 32,
            element: Element::E2M1,
            codes: &codes,
            transposed: false,
            scales: MiniScales::E8M0(&[128]),
            global: 0.5,
        };
        m.validate().unwrap();
        let mut row = [9.0; 32];
        m.dequantize_row(0, &mut row);
        assert_eq!(row[..3], [0.5, -1.0, 0.0]);
    }

    #[test]
    fn codes_of_eight_bits() {
        assert_eq!([0x38, 0x7e, 0x01, 0x08, 0xb8].map(e4m3), [1.0, 448.0, 1.0 / 512.0, 1.0 / 64.0, -1.0]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan() && e8m0(255).is_nan());
        assert_eq!([0, 1, 127, 254].map(e8m0), [-127, -126, 0, 127].map(|e| 2f32.powi(e)));
    }

    #[test]
    fn both_orientations_hold_the_same_matrix() {
        let (rows, cols) = (6, 32);
        let code = |n: usize, k: usize| ((n * 7 + k * 5) % 16) as u8;
        let pack = |lines: usize, len: usize, at: &dyn Fn(usize, usize) -> u8| -> Vec<u8> {
            let byte = |l: usize, i: usize| at(l, 2 * i) | at(l, 2 * i + 1) << 4;
            (0..lines).flat_map(|l| (0..len / 2).map(move |i| byte(l, i))).collect()
        };
        let straight = pack(rows, cols, &code);
        let transposed = pack(cols, rows, &|k, n| code(n, k));
        let scales: Vec<u8> = (0..rows as u8).map(|n| 120 + n).collect();
        let of = |codes, transposed| MiniMatrix {
            rows,
            cols,
            element: Element::E2M1,
            codes,
            transposed,
            scales: MiniScales::E8M0(&scales),
            global: 3.0,
        };
        for n in 0..rows {
            let (mut a, mut b) = ([0.0; 32], [0.0; 32]);
            of(&straight, false).dequantize_row(n, &mut a);
            of(&transposed, true).dequantize_row(n, &mut b);
            assert_eq!(a, b);
        }
        assert!(of(&straight[1..], false).validate().is_err());
    }
}
