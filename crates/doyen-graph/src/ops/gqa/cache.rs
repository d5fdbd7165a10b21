//! Key and value caches `[B,Nkv,rows,D]` in their stored form: floats, or int8 and int4 codes with scales.

use super::super::OpError;
use super::super::args::zeros;
use super::plan::{Plan, Sequence, window_rows};
use super::{GroupQueryAttention, KvCache};
use bytes::Bytes;
use doyen_tensor::{DType, Shape, Tensor};

/// How one cache stores a number.
#[derive(Debug, Clone)]
pub(super) enum Codec {
    /// In this type.
    Float(DType),
    /// As a code of `bits` bits times a scale, one or one a head and channel.
    Int { bits: u32, scales: Vec<f64> },
}

/// Extents of a cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extents {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) rows: usize,
    pub(super) size: usize,
}

/// Stored values: floats, or codes as numbers.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    pub(super) extents: Extents,
    pub(super) codec: Codec,
    values: Vec<f64>,
}

impl Codec {
    pub(super) fn new(
        op: &GroupQueryAttention,
        dtype: DType,
        scales: Option<&Tensor>,
    ) -> Result<Self, OpError> {
        let bits = match op.kv {
            KvCache::Float => return Ok(Self::Float(dtype)),
            KvCache::Int8(_) => 8,
            KvCache::Int4(_) => 4,
        };
        let scales = scales.map(Tensor::to_f64).transpose()?.unwrap_or_default();
        Ok(Self::Int { bits, scales })
    }

    fn scale(scales: &[f64], at: usize) -> f64 {
        if scales.len() == 1 { scales[0] } else { scales[at % scales.len()] }
    }

    /// The number a stored value of channel `at` (head * D + channel) stands for.
    fn decode(&self, at: usize, value: f64) -> f64 {
        match self {
            Self::Float(_) => value,
            Self::Int { scales, .. } => value * Self::scale(scales, at),
        }
    }

    /// Rows of all heads, `[.., Nkv*D]`, as stored values. There is no code for NaN, which is kept until a cache becomes
    /// a tensor: this step's queries see it.
    pub(super) fn encode(&self, rows: &[f64]) -> Result<Vec<f64>, OpError> {
        match self {
            Self::Float(dtype) => Ok(Tensor::from_f64(*dtype, [rows.len()], rows)?.to_f64()?),
            Self::Int { bits, scales } => {
                let low = -f64::from(1 << (bits - 1));
                let code = |(at, v): (usize, &f64)| {
                    (v / Self::scale(scales, at)).round_ties_even().clamp(low, -low - 1.0)
                };
                Ok(rows.iter().enumerate().map(code).collect())
            }
        }
    }
}

impl Cache {
    /// A cache of zero bytes.
    fn zeros(extents: Extents, codec: Codec) -> Result<Self, OpError> {
        let n = [extents.batch, extents.heads, extents.rows, extents.size]
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .ok_or_else(|| OpError::other("the caches do not fit the address space"))?;
        let mut values = zeros(n)?;
        if let Codec::Int { bits: 4, .. } = codec {
            values.fill(-8.0);
        }
        Ok(Self { extents, codec, values })
    }

    /// The cache that a past input holds; without one, a cache of no rows.
    pub(super) fn read(past: Option<&Tensor>, extents: Extents, codec: Codec) -> Result<Self, OpError> {
        let Some(t) = past else { return Self::zeros(Extents { rows: 0, ..extents }, codec) };
        let values = match codec {
            Codec::Float(_) => t.to_f64()?,
            Codec::Int { bits: 8, .. } => t.to_i64()?.into_iter().map(|v| v as f64).collect(),
            Codec::Int { .. } => {
                t.bytes().iter().flat_map(|b| [b & 15, b >> 4]).map(|c| f64::from(c) - 8.0).collect()
            }
        };
        Ok(Self { extents, codec, values })
    }

    fn at(&self, b: usize, head: usize, row: usize) -> usize {
        ((b * self.extents.heads + head) * self.extents.rows + row) * self.extents.size
    }

    /// Stored row `row` of a head.
    pub(super) fn row(&self, b: usize, head: usize, row: usize) -> &[f64] {
        let at = self.at(b, head, row);
        &self.values[at..at + self.extents.size]
    }

    fn put(&mut self, b: usize, head: usize, row: usize, values: &[f64]) {
        let at = self.at(b, head, row);
        self.values[at..at + values.len()].copy_from_slice(values);
    }

    /// The kept past rows and the new rows of one head, as stored values.
    pub(super) fn pool<'a>(
        &'a self,
        b: usize,
        head: usize,
        s: &Sequence,
        new: &'a [&'a [f64]],
    ) -> Vec<&'a [f64]> {
        (0..s.kept).map(|r| self.row(b, head, r)).chain(new.iter().copied()).collect()
    }

    /// The numbers that stored rows of a head stand for.
    pub(super) fn decode(&self, head: usize, rows: &[&[f64]]) -> Vec<Vec<f64>> {
        let size = self.extents.size;
        rows.iter()
            .map(|r| r.iter().enumerate().map(|(c, &v)| self.codec.decode(head * size + c, v)).collect())
            .collect()
    }

    /// The present cache: the past with the new rows appended, or the rows a window-sized cache keeps; zero bytes
    /// behind them. `new` gives the stored new rows of a sequence and head.
    pub(super) fn present<'a>(
        &self,
        op: &GroupQueryAttention,
        plan: &Plan,
        new: impl Fn(usize, usize) -> Vec<&'a [f64]>,
    ) -> Result<Self, OpError> {
        let mut out = Self::zeros(Extents { rows: plan.rows, ..self.extents }, self.codec.clone())?;
        for (b, s) in plan.sequences.iter().enumerate() {
            for h in 0..self.extents.heads {
                let new = new(b, h);
                if let (true, Some(window)) = (op.window_cache, op.window) {
                    let pool = self.pool(b, h, s, &new[..s.valid]);
                    let keep = window_rows(s.length(), self.extents.rows, window);
                    for (r, row) in pool[pool.len() - keep..].iter().enumerate() {
                        out.put(b, h, r, row);
                    }
                    continue;
                }
                for r in 0..s.past {
                    out.put(b, h, r, self.row(b, h, r));
                }
                for (i, row) in new.iter().enumerate() {
                    out.put(b, h, s.past + i, row);
                }
            }
        }
        Ok(out)
    }

    /// The cache as an output tensor.
    pub(super) fn into_tensor(self) -> Result<Tensor, OpError> {
        let Extents { batch, heads, rows, size } = self.extents;
        let shape = Shape::from([batch, heads, rows, size]);
        Ok(match self.codec {
            Codec::Float(dtype) => Tensor::from_f64(dtype, shape, &self.values)?,
            Codec::Int { bits: 8, .. } => {
                Tensor::from_slice(shape, &self.values.iter().map(|&v| v as i8).collect::<Vec<_>>())?
            }
            Codec::Int { .. } => {
                let nibble = |v: f64| (v as i8 + 8) as u8 & 15;
                let bytes: Vec<u8> =
                    self.values.chunks(2).map(|p| nibble(p[0]) | (nibble(p[1]) << 4)).collect();
                Tensor::from_bytes(DType::U8, [batch, heads, rows, size / 2], Bytes::from(bytes))?
            }
        })
    }
}
