//! One GGUF file: header, metadata and the directory of tensors, checked against the file's length.
//!
//! Layout: magic, version, number of tensors, number of key-value pairs, the pairs, then for each tensor its name, extents
//! (fastest first), type and offset; then, from the next multiple of the alignment on, the tensors.

use super::{metadata::Metadata, reader::Reader, types::GgmlType};
use crate::{ConvertError, source::Data};
use std::{collections::BTreeMap, io::Read, path::Path};

const MAGIC: [u8; 4] = *b"GGUF";
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Sectors and huge pages are far below; a larger one only serves to overflow something.
const MOST_ALIGNMENT: u64 = 1 << 24;
const MOST_DIMS: u32 = 4;
/// Key length, type and a value of one byte; name length, number of extents, type and offset.
const LEAST_PAIR: u64 = 13;
const LEAST_TENSOR: u64 = 24;

/// A file's front matter.
#[derive(Debug)]
pub(super) struct GgufFile {
    pub metadata: Metadata,
    /// By name.
    pub tensors: BTreeMap<String, Stored>,
}

/// A tensor as the directory describes it, its range checked.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub ty: GgmlType,
    /// Extents, slowest first; one at least.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// The file.
    pub data: Data,
}

impl GgufFile {
    pub(super) fn open(path: &Path) -> Result<Self, ConvertError> {
        Self::parse(&Data::open(path).map_err(ConvertError::read(path))?)
    }

    pub(super) fn parse(data: &Data) -> Result<Self, ConvertError> {
        let mut r = Reader::new(data);
        check_version(&mut r)?;
        let tensor_count = r.count(LEAST_TENSOR, "number of tensors")?;
        let pair_count = r.count(LEAST_PAIR, "number of key-value pairs")?;
        let metadata = Metadata::read(&mut r, data.path(), pair_count)?;
        let alignment = alignment(&metadata)?;
        let mut tensors = BTreeMap::new();
        for i in 0..tensor_count {
            let name = r.string(&format!("name of tensor {i} of {tensor_count}"))?;
            let stored = read_tensor(&mut r, data, &name, alignment)?;
            if tensors.insert(name.clone(), stored).is_some() {
                return Err(r.fail(format!("tensor {name:?}: expected once, found twice")));
            }
        }
        let start = r.at().next_multiple_of(alignment);
        place(data, &mut tensors, start)?;
        Ok(Self { metadata, tensors })
    }
}

fn check_version(r: &mut Reader<'_>) -> Result<(), ConvertError> {
    let magic: [u8; 4] = r.array("not a GGUF file")?;
    if magic != MAGIC {
        let text = magic.escape_ascii();
        return Err(r.fail(format!("not a GGUF file: it starts with \"{text}\", expected \"GGUF\"")));
    }
    match r.u32("version")? {
        2 | 3 => Ok(()),
        v if v.swap_bytes() <= 3 => {
            Err(r.fail("a big-endian GGUF file; only little-endian files are read, convert it first"))
        }
        v => Err(r.fail(format!("version is {v}, expected 2 or 3"))),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, ConvertError> {
    match metadata.unsigned(ALIGNMENT)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(n) if n.is_power_of_two() && (8..=MOST_ALIGNMENT).contains(&n) => Ok(n),
        Some(n) => Err(metadata.wrong(ALIGNMENT, n, "a power of two from 8 to 16777216")),
    }
}

/// Reads a directory entry; the offset is still relative to the first tensor.
fn read_tensor(r: &mut Reader<'_>, data: &Data, name: &str, alignment: u64) -> Result<Stored, ConvertError> {
    let what = format!("tensor {name:?}");
    let dims = r.u32(&what)?;
    if !(1..=MOST_DIMS).contains(&dims) {
        return Err(r.fail(format!("{what}: expected 1 to {MOST_DIMS} dimensions, found {dims}")));
    }
    let mut shape = Vec::new();
    for _ in 0..dims {
        let extent = r.u64(&what)?;
        match usize::try_from(extent) {
            Ok(n @ 1..) => shape.push(n),
            _ => return Err(r.fail(format!("{what}: expected extents of 1 or more, found {extent}"))),
        }
    }
    let number = r.u32(&what)?;
    let ty = GgmlType::new(number).ok_or_else(|| {
        let known = GgmlType::read().map(GgmlType::name).collect::<Vec<_>>().join(", ");
        r.fail(format!("{what}: its type has the number {number}, which is not known; known are {known}"))
    })?;
    let offset = r.u64(&what)?;
    if !offset.is_multiple_of(alignment) {
        return Err(
            r.fail(format!("{what}: expected an offset that is a multiple of {alignment}, found {offset}"))
        );
    }
    let cols = shape[0];
    let row = ty.row_bytes(cols).ok_or_else(|| {
        let (values, _) = ty.block();
        r.fail(format!("{what}: expected rows of a multiple of {values} values, as {ty} has, found {cols}"))
    })?;
    shape.reverse();
    let rows = shape[..shape.len() - 1].iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let bytes = rows
        .and_then(|n| n.checked_mul(row))
        .filter(|_| shape.iter().try_fold(8usize, |n, &d| n.checked_mul(d)).is_some());
    let bytes = bytes.ok_or_else(|| r.fail(format!("{what}: its extents {shape:?} overflow")))?;
    Ok(Stored { ty, shape, offset, bytes: bytes as u64, data: data.clone() })
}

/// Makes offsets absolute; every range must lie in the file, and none in another.
fn place(data: &Data, tensors: &mut BTreeMap<String, Stored>, start: u64) -> Result<(), ConvertError> {
    let len = data.len();
    let fail =
        |name: &str, message: String| ConvertError::file(data.path(), format!("tensor {name:?}: {message}"));
    for (name, t) in tensors.iter_mut() {
        let (relative, bytes) = (t.offset, t.bytes);
        let at = start.checked_add(relative);
        let end = at.and_then(|at| at.checked_add(bytes));
        match (at, end) {
            (Some(at), Some(end)) if end <= len => t.offset = at,
            (Some(at), Some(end)) => {
                let message = format!(
                    "expected bytes {at}..{end}, found the end of the file at {len}; is it truncated?"
                );
                return Err(fail(name, message));
            }
            _ => return Err(fail(name, format!("its offset {relative} overflows"))),
        }
    }
    let mut ranges: Vec<(u64, u64, &str)> =
        tensors.iter().map(|(n, t)| (t.offset, t.offset + t.bytes, n.as_str())).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((_, end, first), (at, _, second)) = (pair[0], pair[1]);
        if at < end {
            return Err(fail(
                second,
                format!("starts at byte {at}, inside of {first:?}, which ends at {end}"),
            ));
        }
    }
    Ok(())
}

/// Whether a file starts as GGUF files do.
pub(super) fn has_magic(path: &Path) -> bool {
    let mut start = [0; 4];
    std::fs::File::open(path).and_then(|mut f| f.read_exact(&mut start)).is_ok() && start == MAGIC
}
