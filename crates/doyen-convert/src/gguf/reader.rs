//! A cursor over the front of a GGUF file that never takes a claimed length on trust.
//!
//! Every length is compared with the bytes that are left before anything is allocated, so that memory stays within a
//! small multiple of the metadata's size, which is bounded itself.

use crate::{ConvertError, source::Data};
use bytes::Bytes;

/// Far above every released file, whose metadata is mostly the tokenizer (40 MB for a million tokens).
const MAX_METADATA: u64 = 512 << 20;

/// Bytes that are fetched at once.
const WINDOW: usize = 1 << 20;

/// Reads little-endian values one after the other.
pub(super) struct Reader<'a> {
    data: &'a Data,
    window: Bytes,
    /// Place of the window's first byte in the file.
    window_at: u64,
    /// Place of the next byte in the file.
    at: u64,
    end: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(data: &'a Data) -> Self {
        let end = data.len().min(MAX_METADATA);
        Self { data, window: Bytes::new(), window_at: 0, at: 0, end }
    }

    pub(super) const fn at(&self) -> u64 {
        self.at
    }

    pub(super) const fn left(&self) -> u64 {
        self.end - self.at
    }

    pub(super) fn fail(&self, message: impl Into<String>) -> ConvertError {
        ConvertError::file(self.data.path(), message)
    }

    /// The next `len` bytes, which belong to `what`.
    pub(super) fn bytes(&mut self, len: u64, what: &str) -> Result<Bytes, ConvertError> {
        if len > self.left() {
            let (at, left) = (self.at, self.left());
            let why = if self.end < self.data.len() { "metadata may take" } else { "the file has" };
            return Err(self.fail(format!("{what}: expected {len} bytes at byte {at}, {why} {left} more")));
        }
        let len = len as usize;
        let start = self.at.checked_sub(self.window_at).map(|s| s as usize);
        let start = if let Some(start) = start.filter(|s| s + len <= self.window.len()) {
            start
        } else {
            let wanted = (WINDOW as u64).min(self.left()) as usize;
            self.window = self.data.range(self.at, wanted.max(len))?;
            self.window_at = self.at;
            0
        };
        self.at += len as u64;
        Ok(self.window.slice(start..start + len))
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ConvertError> {
        let bytes = self.bytes(N as u64, what)?;
        bytes.first_chunk().copied().ok_or_else(|| self.fail(format!("{what}: expected {N} bytes")))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ConvertError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ConvertError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `least` bytes each.
    pub(super) fn count(&mut self, least: u64, what: &str) -> Result<usize, ConvertError> {
        let n = self.u64(what)?;
        if n > self.left() / least {
            let most = self.left() / least;
            return Err(self.fail(format!("{what}: expected at most {most}, which fit the file, found {n}")));
        }
        Ok(n as usize)
    }

    /// A string: its length in 8 bytes, then UTF-8 text.
    pub(super) fn string(&mut self, what: &str) -> Result<String, ConvertError> {
        let len = self.u64(what)?;
        let bytes = self.bytes(len, what)?;
        String::from_utf8(bytes.to_vec()).map_err(|e| {
            self.fail(format!(
                "{what}: expected UTF-8 text, found other bytes after {}",
                e.utf8_error().valid_up_to()
            ))
        })
    }
}
