//! One safetensors file: header checked, tensors as ranges of it.
//!
//! Layout: 8 bytes little-endian header length, a JSON header, then the tensors without gaps. The `safetensors`
//! crate parses and validates the header; the checks against the file's length are ours, for their messages.

use super::{Entry, RowOrder, SourceType};
use crate::ConvertError;
use bytes::Bytes;
use doyen_graph::package::map_range;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The format's own bound on the header.
const MAX_HEADER: u64 = 100_000_000;

/// The bytes of a file, mapped range by range: whoever reads a large checkpoint once holds a range at a time.
#[derive(Debug, Clone)]
pub(crate) enum Data {
    Mapped { file: Arc<File>, path: Arc<Path>, len: u64 },
    Memory { bytes: Bytes, path: Arc<Path> },
}

impl Data {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // A pipe would block the open itself, so the kind is asked for first.
        if !path.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok(Self::Mapped { file: Arc::new(file), path: path.into(), len })
    }

    pub(crate) fn memory(bytes: &Bytes, path: &Path) -> Self {
        Self::Memory { bytes: bytes.clone(), path: path.into() }
    }

    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Mapped { len, .. } => *len,
            Self::Memory { bytes, .. } => bytes.len() as u64,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Mapped { path, .. } | Self::Memory { path, .. } => path,
        }
    }

    /// A range that the header has vouched for.
    pub(crate) fn range(&self, offset: u64, len: usize) -> Result<Bytes, ConvertError> {
        let found = match self {
            Self::Mapped { file, .. } => map_range(file, offset, len),
            Self::Memory { bytes, .. } => usize::try_from(offset)
                .ok()
                .and_then(|start| Some(start..start.checked_add(len)?))
                .filter(|r| r.end <= bytes.len())
                .map(|r| bytes.slice(r))
                .ok_or_else(|| io::ErrorKind::UnexpectedEof.into()),
        };
        found.map_err(ConvertError::read(self.path()))
    }
}

#[derive(Debug)]
pub(super) struct TensorFile {
    metadata: Metadata,
    data: Data,
    /// Where the tensors start.
    start: u64,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, ConvertError> {
        Self::parse(Data::open(path).map_err(ConvertError::read(path))?)
    }

    pub(super) fn parse(data: Data) -> Result<Self, ConvertError> {
        let len = data.len();
        let fail = |message: String| ConvertError::File { path: PathBuf::from(data.path()), message };
        if len < 8 {
            return Err(fail(format!("not a safetensors file: {len} bytes")));
        }
        let header_len = data.range(0, 8)?.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        if header_len > MAX_HEADER {
            return Err(fail(format!("not a safetensors file: its header claims {header_len} bytes")));
        }
        let start = 8 + header_len;
        if start > len {
            return Err(fail(format!("truncated: the header ends at byte {start}, the file at {len}")));
        }
        let header = data.range(8, header_len as usize)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|e| fail(format!("malformed safetensors header: {}", diagnosis(&header, &e))))?;
        let (expected, found) = (metadata.data_len() as u64, len - start);
        if expected != found {
            let what = if found < expected { "truncated" } else { "longer than its header says" };
            return Err(fail(format!("{what}: expected {expected} bytes of tensors, found {found}")));
        }
        Ok(Self { metadata, data, start })
    }

    pub(super) fn into_entries(self) -> impl Iterator<Item = (String, Entry)> {
        let Self { metadata, data, start } = self;
        metadata.offset_keys().into_iter().filter_map(move |name| {
            let info = metadata.info(&name)?;
            let entry = Entry {
                dtype: source_type(info.dtype),
                shape: info.shape.clone(),
                data: data.clone(),
                offset: start + info.data_offsets.0 as u64,
                stored_name: None,
                order: RowOrder::Stored,
                parts: Vec::new(),
            };
            Some((name, entry))
        })
    }
}

/// What is wrong with a header that was refused, by tensor: the crate that refuses it names none, or any.
fn diagnosis(header: &[u8], refusal: &serde_json::Error) -> String {
    let Ok(entries) = serde_json::from_slice::<serde_json::Map<_, _>>(header) else {
        return refusal.to_string();
    };
    let mut ranges = Vec::new();
    for (name, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
        let info: TensorInfo = match serde_json::from_value(entry.clone()) {
            Ok(info) => info,
            Err(e) => return format!("tensor {name:?}: {e}"),
        };
        let (start, end) = info.data_offsets;
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
        if bits.is_none_or(|b| !b.is_multiple_of(8) || end.checked_sub(start) != Some(b / 8)) {
            let (dtype, shape) = (info.dtype, info.shape);
            return format!("tensor {name:?}: bytes {start}..{end} are not what {dtype} {shape:?} takes");
        }
        ranges.push((start, end, name));
    }
    ranges.sort_unstable();
    let mut before = 0;
    for (start, end, name) in ranges {
        if start != before {
            let what = if start < before { "overlaps the one before" } else { "leaves a gap" };
            return format!("tensor {name:?}: its range {start}..{end} {what}, which ends at {before}");
        }
        before = end;
    }
    refusal.to_string()
}

fn source_type(dtype: Dtype) -> SourceType {
    match dtype {
        Dtype::F32 => SourceType::F32,
        Dtype::F16 => SourceType::F16,
        Dtype::BF16 => SourceType::BF16,
        Dtype::F64 => SourceType::F64,
        other => SourceType::Other(other),
    }
}
