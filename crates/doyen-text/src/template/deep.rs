//! A stack that hostile templates cannot overflow.
//!
//! A template can nest values as deep as it has steps (`{% set ns.x = [ns.x] %}` in a loop), and a long chain of
//! operators nests its syntax tree. The engine drops, compares and prints such things recursively; an overflow
//! would end the process. So templates are compiled and rendered on a thread of their own, whose stack is larger
//! than the limits on steps and source can fill. Only touched pages take memory, so it costs what starting a
//! thread costs (tens of microseconds).

use std::thread;

/// Stack per step or byte of source. Measured on x86-64 without optimization of this crate: at most 420 bytes per
/// level for dropping, comparing and printing nested lists and slices.
const BYTES_PER_LEVEL: u64 = 512;
const BASE: u64 = 4 << 20;

/// Why the work has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeepError {
    #[error("cannot start a thread with a stack of {bytes} bytes: {source}")]
    Start { bytes: u64, source: std::io::Error },
    #[error("the template engine failed internally")]
    Panic,
}

/// Runs `work` on a stack for at least `levels` of nesting.
pub(super) fn with_stack<T: Send>(levels: u64, work: impl FnOnce() -> T + Send) -> Result<T, DeepError> {
    let bytes = BASE.saturating_add(levels.saturating_mul(BYTES_PER_LEVEL));
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("chat-template".to_owned()).stack_size(size);
        let handle = thread.spawn_scoped(scope, work).map_err(|source| DeepError::Start { bytes, source })?;
        handle.join().map_err(|_| DeepError::Panic)
    })
}
