//! Checkpoints as they lie on disk: safetensors, in one file or sharded with an index. (GGUF files become the same
//! [`Checkpoint`] in `gguf`.)
//!
//! A checkpoint is mapped, never loaded: a [`Weight`] is a name, a shape and a place in a file, and rows are mapped and
//! widened to f32 a chunk at a time, so that neither memory nor mapped pages grow with the checkpoint. Everything a file
//! claims is checked here; what the tensors mean is the business of `blocks`.

mod compose;
mod file;
mod packed;
mod weight;
mod wrapped;

pub(crate) use file::Data;
pub use packed::Packing;
pub use weight::{RowOrder, SourceType, Weight};

use crate::ConvertError;
use bytes::Bytes;
use file::TensorFile;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a checkpoint folder by name. Remembers which were taken.
#[derive(Debug)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Entry>,
    taken: BTreeSet<String>,
    /// What the file calls a tensor, where recipes call it otherwise.
    naming: Option<&'static dyn Naming>,
    /// Tensors of zeros that stand for nothing.
    zeros: BTreeSet<String>,
}

/// What a file calls the tensors that recipes ask for.
pub(crate) trait Naming: std::fmt::Debug + Sync {
    /// The name in the file.
    fn stored_name(&self, asked: &str) -> Option<String>;
}

/// A tensor's place.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub dtype: SourceType,
    pub shape: Vec<usize>,
    pub data: Data,
    /// First byte in `data`.
    pub offset: u64,
    /// Name in the file, where it is another.
    pub stored_name: Option<String>,
    pub order: RowOrder,
    /// Tensors that make up the matrix, where it is several.
    pub parts: Vec<packed::Part>,
}

impl Checkpoint {
    /// Opens the tensors of `dir`: `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// When neither is there, a shard is missing, a file is truncated or its header is malformed (overlapping or
    /// overflowing ranges included), or the index names a tensor that its shard does not hold.
    pub fn open(dir: &Path) -> Result<Self, ConvertError> {
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        let tensors = if single.is_file() {
            TensorFile::open(&single)?.into_entries().collect()
        } else if index.is_file() {
            read_shards(dir, &index)?
        } else {
            return Err(nothing_to_read(dir, single));
        };
        Ok(Self::of(tensors, None))
    }

    /// The tensors of one safetensors file that is in memory; `name` stands for its path in errors.
    ///
    /// # Errors
    /// When the header is malformed or the bytes are not what it says.
    pub fn from_bytes(bytes: &Bytes, name: &Path) -> Result<Self, ConvertError> {
        let tensors = TensorFile::parse(Data::memory(bytes, name))?.into_entries().collect();
        Ok(Self::of(tensors, None))
    }

    /// Tensors that were found elsewhere.
    pub(crate) fn of(tensors: BTreeMap<String, Entry>, naming: Option<&'static dyn Naming>) -> Self {
        Self { tensors, taken: BTreeSet::new(), naming, zeros: BTreeSet::new() }
    }

    /// Whether its tensors have other names in the file, as those of GGUF files.
    pub(crate) fn is_renamed(&self) -> bool {
        self.naming.is_some()
    }

    /// Name and shape of every tensor.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(n, e)| (n.as_str(), e.shape.as_slice()))
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of this name, which must be a float tensor of exactly `shape` (rank 1 or 2).
    ///
    /// # Errors
    /// When it is absent, of another type, or of another shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Weight, ConvertError> {
        let (stored, entry) = self.entry(name, shape)?;
        if let Some((expected, found)) = entry.dtype.unread() {
            return Err(ConvertError::tensor(&stored, format!("expected {expected}, found {found}")));
        }
        let (rows, cols) = match *shape {
            [cols] => (1, cols),
            [rows, cols] => (rows, cols),
            _ => return Err(ConvertError::tensor(&stored, format!("expected rank 1 or 2, found {shape:?}"))),
        };
        Ok(Weight::new(&stored, &entry, (rows, cols)))
    }

    /// The tensor of this name and shape as a matrix `[rows, cols]` of as many values.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_as(
        &mut self,
        name: &str,
        shape: &[usize],
        matrix: (usize, usize),
    ) -> Result<Weight, ConvertError> {
        let (stored, entry) = self.entry(name, shape)?;
        if let Some((expected, found)) = entry.dtype.unread() {
            return Err(ConvertError::tensor(&stored, format!("expected {expected}, found {found}")));
        }
        Ok(Weight::new(&stored, &entry, matrix))
    }

    /// The matrices `[rows, cols]` of the tensor `[count, rows, cols]` of this name, or `[count, cols, rows]` where they
    /// are stored transposed.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_stack(
        &mut self,
        name: &str,
        [count, rows, cols]: [usize; 3],
        transposed: bool,
    ) -> Result<Vec<Weight>, ConvertError> {
        let shape = if transposed { [count, cols, rows] } else { [count, rows, cols] };
        let (stored, mut entry) = self.entry(name, &shape)?;
        if let Some((expected, found)) = entry.dtype.unread() {
            return Err(ConvertError::tensor(&stored, format!("expected {expected}, found {found}")));
        }
        if transposed && matches!(entry.dtype, SourceType::Packed(_)) {
            let message = "has codes along the rows of a transposed matrix, which no stored format keeps; expected \
                           [experts, rows, columns]";
            return Err(ConvertError::tensor(&stored, message));
        }
        if transposed {
            entry.order = RowOrder::Transposed { width: rows, first: 0 };
        }
        Ok((0..count).map(|i| Weight::matrix(&stored, &entry, (rows, cols), i)).collect())
    }

    /// The matrices `[rows, cols]` of 4-bit floats in the tensors `NAME_blocks` `[count, rows, cols / 32, 16]` and
    /// `NAME_scales` `[count, rows, cols / 32]`.
    ///
    /// # Errors
    /// When either is absent, holds no bytes, or has another shape.
    pub fn take_mxfp4(
        &mut self,
        name: &str,
        [count, rows, cols]: [usize; 3],
    ) -> Result<Vec<Weight>, ConvertError> {
        const GROUP: usize = 32;
        if !cols.is_multiple_of(GROUP) {
            let message =
                format!("has 4-bit floats in groups of {GROUP}, which do not divide its {cols} columns");
            return Err(ConvertError::tensor(name, message));
        }
        let mut bytes = |suffix: &str, shape: &[usize]| {
            let (stored, entry) = self.entry(&format!("{name}_{suffix}"), shape)?;
            match entry.dtype {
                SourceType::Other(safetensors::Dtype::U8) => Ok(entry),
                other => Err(ConvertError::tensor(&stored, format!("expected U8, found {other}"))),
            }
        };
        let mut entry = bytes("blocks", &[count, rows, cols / GROUP, GROUP / 2])?;
        let scales = bytes("scales", &[count, rows, cols / GROUP])?;
        entry.parts = vec![entry.part(), scales.part()];
        entry.dtype = SourceType::Packed(Packing::Mxfp4);
        Ok((0..count).map(|i| Weight::matrix(name, &entry, (rows, cols), i)).collect())
    }

    /// Name in the file and place of the tensor of this name and shape, which is taken with it.
    fn entry(&mut self, name: &str, shape: &[usize]) -> Result<(String, Entry), ConvertError> {
        let Some(entry) = self.tensors.get(name) else {
            let stored = self.naming.and_then(|n| n.stored_name(name)).unwrap_or_else(|| name.to_owned());
            return Err(ConvertError::tensor(&stored, "not in the checkpoint, and the model needs it"));
        };
        let stored = entry.stored_name.clone().unwrap_or_else(|| name.to_owned());
        if entry.shape != shape {
            let found = &entry.shape;
            let message = format!("expected shape {shape:?} by the model's configuration, found {found:?}");
            return Err(ConvertError::tensor(&stored, message));
        }
        self.taken.insert(name.to_owned());
        Ok((stored, entry.clone()))
    }

    /// Whether it holds weights that are quantized.
    pub(crate) fn is_quantized(&self) -> bool {
        let packed =
            |(n, e): (&String, &Entry)| n.ends_with("_blocks") || matches!(e.dtype, SourceType::Packed(_));
        self.is_renamed() || self.tensors.iter().any(packed)
    }

    /// Whether two matrices hold the same numbers, whatever type they are stored in.
    ///
    /// # Errors
    /// When one is absent, or has a value that is no number.
    pub(crate) fn same_values(&self, a: &str, b: &str) -> Result<bool, ConvertError> {
        /// Values that are compared at a time.
        const CHUNK: usize = 1 << 20;
        let place = |name: &str| {
            self.tensors.get(name).ok_or_else(|| ConvertError::tensor(name, "not in the checkpoint"))
        };
        let entries = [place(a)?, place(b)?];
        let [&[rows, cols], &[..]] = entries.map(|e| e.shape.as_slice()) else { return Ok(false) };
        if entries[0].shape != entries[1].shape || entries.iter().any(|e| e.dtype.unread().is_some()) {
            return Ok(false);
        }
        let step = (CHUNK / cols.max(1)).max(1);
        let (x, y) = (Weight::new(a, entries[0], (rows, cols)), Weight::new(b, entries[1], (rows, cols)));
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for first in (0..rows).step_by(step) {
            let chunk = first..rows.min(first + step);
            left.clear();
            right.clear();
            x.read_rows(chunk.clone(), &mut left)?;
            y.read_rows(chunk, &mut right)?;
            if left != right {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The shape of the tensor of this name.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|e| e.shape.as_slice())
    }

    /// The type of the tensor of this name.
    pub fn dtype(&self, name: &str) -> Option<SourceType> {
        self.tensors.get(name).map(|e| e.dtype)
    }

    /// Names of tensors that nobody took, in order.
    pub fn untaken(&self) -> impl Iterator<Item = &str> {
        self.tensors
            .keys()
            .map(String::as_str)
            .filter(|n| !self.taken.contains(*n) && !self.zeros.contains(*n))
    }
}

fn nothing_to_read(dir: &Path, single: PathBuf) -> ConvertError {
    let other = ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "consolidated.00.pth"]
        .iter()
        .find(|f| dir.join(f).exists());
    let needed = match other {
        Some(f) => {
            format!("nor is there {INDEX}; {f} cannot be read, save the checkpoint as safetensors first")
        }
        None => format!("nor is there {INDEX}; a checkpoint folder holds one of the two"),
    };
    ConvertError::Missing { path: single, needed }
}

fn read_shards(dir: &Path, index: &Path) -> Result<BTreeMap<String, Entry>, ConvertError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read(index).map_err(ConvertError::read(index))?;
    let Index { weight_map } =
        serde_json::from_slice(&text).map_err(|e| ConvertError::file(index, format!("not an index: {e}")))?;
    let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        if Path::new(shard).file_name().is_none_or(|n| n != shard.as_str()) {
            return Err(ConvertError::file(
                index,
                format!("tensor {tensor:?} lies in {shard:?}; expected a file name beside the index"),
            ));
        }
        by_shard.entry(shard).or_default().push(tensor);
    }
    let mut out = BTreeMap::new();
    for (shard, names) in by_shard {
        let path = dir.join(shard);
        if !path.is_file() {
            let needed = format!("{INDEX} places {} tensors in it, {:?} among them", names.len(), names[0]);
            return Err(ConvertError::Missing { path, needed });
        }
        let mut entries: BTreeMap<String, Entry> = TensorFile::open(&path)?.into_entries().collect();
        for name in names {
            let entry = entries.remove(name).ok_or_else(|| {
                ConvertError::tensor(name, format!("{INDEX} places it in {shard}, which does not hold it"))
            })?;
            out.insert(name.to_owned(), entry);
        }
        // What is left of the shard is nobody's, unless the index places a tensor of the name elsewhere.
        if let Some((name, other)) = entries.keys().find_map(|n| weight_map.get_key_value(n)) {
            return Err(ConvertError::tensor(
                name,
                format!("is in {shard} and in {other}; expected one of them"),
            ));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
