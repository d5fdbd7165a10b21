//! Cache-line aligned, zeroed memory for the arena, scratch and KV pages.
//!
//! Taken from the system zeroed, so that a large KV cache costs physical pages only as it fills.

use doyen_graph::device::DeviceError;
use doyen_tensor::ByteCount;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ops::{Deref, DerefMut},
    ptr::NonNull,
};

const ALIGN: usize = 64;

/// A fixed-size buffer of bytes.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
    len: usize,
}

// SAFETY: the buffer is owned exclusively, like a Vec<u8>.
unsafe impl Send for Memory {}
// SAFETY: shared access reads only.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// When the system has no such memory; `what` says what for.
    pub(crate) fn new(len: usize, what: &str) -> Result<Self, DeviceError> {
        let error = || DeviceError::Memory { what: what.to_owned(), bytes: ByteCount(len as u64) };
        let layout = Layout::from_size_align(len.max(1), ALIGN).map_err(|_| error())?;
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) };
        Ok(Self { start: NonNull::new(start).ok_or_else(error)?, layout, len })
    }

    /// The start, for regions that are handed out separately.
    pub(crate) const fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that live as long as self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
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
