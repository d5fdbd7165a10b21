//! What the threads of a pool share: the current region, who still works on it, and who sleeps.
//!
//! Used by [`super::Pool`] only. The protocol: the caller writes the job, sets `pending` and increments `epoch`. Each
//! worker's share of the region is claimed once, by the worker when it sees the new epoch, or by the caller when it
//! is through with its own share: then that worker is asleep, or the system runs something else in its place, and
//! waiting for it could take a time slice. Whoever claimed a share runs it and decrements `pending`; the caller returns
//! at zero. So the job is read only by holders of a claim, and is alive and unchanged until the last of them is done.

use std::{
    any::Any,
    cell::UnsafeCell,
    hint,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

/// Checks before a waiting thread starts to yield; a check with its pause takes about 20 ns, so 2000 are some 40 us:
/// longer than the serial stretch between two regions of a step, far shorter than a scheduler's time slice.
const SPINS: u32 = 2000;
/// Yields before a waiting thread goes to sleep.
const YIELDS: u32 = 16;

pub(super) type Payload = Box<dyn Any + Send>;
type Job<'a> = &'a (dyn Fn(usize) + Sync + 'a);

/// A value alone on its cache lines (two, for the adjacent-line prefetcher), so that spinning on one does not slow
/// the others.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Line<T>(pub(super) T);

/// One worker's sleeping place.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Slot {
    /// Set by the worker before it parks, cleared by whoever wakes it.
    pub(super) asleep: AtomicBool,
    /// The last epoch for which this worker's share was claimed. Every region's share is, so that the value is one less
    /// than the epoch as long as the share is free.
    claimed: AtomicU64,
}

impl Slot {
    /// Whether the share of region `epoch` was free and is now the caller's to run.
    fn claim(&self, epoch: u64) -> bool {
        // A look first: a failed exchange would take the line away from the worker that runs the share.
        self.claimed.load(Ordering::Relaxed) != epoch
            && self.claimed.compare_exchange(epoch - 1, epoch, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

pub(super) struct Shared {
    epoch: Line<AtomicU64>,
    pending: Line<AtomicUsize>,
    job: UnsafeCell<Option<Job<'static>>>,
    busy: AtomicBool,
    stop: AtomicBool,
    spins: u32,
    pub(super) slots: Vec<Slot>,
    caller_asleep: AtomicBool,
    caller_gate: Mutex<()>,
    caller_bell: Condvar,
    panicked: AtomicBool,
    panic: Mutex<Option<Payload>>,
}

// `job` is the only field that is not Sync by itself; it is written by the one caller that holds `busy`, while `pending` is zero.
// SAFETY: workers read the job only between a successful claim and their decrement of `pending`.
unsafe impl Sync for Shared {}
// SAFETY: the job is a reference to a Sync closure, which may be used from any thread.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("workers", &self.slots.len())
            .field("spins", &self.spins)
            .finish_non_exhaustive()
    }
}

/// A region in progress; [`Region::finish`] waits for it, and so does dropping it.
pub(super) struct Region<'a> {
    shared: &'a Shared,
    job: Job<'a>,
    epoch: u64,
}

impl Shared {
    /// State for `workers` started threads; without `spin`, waiting threads yield and sleep at once.
    pub(super) fn new(workers: usize, spin: bool) -> Self {
        Self {
            epoch: Line::default(),
            pending: Line::default(),
            job: UnsafeCell::new(None),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            spins: if spin { SPINS } else { 0 },
            slots: (0..workers).map(|_| Slot::default()).collect(),
            caller_asleep: AtomicBool::new(false),
            caller_gate: Mutex::new(()),
            caller_bell: Condvar::new(),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Hands `job` to the workers that are awake; `None` when a region is already running.
    pub(super) fn begin<'a>(&'a self, job: Job<'a>) -> Option<Region<'a>> {
        if self.busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // Neither `finish` nor the drop of a region returns before the last worker is done, and `Pool::run` never leaks a region.
        // SAFETY: only the lifetime changes; the region borrows the job for 'a and outlives every use of it.
        let forever = unsafe { std::mem::transmute::<Job<'a>, Job<'static>>(job) };
        // SAFETY: `busy` makes this thread the only writer, and `pending` is zero, so that no worker reads.
        unsafe { *self.job.get() = Some(forever) };
        self.pending.0.store(self.slots.len(), Ordering::Relaxed);
        let epoch = self.epoch.0.fetch_add(1, Ordering::SeqCst) + 1;
        Some(Region { shared: self, job, epoch })
    }

    /// Tells the workers to leave; the caller wakes and joins them.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.epoch.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until the epoch differs from `seen` and returns it.
    fn next_epoch(&self, seen: u64, slot: &Slot) -> u64 {
        if poll(self.spins, || self.epoch.0.load(Ordering::Acquire) != seen) {
            return self.epoch.0.load(Ordering::Acquire);
        }
        loop {
            // Sequentially consistent on both sides: either the starter of the region sees the flag and wakes this
            // thread, or this thread sees the new epoch.
            slot.asleep.store(true, Ordering::SeqCst);
            let epoch = self.epoch.0.load(Ordering::SeqCst);
            if epoch != seen {
                slot.asleep.store(false, Ordering::SeqCst);
                return epoch;
            }
            thread::park();
        }
    }

    fn wait_for_workers(&self) {
        if poll(self.spins, || self.pending.0.load(Ordering::Acquire) == 0) {
            return;
        }
        let mut gate = self.caller_gate.lock().unwrap_or_else(PoisonError::into_inner);
        self.caller_asleep.store(true, Ordering::SeqCst);
        while self.pending.0.load(Ordering::SeqCst) != 0 {
            gate = self.caller_bell.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_asleep.store(false, Ordering::SeqCst);
    }

    /// Runs a claimed share.
    fn share(&self, job: Job<'_>, worker: usize) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            self.panicked.store(true, Ordering::Release);
        }
        if self.pending.0.fetch_sub(1, Ordering::SeqCst) == 1 && self.caller_asleep.load(Ordering::SeqCst) {
            // Taking the gate orders this after the caller's check, so that the bell cannot ring before it listens.
            drop(self.caller_gate.lock().unwrap_or_else(PoisonError::into_inner));
            self.caller_bell.notify_all();
        }
    }
}

impl Region<'_> {
    /// Runs the shares that no worker has begun, waits for the others, and gives the payload of a panic among them, if
    /// there was one.
    pub(super) fn finish(self) -> Option<Payload> {
        for (slot, worker) in self.shared.slots.iter().zip(1..) {
            if slot.claim(self.epoch) {
                self.shared.share(self.job, worker);
            }
        }
        self.shared.wait_for_workers();
        if !self.shared.panicked.load(Ordering::Acquire) {
            return None;
        }
        self.shared.panicked.store(false, Ordering::Relaxed);
        self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        self.shared.wait_for_workers();
        self.shared.busy.store(false, Ordering::Release);
    }
}

/// The life of worker `worker` (1-based; 0 is the caller).
pub(super) fn worker_main(shared: &Shared, worker: usize) {
    let slot = &shared.slots[worker - 1];
    let mut seen = 0;
    loop {
        seen = shared.next_epoch(seen, slot);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        if !slot.claim(seen) {
            continue;
        }
        // SAFETY: the share was free, so the region is in progress; its job was written before the epoch and stays until the share is done.
        let job = unsafe { *shared.job.get() };
        if let Some(job) = job {
            shared.share(job, worker);
        }
    }
}

/// Checks `ready` while spinning, then while yielding; whether it became true.
fn poll(spins: u32, ready: impl Fn() -> bool) -> bool {
    for _ in 0..spins {
        if ready() {
            return true;
        }
        hint::spin_loop();
    }
    for _ in 0..YIELDS {
        if ready() {
            return true;
        }
        thread::yield_now();
    }
    ready()
}
