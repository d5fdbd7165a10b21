//! KV pages of every cache group and layer, on the card.

use crate::{
    driver::{Addr, Buffer, Gpu},
    error::CudaError,
};
use bytes::Bytes;
use doyen_graph::{
    device::{DeviceError, GroupPages, Program},
    lowered::{CacheGroup, CacheSlot, KvFormat, Lowered},
};
use doyen_tensor::{ByteCount, DType, FloatType, PageId, Tensor};
use std::fmt;

/// What caches of floats are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// Floats.
    Float(FloatType),
    /// int8 codes with a scale for every token and head.
    Int8,
}

impl KvType {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float(FloatType::F32) => "f32",
            Self::Float(FloatType::F16) => "f16",
            Self::Float(FloatType::BF16) => "bf16",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a row is stored: `StoreKind` of doyen.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Row {
    Float(FloatType),
    Int8,
    Int4,
    /// int8 codes, then their scale in float32.
    Scaled,
}

/// Bytes of the scale of a [`Row::Scaled`].
const SCALE: usize = size_of::<f32>();

impl Row {
    /// The storage of a group's rows, floats in the type given.
    pub(crate) const fn new(format: KvFormat, kv: KvType) -> Self {
        match format {
            KvFormat::Float => match kv {
                KvType::Float(ty) => Self::Float(ty),
                KvType::Int8 => Self::Scaled,
            },
            KvFormat::Int8 { .. } => Self::Int8,
            KvFormat::Int4 { .. } => Self::Int4,
        }
    }

    pub(crate) const fn kind(self) -> u32 {
        match self {
            Self::Float(FloatType::F32) => 0,
            Self::Float(FloatType::F16) => 1,
            Self::Float(FloatType::BF16) => 2,
            Self::Int8 => 3,
            Self::Int4 => 4,
            Self::Scaled => 5,
        }
    }

    const fn bytes(self, head_size: usize) -> usize {
        match self {
            Self::Float(ty) => ty.size() * head_size,
            Self::Int8 => head_size,
            Self::Int4 => head_size / 2,
            // Values made of the keys' rows have none of their own.
            Self::Scaled => head_size + if head_size > 0 { SCALE } else { 0 },
        }
    }

    /// Bytes of a row's note that it was given a NaN, where its codes cannot say so.
    const fn note(self) -> usize {
        match self {
            Self::Int8 | Self::Int4 => 1,
            Self::Float(_) | Self::Scaled => 0,
        }
    }

    /// The type of rows given and taken.
    const fn dtype(self) -> DType {
        match self {
            Self::Float(ty) => ty.dtype(),
            Self::Scaled => DType::F32,
            Self::Int8 => DType::I8,
            Self::Int4 => DType::U8,
        }
    }
}

/// Keys or values of one layer: `[pages, kv_heads, page_size, head_size]`, then the notes of the rows.
pub(crate) struct Store {
    row: Row,
    pages: usize,
    kv_heads: usize,
    page_size: usize,
    head_size: usize,
    memory: Buffer,
}

impl Store {
    const fn row_bytes(&self) -> usize {
        self.row.bytes(self.head_size)
    }

    /// log2 of the positions of a page.
    pub(crate) const fn page_shift(&self) -> u32 {
        self.page_size.trailing_zeros()
    }

    pub(crate) const fn addr(&self) -> Addr {
        self.memory.start()
    }

    /// Where the notes of the rows begin.
    const fn notes(&self) -> usize {
        self.pages * self.kv_heads * self.page_size * self.row_bytes()
    }

    /// The notes of rows that were given a NaN; none where rows keep it themselves.
    pub(crate) fn lost(&self) -> Result<Addr, CudaError> {
        if self.row.note() == 0 { Ok(Addr::NONE) } else { self.memory.at(self.notes(), 0) }
    }

    /// Shape of `len` rows of a sequence: `[kv_heads, len, channels as stored]`.
    fn shape(&self, len: usize) -> [usize; 3] {
        let width = match self.row {
            Row::Scaled => self.head_size,
            row => row.bytes(self.head_size) * 8 / row.dtype().bits(),
        };
        [self.kv_heads, len, width]
    }

    /// First byte of a position's row.
    fn offset(&self, table: &[PageId], head: usize, position: usize) -> Result<usize, DeviceError> {
        let page = table.get(position / self.page_size).filter(|p| p.index() < self.pages);
        let page = page.ok_or_else(|| DeviceError::Step(format!("no page for position {position}")))?;
        let row = (page.index() * self.kv_heads + head) * self.page_size + position % self.page_size;
        Ok(row * self.row_bytes())
    }

    /// Calls `each` with every run of rows that lie together: its offset, and its rows in `[kv_heads, len]`.
    fn runs(
        &self,
        table: &[PageId],
        len: usize,
        mut each: impl FnMut(usize, std::ops::Range<usize>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        for head in 0..self.kv_heads {
            for first in (0..len).step_by(self.page_size) {
                let end = len.min(first + self.page_size);
                each(self.offset(table, head, first)?, head * len + first..head * len + end)?;
            }
        }
        Ok(())
    }

    fn read(&self, gpu: &Gpu, table: &[PageId], len: usize) -> Result<Tensor, DeviceError> {
        let n = self.row_bytes();
        let mut out = vec![0u8; self.kv_heads * len * n];
        self.runs(table, len, |offset, rows| {
            Ok(self.memory.read(gpu, offset, &mut out[rows.start * n..rows.end * n])?)
        })?;
        if self.row == Row::Scaled {
            let values: Vec<f32> = out.chunks_exact(n.max(1)).flat_map(unscaled).collect();
            return Tensor::from_slice(self.shape(len), &values)
                .map_err(|e| DeviceError::Step(e.to_string()));
        }
        Tensor::from_bytes(self.row.dtype(), self.shape(len), Bytes::from(out))
            .map_err(|e| DeviceError::Step(e.to_string()))
    }

    fn write(&mut self, gpu: &Gpu, table: &[PageId], rows: &Tensor) -> Result<(), DeviceError> {
        let len = rows.shape().get(1).copied().unwrap_or(0);
        let stored = self.stored(rows)?;
        if stored.shape()[..] != self.shape(len) {
            return Err(DeviceError::Step(format!(
                "the cache holds {}{:?}, given {rows:?}",
                self.row.dtype(),
                self.shape(len)
            )));
        }
        let n = self.row_bytes();
        let stored = match self.row {
            Row::Scaled => {
                let values = stored.to_f32().map_err(|e| DeviceError::Step(e.to_string()))?;
                Bytes::from(values.chunks_exact(self.head_size.max(1)).flat_map(scaled).collect::<Vec<u8>>())
            }
            _ => stored.shared_bytes().clone(),
        };
        let mut runs = Vec::new();
        self.runs(table, len, |offset, rows| {
            runs.push((offset, rows));
            Ok(())
        })?;
        let unnoted = vec![0; self.page_size * self.row.note()];
        for (offset, rows) in runs {
            if let Some(row) = offset.checked_div(n) {
                let notes = rows.len() * self.row.note();
                self.memory.write(gpu, self.notes() + row * self.row.note(), &unnoted[..notes])?;
            }
            self.memory.write(gpu, offset, &stored[rows.start * n..rows.end * n])?;
        }
        Ok(())
    }

    /// Rows in the stored type: floats are rounded to it, codes must have it.
    fn stored(&self, rows: &Tensor) -> Result<Tensor, DeviceError> {
        let want = self.row.dtype();
        if rows.dtype() == want {
            return Ok(rows.clone());
        }
        if !(rows.dtype().is_float() && want.is_float()) {
            return Err(DeviceError::Step(format!("the cache holds {want}, given {rows:?}")));
        }
        let rounded = rows.to_f32().and_then(|v| Tensor::from_f32(want, rows.shape().clone(), &v));
        rounded.map_err(|e| DeviceError::Step(e.to_string()))
    }
}

/// A row as [`Row::Scaled`] stores it: codes nearest to its numbers, ties to even, and their scale, which is NaN where a number
/// is.
fn scaled(row: &[f32]) -> Vec<u8> {
    let most = row.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = if row.iter().any(|v| v.is_nan()) { f32::NAN } else { most / 127.0 };
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    // Casts of floats saturate, and make NaN 0.
    let codes = row.iter().map(|v| ((v * inverse).round_ties_even() as i8).cast_unsigned());
    codes.chain(scale.to_le_bytes()).collect()
}

/// The numbers of a stored row.
fn unscaled(row: &[u8]) -> Vec<f32> {
    let (codes, scale) = row.split_at(row.len() - SCALE);
    let scale = scale.try_into().map_or(0.0, f32::from_le_bytes);
    codes.iter().map(|&c| f32::from(c.cast_signed()) * scale).collect()
}

/// All caches of a session.
pub(crate) struct Caches {
    /// `[group][layer]`: keys, values.
    groups: Vec<Vec<(Store, Store)>>,
}

impl Caches {
    pub(crate) fn new(gpu: &Gpu, program: &Program, kv: KvType) -> Result<Self, DeviceError> {
        let groups = &program.graph.groups;
        if groups.len() != program.pages.len() {
            return Err(DeviceError::Step("the program does not say the pages of every cache group".into()));
        }
        let store = |g: &CacheGroup, p: &GroupPages, head_size: usize| {
            let row = Row::new(g.format, kv);
            let (pages, kv_heads, page_size) = (p.pages, g.kv_heads, program.limits.page_size);
            let bytes = [kv_heads, page_size, row.bytes(head_size) + row.note()]
                .into_iter()
                .try_fold(pages, usize::checked_mul)
                .ok_or_else(|| DeviceError::Step("the kv cache overflows the address space".into()))?;
            let memory = Buffer::new(gpu, bytes, "kv cache")?;
            Ok::<_, DeviceError>(Store { row, pages, kv_heads, page_size, head_size, memory })
        };
        let layer = |g: &CacheGroup, p: &GroupPages| -> Result<_, DeviceError> {
            Ok((store(g, p, g.k_head_size)?, store(g, p, g.v_head_size)?))
        };
        let groups = groups
            .iter()
            .zip(&program.pages)
            .map(|(g, p)| g.layers.iter().map(|_| layer(g, p)).collect::<Result<Vec<_>, _>>())
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { groups })
    }

    fn find(&self, slot: CacheSlot) -> Option<&(Store, Store)> {
        self.groups.get(slot.group)?.get(slot.layer)
    }

    /// Keys and values of a layer.
    pub(crate) fn layer(&self, slot: CacheSlot) -> Result<&(Store, Store), CudaError> {
        self.find(slot).ok_or_else(|| CudaError::Driver {
            what: "kv cache".into(),
            reason: format!("there is no layer {} of group {}", slot.layer, slot.group),
        })
    }

    pub(crate) fn read(
        &self,
        gpu: &Gpu,
        slot: CacheSlot,
        table: &[PageId],
        len: usize,
    ) -> Result<(Tensor, Tensor), DeviceError> {
        let (keys, values) = self.layer(slot)?;
        Ok((keys.read(gpu, table, len)?, values.read(gpu, table, len)?))
    }

    pub(crate) fn write(
        &mut self,
        gpu: &Gpu,
        slot: CacheSlot,
        table: &[PageId],
        (keys, values): (&Tensor, &Tensor),
    ) -> Result<(), DeviceError> {
        self.layer(slot)?;
        let (k, v) = &mut self.groups[slot.group][slot.layer];
        k.write(gpu, table, keys)?;
        v.write(gpu, table, values)
    }
}

/// Bytes of a page of each group.
pub(crate) fn all_page_bytes(graph: &Lowered, page_size: usize, kv: KvType) -> Vec<ByteCount> {
    graph.groups.iter().map(|g| ByteCount(page_bytes(g, page_size, kv) as u64)).collect()
}

/// Bytes of a page of a group over all its layers, keys and values.
fn page_bytes(group: &CacheGroup, page_size: usize, kv: KvType) -> usize {
    let row = Row::new(group.format, kv);
    let bytes = row.bytes(group.k_head_size) + row.bytes(group.v_head_size) + 2 * row.note();
    group.layers.len() * group.kv_heads * page_size * bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_rows_come_back_within_half_a_step() {
        for row in [vec![0.0; 8], vec![1.0, -127.0, 0.25, 63.5, 1e-9, 100.0, -0.5, 3.0]] {
            let stored = scaled(&row);
            assert_eq!(stored.len(), row.len() + SCALE);
            let step = row.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
            for (found, given) in unscaled(&stored).iter().zip(&row) {
                assert!((found - given).abs() <= 0.5001 * step, "{found} for {given}");
            }
        }
    }

    #[test]
    fn a_nan_takes_its_whole_row() {
        assert!(unscaled(&scaled(&[1.0, f32::NAN, -2.0, 0.0])).iter().all(|v| v.is_nan()));
    }

    #[test]
    fn rows_take_their_bytes() {
        assert_eq!(Row::new(KvFormat::Float, KvType::Int8).bytes(128), 132);
        assert_eq!(Row::new(KvFormat::Float, KvType::Int8).bytes(0), 0);
        assert_eq!(Row::new(KvFormat::Int8 { per_channel: true }, KvType::Int8).bytes(128), 128);
        assert_eq!(Row::new(KvFormat::Float, KvType::Float(FloatType::BF16)).bytes(64), 128);
    }
}
