//! A case's folder: model, data sets, and what is expected of it.

use super::Tolerance;
use crate::onnx::decode_tensor;
use bytes::Bytes;
use doyen_tensor::Tensor;
use serde::Deserialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// What a case must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// Give the expected outputs.
    Ok,
    /// Fail while loading, before any input is seen.
    LoadError,
    /// Fail at the latest when run.
    RunError,
}

/// Who wrote a case, which decides how outputs compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A case with a `case.json`: NaN in an expected output means "not specified".
    Described,
    /// One of ONNX's own node tests: NaN means NaN.
    OnnxNode,
}

/// A case that was found and described; tensors are read when it runs.
#[derive(Debug, Clone)]
pub struct Case {
    /// Folder name.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Operator under test, with its domain if that is not the default; empty when the case does not say.
    pub op: String,
    /// Who wrote it.
    pub source: Source,
    /// What it must do.
    pub expect: Expect,
    /// Words one of which an expected error must contain, `|` between them.
    pub matches: String,
    /// How near outputs must be.
    pub tolerance: Tolerance,
    /// Labels.
    pub tags: Vec<String>,
}

/// Inputs and expected outputs, in the order of the graph's ports.
#[derive(Debug, Clone)]
pub struct DataSet {
    /// Inputs.
    pub inputs: Vec<Tensor>,
    /// Expected outputs; empty where an error is expected.
    pub outputs: Vec<Tensor>,
}

/// A case whose own files cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct CaseFileError {
    path: PathBuf,
    reason: String,
}

impl CaseFileError {
    fn new(path: &Path, reason: &dyn ToString) -> Self {
        Self { path: path.to_owned(), reason: reason.to_string() }
    }
}

#[derive(Deserialize)]
struct Description {
    #[serde(default)]
    op: String,
    #[serde(default)]
    domain: String,
    rtol: f64,
    atol: f64,
    expect: Expect,
    #[serde(default, rename = "match")]
    matches: String,
    #[serde(default)]
    tags: Vec<String>,
}

impl Case {
    /// Every case below a folder (at most two levels down), by name. A folder with a `model.onnx` is a case.
    ///
    /// # Errors
    /// When the folder or a `case.json` cannot be read, or there is no case.
    pub fn find(dir: &Path) -> Result<Vec<Self>, CaseFileError> {
        let mut out = Vec::new();
        search(dir, 2, &mut out)?;
        if out.is_empty() {
            return Err(CaseFileError::new(dir, &"no folder with a model.onnx here"));
        }
        out.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(out)
    }

    fn open(path: PathBuf) -> Result<Self, CaseFileError> {
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let file = path.join("case.json");
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(Self {
                    name,
                    path,
                    op: String::new(),
                    source: Source::OnnxNode,
                    expect: Expect::Ok,
                    matches: String::new(),
                    tolerance: Tolerance::ONNX_NODE,
                    tags: Vec::new(),
                });
            }
            Err(e) => return Err(CaseFileError::new(&file, &e)),
        };
        let d: Description = serde_json::from_str(&text).map_err(|e| CaseFileError::new(&file, &e))?;
        let op = match d.domain.as_str() {
            "" | "ai.onnx" => d.op,
            domain => format!("{domain}::{}", d.op),
        };
        Ok(Self {
            name,
            path,
            op,
            source: Source::Described,
            expect: d.expect,
            matches: d.matches,
            tolerance: Tolerance { rtol: d.rtol, atol: d.atol, nan_is_free: true },
            tags: d.tags,
        })
    }

    /// The data sets, in order.
    ///
    /// # Errors
    /// When a tensor file cannot be read.
    pub fn data_sets(&self) -> Result<Vec<DataSet>, CaseFileError> {
        let mut out = Vec::new();
        loop {
            let dir = self.path.join(format!("test_data_set_{}", out.len()));
            if !dir.is_dir() {
                return Ok(out);
            }
            out.push(DataSet { inputs: tensors(&dir, "input")?, outputs: tensors(&dir, "output")? });
        }
    }
}

fn search(dir: &Path, depth: usize, out: &mut Vec<Case>) -> Result<(), CaseFileError> {
    if dir.join("model.onnx").is_file() {
        out.push(Case::open(dir.to_owned())?);
        return Ok(());
    }
    if depth == 0 {
        return Ok(());
    }
    for entry in fs::read_dir(dir).map_err(|e| CaseFileError::new(dir, &e))? {
        let path = entry.map_err(|e| CaseFileError::new(dir, &e))?.path();
        if path.is_dir() {
            search(&path, depth - 1, out)?;
        }
    }
    Ok(())
}

fn tensors(dir: &Path, kind: &str) -> Result<Vec<Tensor>, CaseFileError> {
    let mut out = Vec::new();
    loop {
        let path = dir.join(format!("{kind}_{}.pb", out.len()));
        let bytes = match fs::read(&path) {
            Ok(bytes) => Bytes::from(bytes),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(out),
            Err(e) => return Err(CaseFileError::new(&path, &e)),
        };
        out.push(decode_tensor(bytes).map_err(|e| CaseFileError::new(&path, &e))?.1);
    }
}
