//! Random numbers, and quantized matrices made of them.

use super::{BenchError, Labels};
use crate::session::Memory;
use doyen_tensor::{
    FloatType, FloatView,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use half::{bf16, f16};

/// A small generator (xorshift64); benchmarks need other numbers every call, not good ones.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Default for Rng {
    fn default() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }
}

impl Rng {
    /// A generator of its own, whose numbers depend on this one's.
    pub const fn fork(&mut self) -> Self {
        Self(self.next() | 1)
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `n`, which is not 0.
    pub const fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A number in `[-1, 1)`.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `n` numbers in `[-1, 1)`.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Fills `out` with random bytes. Threads share the work: several gigabytes take a while otherwise.
    pub fn fill(&mut self, out: &mut [u8]) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let part = out.len().div_ceil(threads).max(1 << 20);
        std::thread::scope(|scope| {
            for part in out.chunks_mut(part) {
                let mut rng = self.fork();
                scope.spawn(move || {
                    for word in part.chunks_mut(8) {
                        word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()]);
                    }
                });
            }
        });
    }

    /// Fills `out` with numbers of about `size` in a stored type.
    pub fn fill_stored(&mut self, ty: FloatType, size: f32, out: &mut [u8]) {
        /// Numbers after which the same ones come again.
        const PERIOD: usize = 4099;
        let values: Vec<f32> = (0..PERIOD.min(out.len())).map(|_| self.float() * size).collect();
        let pattern: Vec<u8> = match ty {
            FloatType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            FloatType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            FloatType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        };
        for part in out.chunks_mut(pattern.len().max(1)) {
            part.copy_from_slice(&pattern[..part.len()]);
        }
    }
}

/// `n` bytes for `what`, to measure with: pages as a loaded model has them.
pub(super) fn memory(n: usize, what: &str) -> Result<Memory, BenchError> {
    Memory::new(n, what).map_err(|e| BenchError::Unsupported(e.to_string()))
}

/// How a benchmark's weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantFormat {
    /// Code width.
    pub bits: Bits,
    /// Columns that share a scale; more than there are means the whole row.
    pub block: usize,
    /// Stored type of the scales.
    pub scales: FloatType,
    /// Whether each block has a zero point.
    pub zero_points: bool,
}

impl QuantFormat {
    /// The block of matrices whose rows have one scale each.
    pub const ROW: usize = usize::MAX;

    const fn blocks(self, cols: usize) -> usize {
        cols.div_ceil(if self.block == 0 { 1 } else { self.block })
    }

    /// All but the width, as labels.
    pub(super) fn labels(self) -> Labels {
        vec![
            ("block", if self.block == Self::ROW { "row".to_owned() } else { self.block.to_string() }),
            ("scales", self.scales.dtype().to_string()),
            ("zero_points", if self.zero_points { "yes" } else { "no" }.to_owned()),
        ]
    }

    /// Bytes of a matrix `[rows, cols]`: codes, scales, zero points. `None` on overflow.
    pub fn bytes(self, rows: usize, cols: usize) -> Option<usize> {
        let blocks = self.blocks(cols);
        let zeros = if self.zero_points { self.bits.packed_len(blocks) } else { 0 };
        let row = self.bits.packed_len(cols).checked_add(blocks.checked_mul(self.scales.size())?)?;
        row.checked_add(zeros)?.checked_mul(rows)
    }
}

/// Several quantized matrices of one format, one after the other.
#[derive(Debug)]
pub struct Matrices {
    rows: usize,
    cols: usize,
    format: QuantFormat,
    codes: Memory,
    scales: Memory,
    zeros: Memory,
}

impl Matrices {
    /// `count` matrices `[rows, cols]` with random contents.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn random(
        rng: &mut Rng,
        count: usize,
        (rows, cols): (usize, usize),
        format: QuantFormat,
    ) -> Result<Self, BenchError> {
        let format = QuantFormat { block: format.block.clamp(1, cols.max(1)), ..format };
        let (n, blocks) = (count * rows, format.blocks(cols));
        let zeros = if format.zero_points { n * format.bits.packed_len(blocks) } else { 0 };
        let mut out = Self {
            rows,
            cols,
            format,
            codes: memory(n * format.bits.packed_len(cols), "codes")?,
            scales: memory(n * blocks * format.scales.size(), "scales")?,
            zeros: memory(zeros, "zero points")?,
        };
        rng.fill(&mut out.codes);
        rng.fill_stored(format.scales, 0.01, &mut out.scales);
        rng.fill(&mut out.zeros);
        Ok(out)
    }

    /// Matrix `i`.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn get(&self, i: usize) -> QuantMatrix<'_> {
        let QuantFormat { bits, block, scales, zero_points } = self.format;
        let blocks = self.format.blocks(self.cols);
        let (row_bytes, zero_row) = (bits.packed_len(self.cols), bits.packed_len(blocks));
        let part = |n: usize| i * self.rows * n..(i + 1) * self.rows * n;
        QuantMatrix {
            rows: self.rows,
            cols: self.cols,
            bits,
            block,
            codes: &self.codes[part(row_bytes)],
            row_bytes,
            scales: FloatView::new(scales, &self.scales[part(blocks * scales.size())]).expect("whole scales"),
            zero_points: if zero_points {
                ZeroPoints::PerBlock { packed: &self.zeros[part(zero_row)], row_bytes: zero_row }
            } else {
                ZeroPoints::Default
            },
        }
    }
}
