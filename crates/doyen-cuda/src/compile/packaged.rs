//! Kernels compiled when a release was made, which its program carries: a cubin of every module for every supported card, and PTX that
//! the driver compiles for later ones. A user of it needs the driver alone.
//!
//! They are records one after the other, each compressed, so that reading one leaves the rest on the disk. Records are named after
//! the content of their sources, so that kernels of another release are never used by mistake.

use super::cache::{Fnv, is_elf};
use crate::{
    error::CudaError,
    module::{Arch, HEADER, Module},
};
use bytes::{Buf, Bytes};
use miniz_oxide::{deflate::compress_to_vec_zlib, inflate::decompress_to_vec_zlib_with_limit};
use std::{collections::HashMap, sync::Arc};

/// Compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packaged {
    /// What is compressed, by name.
    records: Arc<HashMap<String, Bytes>>,
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

/// The first bytes, which change with the layout of what follows: lengths of name and compressed bytes (u32, little endian), these,
/// and the next record.
const MAGIC: &[u8] = b"doyen kernels 1\n";

/// Bytes of a module at most, more than ten times the largest there is.
const LARGEST: usize = 64 << 20;

/// zlib's level: packing is done once a release.
const LEVEL: u8 = 9;

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
    /// Finds the records of `bytes`.
    ///
    /// # Errors
    /// When they are no kernels, or some are missing at the end.
    pub fn new(bytes: impl Into<Bytes>) -> Result<Self, CudaError> {
        let mut bytes = bytes.into();
        let len = bytes.len();
        let damaged = |left: usize| CudaError::Packaged { at: len - left, len };
        if !bytes.starts_with(MAGIC) {
            return Err(damaged(len));
        }
        bytes.advance(MAGIC.len());
        let mut records = HashMap::new();
        while !bytes.is_empty() {
            let left = bytes.len();
            let record = next(&mut bytes).ok_or_else(|| damaged(left))?;
            records.insert(record.0, record.1);
        }
        Ok(Self { records: Arc::new(records) })
    }

    /// What [`Packaged::new`] reads: names, and what is called so.
    pub fn pack<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for (name, file) in files {
            let packed = compress_to_vec_zlib(file, LEVEL);
            out.extend((name.len() as u32).to_le_bytes());
            out.extend((packed.len() as u32).to_le_bytes());
            out.extend(name.as_bytes());
            out.extend(packed);
        }
        out
    }

    /// The name of a module's machine code.
    pub fn cubin(module: Module, arch: Arch) -> String {
        format!("{module}-{arch}-{:032x}.cubin", source(module))
    }

    /// The name of a module's PTX for the cards from `arch` on.
    pub fn ptx(module: Module, arch: Arch) -> String {
        format!("{module}-ptx_{}{}-{:032x}.ptx", arch.major, arch.minor, source(module))
    }

    fn unpacked(&self, name: &str) -> Option<Vec<u8>> {
        decompress_to_vec_zlib_with_limit(self.records.get(name)?, LARGEST).ok()
    }

    /// What there is of a module for a card, the best first.
    pub fn images(&self, module: Module, arch: Arch) -> impl Iterator<Item = Image> {
        let cubin = move || self.unpacked(&Self::cubin(module, arch)).filter(|c| is_elf(c)).map(Image::Cubin);
        let ptx = move || {
            let text = self.unpacked(&Self::ptx(module, ptx_arch(arch)?))?;
            String::from_utf8(text).ok().map(Image::Ptx)
        };
        // One after the other, so that PTX that nobody asks for is not unpacked.
        [false, true].into_iter().filter_map(move |portable| if portable { ptx() } else { cubin() })
    }

    /// What there is for a card.
    pub fn found(&self, arch: Arch) -> Found {
        let mut found = Found::default();
        for module in Module::all().into_iter().filter(|m| m.is_for(arch)) {
            if self.records.contains_key(&Self::cubin(module, arch)) {
                found.cubins += 1;
            } else if ptx_arch(arch).is_some_and(|a| self.records.contains_key(&Self::ptx(module, a))) {
                found.ptx += 1;
            } else {
                found.missing += 1;
            }
        }
        found
    }
}

/// Takes a record off the front.
fn next(bytes: &mut Bytes) -> Option<(String, Bytes)> {
    let name = bytes.try_get_u32_le().ok()? as usize;
    let packed = bytes.try_get_u32_le().ok()? as usize;
    if name.checked_add(packed)? > bytes.len() {
        return None;
    }
    let name = String::from_utf8(bytes.split_to(name).to_vec()).ok()?;
    Some((name, bytes.split_to(packed)))
}

/// What PTX a card is given.
fn ptx_arch(card: Arch) -> Option<Arch> {
    PTX_ARCHS.into_iter().rev().find(|&a| a <= card)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Arch = Arch { major: 9, minor: 0 };

    fn packaged(files: &[(String, &[u8])]) -> Packaged {
        Packaged::new(Packaged::pack(files.iter().map(|(name, file)| (name.as_str(), *file)))).unwrap()
    }

    #[test]
    fn machine_code_of_the_card_comes_before_ptx() {
        let (later, old) = (Arch { major: 13, minor: 0 }, Arch { major: 8, minor: 7 });
        let empty = packaged(&[]);
        assert_eq!(empty.images(Module::Route, HOPPER).count(), 0);
        let all = empty.found(HOPPER).missing;

        let newer = (Packaged::ptx(Module::Route, PTX_ARCHS[1]), b".version 9.0".as_slice());
        let cubin = (Packaged::cubin(Module::Route, HOPPER), b"\x7fELF".as_slice());
        let some = packaged(&[newer.clone(), cubin]);
        assert_eq!(
            some.images(Module::Route, HOPPER).collect::<Vec<_>>(),
            [Image::Cubin(b"\x7fELF".to_vec()), Image::Ptx(".version 9.0".into())]
        );
        assert_eq!(some.found(HOPPER), Found { cubins: 1, ptx: 0, missing: all - 1 });
        assert_eq!(some.images(Module::Route, later).count(), 1);
        assert_eq!(some.found(later).ptx, 1);
        assert_eq!(some.images(Module::Route, old).count(), 0, "its launches do not overlap");

        let older = (Packaged::ptx(Module::Route, PTX_ARCHS[0]), b".version 8.0".as_slice());
        let damaged = (Packaged::cubin(Module::Route, HOPPER), b"damaged".as_slice());
        let both = packaged(&[newer, older, damaged]);
        assert_eq!(both.images(Module::Route, old).next(), Some(Image::Ptx(".version 8.0".into())));
        assert_eq!(both.images(Module::Route, later).next(), Some(Image::Ptx(".version 9.0".into())));
        assert_eq!(both.images(Module::Route, HOPPER).count(), 1);
    }

    #[test]
    fn what_is_cut_off_or_changed_is_refused() {
        let name = Packaged::cubin(Module::Route, HOPPER);
        let whole = Packaged::pack([(name.as_str(), b"\x7fELF and much more".as_slice())]);
        for len in (0..whole.len()).filter(|&len| len != MAGIC.len()) {
            let e = Packaged::new(whole[..len].to_vec()).unwrap_err().to_string();
            assert!(e.contains(&format!("of {len}")), "{e}");
        }
        // The checksum of a record is looked at when it is read.
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        assert_eq!(Packaged::new(changed).unwrap().images(Module::Route, HOPPER).count(), 0);
        assert_eq!(Packaged::new(whole).unwrap().images(Module::Route, HOPPER).count(), 1);
    }

    #[test]
    fn every_module_has_records_of_its_own() {
        let all = Module::all();
        let names: std::collections::HashSet<_> =
            all.iter().map(|&m| Packaged::ptx(m, PTX_ARCHS[0])).collect();
        assert_eq!(names.len(), all.len());
    }
}
