//! GGUF files: everything `llama.cpp` and its relatives need of a model, in one file or a few.
//!
//! | module | what lives there |
//! |---|---|
//! | `reader`, `file`, `metadata`, `types` | the container: header, key-value pairs, directory of tensors, all checked |
//! | `block` | the bytes of each quantized type as codes and scales |
//! | `split` | models in several files |
//! | `names` | tensors under the names that recipes ask for, undoing what the writers of GGUF files did to them |
//! | `config` | metadata as the fields of `config.json` |
//! | `tokenizer` | metadata as `tokenizer.json` and its companions |
//!
//! What comes out is a [`Checkpoint`] and the files of a checkpoint folder, so that recipes and
//! `write` know nothing of GGUF.

mod block;
mod config;
mod file;
mod metadata;
mod names;
mod reader;
mod split;
mod tokenizer;
mod types;

pub use block::{Unpacked, unpack};
pub use types::{Codes, GgmlType};

use crate::{
    ConvertError,
    config::{Fields, ModelConfig},
    source::{Checkpoint, Data},
};
use bytes::Bytes;
use file::GgufFile;
use metadata::Metadata;
use names::Architecture;
use std::{path::Path, sync::Arc};

/// A model read from GGUF files.
#[derive(Debug)]
pub(crate) struct Model {
    pub checkpoint: Checkpoint,
    /// Files of the package, by name.
    pub files: Vec<(&'static str, Vec<u8>)>,
    pub notices: Vec<String>,
    /// Whether scales or zero points of tensors that are carried over need float32.
    pub wants_f32: bool,
    /// Divisors of the rotary frequencies, one for each pair of channels.
    pub rope_factors: Option<Arc<[f32]>>,
    fields: Fields,
    metadata: Metadata,
    arch: &'static Architecture,
}

/// Whether `path` is taken for a GGUF file: by its name, or by its first bytes.
pub fn is_gguf(path: &Path) -> bool {
    let named = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    path.is_file() && (named || file::has_magic(path))
}

/// Reads the model in the file at `path` and, if it is one of several, the files beside it.
pub(crate) fn open(path: &Path) -> Result<Model, ConvertError> {
    Model::of(split::open(path)?)
}

/// Reads the front matter of one file in memory, its tensors' elements and its tokenizer; `name` stands for its path in
/// errors. For tests and fuzzing: everything that looks at a file's bytes runs.
///
/// # Errors
/// Whatever is wrong with it.
pub fn try_read(bytes: &Bytes, name: &Path) -> Result<(), ConvertError> {
    let file = GgufFile::parse(&Data::memory(bytes, name))?;
    let mut model = Model::of(file)?;
    model.config()?;
    let shapes: Vec<(String, Vec<usize>)> =
        model.checkpoint.shapes().map(|(n, s)| (n.to_owned(), s.to_vec())).collect();
    for (name, shape) in shapes {
        if let Ok(weight) = model.checkpoint.take(&name, &shape) {
            let rows = 0..weight.rows();
            weight.read_rows(rows.clone(), &mut Vec::new())?;
            weight.read_codes(rows)?;
        }
    }
    Ok(())
}

impl Model {
    fn of(file: GgufFile) -> Result<Self, ConvertError> {
        let arch = Architecture::of(&file.metadata)?;
        let wants_f32 = file
            .tensors
            .values()
            .any(|t| t.shape.len() > 1 && t.ty.codes().is_some_and(|c| c.minimum || !t.ty.has_f16_scales()));
        let config::Config { fields, head_dim, rope_factors } = config::read(&file, arch)?;
        let mut notices = Vec::new();
        let files = tokenizer::files(&file.metadata, config::vocab(&file)?, &mut notices)?;
        let metadata = file.metadata.clone();
        let checkpoint = names::checkpoint(file, arch, head_dim)?;
        Ok(Self { checkpoint, files, notices, wants_f32, rope_factors, fields, metadata, arch })
    }

    /// The model as recipes describe it.
    ///
    /// # Errors
    /// When the metadata holds a value that no recipe implements: names file and key.
    pub(crate) fn config(&self) -> Result<ModelConfig, ConvertError> {
        ModelConfig::parse(&self.fields, None).map_err(|e| config::explain(e, &self.metadata, self.arch))
    }
}
