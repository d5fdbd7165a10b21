//! A decoding step allocates nothing, on any thread.

mod common;

use common::{device, engine, graph, tokens};
use doyen_graph::device::Numerics;
use doyen_runtime::{Engine, PlanOptions, Request, SamplingParams};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(start, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of each of `steps` steps.
fn count(engine: &mut Engine, steps: usize) -> Vec<usize> {
    let mut counts = Vec::with_capacity(steps);
    for _ in 0..steps {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        let events = engine.step().map(<[_]>::len);
        let after = ALLOCATIONS.load(Ordering::SeqCst);
        assert!(events.unwrap() > 0, "a sequence generates");
        counts.push(after - before);
    }
    counts
}

fn main() {
    let graph = graph(None);
    let greedy = SamplingParams::default();
    let sampled =
        SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.9, min_p: 0.01, seed: 3, ..greedy.clone() };
    let penalised = SamplingParams {
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        ..sampled.clone()
    };
    for (numerics, threads) in [(Numerics::Fast, 1), (Numerics::Fast, 2), (Numerics::Exact, 2)] {
        let device = device(threads);
        for (name, jobs) in [
            ("greedy", vec![greedy.clone()]),
            ("sampled", vec![sampled.clone()]),
            ("penalised", vec![penalised.clone()]),
            ("three at once", vec![greedy.clone(), sampled.clone(), penalised.clone()]),
        ] {
            let sequences = jobs.len();
            let options =
                PlanOptions { context: 128, sequences, numerics, page_size: 16, ..PlanOptions::default() };
            let mut engine = engine(&graph, &device, &options);
            for (i, sampling) in jobs.into_iter().enumerate() {
                engine.submit(Request::new(tokens(i as u64, 9 + i, 8000), sampling)).unwrap();
            }
            // The first step reads the prompts; from the second on, pages are crossed several times.
            engine.step().unwrap();
            let counts = count(&mut engine, 36);
            assert!(counts.iter().all(|&n| n == 0), "{name}, {numerics:?}, {threads} threads: {counts:?}");
        }
    }
    println!("decoding allocates nothing");
}
