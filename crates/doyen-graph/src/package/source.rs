//! Where a package's files come from: a directory, or slices embedded in the binary.

use super::map;
use crate::onnx::ExternalFiles;
use bytes::Bytes;
use std::{
    collections::HashMap,
    fmt, fs, io,
    path::{Component, Path, PathBuf},
    sync::Mutex,
};

/// Why a file of a package cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The package itself cannot be opened.
    #[error("package {}: {source}", path.display())]
    Open {
        /// Its directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A name that does not stay inside the package.
    #[error("{name:?} is not a file inside the package: {reason}")]
    Outside {
        /// Name asked for.
        name: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// A file that cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file that is not there.
    #[error("{name:?} is missing in {package}")]
    Missing {
        /// Name asked for.
        name: String,
        /// The package.
        package: String,
    },
}

/// The files of a package, by name relative to it, with `/` between folders.
pub trait PackageSource: fmt::Debug + Send + Sync {
    /// Where the package is, for messages.
    fn describe(&self) -> String;

    /// The file, or `None` when there is none of this name.
    ///
    /// # Errors
    /// When the name leaves the package or the file cannot be read.
    fn file(&self, name: &str) -> Result<Option<Bytes>, SourceError>;

    /// Names of the files directly inside, sorted.
    ///
    /// # Errors
    /// When the package cannot be listed.
    fn names(&self) -> Result<Vec<String>, SourceError>;

    /// The file, which must be there.
    ///
    /// # Errors
    /// As [`PackageSource::file`], and when there is none of this name.
    fn required(&self, name: &str) -> Result<Bytes, SourceError> {
        self.file(name)?
            .ok_or_else(|| SourceError::Missing { name: name.to_owned(), package: self.describe() })
    }
}

/// A directory whose files are memory-mapped read-only.
#[derive(Debug)]
pub struct DirSource {
    /// As given, for messages.
    shown: PathBuf,
    /// Without symbolic links, for the check that files are inside.
    root: PathBuf,
    maps: Mutex<HashMap<String, Bytes>>,
}

impl DirSource {
    /// A package directory.
    ///
    /// # Errors
    /// When it does not exist or is no directory.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, SourceError> {
        let shown = path.into();
        let root = fs::canonicalize(&shown).and_then(|root| {
            if root.is_dir() {
                Ok(root)
            } else {
                Err(io::Error::new(io::ErrorKind::NotADirectory, "a package is a directory"))
            }
        });
        match root {
            Ok(root) => Ok(Self { shown, root, maps: Mutex::default() }),
            Err(source) => Err(SourceError::Open { path: shown, source }),
        }
    }

    /// The directory, as given.
    pub fn path(&self) -> &Path {
        &self.shown
    }
}

/// A name that cannot leave the folder it is relative to, whatever is in the folder.
fn inside(name: &str) -> Result<&Path, SourceError> {
    let outside = |reason| SourceError::Outside { name: name.to_owned(), reason };
    if name.is_empty() || name.contains('\0') {
        return Err(outside("it is empty or holds a zero byte"));
    }
    if name.contains('\\') {
        return Err(outside("folders are separated by /"));
    }
    for part in Path::new(name).components() {
        match part {
            Component::Normal(_) | Component::CurDir => {}
            Component::ParentDir => return Err(outside("it goes up with ..")),
            Component::RootDir | Component::Prefix(_) => return Err(outside("it is an absolute path")),
        }
    }
    Ok(Path::new(name))
}

impl PackageSource for DirSource {
    fn describe(&self) -> String {
        self.shown.display().to_string()
    }

    fn file(&self, name: &str) -> Result<Option<Bytes>, SourceError> {
        let relative = inside(name)?;
        // A poisoned lock means a panic elsewhere; the map itself is only ever inserted into.
        let mut maps = self.maps.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(bytes) = maps.get(name) {
            return Ok(Some(bytes.clone()));
        }
        let path = match fs::canonicalize(self.root.join(relative)) {
            Ok(path) => path,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(SourceError::Read { path: self.shown.join(relative), source }),
        };
        if !path.starts_with(&self.root) {
            return Err(SourceError::Outside {
                name: name.to_owned(),
                reason: "it is a symbolic link that leaves the package; copy the file it points to into the package",
            });
        }
        let bytes = map::map(&path)
            .map_err(|source| SourceError::Read { path: self.shown.join(relative), source })?;
        maps.insert(name.to_owned(), bytes.clone());
        Ok(Some(bytes))
    }

    fn names(&self) -> Result<Vec<String>, SourceError> {
        let read = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in fs::read_dir(&self.root)? {
                let entry = entry?;
                if !entry.path().is_dir() {
                    names.extend(entry.file_name().into_string());
                }
            }
            names.sort();
            Ok(names)
        };
        read().map_err(|source| SourceError::Open { path: self.shown.clone(), source })
    }
}

/// Files that are part of the binary.
#[derive(Clone, Copy)]
pub struct EmbeddedSource {
    name: &'static str,
    files: &'static [(&'static str, &'static [u8])],
}

impl EmbeddedSource {
    /// A package of named slices.
    pub const fn new(name: &'static str, files: &'static [(&'static str, &'static [u8])]) -> Self {
        Self { name, files }
    }
}

impl fmt::Debug for EmbeddedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EmbeddedSource({:?})", self.name)
    }
}

impl PackageSource for EmbeddedSource {
    fn describe(&self) -> String {
        format!("the built-in package {}", self.name)
    }

    fn file(&self, name: &str) -> Result<Option<Bytes>, SourceError> {
        inside(name)?;
        Ok(self.files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| Bytes::from_static(bytes)))
    }

    fn names(&self) -> Result<Vec<String>, SourceError> {
        let mut names: Vec<String> = self.files.iter().map(|(n, _)| (*n).to_owned()).collect();
        names.sort();
        Ok(names)
    }
}

/// The data files of a model file inside a package: locations are relative to the model file's folder.
#[derive(Debug, Clone, Copy)]
pub struct DataFiles<'a> {
    source: &'a dyn PackageSource,
    folder: &'a str,
}

impl<'a> DataFiles<'a> {
    /// The data files beside the model file of this name.
    pub fn beside(source: &'a dyn PackageSource, model: &'a str) -> Self {
        Self { source, folder: model.rsplit_once('/').map_or("", |(folder, _)| folder) }
    }
}

impl ExternalFiles for DataFiles<'_> {
    fn file(&self, location: &str) -> Result<Bytes, String> {
        inside(location).map_err(|e| e.to_string())?;
        let name =
            if self.folder.is_empty() { location.to_owned() } else { format!("{}/{location}", self.folder) };
        self.source.required(&name).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_package_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("p")).unwrap();
        fs::write(dir.path().join("secret"), b"x").unwrap();
        let source = DirSource::open(dir.path().join("p")).unwrap();
        for name in ["../secret", "/etc/passwd", "a/../../secret", "", "a\0b", "..\\secret"] {
            assert!(matches!(source.file(name), Err(SourceError::Outside { .. })), "{name}");
        }
        assert!(source.file("nothing").unwrap().is_none());
    }

    #[cfg(unix)]
    #[test]
    fn links_may_not_leave_the_package() {
        let dir = tempfile::tempdir().unwrap();
        let package = dir.path().join("p");
        fs::create_dir(&package).unwrap();
        fs::write(dir.path().join("secret"), b"x").unwrap();
        fs::write(package.join("data"), b"yz").unwrap();
        std::os::unix::fs::symlink("../secret", package.join("out")).unwrap();
        std::os::unix::fs::symlink("data", package.join("in")).unwrap();
        let source = DirSource::open(&package).unwrap();
        assert!(matches!(source.file("out"), Err(SourceError::Outside { .. })));
        assert_eq!(source.required("in").unwrap().as_ref(), b"yz");
    }

    #[test]
    fn folders_and_empty_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::write(dir.path().join("sub/data"), b"").unwrap();
        let source = DirSource::open(dir.path()).unwrap();
        assert!(matches!(source.file("sub"), Err(SourceError::Read { .. })));
        assert!(DataFiles::beside(&source, "sub/model.onnx").file("data").unwrap().is_empty());
        assert!(DataFiles::beside(&source, "sub/model.onnx").file("../x").is_err());
        assert!(source.names().unwrap().is_empty());
    }
}
