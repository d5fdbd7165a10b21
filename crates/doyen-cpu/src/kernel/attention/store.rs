//! The pages of one layer's keys or values: layout, stored formats, append and read.
//!
//! A store is `[page][kv head][slot][channel]`. Coded stores hold the codes of contract section 3.1, "KV quantization":
//! int8, or 4-bit codes plus 8 with the even channel in the low nibble; they are quantized on append and dequantized
//! on read, a run of rows at a time. Which page holds which position is the batch's business.

use super::{
    Attention, SPLIT,
    params::{AttentionError, Batch, Rows},
};
use crate::{
    kernel::{multiversion::multiversion, rows::for_rows},
    pool::{Pool, UnsafeSlice},
};
use std::ops::Range;

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

/// Width of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvCodec {
    /// `[-128, 127]`, one per byte.
    Int8,
    /// `[-8, 7]` stored as code plus 8, two per byte, even channel in the low nibble.
    Int4,
}

impl KvCodec {
    /// Bytes of a row of `head_size` channels.
    pub const fn row_bytes(self, head_size: usize) -> usize {
        match self {
            Self::Int8 => head_size,
            Self::Int4 => head_size / 2,
        }
    }
}

/// Scales of a coded store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvScales<'a> {
    /// One for all.
    Tensor(f32),
    /// One per channel of each head, `[kv_heads, head_size]`.
    Channel(&'a [f32]),
}

impl KvScales<'_> {
    fn head(&self, head: usize, head_size: usize) -> KvScales<'_> {
        match self {
            Self::Tensor(s) => KvScales::Tensor(*s),
            Self::Channel(all) => KvScales::Channel(&all[head * head_size..][..head_size]),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Data<F, B> {
    F32(F),
    Coded(KvCodec, B),
}

/// A store to read.
#[derive(Debug, Clone, Copy)]
pub struct KvStore<'a> {
    layout: KvLayout,
    data: Data<&'a [f32], &'a [u8]>,
    scales: KvScales<'a>,
}

/// A store to append to.
#[derive(Debug)]
pub struct KvStoreMut<'a> {
    layout: KvLayout,
    data: Data<&'a mut [f32], &'a mut [u8]>,
    scales: KvScales<'a>,
}

impl<'a> KvStore<'a> {
    /// A store of f32 rows.
    ///
    /// # Errors
    /// When its size is not that of the layout.
    pub fn f32(layout: KvLayout, rows: &'a [f32]) -> Result<Self, AttentionError> {
        check_f32(layout, rows.len())?;
        Ok(Self { layout, data: Data::F32(rows), scales: KvScales::Tensor(1.0) })
    }

    /// A store of codes.
    ///
    /// # Errors
    /// When its size or that of the scales is not that of the layout.
    pub fn coded(
        layout: KvLayout,
        codec: KvCodec,
        codes: &'a [u8],
        scales: KvScales<'a>,
    ) -> Result<Self, AttentionError> {
        check_coded(layout, codec, codes.len(), scales)?;
        Ok(Self { layout, data: Data::Coded(codec, codes), scales })
    }

    /// The layout.
    pub const fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Elements of scratch that [`KvStore::read`] takes.
    pub(super) fn read_scratch(layout_channels: usize) -> usize {
        SPLIT * layout_channels
    }

    /// Rows of `slots` of a page and head as f32: the stored ones, or dequantized into `scratch`.
    pub(super) fn read<'s>(
        &self,
        page: usize,
        head: usize,
        slots: Range<usize>,
        scratch: &'s mut [f32],
        dequantize: Dequantize,
    ) -> &'s [f32]
    where
        'a: 's,
    {
        let d = self.layout.head_size;
        let (first, n) = (self.layout.row(page, head, slots.start), slots.len());
        match self.data {
            Data::F32(rows) => &rows[first * d..][..n * d],
            Data::Coded(codec, codes) => {
                let bytes = codec.row_bytes(d);
                let out = &mut scratch[..n * d];
                dequantize(codec, &codes[first * bytes..][..n * bytes], self.scales.head(head, d), d, out);
                out
            }
        }
    }
}

impl<'a> KvStoreMut<'a> {
    /// A store of f32 rows.
    ///
    /// # Errors
    /// When its size is not that of the layout.
    pub fn f32(layout: KvLayout, rows: &'a mut [f32]) -> Result<Self, AttentionError> {
        check_f32(layout, rows.len())?;
        Ok(Self { layout, data: Data::F32(rows), scales: KvScales::Tensor(1.0) })
    }

    /// A store of codes.
    ///
    /// # Errors
    /// When its size or that of the scales is not that of the layout.
    pub fn coded(
        layout: KvLayout,
        codec: KvCodec,
        codes: &'a mut [u8],
        scales: KvScales<'a>,
    ) -> Result<Self, AttentionError> {
        check_coded(layout, codec, codes.len(), scales)?;
        Ok(Self { layout, data: Data::Coded(codec, codes), scales })
    }

    /// Writes the step's new rows `x [tokens, kv_heads * head_size]` to the positions after each sequence's past.
    ///
    /// # Panics
    /// When `x` has fewer rows or columns than that, or the batch was checked against other pages.
    pub fn append(&mut self, kernels: &Attention, pool: &Pool, x: Rows<'_>, batch: &Batch<'_>) {
        let layout = self.layout;
        assert_eq!((batch.pages(), batch.page_size()), (layout.pages, layout.page_size), "the batch's pages");
        let (d, scales) = (layout.head_size, self.scales);
        match &mut self.data {
            Data::F32(rows) => {
                let rows = UnsafeSlice::new(rows);
                each_new_row(pool, layout, batch, &|t, head, row| {
                    // SAFETY: the row belongs to `head`, which one worker has to itself.
                    unsafe { rows.range(row * d..(row + 1) * d) }.copy_from_slice(x.part(t, head * d, d));
                });
            }
            Data::Coded(codec, codes) => {
                let (codec, bytes) = (*codec, codec.row_bytes(d));
                let codes = UnsafeSlice::new(codes);
                each_new_row(pool, layout, batch, &|t, head, row| {
                    // SAFETY: the row belongs to `head`, which one worker has to itself.
                    let out = unsafe { codes.range(row * bytes..(row + 1) * bytes) };
                    (kernels.micro.quantize)(codec, x.part(t, head * d, d), scales.head(head, d), out);
                });
            }
        }
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

fn check_f32(layout: KvLayout, found: usize) -> Result<(), AttentionError> {
    check_page_size(layout)?;
    check_size("pages", found, layout.rows() * layout.head_size)
}

fn check_coded(
    layout: KvLayout,
    codec: KvCodec,
    found: usize,
    scales: KvScales<'_>,
) -> Result<(), AttentionError> {
    check_page_size(layout)?;
    if codec == KvCodec::Int4 && !layout.head_size.is_multiple_of(2) {
        return Err(AttentionError::OddHead(layout.head_size));
    }
    if let KvScales::Channel(scales) = scales {
        check_size("scales", scales.len(), layout.kv_heads * layout.head_size)?;
    }
    check_size("pages", found, layout.rows() * codec.row_bytes(layout.head_size))
}

fn check_page_size(layout: KvLayout) -> Result<(), AttentionError> {
    if layout.page_size.is_power_of_two() { Ok(()) } else { Err(AttentionError::PageSize(layout.page_size)) }
}

fn check_size(what: &'static str, found: usize, expected: usize) -> Result<(), AttentionError> {
    if found == expected { Ok(()) } else { Err(AttentionError::Size { what, found, expected }) }
}

/// `dequantize(codec, codes, scales of the head, head_size, out)`.
pub(super) type Dequantize = fn(KvCodec, &[u8], KvScales<'_>, usize, &mut [f32]);
/// `quantize(codec, x, scales of the head, codes)`, one row.
pub(super) type Quantize = fn(KvCodec, &[f32], KvScales<'_>, &mut [u8]);

multiversion! {
    pub(super) fn dequantize(codec: KvCodec, codes: &[u8], scales: KvScales<'_>, d: usize, out: &mut [f32])
        = dequantize_body;
}
multiversion! {
    pub(super) fn quantize(codec: KvCodec, x: &[f32], scales: KvScales<'_>, codes: &mut [u8]) = quantize_body;
}

#[inline(always)]
fn dequantize_body<const FMA: bool>(
    codec: KvCodec,
    codes: &[u8],
    scales: KvScales<'_>,
    d: usize,
    out: &mut [f32],
) {
    match codec {
        KvCodec::Int8 => {
            for (o, &c) in out.iter_mut().zip(codes) {
                *o = f32::from(c as i8);
            }
        }
        KvCodec::Int4 => {
            for (o, &c) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *o = [f32::from(i16::from(c & 15) - 8), f32::from(i16::from(c >> 4) - 8)];
            }
        }
    }
    match scales {
        KvScales::Tensor(s) => out.iter_mut().for_each(|o| *o *= s),
        KvScales::Channel(s) => {
            for row in out.chunks_exact_mut(d.max(1)) {
                row.iter_mut().zip(s).for_each(|(o, s)| *o *= s);
            }
        }
    }
}

#[inline(always)]
fn quantize_body<const FMA: bool>(codec: KvCodec, x: &[f32], scales: KvScales<'_>, codes: &mut [u8]) {
    let scale = |i: usize| match scales {
        KvScales::Tensor(s) => s,
        KvScales::Channel(s) => s[i],
    };
    // The cast of NaN is 0.
    let code = |i: usize, lo: f32, hi: f32| (x[i] / scale(i)).round_ties_even().clamp(lo, hi) as i8;
    match codec {
        KvCodec::Int8 => {
            for (i, c) in codes.iter_mut().enumerate() {
                *c = code(i, -128.0, 127.0) as u8;
            }
        }
        KvCodec::Int4 => {
            for (i, c) in codes.iter_mut().enumerate() {
                let nibble = |i| (code(i, -8.0, 7.0) + 8) as u8;
                *c = nibble(2 * i) | nibble(2 * i + 1) << 4;
            }
        }
    }
}
