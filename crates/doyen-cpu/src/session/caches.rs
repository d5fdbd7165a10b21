//! KV pages of every cache group and layer.

use super::memory::Memory;
use crate::kernel::attention::{KvLayout, KvScales, KvStore, KvStoreMut, KvType};
use bytes::Bytes;
use doyen_graph::{
    device::{DeviceError, GroupPages, Program},
    lowered::{CacheGroup, CacheSlot, KvFormat},
};
use doyen_tensor::{DType, PageId, Tensor};

/// Keys or values of one layer.
pub(crate) struct Store {
    pub(crate) layout: KvLayout,
    ty: KvType,
    memory: Memory,
}

impl Store {
    fn new(layout: KvLayout, format: KvFormat) -> Result<Self, DeviceError> {
        let ty = stored(format);
        let bytes = layout.rows().checked_mul(ty.row_bytes(layout.head_size));
        let bytes =
            bytes.ok_or_else(|| DeviceError::Step("the kv cache overflows the address space".into()))?;
        Ok(Self { layout, ty, memory: Memory::filling(bytes, "kv cache")? })
    }

    pub(crate) fn view<'a>(&'a self, scales: KvScales<'a>) -> Result<KvStore<'a>, String> {
        KvStore::new(self.layout, self.ty, &self.memory, scales).map_err(|e| e.to_string())
    }

    pub(crate) fn view_mut<'a>(&'a mut self, scales: KvScales<'a>) -> Result<KvStoreMut<'a>, String> {
        KvStoreMut::new(self.layout, self.ty, &mut self.memory, scales).map_err(|e| e.to_string())
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
    pub(crate) fn new(program: &Program) -> Result<Self, DeviceError> {
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
            Ok((Store::new(layout(g.k_head_size), g.format)?, Store::new(layout(g.v_head_size), g.format)?))
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

const fn stored(format: KvFormat) -> KvType {
    match format {
        KvFormat::Float => KvType::F32,
        KvFormat::Int8 { .. } => KvType::Int8,
        KvFormat::Int4 { .. } => KvType::Int4,
    }
}

/// Bytes of a page of a group over all its layers, keys and values.
pub(crate) fn page_bytes(group: &CacheGroup, page_size: usize) -> usize {
    let ty = stored(group.format);
    let row = ty.row_bytes(group.k_head_size) + ty.row_bytes(group.v_head_size);
    group.layers.len() * group.kv_heads * page_size * row
}
