//! What a conversion reads: a checkpoint folder, or GGUF files. Opening one checks everything but the weights' values.

use crate::{ConvertError, config::ModelConfig, gguf, manifest, source::Checkpoint};
use doyen_tensor::FloatType;
use std::path::{Path, PathBuf};

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// A model that can be converted.
#[derive(Debug)]
pub struct Input {
    pub(crate) path: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) files: Vec<(&'static str, Vec<u8>)>,
    pub(crate) notices: Vec<String>,
    dtype: FloatType,
}

impl Input {
    /// Opens the checkpoint folder or GGUF file at `path`.
    ///
    /// # Errors
    /// When it cannot be read, or holds something that no recipe implements.
    pub fn open(path: &Path) -> Result<Self, ConvertError> {
        let file = |message: &str| Err(ConvertError::File { path: path.to_owned(), message: message.into() });
        match path.metadata() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => file("there is no such folder or file"),
            _ if gguf::is_gguf(path) => Self::open_gguf(path),
            Ok(found) if found.is_file() => file(
                "expected a checkpoint's folder or a GGUF file, found another file; give the folder it is in",
            ),
            _ => Self::open_folder(path),
        }
    }

    fn open_folder(path: &Path) -> Result<Self, ConvertError> {
        let mut config = ModelConfig::read(path)?;
        let mut notices = Vec::new();
        let files = manifest::copied_files(path, config.vocab, &mut notices)?;
        let mut checkpoint = Checkpoint::open(path)?;
        if let Some(wrapper) = &config.wrapper {
            let left = checkpoint.unwrap_text()?;
            notices.push(wrapper.told(&left));
            // Files say little and classes assume this and that: what is there decides.
            config.head.tied = wrapper.tied.unwrap_or(true);
        } else {
            checkpoint.lift_text()?;
        }
        if let Some(quantization) = &config.quantization {
            checkpoint.compose(quantization)?;
        }
        if config.head.tied && checkpoint.contains(HEAD) {
            config.head.tied = checkpoint.same_values(HEAD, EMBEDDING)?;
            notices.push(if config.head.tied {
                format!("{HEAD} holds what {EMBEDDING} holds, and is left out")
            } else {
                format!("{HEAD} differs from {EMBEDDING}, and is the head, whatever tie_word_embeddings says")
            });
        }
        Ok(Self { path: path.to_owned(), config, checkpoint, files, notices, dtype: FloatType::F16 })
    }

    fn open_gguf(path: &Path) -> Result<Self, ConvertError> {
        let model = gguf::open(path)?;
        let mut config = model.config()?;
        if let Some(factors) = model.rope_factors {
            config.set_rope_factors(&factors);
        }
        let dtype = if model.wants_f32 { FloatType::F32 } else { FloatType::F16 };
        let gguf::Model { checkpoint, files, notices, .. } = model;
        Ok(Self { path: path.to_owned(), config, checkpoint, files, notices, dtype })
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file that the package will hold beside the model: `tokenizer.json` and its companions.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// The float type to convert to where nobody chose one: float16, or float32 where a GGUF file's scales and minimums
    /// need it to be carried over.
    pub const fn default_dtype(&self) -> FloatType {
        self.dtype
    }
}
