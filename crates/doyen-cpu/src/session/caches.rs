//! KV pages of every cache group and layer.

use super::memory::Memory;
use crate::{
    kernel::attention::{
        Attention, AttentionParams, Batch, KvLayout, KvScales, KvStore, KvStoreMut, KvType, Rows,
    },
    pool::Pool,
};
use bytes::Bytes;
use doyen_graph::{
    device::{DeviceError, GroupPages, Program},
    lowered::{CacheGroup, CacheSlot, KvFormat},
};
use doyen_tensor::{DType, FloatType, PageId, Tensor};
use std::collections::HashSet;

/// Keys or values of one layer.
pub(crate) struct Store {
    pub(crate) layout: KvLayout,
    ty: KvType,
    memory: Memory,
    /// Rows that were given NaN and could not keep it, in a store of codes: as good as always none.
    nan: HashSet<usize>,
}

impl Store {
    fn new(layout: KvLayout, ty: KvType) -> Result<Self, DeviceError> {
        let bytes = layout.rows().checked_mul(ty.row_bytes(layout.head_size));
        let bytes =
            bytes.ok_or_else(|| DeviceError::Step("the kv cache overflows the address space".into()))?;
        Ok(Self { layout, ty, memory: Memory::filling(bytes, "kv cache")?, nan: HashSet::new() })
    }

    pub(crate) fn view<'a>(&'a self, scales: KvScales<'a>) -> Result<KvStore<'a>, String> {
        KvStore::new(self.layout, self.ty, &self.memory, scales).map_err(|e| e.to_string())
    }

    /// Writes a step's new rows, as [`KvStoreMut::append`]. Codes have none for NaN: rows that hold one are noted, for
    /// [`Store::spread_nan`] to show.
    pub(crate) fn append(
        &mut self,
        scales: KvScales<'_>,
        kernels: &Attention,
        pool: &Pool,
        x: Rows<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), String> {
        let mut store =
            KvStoreMut::new(self.layout, self.ty, &mut self.memory, scales).map_err(|e| e.to_string())?;
        store.append(kernels, pool, x, batch);
        if matches!(self.ty, KvType::Int8 | KvType::Int4) {
            self.note_nan(x, batch);
        }
        Ok(())
    }

    fn note_nan(&mut self, x: Rows<'_>, batch: &Batch<'_>) {
        let KvLayout { kv_heads, head_size, .. } = self.layout;
        for (sequence, span) in batch.spans().iter().enumerate() {
            for i in 0..span.len {
                let (page, slot) = batch.place(sequence, span.past + i);
                for head in 0..kv_heads {
                    let row = self.layout.row(page, head, slot);
                    if x.part(span.first + i, head * head_size, head_size).iter().any(|v| v.is_nan()) {
                        self.nan.insert(row);
                    } else if !self.nan.is_empty() {
                        self.nan.remove(&row);
                    }
                }
            }
        }
    }

    /// Makes the attention `out [tokens, heads * v_head_size]` of queries NaN that see a row which held one, as it
    /// would be had the store kept it.
    pub(crate) fn spread_nan(&self, params: &AttentionParams, batch: &Batch<'_>, out: &mut [f32]) {
        if self.nan.is_empty() {
            return;
        }
        let group = params.heads / params.kv_heads * params.v_head_size;
        for (sequence, &span) in batch.spans().iter().enumerate() {
            for head in 0..params.kv_heads {
                let held = |position: usize| {
                    let (page, slot) = batch.place(sequence, position);
                    self.nan.contains(&self.layout.row(page, head, slot))
                };
                for i in 0..span.len {
                    if params.visible(span, i).any(held) {
                        let start = ((span.first + i) * params.kv_heads + head) * group;
                        out[start..start + group].fill(f32::NAN);
                    }
                }
            }
        }
    }

    fn row_bytes(&self) -> usize {
        self.ty.row_bytes(self.layout.head_size)
    }

    fn dtype(&self) -> DType {
        match self.ty {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            KvType::BF16 => DType::BF16,
            KvType::Int8 => DType::I8,
            KvType::Int4 => DType::U8,
        }
    }

    /// Shape of `len` rows of a sequence: `[kv_heads, len, channels as stored]`.
    fn shape(&self, len: usize) -> [usize; 3] {
        [self.layout.kv_heads, len, self.row_bytes() * 8 / self.dtype().bits()]
    }

    /// Byte range of a position's row.
    fn range(
        &self,
        table: &[PageId],
        head: usize,
        position: usize,
    ) -> Result<std::ops::Range<usize>, DeviceError> {
        let page = table.get(position / self.layout.page_size).filter(|p| p.index() < self.layout.pages);
        let page = page.ok_or_else(|| DeviceError::Step(format!("no page for position {position}")))?;
        let row = self.layout.row(page.index(), head, position % self.layout.page_size);
        Ok(row * self.row_bytes()..(row + 1) * self.row_bytes())
    }

    fn read(&self, table: &[PageId], len: usize) -> Result<Tensor, DeviceError> {
        let mut out = Vec::with_capacity(self.layout.kv_heads * len * self.row_bytes());
        for head in 0..self.layout.kv_heads {
            for position in 0..len {
                out.extend_from_slice(&self.memory[self.range(table, head, position)?]);
            }
        }
        Tensor::from_bytes(self.dtype(), self.shape(len), Bytes::from(out))
            .map_err(|e| DeviceError::Step(e.to_string()))
    }

    fn write(&mut self, table: &[PageId], rows: &Tensor) -> Result<(), DeviceError> {
        let len = rows.shape().get(1).copied().unwrap_or(0);
        if rows.dtype() != self.dtype() || rows.shape()[..] != self.shape(len) {
            return Err(DeviceError::Step(format!(
                "the cache holds {}{:?}, given {rows:?}",
                self.dtype(),
                self.shape(len)
            )));
        }
        let n = self.row_bytes();
        for head in 0..self.layout.kv_heads {
            for position in 0..len {
                let range = self.range(table, head, position)?;
                let from = (head * len + position) * n;
                self.nan.remove(&(range.start / n.max(1)));
                self.memory[range].copy_from_slice(&rows.bytes()[from..from + n]);
            }
        }
        Ok(())
    }
}

/// All caches of a session.
pub(crate) struct Caches {
    /// `[group][layer]`: keys, values.
    groups: Vec<Vec<(Store, Store)>>,
}

impl Caches {
    /// Caches of a program that hold floats in `float`.
    pub(crate) fn new(program: &Program, float: FloatType) -> Result<Self, DeviceError> {
        let groups = &program.graph.groups;
        if groups.len() != program.pages.len() {
            return Err(DeviceError::Step("the program does not say the pages of every cache group".into()));
        }
        let layer = |g: &CacheGroup, pages: &GroupPages| {
            let layout = |head_size| KvLayout {
                pages: pages.pages,
                kv_heads: g.kv_heads,
                page_size: program.limits.page_size,
                head_size,
            };
            let ty = stored(g.format, float);
            Ok((Store::new(layout(g.k_head_size), ty)?, Store::new(layout(g.v_head_size), ty)?))
        };
        let groups = groups
            .iter()
            .zip(&program.pages)
            .map(|(g, p)| g.layers.iter().map(|_| layer(g, p)).collect::<Result<Vec<_>, DeviceError>>())
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { groups })
    }

    /// Keys and values of a layer, to append to and read.
    pub(crate) fn layer(&mut self, slot: CacheSlot) -> Result<&mut (Store, Store), String> {
        self.groups
            .get_mut(slot.group)
            .and_then(|g| g.get_mut(slot.layer))
            .ok_or_else(|| format!("no cache for layer {} of group {}", slot.layer, slot.group))
    }

    pub(crate) fn read(
        &self,
        slot: CacheSlot,
        table: &[PageId],
        len: usize,
    ) -> Result<(Tensor, Tensor), DeviceError> {
        let (keys, values) =
            self.groups.get(slot.group).and_then(|g| g.get(slot.layer)).ok_or_else(|| {
                DeviceError::Step(format!("no cache for layer {} of group {}", slot.layer, slot.group))
            })?;
        Ok((keys.read(table, len)?, values.read(table, len)?))
    }

    pub(crate) fn write(
        &mut self,
        slot: CacheSlot,
        table: &[PageId],
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(), DeviceError> {
        let (k, v) = self.layer(slot).map_err(DeviceError::Step)?;
        k.write(table, keys)?;
        v.write(table, values)
    }
}

const fn stored(format: KvFormat, float: FloatType) -> KvType {
    match (format, float) {
        (KvFormat::Float, FloatType::F32) => KvType::F32,
        (KvFormat::Float, FloatType::F16) => KvType::F16,
        (KvFormat::Float, FloatType::BF16) => KvType::BF16,
        (KvFormat::Int8 { .. }, _) => KvType::Int8,
        (KvFormat::Int4 { .. }, _) => KvType::Int4,
    }
}

/// Bytes of a page of a group over all its layers, keys and values, where floats are held in `float`.
pub(crate) fn page_bytes(group: &CacheGroup, float: FloatType, page_size: usize) -> usize {
    let ty = stored(group.format, float);
    let row = ty.row_bytes(group.k_head_size) + ty.row_bytes(group.v_head_size);
    group.layers.len() * group.kv_heads * page_size * row
}
