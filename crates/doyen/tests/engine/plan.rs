//! Plans that fit, and refusals that say what would help.

use crate::common::{device, graph, shared};
use doyen_runtime::{Plan, PlanError, PlanOptions};
use doyen_tensor::ByteCount;
use std::sync::Arc;

#[test]
fn short_memory_is_refused_with_the_shortfall_and_a_hint() {
    let (graph, device) = (graph(None), device(1));
    let plan = |options: PlanOptions| Plan::new(Arc::clone(&graph), &device, &options);
    let options = PlanOptions { context: 512, memory: Some(ByteCount(u64::MAX)), ..PlanOptions::default() };
    let needed = plan(options.clone()).unwrap().ledger().allocated();
    let exactly = |memory| PlanOptions { memory: Some(memory), ..options.clone() };
    plan(exactly(needed)).expect("what is needed is enough");

    let short = ByteCount(3 << 20);
    let e = plan(exactly(ByteCount(needed.0 - short.0))).unwrap_err();
    let PlanError::Memory { needed: said, available, .. } = &e else { panic!("{e}") };
    assert_eq!((*said, *available), (needed, ByteCount(needed.0 - short.0)));
    let text = e.to_string();
    assert!(text.contains(&format!("{short} short")), "{text}");
    assert!(text.contains("a context shorter than 512 (--context)"), "{text}");

    let several = PlanOptions { sequences: 4, memory: Some(ByteCount(1)), ..options };
    let text = plan(several).unwrap_err().to_string();
    assert!(text.contains("fewer sequences at once than 4"), "{text}");
}

#[test]
fn impossible_options_are_refused() {
    let (graph, device) = (graph(None), device(1));
    let refused = |options: PlanOptions| {
        let e = Plan::new(Arc::clone(&graph), &device, &options).unwrap_err();
        assert!(matches!(e, PlanError::Options(_)), "{e}");
        e.to_string()
    };
    let all = PlanOptions::default;
    assert!(refused(PlanOptions { page_size: 24, ..all() }).contains("24"));
    for zero in [
        PlanOptions { context: 0, ..all() },
        PlanOptions { sequences: 0, ..all() },
        PlanOptions { step_tokens: 0, ..all() },
        PlanOptions { step_rows: 0, ..all() },
    ] {
        assert!(refused(zero).contains("at least 1"));
    }
    for context in [usize::MAX, 1 << 37] {
        assert!(refused(PlanOptions { context, ..all() }).contains(&context.to_string()));
    }
    let many = PlanOptions { context: 1024, sequences: 1 << 20, ..all() };
    let e = Plan::new(Arc::clone(&graph), &device, &many).unwrap_err();
    assert!(matches!(e, PlanError::Memory { .. }), "{e}");
}

/// Two slots for each sequence: what a step reads stays as it was.
#[test]
fn the_ledger_counts_recurrent_states() {
    let graph = graph(Some(&shared("goldens/qwen3_next/package-mobius")));
    let options = PlanOptions { sequences: 3, ..PlanOptions::default() };
    let plan = Plan::new(Arc::clone(&graph), &device(1), &options).unwrap();
    let found = plan.ledger().entries().iter().find(|e| e.what.starts_with("recurrent states"));
    let state = 3 * (4 * 32 * 32 + 3 * 256) * 4;
    assert_eq!(graph.state_bytes(), ByteCount(state));
    assert_eq!(found.expect("a line for the states").bytes, ByteCount(3 * 2 * state));
}
