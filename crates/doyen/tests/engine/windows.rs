//! Cache groups with a window keep few pages, and give the same bits.

use crate::common::{device, engine, graph, shared, tokens};
use doyen_graph::device::Device;
use doyen_runtime::{Engine, Plan, PlanOptions, Request, SamplingParams};
use doyen_tensor::ByteCount;
use std::sync::Arc;

const CONTEXT: usize = 300;
const STEP: usize = 32;
const PAGE: usize = 16;

/// All logits of an answer, and the most pages each group held while it was generated.
fn generate(engine: &mut Engine, groups: usize) -> (Vec<u32>, Vec<usize>) {
    let prompt = tokens(5, 100, 1000);
    engine
        .submit(Request { max_new_tokens: Some(150), ..Request::new(prompt, SamplingParams::default()) })
        .unwrap();
    let (mut bits, mut most) = (Vec::new(), vec![0; groups]);
    while !engine.is_idle() {
        engine.step_with(|_, row| bits.extend(row.iter().map(|l| l.to_bits()))).unwrap();
        for (g, most) in most.iter_mut().enumerate().filter(|_| !bits.is_empty()) {
            *most = engine.pages_used(g).max(*most);
        }
    }
    (bits, most)
}

#[test]
fn a_long_generation_holds_few_pages_of_a_window() {
    let graph = graph(Some(&shared("goldens/gpt_oss/package-genai-fp32")));
    let window = graph.groups.iter().position(|g| g.window == Some(16)).expect("layers with a window of 16");
    let whole = graph.groups.iter().position(|g| g.window.is_none()).expect("layers without one");
    let device = device(2);
    let options =
        PlanOptions { context: CONTEXT, step_tokens: STEP, page_size: PAGE, ..PlanOptions::default() };
    let plan = Plan::new(Arc::clone(&graph), &device, &options).unwrap();
    // 15 keys before a query touch two pages, the query may be in a third; a step's 32 tokens fill two more.
    assert_eq!(plan.program().pages[window].pages, 5);
    assert_eq!(plan.program().pages[whole].pages, CONTEXT.div_ceil(PAGE));

    let (got, held) = generate(&mut Engine::new(&plan, &device).unwrap(), graph.groups.len());
    assert_eq!(held[whole], 250usize.div_ceil(PAGE));
    assert!(held[window] <= 3, "{} pages held", held[window]);

    // One page holds the whole context, so that nothing is ever given back.
    let kept = PlanOptions { page_size: 512, ..options };
    let (want, _) = generate(&mut engine(&graph, &device, &kept), graph.groups.len());
    assert!(got == want, "the same bits whether pages are given back or not");
}

#[test]
fn the_ledger_counts_the_pages_there_are() {
    let graph = graph(Some(&shared("goldens/gpt_oss/package-genai-fp32")));
    let device = device(1);
    let options = PlanOptions { context: 2048, sequences: 3, ..PlanOptions::default() };
    let plan = Plan::new(Arc::clone(&graph), &device, &options).unwrap();
    let per_page = device.page_bytes(&graph, options.page_size);
    let pages = plan.program().pages.iter().zip(&per_page);
    let (windows, wholes): (Vec<_>, Vec<_>) = pages.partition(|(p, _)| p.window.is_some());
    let bytes = |groups: &[(&doyen_graph::device::GroupPages, &ByteCount)]| {
        ByteCount(groups.iter().map(|(p, b)| p.pages as u64 * b.0).sum())
    };
    let line = |what: &str| {
        let found = plan.ledger().entries().iter().find(|e| e.what.starts_with(what));
        found.unwrap_or_else(|| panic!("no line {what:?} in\n{}", plan.ledger())).bytes
    };
    assert_eq!(line("kv cache in f32,"), bytes(&wholes));
    assert_eq!(line("kv cache of windows in f32,"), bytes(&windows));
    assert!(bytes(&windows).0 * 5 < bytes(&wholes).0, "windows of 16 take little of a context of 2048");
}
