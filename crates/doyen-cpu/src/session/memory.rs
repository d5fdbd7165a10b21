//! Zeroed memory for the arena, scratch and KV pages, in huge pages where the system has them.
//!
//! Taken from the system as mappings, so that a large KV cache costs physical pages only as it fills. Huge pages matter: walking the
//! tables of small ones costs a reader of memory a third of its speed in a virtual machine (16 GB/s against 25 on one Zen 4 core).

use doyen_graph::device::DeviceError;
use doyen_tensor::ByteCount;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Alignment of a huge page. What is smaller than one starts on an ordinary page.
const HUGE: usize = 2 << 20;

/// A fixed-size buffer of bytes, at least a page aligned.
#[derive(Debug)]
pub(crate) struct Memory {
    map: MmapMut,
    start: usize,
    len: usize,
}

impl Memory {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// When the system has no such memory; `what` says what for.
    pub(crate) fn new(len: usize, what: &str) -> Result<Self, DeviceError> {
        Self::with(len, len >= HUGE, what)
    }

    /// As [`Memory::new`], for what fills from the front and may never be full: in huge pages only where one of them is a small part
    /// of it. (In huge pages throughout, a prompt of one word took 120 MiB of a small model's caches.)
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub(crate) fn filling(len: usize, what: &str) -> Result<Self, DeviceError> {
        Self::with(len, len >= 16 * HUGE, what)
    }

    fn with(len: usize, huge: bool, what: &str) -> Result<Self, DeviceError> {
        let error = || DeviceError::Memory { what: what.to_owned(), bytes: ByteCount(len as u64) };
        let room = if huge { HUGE } else { 0 };
        let map = MmapMut::map_anon(len.max(1).checked_add(room).ok_or_else(error)?).map_err(|_| error())?;
        #[cfg(target_os = "linux")]
        if room > 0 {
            // A system without huge pages refuses, and small ones do as well.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let start = if room == 0 { 0 } else { map.as_ptr().addr().wrapping_neg() % HUGE };
        Ok(Self { map, start, len })
    }

    /// The start, for regions that are handed out separately.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self[..].as_mut_ptr()
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map[self.start..self.start + self.len]
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..self.start + self.len]
    }
}

/// Plain numbers that any bytes are valid values of.
pub(crate) trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for u32 {}
impl Plain for u8 {}

/// Bytes as numbers.
///
/// # Panics
/// When the bytes are not aligned for `T` or not a whole number of them.
pub(crate) fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    check::<T>(bytes);
    // SAFETY: checked alignment and length; every bit pattern is a valid T.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// Bytes as numbers to write.
///
/// # Panics
/// As [`cast`].
pub(crate) fn cast_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    check::<T>(bytes);
    // SAFETY: as in `cast`, borrowed exclusively.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}

fn check<T>(bytes: &[u8]) {
    assert!(bytes.as_ptr().cast::<T>().is_aligned(), "misaligned numbers");
    assert_eq!(bytes.len() % size_of::<T>(), 0, "bytes of whole numbers");
}
