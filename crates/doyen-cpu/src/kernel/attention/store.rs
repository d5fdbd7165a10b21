//! The pages of one layer's keys or values: layout, stored types, append and read.
//!
//! A store is `[page][kv head][slot][channel]`. Coded stores hold the codes of contract section 3.1, "KV quantization":
//! int8, or 4-bit codes plus 8 with the even channel in the low nibble. Rows are narrowed on append (`narrow`) and
//! widened in registers by the loops that read them. Which page holds which position is the batch's business.

use super::{
    Attention,
    params::{AttentionError, Batch, Rows, Run},
};
use crate::{
    kernel::rows::for_rows,
    pool::{Pool, UnsafeSlice},
};

/// Extents of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Pages.
    pub pages: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Positions of a page; a power of two.
    pub page_size: usize,
    /// Channels of a head.
    pub head_size: usize,
}

impl KvLayout {
    /// Index of a row (one position of one head) in the store; rows are contiguous along slots.
    #[inline]
    pub const fn row(&self, page: usize, head: usize, slot: usize) -> usize {
        (page * self.kv_heads + head) * self.page_size + slot
    }

    /// Number of rows.
    pub const fn rows(&self) -> usize {
        self.pages * self.kv_heads * self.page_size
    }
}

/// How the numbers of a store are stored, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// As they are.
    F32,
    /// Rounded to nearest, ties to even; beyond 65504 infinite.
    F16,
    /// Rounded to nearest, ties to even.
    BF16,
    /// Codes in `[-128, 127]`, one per byte.
    Int8,
    /// Codes in `[-8, 7]` stored as code plus 8, two per byte, even channel in the low nibble.
    Int4,
}

impl KvType {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes of a row of `head_size` channels.
    pub const fn row_bytes(self, head_size: usize) -> usize {
        match self {
            Self::F32 => 4 * head_size,
            Self::F16 | Self::BF16 => 2 * head_size,
            Self::Int8 => head_size,
            Self::Int4 => head_size / 2,
        }
    }
}

/// Scales of a coded store; other stores have `Tensor(1.0)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvScales<'a> {
    /// One for all.
    Tensor(f32),
    /// One per channel of each head, `[kv_heads, head_size]`.
    Channel(&'a [f32]),
}

impl KvScales<'_> {
    pub(super) fn head(&self, head: usize, head_size: usize) -> KvScales<'_> {
        match self {
            Self::Tensor(s) => KvScales::Tensor(*s),
            Self::Channel(all) => KvScales::Channel(&all[head * head_size..][..head_size]),
        }
    }
}

/// A store to read.
#[derive(Debug, Clone, Copy)]
pub struct KvStore<'a> {
    layout: KvLayout,
    ty: KvType,
    data: &'a [u8],
    scales: KvScales<'a>,
}

/// A store to append to.
#[derive(Debug)]
pub struct KvStoreMut<'a> {
    layout: KvLayout,
    ty: KvType,
    data: &'a mut [u8],
    scales: KvScales<'a>,
}

impl<'a> KvStore<'a> {
    /// A store over the bytes of all its pages.
    ///
    /// # Errors
    /// When the size of the bytes or of the scales is not that of the layout, or the layout not one of the type.
    pub fn new(
        layout: KvLayout,
        ty: KvType,
        data: &'a [u8],
        scales: KvScales<'a>,
    ) -> Result<Self, AttentionError> {
        check(layout, ty, data.len(), scales)?;
        Ok(Self { layout, ty, data, scales })
    }

    /// The layout.
    pub const fn layout(&self) -> KvLayout {
        self.layout
    }

    /// How numbers are stored.
    pub const fn ty(&self) -> KvType {
        self.ty
    }

    pub(super) const fn scales(&self) -> KvScales<'a> {
        self.scales
    }

    /// The rows of a run and head, as stored.
    pub(super) fn rows(&self, run: &Run, head: usize) -> &'a [u8] {
        let bytes = self.ty.row_bytes(self.layout.head_size);
        &self.data[self.layout.row(run.page, head, run.slot) * bytes..][..run.positions.len() * bytes]
    }
}

impl<'a> KvStoreMut<'a> {
    /// A store over the bytes of all its pages.
    ///
    /// # Errors
    /// As [`KvStore::new`].
    pub fn new(
        layout: KvLayout,
        ty: KvType,
        data: &'a mut [u8],
        scales: KvScales<'a>,
    ) -> Result<Self, AttentionError> {
        check(layout, ty, data.len(), scales)?;
        Ok(Self { layout, ty, data, scales })
    }

    /// Writes the step's new rows `x [tokens, kv_heads * head_size]` to the positions after each sequence's past.
    ///
    /// # Panics
    /// When `x` has fewer rows or columns than that, or the batch was checked against other pages.
    pub fn append(&mut self, kernels: &Attention, pool: &Pool, x: Rows<'_>, batch: &Batch<'_>) {
        let layout = self.layout;
        assert_eq!((batch.pages(), batch.page_size()), (layout.pages, layout.page_size), "the batch's pages");
        let (d, ty, scales) = (layout.head_size, self.ty, self.scales);
        let bytes = ty.row_bytes(d);
        let data = UnsafeSlice::new(self.data);
        each_new_row(pool, layout, batch, &|t, head, row| {
            // SAFETY: the row belongs to `head`, which one worker has to itself.
            let out = unsafe { data.range(row * bytes..(row + 1) * bytes) };
            (kernels.narrow)(ty, x.part(t, head * d, d), scales.head(head, d), out);
        });
    }
}

/// Calls `f(token, head, row)` for every new row. Workers share out the heads, not the tokens: rows of different heads
/// are different whatever the block tables say, so a wrong table cannot make two workers write to one place.
fn each_new_row(pool: &Pool, layout: KvLayout, batch: &Batch<'_>, f: &(dyn Fn(usize, usize, usize) + Sync)) {
    for_rows(pool, layout.kv_heads, batch.tokens() * layout.head_size, &|heads| {
        for (sequence, span) in batch.spans().iter().enumerate() {
            for i in 0..span.len {
                let (page, slot) = batch.place(sequence, span.past + i);
                for head in heads.clone() {
                    f(span.first + i, head, layout.row(page, head, slot));
                }
            }
        }
    });
}

fn check(layout: KvLayout, ty: KvType, found: usize, scales: KvScales<'_>) -> Result<(), AttentionError> {
    if !layout.page_size.is_power_of_two() {
        return Err(AttentionError::PageSize(layout.page_size));
    }
    if ty == KvType::Int4 && !layout.head_size.is_multiple_of(2) {
        return Err(AttentionError::OddHead(layout.head_size));
    }
    if let KvScales::Channel(scales) = scales {
        check_size("scales", scales.len(), layout.kv_heads * layout.head_size)?;
    }
    check_size("pages", found, layout.rows() * ty.row_bytes(layout.head_size))
}

fn check_size(what: &'static str, found: usize, expected: usize) -> Result<(), AttentionError> {
    if found == expected { Ok(()) } else { Err(AttentionError::Size { what, found, expected }) }
}
