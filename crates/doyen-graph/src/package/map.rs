//! Read-only memory maps of package files; `watch`: those that are truncated meanwhile. The only unsafe code of this crate.

mod watch;

pub use watch::explain_truncated_files;

use bytes::Bytes;
use memmap2::{Mmap, MmapOptions};
use std::{fs::File, io, path::Path};
use watch::Watched;

/// The whole of a regular file, mapped; the mapping lives as long as any slice of it.
///
/// # Errors
/// When the file cannot be opened or mapped, or is no regular file (a pipe or device has no end).
#[allow(unsafe_code)]
pub(super) fn map(path: &Path) -> io::Result<Bytes> {
    // A pipe would block the open itself, so the kind is asked for first.
    if !path.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    if metadata.len() == 0 {
        return Ok(Bytes::new());
    }
    // Another process that writes to the file while we run can change what we read, and one that truncates it ends this
    // process (`watch`). Packages are replaced by renaming, never in place, and every value read from a mapping is
    // checked where it is used, so that no memory outside of it is ever reached.
    // SAFETY: the mapping is read-only, and its bytes are handed out only as slices of `Bytes`, which owns it.
    let map = unsafe { Mmap::map(&file)? };
    prefer_huge_pages(&map);
    Ok(Bytes::from_owner(Watched::new(map)))
}

/// Asks for huge pages: file systems whose page cache can hold them then read whole ones from the disk, and map those that
/// are there as such. Every weight is read for every token, and walking the tables of small pages costs a reader of memory up to a
/// third of its speed in a virtual machine. What is in the page cache in small pages already stays so.
fn prefer_huge_pages(map: &Mmap) {
    #[cfg(target_os = "linux")]
    if map.len() >= 2 << 20 {
        // Systems without huge pages refuse, and small ones do as well.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = map;
}

/// Bytes `offset .. offset + len` of a regular file, mapped; the mapping lives as long as any slice of it. For readers
/// that go through a large file once and want its pages back as they go.
///
/// # Errors
/// When the file ends before the range, or cannot be mapped.
#[allow(unsafe_code)]
pub fn map_range(file: &File, offset: u64, len: usize) -> io::Result<Bytes> {
    let end = offset.checked_add(len as u64);
    let found = file.metadata()?.len();
    if end.is_none_or(|end| end > found) {
        let message = format!("bytes {offset} to {offset} + {len} of a file of {found} bytes");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
    }
    if len == 0 {
        return Ok(Bytes::new());
    }
    // The range was inside of the file at the check above; what a file that shrinks means stands in `map`.
    // SAFETY: the mapping is read-only, and its bytes are handed out only as slices of `Bytes`, which owns it.
    let map = unsafe { MmapOptions::new().offset(offset).len(len).map(file)? };
    Ok(Bytes::from_owner(Watched::new(map)))
}
