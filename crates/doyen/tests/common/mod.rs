//! Models to test the engine with.

use doyen::model::{cpu, lowered, source};
use doyen_cpu::CpuDevice;
use doyen_graph::{lowered::Lowered, package::Package};
use doyen_runtime::{Engine, Plan, PlanOptions};
use doyen_tensor::TokenId;
use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A package's lowered graph; the built-in model's without a path.
pub fn graph(package: Option<&Path>) -> Arc<Lowered> {
    let package = Package::open(source(package).expect("the package exists")).expect("the package is sound");
    Arc::new(lowered(&package).expect("the package can be lowered"))
}

/// A folder of the shared test data.
#[allow(dead_code, reason = "not every test binary needs shared data")]
pub fn shared(path: &str) -> PathBuf {
    let root = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let full = root.join(path);
    assert!(full.exists(), "{} is missing: point DOYEN_SHARED at the shared test data", full.display());
    full
}

/// A CPU of some threads.
pub fn device(threads: usize) -> CpuDevice {
    cpu(NonZeroUsize::new(threads)).expect("threads can be started")
}

/// A loaded engine.
pub fn engine(graph: &Arc<Lowered>, device: &CpuDevice, options: &PlanOptions) -> Engine {
    let plan = Plan::new(Arc::clone(graph), device, options).expect("the model can be planned");
    Engine::new(&plan, device).expect("the model can be loaded")
}

/// `len` tokens below `vocab`, the same for the same seed.
pub fn tokens(seed: u64, len: usize, vocab: usize) -> Vec<TokenId> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        TokenId((state % vocab as u64) as u32)
    };
    (0..len).map(|_| next()).collect()
}
