//! A process of these tests in which the driver and the compiler are emulated.

use std::{
    collections::hash_map::DefaultHasher,
    fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

/// Names the file that says what other processes have of the card's memory: a variable of the emulator.
pub const TAKEN: &str = "CUDA_EMULATOR_TAKEN";

#[test]
fn all_on_an_emulated_card() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/cuda-emulator");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cuda-emulator");
    let built =
        Command::new(sources.join("build.sh")).arg(&folder).status().expect("the emulator's script runs");
    assert!(built.success(), "the emulator cannot be built: g++ and bash are needed");
    let taken = folder.join(format!("taken-{}", std::process::id()));
    fs::write(&taken, "0").unwrap();
    // Kernels compiled by an emulator are of use to it alone.
    let cache = folder.join(format!("cache-{:016x}", version(&sources)));
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--test-threads", "1"])
        .env("LD_LIBRARY_PATH", &folder)
        .env("XDG_CACHE_HOME", cache)
        .env("CUDA_EMULATOR_MEMORY", (1u64 << 30).to_string())
        .env(TAKEN, &taken)
        .status()
        .expect("these tests run in a process of their own");
    fs::remove_file(&taken).unwrap();
    assert!(done.success(), "see above");
}

fn version(sources: &Path) -> u64 {
    let mut hash = DefaultHasher::new();
    let mut files: Vec<_> = fs::read_dir(sources).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    for file in files {
        fs::read(file).unwrap().hash(&mut hash);
    }
    hash.finish()
}
