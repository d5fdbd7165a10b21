//! Quantized layouts of Hugging Face checkpoints: several tensors that are one matrix, as codes and scales.
//!
//! `compose` finds the tensors; here their bytes become rows. Layouts whose codes are integers with a scale for a group of
//! columns come out as [`Unpacked`], which `quant` carries over; others as values.

use super::Data;
use crate::{
    ConvertError,
    gguf::{Codes, Unpacked},
};
use bytes::Bytes;
use half::{bf16, f16};
use safetensors::Dtype;
use std::{fmt, ops::Range};

/// A layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// 4-bit floats with a power of two for every 32 columns: `_blocks` `[.., K/32, 16]` and `_scales` `[.., K/32]`.
    Mxfp4,
    /// Codes packed along K in int32 `qweight` `[K bits/32, N]`, `scales` `[K/group, N]`, `qzeros` `[K/group, N bits/32]`.
    Gptq {
        /// Bits of a code.
        bits: u8,
        /// Columns of a group.
        group: usize,
        /// Added to a stored zero point: 1, but 0 in the format's second version.
        shift: u8,
    },
    /// 4-bit codes packed along N in int32 `qweight` `[K, N/8]`, `scales` `[K/group, N]`, `qzeros` `[K/group, N/8]`.
    Awq {
        /// Columns of a group.
        group: usize,
    },
    /// 8-bit floats (e4m3) with a factor for every tile of this many rows and columns.
    Fp8 {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Codes packed along K in uint8 `NAME_qweight` `[.., N, K bits/8]`, `NAME_scales` `[.., N, K/group]`, `NAME_qzeros`
    /// `[.., N, K/group bits/8]`.
    Olive {
        /// Bits of a code.
        bits: u8,
        /// Columns of a group.
        group: usize,
        /// Whether all zero points are in the middle, and there is no tensor of them.
        symmetric: bool,
    },
}

/// A tensor that is part of a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub data: Data,
    /// First byte in `data`.
    pub offset: u64,
    /// Elements of its last axis.
    pub width: usize,
    /// Bytes of an element.
    pub element: usize,
    /// Element type.
    pub dtype: Dtype,
}

impl Part {
    /// Rows of the tensor as a matrix.
    fn rows(&self, rows: Range<usize>) -> Result<Bytes, ConvertError> {
        let bytes = self.width * self.element;
        self.data.range(self.offset + (rows.start * bytes) as u64, rows.len() * bytes)
    }

    fn float(&self, bytes: &[u8], at: usize) -> f32 {
        match self.dtype {
            Dtype::F32 => bytes.as_chunks().0.get(at).map_or(f32::NAN, |&b| f32::from_le_bytes(b)),
            Dtype::BF16 => bytes.as_chunks().0.get(at).map_or(f32::NAN, |&b| bf16::from_le_bytes(b).to_f32()),
            _ => bytes.as_chunks().0.get(at).map_or(f32::NAN, |&b| f16::from_le_bytes(b).to_f32()),
        }
    }
}

/// Which nibble of an AWQ word holds which of its eight columns.
const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Twice the value of every 4-bit float.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Packing {
    /// Columns of 4-bit floats that share a power of two.
    pub(crate) const MXFP4_GROUP: usize = 32;

    /// What its codes are, where they are integers with a scale for a group.
    pub const fn codes(self) -> Option<Codes> {
        match self {
            Self::Mxfp4 => Some(Codes { group: 32, range: (-12, 12), minimum: false, zero_points: false }),
            Self::Gptq { bits, group, .. } | Self::Olive { bits, group, symmetric: false } => {
                Some(Codes::unsigned(bits, group))
            }
            Self::Awq { group } => Some(Codes::unsigned(4, group)),
            Self::Olive { bits, group, symmetric: true } => {
                let half = 1i16 << (bits - 1);
                Some(Codes {
                    group,
                    range: ((-half) as i8, (half - 1) as i8),
                    minimum: false,
                    zero_points: false,
                })
            }
            Self::Fp8 { .. } => None,
        }
    }

    /// Bytes of the codes of a row.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Mxfp4 | Self::Awq { .. } => cols / 2,
            Self::Gptq { bits, .. } | Self::Olive { bits, .. } => cols * bits as usize / 8,
            Self::Fp8 { .. } => cols,
        }
    }

    /// Rows of codes, scales and zero points; for layouts that have [`codes`](Self::codes).
    pub(super) fn unpack(
        self,
        parts: &[Part],
        rows: Range<usize>,
        cols: usize,
    ) -> Result<Unpacked, ConvertError> {
        match (self, parts) {
            (Self::Mxfp4, [blocks, scales]) => {
                let groups = cols / 32;
                let of = |r: &Range<usize>| r.start * groups..r.end * groups;
                let blocks = blocks.rows(of(&rows))?;
                let scales =
                    scales.data.range(scales.offset + (rows.start * groups) as u64, rows.len() * groups)?;
                Ok(mxfp4(&blocks, &scales))
            }
            (Self::Gptq { bits, group, shift }, [codes, scales, zeros]) => {
                let per_word = 32 / usize::from(bits);
                let word = |row: usize, col: usize| Place {
                    word: row / per_word * codes.width + col,
                    lane: row % per_word,
                };
                let zero = |g: usize, col: usize| Place {
                    word: g * zeros.width + col / per_word,
                    lane: col % per_word,
                };
                unsigned(bits, group, [codes, scales, zeros], shift, (rows, cols), word, zero)
            }
            (Self::Awq { group }, [codes, scales, zeros]) => {
                let place = |width: usize| {
                    move |row: usize, col: usize| Place {
                        word: row * width + col / 8,
                        lane: AWQ_NIBBLE[col % 8],
                    }
                };
                unsigned(
                    4,
                    group,
                    [codes, scales, zeros],
                    0,
                    (rows, cols),
                    place(codes.width),
                    place(zeros.width),
                )
            }
            (Self::Olive { bits, group, .. }, [codes, scales, zeros @ ..]) => {
                by_rows((bits, cols / group), (codes, scales, zeros.first()), (rows, cols))
            }
            _ => Ok(Unpacked::default()),
        }
    }

    /// The bytes of rows of 4-bit floats: codes, and scales.
    pub(super) fn mxfp4_bytes(
        parts: &[Part],
        rows: Range<usize>,
        cols: usize,
    ) -> Result<Vec<Vec<u8>>, ConvertError> {
        let bytes = |part: &Part, row: usize| {
            part.data.range(part.offset + (rows.start * row) as u64, rows.len() * row).map(|b| b.to_vec())
        };
        let [codes, scales] = parts else { return Ok(Vec::new()) };
        Ok(vec![bytes(codes, cols / 2)?, bytes(scales, cols / 32)?])
    }

    /// Values of rows, appended to `out`; for layouts without codes.
    pub(super) fn values(
        self,
        parts: &[Part],
        rows: Range<usize>,
        cols: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), ConvertError> {
        let (Self::Fp8 { tile: [tall, wide] }, [codes, scales]) = (self, parts) else { return Ok(()) };
        let bytes = codes.rows(rows.clone())?;
        let tiles = rows.start / tall..rows.end.div_ceil(tall);
        let factors = scales.rows(tiles.clone())?;
        for (row, codes) in rows.zip(bytes.chunks_exact(cols)) {
            let first = (row / tall - tiles.start) * scales.width;
            out.extend(
                codes.iter().enumerate().map(|(c, &b)| e4m3(b) * scales.float(&factors, first + c / wide)),
            );
        }
        Ok(())
    }
}

/// A code within int32 words.
struct Place {
    word: usize,
    lane: usize,
}

/// Unsigned codes with zero points, both in int32 words; `word` places the code of (column of the matrix, row of the
/// matrix), `zero` the zero point of (group, row).
fn unsigned(
    bits: u8,
    group: usize,
    [codes, scales, zeros]: [&Part; 3],
    shift: u8,
    (rows, cols): (Range<usize>, usize),
    word: impl Fn(usize, usize) -> Place,
    zero: impl Fn(usize, usize) -> Place,
) -> Result<Unpacked, ConvertError> {
    let groups = cols / group;
    // Matrices are stored with K along their rows, so that every row of codes is all over them.
    let lines = codes.rows(0..word(cols - 1, 0).word / codes.width + 1)?;
    let (factors, zero_words) = (scales.rows(0..groups)?, zeros.rows(0..groups)?);
    let mask = u32::MAX >> (32 - u32::from(bits));
    let read = |bytes: &[u8], p: &Place| {
        let word = bytes.as_chunks().0.get(p.word).map_or(0, |&b| u32::from_le_bytes(b));
        (word >> (p.lane as u32 * u32::from(bits)) & mask) as u8
    };
    let mut out = Unpacked::default();
    for row in rows {
        // Codes of 8 bits are held as their two's complement; `quant` reads them as unsigned.
        out.codes.extend((0..cols).map(|k| read(&lines, &word(k, row)).cast_signed()));
        for g in 0..groups {
            out.scales.push(scales.float(&factors, g * scales.width + row));
            out.zero_points.push(read(&zero_words, &zero(g, row)).wrapping_add(shift) & mask as u8);
        }
    }
    Ok(out)
}

/// Codes that lie row by row as the model's do, each row's with its own scales and zero points; without zero points they
/// are taken less the middle.
fn by_rows(
    (bits, groups): (u8, usize),
    (codes, scales, zeros): (&Part, &Part, Option<&Part>),
    (rows, cols): (Range<usize>, usize),
) -> Result<Unpacked, ConvertError> {
    let (per_byte, mask, middle) = (8 / usize::from(bits), u8::MAX >> (8 - bits), 1u8 << (bits - 1));
    let read = |bytes: &[u8], i: usize| bytes[i / per_byte] >> (i % per_byte * usize::from(bits)) & mask;
    let (lines, factors) = (codes.rows(rows.clone())?, scales.rows(rows.clone())?);
    let points = zeros.map(|z| z.rows(rows.clone())).transpose()?;
    let mut out = Unpacked::default();
    for row in 0..rows.len() {
        let line = &lines[row * codes.width..(row + 1) * codes.width];
        let less = if zeros.is_some() { 0 } else { middle };
        out.codes.extend((0..cols).map(|k| read(line, k).wrapping_sub(less).cast_signed()));
        out.scales.extend((0..groups).map(|g| scales.float(&factors, row * scales.width + g)));
        if let (Some(points), Some(zeros)) = (&points, zeros) {
            let points = &points[row * zeros.width..(row + 1) * zeros.width];
            out.zero_points.extend((0..groups).map(|g| read(points, g)));
        }
    }
    Ok(out)
}

/// Unpacks two codes a byte, the low nibble first, and exponents with a bias of 127.
fn mxfp4(blocks: &[u8], scales: &[u8]) -> Unpacked {
    let codes = |b: &u8| [E2M1_DOUBLED[usize::from(b & 15)], E2M1_DOUBLED[usize::from(b >> 4)]];
    Unpacked {
        codes: blocks.iter().flat_map(codes).collect(),
        scales: scales.iter().map(|&s| half_power(s)).collect(),
        ..Unpacked::default()
    }
}

/// `2^(s - 128)`, exact in float32; 255 stands for no number.
fn half_power(s: u8) -> f32 {
    if s == u8::MAX { f32::NAN } else { 2f64.powi(i32::from(s) - 128) as f32 }
}

/// The value of an 8-bit float of 4 exponent and 3 mantissa bits, without infinities.
fn e4m3(b: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(b >> 3 & 15), f32::from(b & 7));
    let magnitude = match (exponent, b & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if b & 0x80 == 0 { magnitude } else { -magnitude }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mxfp4 => "MXFP4",
            Self::Gptq { .. } => "GPTQ",
            Self::Awq { .. } => "AWQ",
            Self::Fp8 { .. } => "FP8",
            Self::Olive { .. } => "Olive",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn four_bit_floats() {
        let out = mxfp4(&[0xA1], &[128]);
        let values: Vec<f32> = out.values(32).collect();
        assert_eq!(values, [1.0, -2.0], "0.5 and -1, twice");
        assert_eq!(half_power(0).to_bits(), 1 << 21, "two to the -128 is subnormal");
        assert!(half_power(255).is_nan());
    }

    #[test]
    fn eight_bit_floats() {
        for (code, value) in [(0x00, 0.0), (0x01, 0.001_953_125), (0x38, 1.0), (0x7E, 448.0), (0xB9, -1.125)]
        {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
    }

    fn part(words: &[u32], width: usize) -> Part {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let data = Data::memory(&bytes.into(), Path::new("x"));
        Part { data, offset: 0, width, element: 4, dtype: Dtype::I32 }
    }

    fn factors(values: &[f32], width: usize) -> Part {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let data = Data::memory(&bytes.into(), Path::new("x"));
        Part { data, offset: 0, width, element: 4, dtype: Dtype::F32 }
    }

    /// Code (3 k + 5 n) mod 16, zero point (n + g) mod 16, scale 1 + n / 8 + g, of 8 rows and 16 columns in groups of 8.
    fn expected() -> Vec<f32> {
        let value = |n: usize, k: usize| {
            let (q, z) = ((3 * k + 5 * n) % 16, (n + k / 8) % 16);
            (q as f32 - z as f32) * (1.0 + n as f32 / 8.0 + (k / 8) as f32)
        };
        (0..8).flat_map(|n| (0..16).map(move |k| value(n, k))).collect()
    }

    fn scales() -> Part {
        factors(&(0..16).map(|i| 1.0 + (i % 8) as f32 / 8.0 + (i / 8) as f32).collect::<Vec<_>>(), 8)
    }

    #[test]
    fn words_along_k_with_zero_points_less_one() {
        let word = |f: &dyn Fn(usize) -> usize| (0..8).fold(0u32, |w, i| w | (f(i) as u32) << (4 * i));
        let codes: Vec<u32> =
            (0..16).map(|i| word(&|lane| (3 * (i / 8 * 8 + lane) + 5 * (i % 8)) % 16)).collect();
        let zeros: Vec<u32> = (0..2).map(|g| word(&|n| (n + g + 15) % 16)).collect();
        let packing = Packing::Gptq { bits: 4, group: 8, shift: 1 };
        let parts = [part(&codes, 8), scales(), part(&zeros, 1)];
        let all = packing.unpack(&parts, 0..8, 16).unwrap();
        assert_eq!(all.values(8).collect::<Vec<_>>(), expected());
        let some = packing.unpack(&parts, 3..5, 16).unwrap();
        assert_eq!(some.values(8).collect::<Vec<_>>(), expected()[48..80]);
    }

    #[test]
    fn words_along_n_in_the_order_of_awq() {
        // Nibble i of a word holds this column.
        const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
        let word = |f: &dyn Fn(usize) -> usize| (0..8).fold(0u32, |w, i| w | (f(ORDER[i]) as u32) << (4 * i));
        let codes: Vec<u32> = (0..16).map(|k| word(&|n| (3 * k + 5 * n) % 16)).collect();
        let zeros: Vec<u32> = (0..2).map(|g| word(&|n| (n + g) % 16)).collect();
        let parts = [part(&codes, 1), scales(), part(&zeros, 1)];
        let all = Packing::Awq { group: 8 }.unpack(&parts, 0..8, 16).unwrap();
        assert_eq!(all.values(8).collect::<Vec<_>>(), expected());
    }

    #[test]
    fn tiles_of_eight_bit_floats() {
        let data = Data::memory(&vec![0x38u8; 5 * 6].into(), Path::new("x"));
        let codes = Part { data, offset: 0, width: 6, element: 1, dtype: Dtype::F8_E4M3 };
        let parts = [codes, factors(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2)];
        let mut out = Vec::new();
        Packing::Fp8 { tile: [2, 4] }.values(&parts, 1..5, 6, &mut out).unwrap();
        let row = |a: f32, b: f32| [a, a, a, a, b, b];
        assert_eq!(out, [row(1.0, 2.0), row(3.0, 4.0), row(3.0, 4.0), row(5.0, 6.0)].concat());
    }
}
