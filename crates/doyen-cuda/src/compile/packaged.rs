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

/// What PTX is made for: the oldest supported card, so that every one takes it, and the oldest whose launches overlap, since
/// kernels must wait for that by themselves.
pub const PTX_ARCHS: [Arch; 2] = [Arch { major: 8, minor: 0 }, Arch { major: 9, minor: 0 }];

/// How many modules there are for a card, by their form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Found {
    /// Machine code.
    pub cubins: usize,
    /// Code that the driver compiles, of modules without machine code.
    pub ptx: usize,
    /// Neither.
    pub missing: usize,
}

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

    /// The file of a module's PTX for the cards from `arch` on.
    pub fn ptx(&self, module: Module, arch: Arch) -> PathBuf {
        self.folder.join(format!("{module}-ptx_{}{}-{:032x}.ptx", arch.major, arch.minor, source(module)))
    }

    /// What there is of a module for a card, the best first.
    pub fn images(&self, module: Module, arch: Arch) -> impl Iterator<Item = Image> {
        let cubin = fs::read(self.cubin(module, arch)).ok().filter(|c| is_elf(c)).map(Image::Cubin);
        let ptx = ptx_arch(arch).and_then(|a| fs::read_to_string(self.ptx(module, a)).ok()).map(Image::Ptx);
        cubin.into_iter().chain(ptx)
    }

    /// What there is for a card.
    pub fn found(&self, arch: Arch) -> Found {
        let mut found = Found::default();
        for module in Module::all().into_iter().filter(|m| m.is_for(arch)) {
            if self.cubin(module, arch).is_file() {
                found.cubins += 1;
            } else if ptx_arch(arch).is_some_and(|a| self.ptx(module, a).is_file()) {
                found.ptx += 1;
            } else {
                found.missing += 1;
            }
        }
        found
    }
}

/// What PTX a card is given.
fn ptx_arch(card: Arch) -> Option<Arch> {
    PTX_ARCHS.into_iter().rev().find(|&a| a <= card)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_of_the_card_comes_before_ptx() {
        let folder = tempfile::tempdir().unwrap();
        let packaged = Packaged::new(folder.path());
        let (hopper, later) = (Arch { major: 9, minor: 0 }, Arch { major: 13, minor: 0 });
        let old = Arch { major: 8, minor: 7 };
        assert_eq!(packaged.images(Module::Route, hopper).count(), 0);
        let all = packaged.found(hopper).missing;
        fs::write(packaged.ptx(Module::Route, PTX_ARCHS[1]), ".version 9.0").unwrap();
        fs::write(packaged.cubin(Module::Route, hopper), b"\x7fELF").unwrap();
        assert_eq!(
            packaged.images(Module::Route, hopper).collect::<Vec<_>>(),
            [Image::Cubin(b"\x7fELF".to_vec()), Image::Ptx(".version 9.0".into())]
        );
        assert_eq!(packaged.found(hopper), Found { cubins: 1, ptx: 0, missing: all - 1 });
        assert_eq!(packaged.images(Module::Route, later).count(), 1);
        assert_eq!(packaged.found(later).ptx, 1);
        assert_eq!(packaged.images(Module::Route, old).count(), 0, "its launches do not overlap");
        fs::write(packaged.ptx(Module::Route, PTX_ARCHS[0]), ".version 8.0").unwrap();
        assert_eq!(packaged.images(Module::Route, old).next(), Some(Image::Ptx(".version 8.0".into())));
        assert_eq!(packaged.images(Module::Route, later).next(), Some(Image::Ptx(".version 9.0".into())));
        fs::write(packaged.cubin(Module::Route, hopper), b"damaged").unwrap();
        assert_eq!(packaged.images(Module::Route, hopper).count(), 1);
    }

    #[test]
    fn every_module_has_files_of_its_own() {
        let packaged = Packaged::new("kernels");
        let all = Module::all();
        let files: std::collections::HashSet<_> =
            all.iter().map(|&m| packaged.ptx(m, PTX_ARCHS[0])).collect();
        assert_eq!(files.len(), all.len());
    }
}
