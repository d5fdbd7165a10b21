//! A sequence alone and in company: the same tokens in exact numerics, its logits within the last bits, since which kernel a
//! product takes depends on the rows of a step (docs/cuda.md).

use crate::{
    card,
    common::{shared, tokens},
};
use doyen::device::{FloatName, KvName};
use doyen_graph::{
    device::{Device, Numerics},
    lowered::Lowered,
};
use doyen_runtime::{Engine, Event, Plan, PlanOptions, Request, RequestId, SamplingParams};
use doyen_tensor::TokenId;
use std::{collections::HashMap, sync::Arc};

/// Prompts of different lengths, all longer than a step so that they are read in chunks beside others' tokens.
const PROMPTS: [usize; 4] = [1, 9, 23, 40];
const ANSWER: usize = 6;

/// Every token with the logits that it was chosen from, for each of the prompts.
type Answers = Vec<Vec<(TokenId, Vec<f32>)>>;

fn run(graph: &Arc<Lowered>, card: &dyn Device, numerics: Numerics, prompts: &[usize]) -> Answers {
    let sequences = prompts.len();
    let options = PlanOptions { context: 64, sequences, step_tokens: 16, numerics, ..PlanOptions::default() };
    let plan = Plan::new(Arc::clone(graph), card, &options).unwrap();
    let mut engine = Engine::new(&plan, card).unwrap();
    let vocab = engine.vocab();
    let ids: HashMap<RequestId, usize> = prompts
        .iter()
        .enumerate()
        .map(|(i, &len)| {
            let request = Request::new(tokens(len as u64, len, vocab), SamplingParams::default());
            (engine.submit(Request { max_new_tokens: Some(ANSWER), ..request }).unwrap(), i)
        })
        .collect();
    let mut answers: Answers = vec![Vec::new(); prompts.len()];
    while !engine.is_idle() {
        let mut rows = HashMap::new();
        let events = engine.step_with(|id, row| {
            rows.insert(id, row.to_vec());
        });
        for event in events.unwrap() {
            if let Event::Token { id, token } = *event {
                answers[ids[&id]].push((token, rows.remove(&id).expect("a token has logits")));
            }
        }
    }
    answers
}

/// The largest difference of logits, by the largest logit, up to the first token that differs; and whether one does.
fn apart(alone: &Answers, together: &Answers) -> (f32, bool) {
    let (mut most, mut differ) = (0f32, false);
    for (a, b) in alone.iter().zip(together) {
        for ((a_token, a), (b_token, b)) in a.iter().zip(b) {
            let size = a.iter().fold(0f32, |m, v| m.max(v.abs()));
            let largest = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            most = most.max(largest / size);
            if a_token != b_token {
                differ = true;
                break;
            }
        }
    }
    (most, differ)
}

#[test]
#[ignore = "needs a card; `all_on_an_emulated_card` runs it on an emulated one"]
fn company_changes_the_last_bits_alone() {
    // Attention with experts; a recurrence; latent attention.
    for package in ["qwen3_moe/package-mobius", "qwen3_next/package-mobius", "deepseek_v2/package-mobius"] {
        let graph = crate::common::graph(Some(&shared("goldens").join(package)));
        let exact = card(FloatName::F32, KvName::F32);
        let fast = card(FloatName::F16, KvName::F16);
        for (card, numerics, bound, tokens) in
            [(exact.as_ref(), Numerics::Exact, 1e-5, true), (fast.as_ref(), Numerics::Fast, 2e-2, false)]
        {
            let alone: Answers =
                PROMPTS.iter().map(|&p| run(&graph, card, numerics, &[p]).remove(0)).collect();
            let (most, differ) = apart(&alone, &run(&graph, card, numerics, &PROMPTS));
            assert!(most <= bound, "{package}, {numerics:?}: logits {most:e} apart");
            assert!(!(tokens && differ), "{package}, {numerics:?}: a token differs");
            println!("{package}, {numerics:?}: logits at most {most:.1e} apart");
        }
    }
}
