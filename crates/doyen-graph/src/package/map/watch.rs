//! Mapped files that become shorter while they are read: the system sends SIGBUS, which by itself ends a process without a
//! word. Here it is known which addresses are mapped files, so that the process can end with a reason instead.
//!
//! Going on is no option: whoever reads a mapping holds a plain slice. The handler keeps to what a handler may do: it reads
//! atomics, writes a line and leaves.

use memmap2::Mmap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A mapping that is watched as long as it lives.
pub(super) struct Watched {
    map: Mmap,
    range: Option<&'static Range>,
}

/// Addresses of one mapping; all zero when unused.
struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
}

/// A package has a few files, a converter a window on each of a checkpoint's. What finds no place is not watched.
static RANGES: [Range; 256] = [const { Range { start: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; 256];

impl Watched {
    pub(super) fn new(map: Mmap) -> Self {
        let start = map.as_ptr().addr();
        let free =
            |r: &&Range| r.start.compare_exchange(0, start, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let range = RANGES.iter().find(free);
        if let Some(r) = range {
            r.len.store(map.len(), Ordering::Release);
        }
        Self { map, range }
    }
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(r) = self.range {
            r.len.store(0, Ordering::Relaxed);
            r.start.store(0, Ordering::Release);
        }
    }
}

/// From now on, a file that was truncated while it was mapped (the files of a package, a checkpoint being converted) ends the
/// process with a line on stderr and exit code 2 when it is read past its new end, instead of SIGBUS alone. For `main`:
/// signal handlers are the process's.
pub fn explain_truncated_files() {
    #[cfg(unix)]
    handler::install();
}

#[cfg(unix)]
mod handler {
    use super::{Ordering, RANGES};
    use nix::{
        libc,
        sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction},
    };

    const SAID: &[u8] =
        b"\nerror: a file became shorter while it was in use: something truncated or overwrote it; \
        write new files beside old ones and rename them\n";

    #[allow(unsafe_code)]
    pub(super) fn install() {
        let action =
            SigAction::new(SigHandler::SigAction(on_bus_error), SaFlags::SA_SIGINFO, SigSet::empty());
        // SAFETY: the handler is async-signal-safe: atomics, write, _exit, sigaction and raise.
        let installed = unsafe { sigaction(Signal::SIGBUS, &action) };
        // Without it the process ends all the same, only silently.
        let _ = installed;
    }

    #[allow(unsafe_code)]
    extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system hands a valid structure to handlers with SA_SIGINFO.
        let address = unsafe { (*info).si_addr() }.addr();
        let watched = RANGES.iter().any(|r| {
            let len = r.len.load(Ordering::Acquire);
            address.wrapping_sub(r.start.load(Ordering::Relaxed)) < len
        });
        if watched {
            // SAFETY: both take what they are given; the bytes are static.
            unsafe {
                libc::write(libc::STDERR_FILENO, SAID.as_ptr().cast(), SAID.len());
                libc::_exit(2)
            }
        }
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: the default action has no handler.
        let restored = unsafe { sigaction(Signal::SIGBUS, &default) };
        // It is blocked until the handler returns, and then ends the process, whatever has sent it.
        let _ = restored.and_then(|_| raise(Signal::SIGBUS));
    }
}
