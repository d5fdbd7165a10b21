//! Which CPUs this process may use, and binding a thread to one of them.
//!
//! Linux only; elsewhere the set is empty and binding does nothing. Called when a pool is made, never per region.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// A CPU as the operating system numbers it.
pub type Cpu = usize;

/// CPUs that pools of this process have threads bound to.
static TAKEN: Mutex<BTreeSet<Cpu>> = Mutex::new(BTreeSet::new());

/// CPUs that are one pool's own until it is dropped: two engines in one process must not spin on the same ones.
#[derive(Debug)]
pub(super) struct Reserved(Vec<Cpu>);

impl Reserved {
    /// `n` of the CPUs this process may use that no other pool has; `None` when there are not as many.
    pub(super) fn take(n: usize) -> Option<Self> {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let free = choose(&allowed_cpus(), &taken, n)?;
        taken.extend(&free);
        Some(Self(free))
    }

    /// The CPUs, one a thread.
    pub(super) fn cpus(&self) -> &[Cpu] {
        &self.0
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|cpu| !self.0.contains(cpu));
    }
}

/// The first `n` of `allowed` that are not in `taken`.
fn choose(allowed: &[Cpu], taken: &BTreeSet<Cpu>, n: usize) -> Option<Vec<Cpu>> {
    let free: Vec<Cpu> = allowed.iter().copied().filter(|cpu| !taken.contains(cpu)).take(n).collect();
    (free.len() == n).then_some(free)
}

/// The CPUs the calling thread may run on: first one of every core, then their hyper-threads. Empty when unknown.
pub fn allowed_cpus() -> Vec<Cpu> {
    imp::allowed_cpus()
}

/// Binds the calling thread to one CPU.
///
/// # Errors
/// When the system refuses, for example because the CPU is outside of the allowed set.
pub fn pin_current(cpu: Cpu) -> std::io::Result<()> {
    imp::pin_current(cpu)
}

#[cfg(target_os = "linux")]
mod imp {
    use super::Cpu;
    use std::{fs, io, mem};

    pub(super) fn allowed_cpus() -> Vec<Cpu> {
        // SAFETY: an all-zero cpu_set_t is a valid, empty set.
        let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
        // SAFETY: the pointer is to a live cpu_set_t and the size is its size; pid 0 is the calling thread.
        if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
            return Vec::new();
        }
        let limit = 8 * size_of::<libc::cpu_set_t>();
        // SAFETY: `cpu` is below the number of bits of the set.
        let mut cpus: Vec<Cpu> = (0..limit).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect();
        cpus.sort_by_key(|&cpu| (sibling_rank(cpu), cpu));
        cpus
    }

    pub(super) fn pin_current(cpu: Cpu) -> io::Result<()> {
        if cpu >= 8 * size_of::<libc::cpu_set_t>() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no CPU {cpu}")));
        }
        // SAFETY: an all-zero cpu_set_t is a valid, empty set.
        let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
        // SAFETY: `cpu` was checked to be below the number of bits of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        // SAFETY: the pointer is to a live cpu_set_t and the size is its size; pid 0 is the calling thread.
        if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Position of a CPU among the hyper-threads of its core; 0 when the system does not say.
    fn sibling_rank(cpu: Cpu) -> usize {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        fs::read_to_string(path).map_or(0, |list| rank_in_list(list.trim(), cpu))
    }

    /// Position of `cpu` in a list such as `0,64` or `2-3`.
    fn rank_in_list(list: &str, cpu: Cpu) -> usize {
        let mut rank = 0;
        for part in list.split(',') {
            let mut ends = part.splitn(2, '-').map(str::parse::<usize>);
            let Some(Ok(first)) = ends.next() else { return 0 };
            let last = match ends.next() {
                Some(Ok(last)) => last,
                Some(Err(_)) => return 0,
                None => first,
            };
            if (first..=last).contains(&cpu) {
                return rank + cpu - first;
            }
            rank += (last + 1).saturating_sub(first);
        }
        0
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn ranks_in_sibling_lists() {
            assert_eq!(rank_in_list("0,64", 0), 0);
            assert_eq!(rank_in_list("0,64", 64), 1);
            assert_eq!(rank_in_list("2-3", 3), 1);
            assert_eq!(rank_in_list("0-1,8-9", 9), 3);
            assert_eq!(rank_in_list("nonsense", 9), 0);
            assert_eq!(rank_in_list("", 9), 0);
        }

        #[test]
        fn pins_inside_the_allowed_set_and_refuses_outside() {
            std::thread::spawn(|| {
                let cpus = allowed_cpus();
                assert!(!cpus.is_empty());
                let last = cpus[cpus.len() - 1];
                pin_current(last).unwrap();
                assert_eq!(allowed_cpus(), vec![last]);
                assert!(pin_current(usize::MAX).is_err());
            })
            .join()
            .unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_get_cpus_that_no_other_has() {
        let taken = BTreeSet::from([0, 2]);
        assert_eq!(choose(&[0, 4, 2, 6], &taken, 2), Some(vec![4, 6]));
        assert_eq!(choose(&[0, 4, 2, 6], &taken, 3), None);
        assert_eq!(choose(&[], &taken, 1), None);
    }
}

#[cfg(not(target_os = "linux"))]
mod imp {
    use super::Cpu;

    pub(super) fn allowed_cpus() -> Vec<Cpu> {
        Vec::new()
    }

    pub(super) fn pin_current(_cpu: Cpu) -> std::io::Result<()> {
        Ok(())
    }
}
