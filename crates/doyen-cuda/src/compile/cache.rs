//! Cubins on disk, so that a program compiles a kernel once on a machine.
//!
//! A file is named after everything that decides its content: source and header, definitions, architecture, the versions
//! of NVRTC and driver. Files are written beside their name and renamed, so that no reader meets half of one.

use crate::{
    error::CudaError,
    module::{Arch, HEADER, Module},
};
use std::{
    fmt, fs,
    io::Write,
    path::{Path, PathBuf},
};

/// What decides the content of a cubin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    module: Module,
    arch: Arch,
    hash: u128,
}

impl Key {
    /// The key of a module for a card, the versions of NVRTC and of the driver given.
    pub fn new(module: Module, arch: Arch, nvrtc: (i32, i32), driver: i32) -> Self {
        let mut hash = Fnv::new();
        let (file, source) = module.source();
        for part in [HEADER.1, file, source] {
            hash.add(part.as_bytes());
        }
        for define in module.defines() {
            hash.add(define.as_bytes());
        }
        hash.add(arch.to_string().as_bytes());
        for number in [nvrtc.0, nvrtc.1, driver] {
            hash.add(&number.to_le_bytes());
        }
        Self { module, arch, hash: hash.0 }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{:032x}", self.module, self.arch, self.hash)
    }
}

/// FNV-1a of 128 bits over length-prefixed parts. It tells honest inputs apart; the cache is the user's own folder.
pub(super) struct Fnv(u128);

impl Fnv {
    pub(super) const fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    pub(super) fn add(&mut self, part: &[u8]) {
        for &byte in (part.len() as u64).to_le_bytes().iter().chain(part) {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    pub(super) const fn get(&self) -> u128 {
        self.0
    }
}

/// A folder of cubins.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// A cache in `folder`, which is made when the first cubin is stored.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The file of a key.
    pub fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    /// The cubin of a key, if it is there.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        fs::read(self.path(key)).ok().filter(|cubin| is_elf(cubin))
    }

    /// Stores a cubin.
    ///
    /// # Errors
    /// When the folder cannot be made or the file not be written.
    pub fn put(&self, key: &Key, cubin: &[u8]) -> Result<(), CudaError> {
        let path = self.path(key);
        write_whole(&path, cubin).map_err(|e| CudaError::Cache { path, reason: e.to_string() })
    }
}

/// Cubins are ELF files.
pub(super) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = path.with_extension(format!("{}.part", std::process::id()));
    let written = fs::File::create(&beside)
        .and_then(|mut f| f.write_all(bytes))
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        // The error of the write is the one to report.
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::module::{Operand, Width};

    const ARCH: Arch = Arch { major: 9, minor: 0 };

    #[test]
    fn keys_differ_with_everything_that_decides_the_content() {
        let module = Module::Gemm(Width::F32, Operand::F16);
        let key = Key::new(module, ARCH, (13, 0), 13000);
        assert_eq!(key, Key::new(module, ARCH, (13, 0), 13000));
        for other in [
            Key::new(Module::Gemm(Width::F32, Operand::Bf16), ARCH, (13, 0), 13000),
            Key::new(Module::Gemm(Width::F16, Operand::F16), ARCH, (13, 0), 13000),
            Key::new(module, Arch { major: 8, minor: 0 }, (13, 0), 13000),
            Key::new(module, ARCH, (13, 1), 13000),
            Key::new(module, ARCH, (13, 0), 13010),
        ] {
            assert_ne!(key.hash, other.hash, "{other}");
        }
    }

    #[test]
    fn what_is_stored_comes_back_and_damage_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("cubins"));
        let key = Key::new(Module::Route, ARCH, (13, 0), 13000);
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"\x7fELF and more").unwrap();
        assert_eq!(cache.get(&key).unwrap(), b"\x7fELF and more");
        fs::write(cache.path(&key), b"").unwrap();
        assert_eq!(cache.get(&key), None);
        let files: Vec<_> = fs::read_dir(folder.path().join("cubins")).unwrap().collect();
        assert_eq!(files.len(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"x").unwrap();
        let error = Cache::new(&file).put(&Key::new(Module::Route, ARCH, (13, 0), 13000), b"x").unwrap_err();
        assert!(error.to_string().contains(&*file.to_string_lossy()), "{error}");
    }
}
