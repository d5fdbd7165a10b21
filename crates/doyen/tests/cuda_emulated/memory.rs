//! Memory of the card that is not there: refused with numbers, and the process goes on.
//!
//! The emulated card has 1 GiB, of which a file says how much others have.

use crate::{
    card,
    common::{shared, tokens},
    emulated::TAKEN,
};
use doyen::device::{FloatName, KvName};
use doyen_graph::{
    device::{Device, DeviceError},
    lowered::Lowered,
};
use doyen_runtime::{Engine, EngineError, Event, Plan, PlanError, PlanOptions, Request, SamplingParams};
use doyen_tensor::{ByteCount, TokenId};
use std::{fs, sync::Arc};

const MEMORY: u64 = 1 << 30;

fn others_take(bytes: u64) {
    let path = std::env::var_os(TAKEN).expect("an emulated card is told what others take");
    fs::write(path, bytes.to_string()).unwrap();
}

fn graph() -> Arc<Lowered> {
    crate::common::graph(Some(&shared("goldens/llama/package-genai-int4")))
}

fn plan(graph: &Arc<Lowered>, card: &dyn Device, context: usize, memory: u64) -> Result<Plan, PlanError> {
    let options = PlanOptions { context, memory: Some(ByteCount(memory)), ..PlanOptions::default() };
    Plan::new(Arc::clone(graph), card, &options)
}

/// The tokens of one answer.
fn answer(engine: &mut Engine, prompt: usize) -> Result<Vec<TokenId>, EngineError> {
    let vocab = engine.vocab();
    let request = Request::new(tokens(1, prompt, vocab), SamplingParams::default());
    engine.submit(Request { max_new_tokens: Some(5), ..request })?;
    let mut all = Vec::new();
    while !engine.is_idle() {
        all.extend(engine.step()?.iter().filter_map(|e| match e {
            Event::Token { token, .. } => Some(*token),
            Event::Finished { .. } => None,
        }));
    }
    Ok(all)
}

#[test]
#[ignore = "needs an emulated card, on which `all_on_an_emulated_card` runs it"]
fn emulated_memory_runs_out() {
    let (graph, card) = (graph(), card(FloatName::F16, KvName::F32));
    let context = 256;
    let needed = plan(&graph, card.as_ref(), context, u64::MAX).unwrap().ledger().allocated().0;

    // More than there is, when it is planned.
    let e = plan(&graph, card.as_ref(), context, needed - 1).unwrap_err().to_string();
    for said in [ByteCount(needed).to_string().as_str(), "weights", "kv cache", "short", "--context"] {
        assert!(e.contains(said), "{said}: {e}");
    }

    // Planned for what was free, of which another process takes all but 100 KB before the caches are allocated.
    let planned = plan(&graph, card.as_ref(), context, MEMORY).unwrap();
    others_take(MEMORY - 100_000);
    match Engine::new(&planned, card.as_ref()).map(|_| ()) {
        Err(EngineError::Device(e @ DeviceError::NoRoom { free, needed: said, .. })) => {
            assert_eq!((free.0, said.0), (100_000, needed), "{e}");
            let text = e.to_string();
            assert!(
                ["weights", "kv cache", "activations", "--context"].iter().all(|s| text.contains(s)),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }

    // The process goes on: with enough memory, and what was loaded before is given back.
    others_take(MEMORY - needed - (8 << 20));
    let mut engine = Engine::new(&planned, card.as_ref()).unwrap();
    let want = answer(&mut engine, 20).unwrap();
    assert_eq!(want.len(), 5);

    // Nobody leaves room for recorded steps: they are launched one by one.
    others_take(MEMORY);
    assert_eq!(answer(&mut engine, 20).unwrap(), want);
    others_take(0);
    assert_eq!(answer(&mut engine, 20).unwrap(), want);
}

#[test]
#[ignore = "needs a card; `all_on_an_emulated_card` runs it on an emulated one"]
fn what_is_longer_than_reserved_is_refused_and_shorter_ones_go_on() {
    let (graph, card) = (graph(), card(FloatName::F16, KvName::F32));
    let planned = plan(&graph, card.as_ref(), 64, MEMORY).unwrap();
    let mut engine = Engine::new(&planned, card.as_ref()).unwrap();
    let want = answer(&mut engine, 20).unwrap();
    let e = answer(&mut engine, 64).unwrap_err().to_string();
    assert!(e.contains("64 tokens") && e.contains("context holds 64") && e.contains("--context"), "{e}");
    assert_eq!(answer(&mut engine, 20).unwrap(), want);
}
