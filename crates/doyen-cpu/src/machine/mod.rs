//! What the operating system says of this machine: processor, caches, limits on CPUs and memory.
//!
//! Read from `/proc` and `/sys` when asked, never while a step runs; elsewhere than on Linux most of it is unknown. Used by
//! `doyen doctor` and `doyen bench` (a figure without its machine means nothing) and to size what benchmarks allocate.

mod caches;
mod cgroup;
mod memory;
mod processor;

pub use caches::Cache;
pub use memory::{HugePages, MemoryState};

use crate::pool::affinity::allowed_cpus;
use std::{fs, num::NonZeroUsize, path::Path, thread::available_parallelism};

/// A machine as this process sees it.
#[derive(Debug, Clone)]
pub struct Machine {
    /// What the processor calls itself.
    pub cpu: String,
    /// Instruction-set features that kernels could use, by the names of `is_x86_feature_detected`.
    pub features: Vec<&'static str>,
    /// Whether a hypervisor is below.
    pub virtual_machine: bool,
    /// CPUs that are switched on.
    pub online: usize,
    /// CPUs that the affinity mask of this process allows.
    pub affinity: usize,
    /// Cores' worth of time that control groups allow, when they limit it.
    pub quota: Option<f64>,
    /// The caches that the allowed CPUs have, all instances together, smallest level first.
    pub caches: Vec<Cache>,
    /// Memory nodes.
    pub numa_nodes: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Memory and huge pages.
    pub memory: MemoryState,
}

impl Machine {
    /// Asks the operating system.
    pub fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = text("/proc/cpuinfo");
        let allowed = allowed_cpus();
        let online = count_list(&text("/sys/devices/system/cpu/online"));
        let affinity = if allowed.is_empty() { parallelism() } else { allowed.len() };
        let control = cgroup::Limits::read(Path::new("/sys/fs/cgroup"), &text("/proc/self/cgroup"));
        Self {
            cpu: processor::name(&cpuinfo),
            features: processor::features(),
            virtual_machine: processor::is_virtual(&cpuinfo),
            online: online.unwrap_or(affinity),
            affinity,
            quota: control.cpus,
            caches: caches::read(Path::new("/sys/devices/system/cpu"), &allowed),
            numa_nodes: count_list(&text("/sys/devices/system/node/online")).unwrap_or(1),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            memory: MemoryState::read(control.memory_left),
        }
    }

    /// Threads that can run at once: affinity and quota together.
    pub fn threads(&self) -> usize {
        let quota = self.quota.map_or(usize::MAX, |q| (q.ceil() as usize).max(1));
        self.affinity.min(quota)
    }

    /// Bytes of the last cache level, over all allowed CPUs; 32 MiB when the system does not say.
    pub fn last_level_cache(&self) -> usize {
        self.caches.last().map_or(32 << 20, |c| c.bytes)
    }
}

fn parallelism() -> usize {
    available_parallelism().map_or(1, NonZeroUsize::get)
}

/// How many numbers a list such as `0-3,8` has.
fn count_list(list: &str) -> Option<usize> {
    list.trim().split(',').try_fold(0usize, |n, part| {
        let mut ends = part.splitn(2, '-').map(str::parse::<usize>);
        let first = ends.next()?.ok()?;
        let last = ends.next().map_or(Some(first), Result::ok)?;
        n.checked_add(last.checked_sub(first)? + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_counted() {
        assert_eq!(count_list("0-3,8\n"), Some(5));
        assert_eq!(count_list("0"), Some(1));
        assert_eq!(count_list(""), None);
        assert_eq!(count_list("3-1"), None);
    }

    #[test]
    fn this_machine_has_a_processor_and_memory() {
        let m = Machine::read();
        assert!(m.threads() >= 1 && m.threads() <= m.affinity);
        assert!(m.affinity <= m.online, "{m:?}");
        assert!(m.last_level_cache() > 0);
        if cfg!(target_os = "linux") {
            assert!(m.memory.total > Some(0) && m.memory.available <= m.memory.total, "{m:?}");
            assert!(!m.kernel.is_empty());
        }
    }
}
