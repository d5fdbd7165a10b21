//! A pinned fork-join pool.
//!
//! A step of the program is a sequence of short parallel regions, a few microseconds each, thousands per second. The
//! pool is built for that: starting a region is one atomic increment, workers spin briefly before they sleep, and no
//! region allocates or takes a lock (locks exist only on the sleeping and panicking paths). Spinning is bounded and
//! left out when there are more threads than CPUs, and the caller does the work of workers that are not there yet, so
//! that a busy machine makes regions slower, not stuck.
//!
//! The affinity calls are in [`affinity`]; how work is cut is in `split`. The pool knows nothing of kernels.

pub mod affinity;
mod runs;
mod shared;
mod split;
#[cfg(test)]
mod tests;

pub use split::{Split, UnsafeSlice};

use affinity::{Cpu, Reserved};
use runs::Runs;
use shared::{Shared, worker_main};
use std::{
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, atomic::Ordering, mpsc},
    thread::{self, JoinHandle},
};

/// Threads of a pool at most.
const MAX_THREADS: usize = 1024;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// More threads than any machine has a use for. A system that runs out of room for their stacks may end the process.
    #[error("{threads} threads are too many; at most {MAX_THREADS} can be started")]
    TooMany {
        /// Threads asked for, the caller included.
        threads: usize,
    },
    /// The system refused a thread.
    #[error("cannot start worker {worker} of {threads}: {source}; try fewer threads")]
    Spawn {
        /// The worker that was refused.
        worker: usize,
        /// Threads asked for, the caller included.
        threads: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system refused to pin a thread.
    #[error("cannot pin worker {worker} to CPU {cpu}: {source}; try without pinning")]
    Pin {
        /// The worker.
        worker: usize,
        /// The CPU it was to run on.
        cpu: Cpu,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A team of threads that runs one region at a time; the caller is worker 0.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    /// Workers 1.., in order.
    workers: Vec<JoinHandle<()>>,
    /// A CPU for the caller and each worker, when the pool is pinned.
    cpus: Option<Reserved>,
}

impl Pool {
    /// A pool of `threads`, the caller included, so that `threads - 1` are started.
    ///
    /// With `pin`, started workers are bound to one CPU each out of the set this process may use, whole cores before
    /// their hyper-threads, and leave one for the caller, whose own thread is not bound (its children would inherit that).
    /// Nothing is pinned when other pools of this process have left fewer CPUs than threads, or on systems other than Linux.
    ///
    /// # Errors
    /// When more than 1024 threads are asked for, or the system refuses a thread or the binding.
    pub fn new(threads: NonZeroUsize, pin: bool) -> Result<Self, PoolError> {
        let n = threads.get();
        if n > MAX_THREADS {
            return Err(PoolError::TooMany { threads: n });
        }
        let cpus = affinity::allowed_cpus();
        let oversubscribed = n > available_cpus(&cpus);
        let reserved = (pin && !oversubscribed).then(|| Reserved::take(n)).flatten();
        let shared = Arc::new(Shared::new(n - 1, !oversubscribed));
        let mut pool = Self { shared, workers: Vec::with_capacity(n - 1), cpus: reserved };
        let (report, reports) = mpsc::channel();
        for worker in 1..n {
            let shared = Arc::clone(&pool.shared);
            let cpu = pool.cpus.as_ref().map(|r| r.cpus()[worker]);
            let report = report.clone();
            let handle = thread::Builder::new()
                .name(format!("doyen-{worker}"))
                .spawn(move || {
                    let outcome = cpu.map_or(Ok(()), |cpu| {
                        affinity::pin_current(cpu).map_err(|source| PoolError::Pin { worker, cpu, source })
                    });
                    // The pool waits for every report before it is handed out, so the receiver is there.
                    let _ = report.send(outcome);
                    drop(report);
                    worker_main(&shared, worker);
                })
                .map_err(|source| PoolError::Spawn { worker, threads: n, source })?;
            pool.workers.push(handle);
        }
        drop(report);
        for outcome in reports {
            outcome?;
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(worker)` once for each worker `0 .. threads()`, in parallel, and returns when all are done.
    ///
    /// The number stands for a share of the work, not for a thread: the caller, done with share 0, takes over shares
    /// whose workers have not woken up by then.
    ///
    /// A region started while another one of this pool runs (from inside a region, or from another thread) is run by
    /// its caller alone, one worker number after the other: same result, no parallelism, no deadlock.
    ///
    /// # Panics
    /// With the payload of a panicking `f`, after every worker has finished; the pool stays usable.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return f(0);
        }
        let Some(region) = self.shared.begin(f) else {
            return (0..self.threads()).for_each(f);
        };
        for (slot, worker) in self.shared.slots.iter().zip(&self.workers) {
            if slot.asleep.load(Ordering::SeqCst) && slot.asleep.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        let theirs = region.finish();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Calls `f(i)` for each `i` in `0 .. n`; each worker takes one contiguous run, the same one every time.
    pub fn for_each(&self, n: usize, f: &(dyn Fn(usize) + Sync)) {
        if n <= 1 {
            return (0..n).for_each(f);
        }
        let split = self.split(n, 1);
        self.run(&|worker| split.range(worker).for_each(f));
    }

    /// Calls `f(i)` for each `i` in `0 .. n`, for work that is uneven or on a machine that is: each worker goes through a
    /// contiguous run of its own first, so that it streams memory in order, then takes over what others have not begun.
    pub fn for_each_dynamic(&self, n: usize, f: &(dyn Fn(usize) + Sync)) {
        self.for_each_dynamic_on(n, &|_, i| f(i));
    }

    /// As [`Pool::for_each_dynamic`], with `f(worker, i)`: for work that needs a buffer per worker.
    pub fn for_each_dynamic_on(&self, n: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if n <= 1 || self.workers.is_empty() {
            return (0..n).for_each(|i| f(0, i));
        }
        let runs = Runs::new(n, self.threads());
        self.run(&|worker| runs.each(worker, |i| f(worker, i)));
    }

    /// `0 .. n` cut into one contiguous range per worker, at multiples of `granularity`.
    pub fn split(&self, n: usize, granularity: usize) -> Split {
        Split::new(n, granularity, self.threads())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Panics of regions are caught and handed to `run`; the loop itself has none.
            let _ = worker.join();
        }
    }
}

/// CPUs this process may use, by the affinity mask or, where there is none, by the standard library's estimate.
fn available_cpus(allowed: &[Cpu]) -> usize {
    if allowed.is_empty() {
        thread::available_parallelism().map_or(1, NonZeroUsize::get)
    } else {
        allowed.len()
    }
}
