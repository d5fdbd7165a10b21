//! Spawning the binary, and packages and checkpoints to break.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tempfile::TempDir;

/// A file of the shared test data.
pub fn shared(path: &str) -> PathBuf {
    let root = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = root.join(path);
    assert!(
        path.exists(),
        "{} is missing: set DOYEN_SHARED to the folder of shared test data",
        path.display()
    );
    path
}

/// The binary, with nothing on stdin and two threads, so that tests do not crowd each other out.
pub fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doyen"));
    command.args(args).stdin(Stdio::null()).env_remove("RUST_BACKTRACE");
    command
}

/// What a run of the binary gave.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Run {
    fn from(o: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the binary writes UTF-8");
        Self { code: o.status.code(), stdout: text(o.stdout), stderr: text(o.stderr) }
    }
}

/// Runs the binary to its end.
pub fn doyen<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    command(args).output().expect("the binary starts").into()
}

/// Runs the binary with a text on stdin.
pub fn doyen_with<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, stdin: &[u8]) -> Run {
    feed(&mut command(args), stdin)
}

/// Runs a command with a text on stdin. It may end without reading all of it.
pub fn feed(command: &mut Command, stdin: &[u8]) -> Run {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let _ = child.stdin.take().expect("stdin is piped").write_all(stdin);
    child.wait_with_output().expect("the command ends").into()
}

impl Run {
    /// The run ended well; returns its stdout.
    #[track_caller]
    pub fn ok(&self) -> &str {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.calm();
        &self.stdout
    }

    /// The run refused with an error that has all these words, and nothing on stdout.
    #[track_caller]
    pub fn refused(&self, words: &[&str]) {
        assert_eq!(self.code, Some(2), "{self:#?}");
        assert_eq!(self.stdout, "", "{self:#?}");
        assert!(self.stderr.starts_with("error: "), "{self:#?}");
        self.says(words);
    }

    /// stderr has all these words.
    #[track_caller]
    pub fn says(&self, words: &[&str]) {
        self.calm();
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in: {self:#?}");
        }
    }

    /// No panic, no line said twice.
    #[track_caller]
    fn calm(&self) {
        for alarm in ["panicked", "RUST_BACKTRACE", "stack overflow", "memory allocation"] {
            assert!(!self.stderr.contains(alarm), "{self:#?}");
        }
        let lines: Vec<&str> =
            self.stderr.lines().filter_map(|l| l.trim().strip_prefix("caused by: ")).collect();
        for (i, line) in lines.iter().enumerate() {
            let before = self.stderr.lines().take(i + 1);
            assert!(!before.into_iter().any(|l| l.ends_with(line)), "said twice: {self:#?}");
        }
    }
}

/// Copies a folder without its subfolders; the copies may be written to.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::write(to.join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
        }
    }
}

/// A folder of its own, with a copy of some shared folder in it.
pub struct Place {
    pub dir: TempDir,
    /// The copy.
    pub path: PathBuf,
}

impl Place {
    fn copy(of: &str, name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        copy_dir(&shared(of), &path);
        Self { dir, path }
    }

    /// A small package of another producer (Llama, int4, float32), with chat template and manifest.
    pub fn package() -> Self {
        Self::copy("goldens/llama/package-genai-int4", "package")
    }

    /// A small Llama checkpoint.
    pub fn checkpoint() -> Self {
        Self::copy("goldens/llama/checkpoint", "checkpoint")
    }

    /// Changes a file of the copy.
    pub fn edit(&self, file: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
        let path = self.path.join(file);
        fs::write(&path, change(fs::read(&path).unwrap())).unwrap();
    }

    /// The copy as an argument.
    pub fn arg(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// A name beside the copy.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What lies beside the copy, sorted.
    pub fn listing(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(&self.dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Replaces bytes by as many others, wherever they stand.
pub fn replace(bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len(), "protobuf lengths stay as they are");
    let mut out = bytes;
    let mut found = false;
    let mut i = 0;
    while i + from.len() <= out.len() {
        if &out[i..i + from.len()] == from.as_bytes() {
            out[i..i + from.len()].copy_from_slice(to.as_bytes());
            found = true;
        }
        i += 1;
    }
    assert!(found, "{from:?} is not in the file");
    out
}

/// Replaces a text in a text file.
pub fn replace_text(bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.contains(from), "{from:?} is not in {text}");
    text.replace(from, to).into_bytes()
}
