//! Memory of the card: buffers, addresses into them, and constants brought there once.

use super::{Gpu, failed};
use crate::error::CudaError;
use bytes::Bytes;
use cudarc::driver::{CudaContext, CudaSlice, DevicePtr, DriverError, result, sys};
use doyen_graph::device::DeviceError;
use doyen_tensor::ByteCount;
use std::{collections::HashMap, ptr::NonNull, sync::Arc};

/// An address in a buffer of the card, or none.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addr(u64);

impl Addr {
    /// No address: an absent operand.
    pub(crate) const NONE: Self = Self(0);

    /// Whether there is one.
    pub(crate) const fn is_some(self) -> bool {
        self.0 != 0
    }

    pub(crate) const fn is_aligned(self, bytes: u64) -> bool {
        self.0.is_multiple_of(bytes)
    }
}

/// Bytes of the card.
#[derive(Debug)]
pub(crate) struct Buffer {
    slice: CudaSlice<u8>,
    start: u64,
    len: usize,
}

fn out_of_memory(what: &str, bytes: usize, e: DriverError) -> DeviceError {
    if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return DeviceError::Memory { what: format!("{what} on the card"), bytes: ByteCount(bytes as u64) };
    }
    failed(format!("cannot allocate {} for {what}", ByteCount(bytes as u64)))(e).into()
}

impl From<CudaError> for DeviceError {
    fn from(e: CudaError) -> Self {
        Self::Step(e.to_string())
    }
}

impl Buffer {
    /// Zeroed bytes.
    ///
    /// # Errors
    /// When the card has no such memory; `what` says what for.
    pub(crate) fn new(gpu: &Gpu, len: usize, what: &str) -> Result<Self, DeviceError> {
        let slice = gpu.stream().alloc_zeros::<u8>(len.max(1)).map_err(|e| out_of_memory(what, len, e))?;
        let start = slice.device_ptr(gpu.stream()).0;
        Ok(Self { slice, start, len })
    }

    /// The address of a byte.
    ///
    /// # Errors
    /// When `len` bytes from there on are not inside.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Result<Addr, CudaError> {
        self.range(offset, len)?;
        Ok(Addr(self.start + offset as u64))
    }

    /// The first byte.
    pub(crate) const fn start(&self) -> Addr {
        Addr(self.start)
    }

    fn range(&self, offset: usize, len: usize) -> Result<std::ops::Range<usize>, CudaError> {
        match offset.checked_add(len).filter(|&end| end <= self.len) {
            Some(end) => Ok(offset..end),
            None => Err(CudaError::Driver {
                what: "memory of the card".into(),
                reason: format!("{len} bytes at {offset} of a buffer of {}", self.len),
            }),
        }
    }

    /// Copies bytes to the card; they may be reused at once.
    pub(crate) fn write(&mut self, gpu: &Gpu, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let range = self.range(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let mut part = self.slice.slice_mut(range);
        gpu.stream().memcpy_htod(bytes, &mut part).map_err(failed("cannot copy to the card"))
    }

    /// Copies another buffer of the same length, within the card.
    pub(crate) fn copy(&mut self, gpu: &Gpu, from: &Self) -> Result<(), CudaError> {
        if self.len != from.len {
            let reason = format!("{} bytes into a buffer of {}", from.len, self.len);
            return Err(CudaError::Driver { what: "cannot copy within the card".into(), reason });
        }
        gpu.stream().memcpy_dtod(&from.slice, &mut self.slice).map_err(failed("cannot copy within the card"))
    }

    /// Copies bytes from the card, once everything launched before is done.
    pub(crate) fn read(&self, gpu: &Gpu, offset: usize, out: &mut [u8]) -> Result<(), CudaError> {
        let range = self.range(offset, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let part = self.slice.slice(range);
        gpu.stream().memcpy_dtoh(&part, out).map_err(failed("cannot copy from the card"))?;
        gpu.wait()
    }
}

impl Buffer {
    /// Copies float32 numbers from the card, once everything launched before is done.
    pub(crate) fn read_f32(&self, gpu: &Gpu, offset: usize, out: &mut [f32]) -> Result<(), CudaError> {
        let len = size_of_val(out);
        // SAFETY: the bytes of the numbers, borrowed exclusively as they are; every bit pattern is a float.
        let bytes = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), len) };
        self.read(gpu, offset, bytes)
    }
}

/// Numbers of which every bit pattern is one.
pub(crate) trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for u8 {}

/// Numbers that the card reads and writes directly: page-locked memory of the host, which grows as it is needed.
pub(crate) struct Pinned<T: Plain> {
    context: Arc<CudaContext>,
    first: NonNull<T>,
    room: usize,
    len: usize,
}

// SAFETY: the memory is the value's own, and freed with it; any thread may use page-locked memory.
unsafe impl<T: Plain> Send for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    pub(crate) fn new(gpu: &Gpu) -> Self {
        Self { context: Arc::clone(&gpu.context), first: NonNull::dangling(), room: 0, len: 0 }
    }

    /// `len` numbers of any value.
    ///
    /// # Errors
    /// When the host has no such memory.
    pub(crate) fn resize(&mut self, len: usize) -> Result<&mut [T], CudaError> {
        if len > self.room {
            self.free();
            let bytes = len * size_of::<T>();
            let what = || format!("cannot lock {} of the host's memory", ByteCount(bytes as u64));
            self.context.bind_to_thread().map_err(failed(what()))?;
            // SAFETY: nobody else knows the memory; it is written once before numbers of it are seen.
            let first = unsafe {
                let first = result::malloc_host(bytes, 0).map_err(failed(what()))?.cast::<T>();
                first.write_bytes(0, len);
                first
            };
            let reason = || "it gave no address".to_owned();
            self.first =
                NonNull::new(first).ok_or_else(|| CudaError::Driver { what: what(), reason: reason() })?;
            self.room = len;
        }
        self.len = len;
        // SAFETY: `room` initialised numbers from `first` on, at least `len`; the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), len) })
    }

    pub(crate) const fn get(&self) -> &[T] {
        // SAFETY: `room` initialised numbers from `first` on, at least `len`; a dangling address stands for none.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    fn free(&mut self) {
        if self.room == 0 {
            return;
        }
        (self.room, self.len) = (0, 0);
        // Nothing to be done about a context that is gone: the memory went with it.
        let _ = self.context.bind_to_thread();
        // SAFETY: it came from `malloc_host` and is freed once; copies to it were waited for.
        let _ = unsafe { result::free_host(self.first.as_ptr().cast()) };
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        self.free();
    }
}

/// Constants of a program on the card. Bytes that several nodes read are there once.
#[derive(Default)]
pub(crate) struct Uploads {
    by_source: HashMap<(usize, usize), Arc<Buffer>>,
    bytes: u64,
}

impl Uploads {
    /// The bytes on the card.
    ///
    /// # Errors
    /// When the card has no memory for them.
    pub(crate) fn get(&mut self, gpu: &Gpu, bytes: &Bytes, what: &str) -> Result<Arc<Buffer>, DeviceError> {
        let source = (bytes.as_ptr() as usize, bytes.len());
        if let Some(buffer) = self.by_source.get(&source) {
            return Ok(Arc::clone(buffer));
        }
        let mut buffer = Buffer::new(gpu, bytes.len(), what)?;
        buffer.write(gpu, 0, bytes)?;
        let buffer = Arc::new(buffer);
        self.bytes += bytes.len() as u64;
        self.by_source.insert(source, Arc::clone(&buffer));
        Ok(buffer)
    }
}
