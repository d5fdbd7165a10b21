//! Models in several files: `NAME-00001-of-00003.gguf` and so on, the first with the metadata.

use super::file::GgufFile;
use crate::ConvertError;
use std::path::{Path, PathBuf};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Opens the file, and all of its set where it is one of several; tensors of all files come under the first one's
/// metadata.
pub(super) fn open(path: &Path) -> Result<GgufFile, ConvertError> {
    let file = GgufFile::open(path)?;
    let count = file.metadata.unsigned(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(file);
    }
    let name = SplitName::parse(path).filter(|n| n.count == count).ok_or_else(|| {
        let expected = format!("a file name that ends in -00001-of-{count:05}.gguf, to find the others by");
        ConvertError::file(path, format!("{COUNT} is {count}, which needs {expected}"))
    })?;
    let mut first = check_number(GgufFile::open(&name.path(1))?, 1)?;
    for number in 2..=count {
        let next = name.path(number);
        if !next.is_file() {
            let needed = format!("{} is file {} of {count}", path.display(), name.number);
            return Err(ConvertError::Missing { path: next, needed });
        }
        let part = check_number(GgufFile::open(&next)?, number)?;
        for (tensor, stored) in part.tensors {
            if first.tensors.insert(tensor.clone(), stored).is_some() {
                let message = format!("tensor {tensor:?}: expected once in all files, found twice");
                return Err(ConvertError::file(&next, message));
            }
        }
    }
    let (expected, found) = (first.metadata.unsigned(TENSORS)?, first.tensors.len() as u64);
    match expected {
        Some(n) if n != found => Err(first.metadata.wrong(
            TENSORS,
            n,
            &format!("{found}, the number of tensors in the {count} files"),
        )),
        _ => Ok(first),
    }
}

fn check_number(file: GgufFile, number: u64) -> Result<GgufFile, ConvertError> {
    match file.metadata.unsigned(NUMBER)? {
        Some(n) if n.checked_add(1) == Some(number) => Ok(file),
        Some(n) => Err(file.metadata.wrong(NUMBER, n, &format!("{}, by the file's name", number - 1))),
        None => Err(file.metadata.absent(NUMBER, &(number - 1).to_string())),
    }
}

/// A file name's parts.
struct SplitName {
    folder: PathBuf,
    stem: String,
    number: u64,
    count: u64,
}

impl SplitName {
    fn parse(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
        Some(Self {
            folder: path.parent()?.to_owned(),
            stem: stem.to_owned(),
            number: digits(number)?,
            count: digits(count)?,
        })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count))
    }
}
