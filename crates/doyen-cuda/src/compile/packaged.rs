//! Kernels compiled when a release was made: a folder with a cubin of every module for every supported card, and PTX that the driver
//! compiles for later ones. A user of it needs the driver alone.
//!
//! Files are named after the content of their sources, so that a folder of another release is never used by mistake.

use super::cache::{Fnv, is_elf};
use crate::module::{Arch, HEADER, Module};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub struct Packaged {
    folder: PathBuf,
}

/// A compiled module as the driver takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Image {
    /// Machine code of a card.
    Cubin(Vec<u8>),
    /// Code that the driver compiles for the card.
    Ptx(String),
}

/// What PTX is made for: the oldest supported card, so that every one takes it.
pub const PTX_ARCH: Arch = Arch { major: 8, minor: 0 };

fn source(module: Module) -> u128 {
    let mut hash = Fnv::new();
    let (file, text) = module.source();
    for part in [HEADER.1, file, text] {
        hash.add(part.as_bytes());
    }
    for define in module.defines() {
        hash.add(define.as_bytes());
    }
    hash.get()
}

impl Packaged {
    /// The kernels in `folder`.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of a module's machine code.
    pub fn cubin(&self, module: Module, arch: Arch) -> PathBuf {
        self.folder.join(format!("{module}-{arch}-{:032x}.cubin", source(module)))
    }

    /// The file of a module's PTX.
    pub fn ptx(&self, module: Module) -> PathBuf {
        self.folder.join(format!("{module}-{:032x}.ptx", source(module)))
    }

    /// What there is of a module for a card, the best first.
    pub fn images(&self, module: Module, arch: Arch) -> impl Iterator<Item = Image> {
        let cubin = fs::read(self.cubin(module, arch)).ok().filter(|c| is_elf(c)).map(Image::Cubin);
        let ptx = fs::read_to_string(self.ptx(module)).ok().map(Image::Ptx);
        cubin.into_iter().chain(ptx)
    }

    /// Modules that there is nothing of for a card.
    pub fn missing(&self, arch: Arch) -> Vec<Module> {
        let there = |m: &Module| self.cubin(*m, arch).is_file() || self.ptx(*m).is_file();
        Module::all().into_iter().filter(|m| m.is_for(arch) && !there(m)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_of_the_card_comes_before_ptx() {
        let folder = tempfile::tempdir().unwrap();
        let packaged = Packaged::new(folder.path());
        let (hopper, later) = (Arch { major: 9, minor: 0 }, Arch { major: 13, minor: 0 });
        assert_eq!(packaged.images(Module::Route, hopper).count(), 0);
        assert!(packaged.missing(hopper).contains(&Module::Route));
        fs::write(packaged.ptx(Module::Route), ".version 9.0").unwrap();
        fs::write(packaged.cubin(Module::Route, hopper), b"\x7fELF").unwrap();
        assert_eq!(
            packaged.images(Module::Route, hopper).collect::<Vec<_>>(),
            [Image::Cubin(b"\x7fELF".to_vec()), Image::Ptx(".version 9.0".into())]
        );
        assert_eq!(packaged.images(Module::Route, later).count(), 1);
        assert!(!packaged.missing(later).contains(&Module::Route));
        fs::write(packaged.cubin(Module::Route, hopper), b"damaged").unwrap();
        assert_eq!(packaged.images(Module::Route, hopper).count(), 1);
    }

    #[test]
    fn every_module_has_files_of_its_own() {
        let packaged = Packaged::new("kernels");
        let all = Module::all();
        let files: std::collections::HashSet<_> = all.iter().map(|&m| packaged.ptx(m)).collect();
        assert_eq!(files.len(), all.len());
    }
}
