//! External data: where the bytes of large initializers come from, and which ranges are allowed.

use super::error::DecodeError;
use bytes::Bytes;
use std::collections::BTreeMap;

/// The data files beside a model file.
pub trait ExternalFiles {
    /// The whole file at `location`, a path relative to the model file.
    ///
    /// # Errors
    /// Says why the location is refused or the file cannot be read.
    fn file(&self, location: &str) -> Result<Bytes, String>;
}

/// No data files: a model that refers to one is refused.
#[derive(Debug, Clone, Copy)]
pub struct NoExternalFiles;

impl ExternalFiles for NoExternalFiles {
    fn file(&self, location: &str) -> Result<Bytes, String> {
        Err(format!("its data is in {location:?}, and this model has no data files"))
    }
}

/// The external ranges of one model. Tensors may share a range (tied weights); ranges that overlap in part are
/// refused, as no exporter writes them and one of the tensors must then be wrong.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    by_file: BTreeMap<String, Vec<(u64, u64, String)>>,
}

impl Ranges {
    pub(super) fn insert(&mut self, location: &str, start: u64, end: u64, tensor: &str) {
        if start < end {
            self.by_file.entry(location.to_owned()).or_default().push((start, end, tensor.to_owned()));
        }
    }

    pub(super) fn check(self) -> Result<(), DecodeError> {
        for (file, mut ranges) in self.by_file {
            ranges.sort();
            for pair in ranges.windows(2) {
                let [(s0, e0, first), (s1, e1, second)] = pair else { continue };
                if s1 < e0 && (s0, e0) != (s1, e1) {
                    return Err(DecodeError::Tensor {
                        name: second.clone(),
                        reason: format!(
                            "its bytes {s1}..{e1} of {file:?} overlap those of tensor {first:?}, {s0}..{e0}; ranges \
                             must be equal or disjoint"
                        ),
                    });
                }
            }
        }
        Ok(())
    }
}
