//! Opens a package: manifest, model file, data files, tokenizer files, ports.

use super::{
    inference::INFERENCE_METADATA,
    manifest::{MANIFEST, Manifest, ManifestError},
    ports::{self, PortError},
    source::{DataFiles, PackageSource, SourceError},
};
use crate::{
    check::{CheckError, check},
    ir::{Attr, Graph},
    onnx::{DecodeError, decode},
    pass::lower::LowerSpec,
};
use bytes::Bytes;
use std::{path::Path, sync::Arc};

/// Why a package cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// A file that is missing or cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// No model file, or several and no manifest that names one.
    #[error("{package}: {reason}")]
    Model {
        /// The package.
        package: String,
        /// What is wrong.
        reason: String,
    },
    /// The model file.
    #[error("{file}: {source}")]
    Decode {
        /// Model file.
        file: String,
        /// What is wrong.
        #[source]
        source: DecodeError,
    },
    /// The graph.
    #[error("{file}: {source}")]
    Check {
        /// Model file.
        file: String,
        /// What is wrong.
        #[source]
        source: CheckError,
    },
    /// The ports.
    #[error("{file}: {source}")]
    Ports {
        /// Model file.
        file: String,
        /// What is wrong.
        #[source]
        source: PortError,
    },
    /// Expert weights in a layout only a CUDA library reads.
    #[error(
        "{file}: node {node:?} (com.microsoft::QMoE): {MANIFEST} was written for CUDA and weights_prepacked is not 0, so \
         its expert weights are permuted for a CUDA library in a way the file does not show; export it for the CPU, or \
         with weights_prepacked=0"
    )]
    Prepacked {
        /// Model file.
        file: String,
        /// Node name.
        node: String,
    },
}

/// Files for the text side, as bytes; `None` where the package has none.
#[derive(Debug, Clone, Default)]
pub struct TextFiles {
    /// `tokenizer.json`.
    pub tokenizer: Option<Bytes>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Bytes>,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Option<Bytes>,
    /// `chat_template.jinja`; a template in the tokenizer's configuration counts only without it.
    pub chat_template: Option<Bytes>,
    /// `generation_config.json`.
    pub generation_config: Option<Bytes>,
}

impl TextFiles {
    fn read(source: &dyn PackageSource, folder: &str) -> Result<Self, SourceError> {
        let folder = folder.trim_end_matches('/');
        let file = |name: &str| match folder {
            "" | "." => source.file(name),
            folder => source.file(&format!("{folder}/{name}")),
        };
        Ok(Self {
            tokenizer: file("tokenizer.json")?,
            tokenizer_config: file("tokenizer_config.json")?,
            special_tokens_map: file("special_tokens_map.json")?,
            chat_template: file("chat_template.jinja")?,
            generation_config: file("generation_config.json")?,
        })
    }
}

/// A package that was read but not judged: enough to show what is in it.
#[derive(Debug, Clone)]
pub struct Draft {
    /// Where it came from.
    pub source: Arc<dyn PackageSource>,
    /// Its manifest; empty when it has none.
    pub manifest: Manifest,
    /// Name of the model file.
    pub model_file: String,
    /// The graph as decoded, with unknown operators in it.
    pub graph: Graph,
    /// Tokenizer and template files.
    pub text: TextFiles,
}

impl Draft {
    /// Reads a package.
    ///
    /// # Errors
    /// When a file is missing or unreadable, or the manifest or the model file is not what it should be.
    pub fn read(source: Arc<dyn PackageSource>) -> Result<Self, PackageError> {
        let mut manifest = manifest(source.as_ref())?;
        let model_file = model_file(source.as_ref(), &manifest)?;
        let model = source.required(&model_file)?;
        let graph = decode(model, &DataFiles::beside(source.as_ref(), &model_file))
            .map_err(|e| PackageError::Decode { file: model_file.clone(), source: e })?;
        let text = TextFiles::read(source.as_ref(), manifest.tokenizer_dir.as_deref().unwrap_or(""))?;
        if let Some(generation) = text.generation_config.as_deref().filter(|_| manifest.eos_tokens.is_empty())
        {
            manifest.read_generation(generation)?;
        }
        Ok(Self { source, manifest, model_file, graph, text })
    }

    /// Checks the graph and finds its ports.
    ///
    /// # Errors
    /// When an operator is not known, the graph contradicts itself, its ports cannot be told apart, or its expert
    /// weights are permuted for CUDA.
    pub fn check(mut self) -> Result<Package, PackageError> {
        let file = || self.model_file.clone();
        if let Some(node) = prepacked(&self.graph, &self.manifest) {
            return Err(PackageError::Prepacked { file: file(), node });
        }
        check(&mut self.graph).map_err(|source| PackageError::Check { file: file(), source })?;
        let ports = ports::derive(&self.graph, &self.manifest)
            .map_err(|source| PackageError::Ports { file: file(), source })?;
        Ok(Package {
            source: self.source,
            manifest: self.manifest,
            model_file: self.model_file,
            graph: self.graph,
            ports,
            text: self.text,
        })
    }
}

/// A package whose graph can run.
#[derive(Debug, Clone)]
pub struct Package {
    /// Where it came from.
    pub source: Arc<dyn PackageSource>,
    /// Its manifest; empty when it has none.
    pub manifest: Manifest,
    /// Name of the model file.
    pub model_file: String,
    /// The checked graph, constants as views of the package's files.
    pub graph: Graph,
    /// What its inputs and outputs are.
    pub ports: LowerSpec,
    /// Tokenizer and template files.
    pub text: TextFiles,
}

impl Package {
    /// Opens a package and checks all of it.
    ///
    /// # Errors
    /// As [`Draft::read`] and [`Draft::check`].
    pub fn open(source: Arc<dyn PackageSource>) -> Result<Self, PackageError> {
        Draft::read(source)?.check()
    }
}

/// The manifest: ONNX Runtime GenAI's where there is one, else onnx-genai's; an empty one without both.
fn manifest(source: &dyn PackageSource) -> Result<Manifest, PackageError> {
    if let Some(bytes) = source.file(MANIFEST)? {
        return Ok(Manifest::parse(&bytes)?);
    }
    let metadata = source.file(INFERENCE_METADATA)?;
    Ok(metadata.map(|bytes| Manifest::parse_inference_metadata(&bytes)).transpose()?.unwrap_or_default())
}

/// The model file: the manifest's, or `model.onnx`, or the only one there is.
fn model_file(source: &dyn PackageSource, manifest: &Manifest) -> Result<String, PackageError> {
    if let Some(name) = &manifest.decoder.filename {
        return Ok(name.clone());
    }
    let names: Vec<String> = source
        .names()?
        .into_iter()
        .filter(|n| Path::new(n).extension().is_some_and(|e| e == "onnx"))
        .collect();
    let wrong = |reason| PackageError::Model { package: source.describe(), reason };
    match names.as_slice() {
        [] => Err(wrong("there is no .onnx file in it".into())),
        [one] => Ok(one.clone()),
        many if many.iter().any(|n| n == "model.onnx") => Ok("model.onnx".into()),
        many => Err(wrong(format!(
            "it has several model files ({}); name the decoder's in {MANIFEST} as model.decoder.filename",
            many.join(", ")
        ))),
    }
}

/// A node with expert weights that a CUDA export has permuted: such files omit `weights_prepacked` and look like any
/// other, so the manifest's provider is the only sign.
fn prepacked(graph: &Graph, manifest: &Manifest) -> Option<String> {
    if !manifest.decoder.providers.iter().any(|p| p.eq_ignore_ascii_case("cuda")) {
        return None;
    }
    let attr =
        |n: &crate::ir::Node, name: &str| n.attrs.iter().find(|(k, _)| *k == name).map(|(_, v)| v.clone());
    let suspicious = graph.nodes.iter().find(|n| {
        n.domain == "com.microsoft"
            && n.op_type == "QMoE"
            && matches!(attr(n, "quant_type"), None | Some(Attr::Str(_)))
            && attr(n, "quant_type").is_none_or(|t| t == Attr::from("int"))
            && attr(n, "weights_prepacked") != Some(Attr::Int(0))
    });
    suspicious.map(|n| n.name.clone())
}
