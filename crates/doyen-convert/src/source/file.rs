//! One safetensors file: mapped, header checked, tensors as slices.
//!
//! Layout: 8 bytes little-endian header length, a JSON header, then the tensors without gaps. The `safetensors`
//! crate parses and validates the header; the checks against the file's length are ours, for their messages.

use super::{Entry, SourceType};
use crate::ConvertError;
use bytes::Bytes;
use doyen_graph::package::map_file;
use safetensors::tensor::{Dtype, Metadata};
use std::path::{Path, PathBuf};

/// The format's own bound on the header.
const MAX_HEADER: u64 = 100_000_000;

#[derive(Debug)]
pub(super) struct TensorFile {
    metadata: Metadata,
    data: Bytes,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, ConvertError> {
        let bytes = map_file(path).map_err(ConvertError::read(path))?;
        Self::parse(&bytes, path)
    }

    pub(super) fn parse(bytes: &Bytes, path: &Path) -> Result<Self, ConvertError> {
        let fail = |message: String| ConvertError::File { path: PathBuf::from(path), message };
        let header_len = bytes
            .first_chunk::<8>()
            .map(|b| u64::from_le_bytes(*b))
            .ok_or_else(|| fail(format!("not a safetensors file: {} bytes", bytes.len())))?;
        if header_len > MAX_HEADER {
            return Err(fail(format!("not a safetensors file: its header claims {header_len} bytes")));
        }
        let start = 8 + header_len as usize;
        let header = bytes.get(8..start).ok_or_else(|| {
            fail(format!("truncated: the header ends at byte {start}, the file at {}", bytes.len()))
        })?;
        let metadata: Metadata =
            serde_json::from_slice(header).map_err(|e| fail(format!("malformed safetensors header: {e}")))?;
        let expected = metadata.data_len();
        let found = bytes.len() - start;
        if expected != found {
            let what = if found < expected { "truncated" } else { "longer than its header says" };
            return Err(fail(format!("{what}: expected {expected} bytes of tensors, found {found}")));
        }
        Ok(Self { metadata, data: bytes.slice(start..) })
    }

    pub(super) fn into_entries(self) -> impl Iterator<Item = (String, Entry)> {
        let Self { metadata, data } = self;
        metadata.offset_keys().into_iter().filter_map(move |name| {
            let info = metadata.info(&name)?;
            let (start, end) = info.data_offsets;
            let entry = Entry {
                dtype: source_type(info.dtype),
                shape: info.shape.clone(),
                bytes: data.slice(start..end),
            };
            Some((name, entry))
        })
    }
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
