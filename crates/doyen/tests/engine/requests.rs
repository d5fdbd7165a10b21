//! The life of a request: what is refused, how it ends, who waits.

use crate::common::{device, engine, graph, tokens};
use doyen_graph::device::{Device, GroupTables, RaggedBatch, SeqSpan};
use doyen_runtime::{
    Engine, EngineError, Event, FinishReason, Plan, PlanOptions, Request, RequestId, SamplingParams,
};
use doyen_tensor::{PageId, TokenId};
use std::sync::Arc;

const CONTEXT: usize = 64;

fn load(sequences: usize) -> Engine {
    let options = PlanOptions { context: CONTEXT, sequences, page_size: 16, ..PlanOptions::default() };
    engine(&graph(None), &device(1), &options)
}

fn request(prompt: usize, max_new_tokens: Option<usize>) -> Request {
    let prompt = tokens(prompt as u64, prompt, 8000);
    Request { max_new_tokens, ..Request::new(prompt, SamplingParams::default()) }
}

/// Runs until idle: the tokens of a request, its end, how many were generated.
fn finish(engine: &mut Engine, own: RequestId) -> (Vec<TokenId>, FinishReason, usize) {
    let (mut out, mut end) = (Vec::new(), None);
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            match *event {
                Event::Token { id, token } if id == own => out.push(token),
                Event::Finished { id, reason, generated, .. } if id == own => end = Some((reason, generated)),
                _ => {}
            }
        }
    }
    let (reason, generated) = end.expect("the request ended");
    (out, reason, generated)
}

#[test]
fn prompts_that_leave_no_room_are_refused_with_the_numbers() {
    let mut engine = load(1);
    for prompt in [CONTEXT, CONTEXT + 1] {
        let e = engine.submit(request(prompt, None)).unwrap_err();
        assert!(matches!(e, EngineError::PromptTooLong { .. }), "{e}");
        let text = e.to_string();
        assert!(
            text.contains(&prompt.to_string()) && text.contains("64") && text.contains("--context"),
            "{text}"
        );
    }
    assert!(matches!(engine.submit(request(0, None)), Err(EngineError::EmptyPrompt)));
    let vocab = engine.vocab();
    let outside = Request::new(vec![TokenId(vocab as u32)], SamplingParams::default());
    assert!(matches!(engine.submit(outside), Err(EngineError::Vocabulary { .. })));
    assert!(matches!(engine.submit(request(1, Some(0))), Err(EngineError::Sampling(_))));
    let hot = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
    assert!(matches!(engine.submit(Request::new(tokens(1, 1, 9), hot)), Err(EngineError::Sampling(_))));
    assert!(engine.is_idle(), "what was refused left nothing behind");
}

#[test]
fn a_generation_ends_with_the_context() {
    let mut engine = load(1);
    for prompt in [CONTEXT - 1, CONTEXT - 5] {
        let id = engine.submit(request(prompt, None)).unwrap();
        let (tokens, reason, generated) = finish(&mut engine, id);
        assert_eq!(
            (tokens.len(), reason, generated),
            (CONTEXT - prompt, FinishReason::Context, CONTEXT - prompt)
        );
    }
    let id = engine.submit(request(CONTEXT - 5, Some(usize::MAX))).unwrap();
    assert_eq!(finish(&mut engine, id).1, FinishReason::Context);
}

#[test]
fn a_generation_ends_with_its_length_or_an_end_token() {
    let mut engine = load(1);
    let id = engine.submit(request(9, Some(6))).unwrap();
    let (all, reason, generated) = finish(&mut engine, id);
    assert_eq!((all.len(), reason, generated), (6, FinishReason::Length, 6));

    // Greedy: the same tokens again, up to the first time the end token comes.
    let eos = all[4];
    let first = all.iter().position(|&t| t == eos).unwrap();
    let unused = TokenId(engine.vocab() as u32 - 1);
    assert!(!all.contains(&unused));
    let id = engine.submit(Request { eos: vec![unused, eos], ..request(9, Some(6)) }).unwrap();
    let (some, reason, generated) = finish(&mut engine, id);
    assert_eq!((&some[..], reason, generated), (&all[..first], FinishReason::Eos, first + 1));
}

#[test]
fn a_cancelled_request_gives_its_pages_back_and_is_silent() {
    let mut engine = load(2);
    let ids: Vec<_> = (20..24).map(|n| engine.submit(request(n, None)).unwrap()).collect();
    engine.step().unwrap();
    assert_eq!(engine.pages_used(0), 2 * 2);
    engine.cancel(ids[0]);
    assert_eq!(engine.pages_used(0), 2);
    // One that waits.
    engine.cancel(ids[3]);
    // One that is unknown by now.
    engine.cancel(ids[0]);
    let (mut heard, mut ended) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            match *event {
                Event::Token { id, .. } => heard.push(id),
                Event::Finished { id, .. } => ended.push(id),
            }
        }
    }
    assert_eq!(ended, [ids[1], ids[2]]);
    assert!(heard.iter().all(|id| ended.contains(id)));
    assert_eq!(engine.pages_used(0), 0);
}

#[test]
fn a_caller_that_stops_a_generation_leaves_nothing_behind() {
    let mut engine = load(1);
    let mut left = 3;
    let reason = engine.generate(request(5, None), |_| {
        left -= 1;
        left > 0
    });
    assert_eq!((reason.unwrap(), left), (FinishReason::Cancelled, 0));
    assert!(engine.is_idle());
    assert_eq!(engine.pages_used(0), 0);
}

#[test]
fn more_requests_than_sequences_wait_their_turn() {
    let mut engine = load(2);
    let ids: Vec<_> = (1..=5).map(|n| engine.submit(request(n, Some(3))).unwrap()).collect();
    let (mut started, mut ended) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        let events = engine.step().unwrap();
        let tokens = events.iter().filter(|e| matches!(e, Event::Token { .. })).count();
        assert!(tokens <= 2, "{tokens} sequences ran");
        for event in events {
            match *event {
                Event::Token { id, .. } if !started.contains(&id) => started.push(id),
                Event::Finished { id, reason: FinishReason::Length, generated: 3, .. } => ended.push(id),
                _ => {}
            }
        }
    }
    assert_eq!((&started, &ended), (&ids, &ids));
}

#[test]
fn evaluation_needs_pages_of_its_own_and_says_so() {
    let mut engine = load(1);
    let text = tokens(3, CONTEXT, 8000);
    let mut rows = 0;
    engine.logits(&text, |_, _| rows += 1).unwrap();
    assert_eq!((rows, engine.pages_used(0)), (CONTEXT, 0));
    engine.submit(request(5, None)).unwrap();
    engine.step().unwrap();
    let e = engine.logits(&text, |_, _| {}).unwrap_err().to_string();
    assert!(e.contains("the kv cache is full"), "{e}");
    assert!(engine.logits(&tokens(3, CONTEXT + 1, 8000), |_, _| {}).is_err());
}

#[test]
fn a_step_without_anything_to_do_does_nothing() {
    let mut engine = load(2);
    assert!(engine.step().unwrap().is_empty());
    let id = engine.submit(request(4, Some(1))).unwrap();
    finish(&mut engine, id);
    assert!(engine.step().unwrap().is_empty());
}

#[test]
fn a_device_runs_empty_steps_and_refuses_what_was_not_planned() {
    let (graph, device) = (graph(None), device(2));
    let options = PlanOptions { context: 32, step_tokens: 8, step_rows: 2, ..PlanOptions::default() };
    let plan = Plan::new(Arc::clone(&graph), &device, &options).unwrap();
    let mut session = device.load(plan.program().clone()).unwrap();
    let mut step = |tokens: usize, spans: &[SeqSpan], pages: &[u32], rows: &[u32]| {
        let mut table = GroupTables::default();
        let pages: Vec<PageId> = pages.iter().copied().map(PageId).collect();
        for _ in spans {
            table.push(&pages);
        }
        let tables = vec![table; graph.groups.len()];
        let tokens = vec![1; tokens];
        let batch = RaggedBatch {
            tokens: &tokens,
            sequences: spans,
            tables: &tables,
            states: &[],
            rows,
            inputs: &[],
        };
        session.step(&batch).map(|()| session.output(0).len())
    };
    let span = |first, len, past| SeqSpan { first, len, past };
    assert_eq!(step(0, &[], &[], &[]), Ok(0));
    assert_eq!(step(0, &[span(0, 0, 0)], &[0], &[]), Ok(0), "a sequence without new tokens");
    assert_eq!(step(3, &[span(0, 3, 0)], &[0], &[]), Ok(0), "no logits wanted");
    let vocab = step(3, &[span(0, 3, 0)], &[0], &[2]).unwrap();
    assert_eq!(step(3, &[span(0, 3, 0)], &[0], &[0, 2]), Ok(2 * vocab));
    for (tokens, spans, pages, rows) in [
        (9, vec![span(0, 9, 0)], vec![0], vec![0]),
        (3, vec![span(0, 3, 0)], vec![0], vec![0, 1, 2]),
        (3, vec![span(0, 3, 0)], vec![0], vec![3]),
        (3, vec![span(0, 2, 0)], vec![0], vec![0]),
        (3, vec![span(1, 2, 0)], vec![0], vec![0]),
        (3, vec![span(0, 1, 0), span(1, 2, 0)], vec![0], vec![0]),
        (3, vec![span(0, 3, 30)], vec![0], vec![0]),
        (3, vec![span(0, 3, usize::MAX)], vec![0], vec![0]),
        (3, vec![span(0, 3, 0)], vec![], vec![0]),
        (3, vec![span(0, 3, 0)], vec![7], vec![0]),
    ] {
        assert!(
            step(tokens, &spans, &pages, &rows).is_err(),
            "{tokens} tokens, {spans:?}, {pages:?}, {rows:?}"
        );
    }
}
