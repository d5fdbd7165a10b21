//! The folder a package ends up in: checked first, staged beside, renamed at the end.

use crate::{ConvertError, store::DATA_FILE};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// Every file a package may hold. Only folders that hold nothing else are ever replaced.
const PACKAGE_FILES: [&str; 8] = [
    "model.onnx",
    DATA_FILE,
    "genai_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// Where to write a package, and whether a package that is there may be replaced.
#[derive(Debug, Clone)]
pub struct Target {
    path: PathBuf,
    replace: bool,
}

impl Target {
    /// A folder that does not exist yet, or is empty.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), replace: false }
    }

    /// Allows replacing a package that is already there. A folder with anything else in it is still refused.
    #[must_use]
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    fn refuse(&self, message: impl Into<String>) -> ConvertError {
        ConvertError::Target { path: self.path.clone(), message: message.into() }
    }

    /// The folder that holds the target.
    fn parent(&self) -> &Path {
        match self.path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        }
    }

    /// Refuses a target that could not be published, before any work is done.
    pub(super) fn check(&self) -> Result<(), ConvertError> {
        if self.path.file_name().is_none() {
            return Err(self.refuse("it is not a folder name"));
        }
        if !self.parent().is_dir() {
            return Err(self.refuse(format!("the folder {} does not exist", self.parent().display())));
        }
        // Not followed: a link would be replaced by the folder, and what it points to forgotten.
        let Ok(found) = fs::symlink_metadata(&self.path) else { return Ok(()) };
        if !found.is_dir() {
            return Err(
                self.refuse("something that is not a folder is there; remove it or choose another name")
            );
        }
        let entries = fs::read_dir(&self.path).map_err(ConvertError::read(&self.path))?;
        for entry in entries {
            let name = entry.map_err(ConvertError::read(&self.path))?.file_name();
            if !PACKAGE_FILES.iter().any(|f| name == *f) {
                let name = name.to_string_lossy();
                return Err(self.refuse(format!("the folder holds {name:?}, which is not part of a package")));
            }
            if !self.replace {
                return Err(self.refuse("a package is there already; give --force to replace it"));
            }
        }
        Ok(())
    }

    /// A temporary folder beside the target, on the same device. Removed when dropped.
    pub(super) fn stage(&self) -> Result<TempDir, ConvertError> {
        tempfile::Builder::new()
            .prefix(&self.part_prefix())
            .tempdir_in(self.parent())
            .map_err(ConvertError::io("create a folder in", self.parent()))
    }

    /// What conversions to this target left beside it that were killed: a notice for each. Another one may be under way, so nothing is
    /// removed.
    pub(super) fn left_over(&self) -> Vec<String> {
        let prefix = self.part_prefix();
        let entries = fs::read_dir(self.parent()).into_iter().flatten().flatten();
        let parts = entries.filter(|e| e.file_name().to_string_lossy().starts_with(&prefix));
        let notice = |path: PathBuf| {
            format!(
                "{} is of a conversion that is under way or was killed; delete it in the latter case",
                path.display()
            )
        };
        parts.map(|e| notice(e.path())).collect()
    }

    /// How names of temporary folders begin.
    fn part_prefix(&self) -> String {
        format!(".{}.part-", self.path.file_name().unwrap_or_default().to_string_lossy())
    }

    /// Puts the staged folder in the target's place. A package that was there is moved aside first, and back if the
    /// rename fails.
    pub(super) fn publish(&self, staging: TempDir) -> Result<(), ConvertError> {
        // Something may have appeared since the first check.
        self.check()?;
        set_readable(staging.path())?;
        let old = if self.path.exists() {
            let aside = self.stage()?;
            let place = aside.path().join("old");
            fs::rename(&self.path, &place).map_err(ConvertError::io("move aside", &self.path))?;
            Some((aside, place))
        } else {
            None
        };
        if let Err(e) = fs::rename(staging.path(), &self.path) {
            if let Some((aside, place)) = old
                && fs::rename(&place, &self.path).is_err()
            {
                let kept = aside.keep().join("old");
                return Err(self.refuse(format!("{e}; the package that was there is now {}", kept.display())));
            }
            return Err(ConvertError::io("rename the finished package to", &self.path)(e));
        }
        // The folder has its final name now; there is nothing left to remove.
        let _ = staging.keep();
        sync_dir(&self.path)?;
        sync_dir(self.parent())
    }
}

/// Temporary folders are private to their owner; a package is an ordinary folder, as `mkdir` makes it.
fn set_readable(dir: &Path) -> Result<(), ConvertError> {
    let probe = dir.join(".mode");
    fs::create_dir(&probe).map_err(ConvertError::io("create", &probe))?;
    let mode = fs::metadata(&probe).map_err(ConvertError::read(&probe))?.permissions();
    fs::remove_dir(&probe).map_err(ConvertError::io("remove", &probe))?;
    fs::set_permissions(dir, mode).map_err(ConvertError::io("set permissions of", dir))
}

/// Makes renames and new names in a folder durable. Only unix can open folders for that.
fn sync_dir(dir: &Path) -> Result<(), ConvertError> {
    if cfg!(unix) {
        File::open(dir).and_then(|d| d.sync_all()).map_err(ConvertError::io("write", dir))?;
    }
    Ok(())
}
