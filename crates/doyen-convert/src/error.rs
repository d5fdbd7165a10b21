//! The error of this crate: what a conversion refuses, where, and what would help.

use crate::options::OptionError;
use doyen_graph::{check::CheckError, ir::GraphError, onnx::EncodeError};
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// A file or folder could not be read or written.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was being done: "read", "write".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The device ran out of room.
    #[error(
        "no space left while writing {} (this package needs {needed} bytes in all); nothing was kept: free space or \
         choose another device with -o",
        path.display()
    )]
    DiskFull {
        /// The file that did not fit.
        path: PathBuf,
        /// Bytes of all weights.
        needed: u64,
    },
    /// A file may not become as large as it has to.
    #[error(
        "{} may not become that large (this package needs {needed} bytes in all); nothing was kept: raise the limit on \
         the file size (ulimit -f), or choose a file system that takes larger files with -o",
        path.display()
    )]
    FileLimit {
        /// The file that did not fit.
        path: PathBuf,
        /// Bytes of all weights.
        needed: u64,
    },
    /// The caller wanted no more of it.
    #[error("interrupted; nothing was kept")]
    Interrupted,
    /// A file that a checkpoint needs is not there.
    #[error("{} is missing: {needed}", path.display())]
    Missing {
        /// The file looked for.
        path: PathBuf,
        /// Who needs it, and what to do.
        needed: String,
    },
    /// A file is not what it should be.
    #[error("{}: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, with expected and found.
        message: String,
    },
    /// The architecture has no recipe.
    #[error("config.json: architecture {found:?} is not known; known are {known}")]
    Architecture {
        /// What config.json says.
        found: String,
        /// What would be accepted.
        known: String,
    },
    /// A field of config.json has a value that the recipes do not implement.
    #[error("config.json: {field} is {found}, expected {expected}")]
    Config {
        /// Field, with its parents.
        field: String,
        /// Its value.
        found: String,
        /// What would be accepted.
        expected: String,
    },
    /// A tensor is missing, malformed or holds values that cannot be converted.
    #[error("tensor {name:?}: {message}")]
    Tensor {
        /// Name in the checkpoint.
        name: String,
        /// What is wrong, with expected and found.
        message: String,
    },
    /// Tensors nobody reads, although they belong to layers that are converted.
    #[error(
        "the checkpoint holds {count} tensors that this architecture's recipe does not use ({names}); converting \
         without them would change the model"
    )]
    UnusedTensors {
        /// How many.
        count: usize,
        /// The first few.
        names: String,
    },
    /// An option does not fit the model.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The place for the package is taken or unusable.
    #[error("cannot write the package to {}: {message}", path.display())]
    Target {
        /// The package folder asked for.
        path: PathBuf,
        /// Why not, and what to do.
        message: String,
    },
    /// The assembled graph is refused; a fault of this crate, not of the checkpoint.
    #[error("the assembled graph is not valid: {0}")]
    Graph(#[from] GraphError),
    /// The assembled graph fails its check; a fault of this crate, not of the checkpoint.
    #[error("the assembled graph is not valid: {0}")]
    Check(#[from] CheckError),
    /// The assembled graph cannot be written; a fault of this crate, not of the checkpoint.
    #[error("the assembled graph cannot be written: {0}")]
    Encode(#[from] EncodeError),
}

impl ConvertError {
    pub(crate) fn read(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io("read", path)
    }

    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_owned(), source }
    }

    pub(crate) fn file(path: &Path, message: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), message: message.into() }
    }

    pub(crate) fn tensor(name: &str, message: impl Into<String>) -> Self {
        Self::Tensor { name: name.to_owned(), message: message.into() }
    }

    pub(crate) fn config(
        field: impl Into<String>,
        found: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Config { field: field.into(), found: found.to_string(), expected: expected.into() }
    }
}
