//! Why CUDA cannot be used.

use std::path::PathBuf;

/// Why a card cannot be used, or a kernel not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver library is not there.
    #[error(
        "no NVIDIA driver: libcuda.so.1 was not found; install the driver of the card, or run without --device cuda"
    )]
    NoDriver,
    /// The driver found no card, or not that many.
    #[error("no card {ordinal}: the driver sees {found}{}", if *found > 0 { format!(" (--device cuda:0 to cuda:{})", found - 1) } else { String::new() })]
    NoDevice {
        /// The card asked for.
        ordinal: usize,
        /// Cards there are.
        found: usize,
    },
    /// A card older than the kernels are written for.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or newer is needed")]
    Capability {
        /// Name of the card.
        name: String,
        /// Its compute capability.
        major: i32,
        /// Minor part.
        minor: i32,
    },
    /// A call of the driver failed.
    #[error("{what}: {reason}")]
    Driver {
        /// What was tried.
        what: String,
        /// What the driver said.
        reason: String,
    },
    /// The card has no memory for something.
    #[error("{what}: the card is out of memory")]
    Memory {
        /// What was tried.
        what: String,
    },
    /// NVRTC is not there.
    #[error(
        "no NVRTC: libnvrtc.so.13 was not found; install CUDA 13 or the Python package nvidia-cuda-nvrtc, and put the \
         folder of the library into the loader's path (LD_LIBRARY_PATH)"
    )]
    NoNvrtc,
    /// An NVRTC older than is supported.
    #[error("NVRTC {major}.{minor} is too old: 13.0 or newer is needed")]
    NvrtcVersion {
        /// Version found.
        major: i32,
        /// Minor part.
        minor: i32,
    },
    /// A kernel does not compile.
    #[error("{module} does not compile for {arch}: {reason}\n{log}")]
    Compile {
        /// The module.
        module: String,
        /// What it was compiled for.
        arch: String,
        /// What NVRTC said.
        reason: String,
        /// Its messages.
        log: String,
    },
    /// What a release carries cannot be read.
    #[error(
        "the kernels in this program cannot be read: damaged at byte {at} of {len}; install the release again"
    )]
    Packaged {
        /// The first byte that makes no sense.
        at: usize,
        /// Bytes of all.
        len: usize,
    },
    /// The cache cannot be written.
    #[error("cannot write the compiled kernel {}: {reason}", .path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
}
