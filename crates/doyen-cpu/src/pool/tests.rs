//! The pool under many tiny regions, panics, nesting, sharing and oversubscription.

use super::*;
use std::sync::atomic::AtomicU64;

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    payload.downcast_ref::<&str>().copied().unwrap_or("not a str")
}

#[test]
fn every_worker_runs_once_per_region() {
    for threads in [1, 2, 3, 7] {
        let pool = pool(threads);
        let counts: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
        let regions = if threads == 2 { 100_000 } else { 2_000 };
        for i in 0..regions {
            pool.run(&|w| {
                counts[w].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == i + 1));
        }
    }
}

#[test]
fn workers_wake_from_sleep() {
    let pool = pool(3);
    for _ in 0..20 {
        let n = AtomicU64::new(0);
        pool.run(&|_| {
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.load(Ordering::Relaxed), 3);
        thread::sleep(std::time::Duration::from_millis(3));
    }
}

#[test]
fn caller_sleeps_for_slow_workers() {
    let pool = pool(2);
    let done = AtomicU64::new(0);
    for _ in 0..5 {
        pool.run(&|w| {
            if w == 1 {
                thread::sleep(std::time::Duration::from_millis(5));
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    assert_eq!(done.load(Ordering::Relaxed), 5);
}

#[test]
fn panics_arrive_and_leave_the_pool_usable() {
    let pool = pool(3);
    for culprit in 0..3 {
        let finished = AtomicU64::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|w| {
                if w == culprit {
                    std::panic::panic_any("culprit");
                }
                finished.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert_eq!(message(&*caught.unwrap_err()), "culprit");
        assert_eq!(finished.load(Ordering::Relaxed), 2);
        let n = AtomicU64::new(0);
        pool.for_each(10, &|i| {
            n.fetch_add(i as u64, Ordering::Relaxed);
        });
        assert_eq!(n.load(Ordering::Relaxed), 45);
    }
}

#[test]
fn nested_regions_run_inline() {
    let pool = pool(2);
    let n = AtomicU64::new(0);
    pool.run(&|_| {
        let id = thread::current().id();
        pool.run(&|_| {
            assert_eq!(thread::current().id(), id);
            n.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(n.load(Ordering::Relaxed), 4);
}

#[test]
fn one_pool_from_several_threads_and_several_pools_at_once() {
    let shared = pool(2);
    let total = AtomicU64::new(0);
    thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                let own = pool(2);
                for _ in 0..500 {
                    for p in [&shared, &own] {
                        p.for_each(4, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 3 * 500 * 2 * 4);
}

#[test]
fn each_item_is_visited_once() {
    let pool = pool(3);
    for n in [0, 1, 2, 3, 4, 100, 1001] {
        let seen: Vec<AtomicU64> = (0..n).map(|_| AtomicU64::new(0)).collect();
        let visit = |i: usize| {
            seen[i].fetch_add(1, Ordering::Relaxed);
        };
        pool.for_each(n, &visit);
        pool.for_each_dynamic(n, &visit);
        assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 2));
    }
}

#[test]
fn oversubscription_finishes() {
    let pool = pool(4 * available_cpus(&affinity::allowed_cpus()) + 1);
    let n = AtomicU64::new(0);
    for _ in 0..200 {
        pool.run(&|_| {
            n.fetch_add(1, Ordering::Relaxed);
        });
    }
    assert_eq!(n.load(Ordering::Relaxed), 200 * pool.threads() as u64);
}

#[test]
fn pinning_binds_workers_to_distinct_cpus() {
    let allowed = affinity::allowed_cpus();
    let threads = allowed.len().max(1);
    let new = |n: usize| Pool::new(NonZeroUsize::new(n).unwrap(), true).unwrap();
    let mut pinned = new(threads);
    // Pools of other tests may have the CPUs for a while.
    while pinned.cpus.is_none() && !allowed.is_empty() {
        drop(pinned);
        thread::yield_now();
        pinned = new(threads);
    }
    if let Some(reserved) = &pinned.cpus {
        assert_eq!(reserved.cpus(), allowed);
        // Shares that wait for each other cannot be taken over.
        let all = std::sync::Barrier::new(threads);
        pinned.run(&|w| {
            all.wait();
            if w > 0 {
                assert_eq!(affinity::allowed_cpus(), [reserved.cpus()[w]]);
            }
        });
        assert!(new(1).cpus.is_none(), "all are taken");
    }
    assert!(new(threads + 1).cpus.is_none());
}

#[test]
fn dropping_joins_idle_and_sleeping_workers() {
    for pause in [0, 5] {
        let pool = pool(4);
        let alive = Arc::downgrade(&pool.shared);
        thread::sleep(std::time::Duration::from_millis(pause));
        drop(pool);
        assert!(alive.upgrade().is_none());
    }
}
