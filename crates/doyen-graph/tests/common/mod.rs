//! Where the shared data is.

use std::path::PathBuf;

/// A folder of the shared data: below `DOYEN_SHARED`, or beside the workspace.
pub fn shared(folder: &str) -> PathBuf {
    let root = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = root.join(folder);
    assert!(
        path.is_dir(),
        "{} is missing: these tests need the shared data; set DOYEN_SHARED to its folder",
        path.display()
    );
    path
}
