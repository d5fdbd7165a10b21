//! A sequence gets bitwise the same logits and tokens in any company, in any chunks, on any number of threads and pages
//! of any size.

use crate::common::{device, engine, graph, shared, tokens};
use doyen_convert::{Options, Silent, Target, convert};
use doyen_graph::{device::Numerics, lowered::Lowered};
use doyen_runtime::{Engine, Event, PlanOptions, Request, RequestId, SamplingParams};
use doyen_tensor::{FloatType, TokenId};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

/// Positions planned for; the longest job and its answer fit.
const CONTEXT: usize = 320;

/// A request and the step before which it arrives.
struct Job {
    arrives: usize,
    request: Request,
}

/// Five jobs of different lengths. The long prompts are still being read when others arrive, and the longest reaches
/// past the position where attention starts its second split.
fn jobs(vocab: usize) -> Vec<Job> {
    let sampled = SamplingParams { temperature: 0.9, top_k: 50, seed: 7, ..SamplingParams::default() };
    let penalised = SamplingParams { repetition_penalty: 1.2, ..SamplingParams::default() };
    let job = |arrives, prompt: usize, answer, sampling: SamplingParams| Job {
        arrives,
        request: Request {
            max_new_tokens: Some(answer),
            ..Request::new(tokens(prompt as u64, prompt, vocab), sampling)
        },
    };
    vec![
        job(0, 3, 12, SamplingParams::default()),
        job(1, 270, 4, SamplingParams::default()),
        job(2, 1, 9, sampled),
        job(3, 40, 6, penalised),
        job(5, 101, 3, SamplingParams::default()),
    ]
}

/// What a job was given: every token with the bits of the logits it was chosen from.
type Answer = Vec<(TokenId, Vec<u32>)>;

fn run(engine: &mut Engine, jobs: &[Job]) -> Vec<Answer> {
    let mut ids: HashMap<RequestId, usize> = HashMap::new();
    let mut answers: Vec<Answer> = jobs.iter().map(|_| Answer::new()).collect();
    let mut step = 0;
    while ids.len() < jobs.len() || !engine.is_idle() {
        for (i, job) in jobs.iter().enumerate().filter(|(_, j)| j.arrives == step) {
            ids.insert(engine.submit(job.request.clone()).unwrap(), i);
        }
        let mut rows = BTreeMap::new();
        let events = engine.step_with(|id, row| {
            rows.insert(id, row.iter().map(|l| l.to_bits()).collect::<Vec<_>>());
        });
        for event in events.unwrap() {
            if let Event::Token { id, token } = *event {
                answers[ids[&id]].push((token, rows.remove(&id).expect("a token has logits")));
            }
        }
        assert!(rows.is_empty(), "logits without a token");
        step += 1;
    }
    answers
}

fn options(numerics: Numerics) -> PlanOptions {
    PlanOptions { context: CONTEXT, numerics, ..PlanOptions::default() }
}

/// What the verbs keep keys and values in.
fn caches(numerics: Numerics) -> FloatType {
    if numerics == Numerics::Exact { FloatType::F32 } else { FloatType::F16 }
}

/// Each job in an engine of its own, on one thread, its prompt in one piece.
fn alone(graph: &Arc<Lowered>, numerics: Numerics) -> Vec<Answer> {
    let device = device(1).with_kv(caches(numerics));
    let options = PlanOptions { step_tokens: CONTEXT, ..options(numerics) };
    let mut engine = engine(graph, &device, &options);
    let one = |job: Job| run(&mut engine, &[Job { arrives: 0, ..job }]).remove(0);
    jobs(engine_vocab(graph)).into_iter().map(one).collect()
}

fn engine_vocab(graph: &Lowered) -> usize {
    let logits = graph.value(graph.outputs[0]);
    logits.dims.last().expect("logits have extents").at(1, 1)
}

/// Every job together with the others, under all combinations, against the job alone.
fn company_changes_nothing(graph: &Arc<Lowered>, numerics: Numerics) {
    // One model at a time: workers of several pools would be bound to the same CPUs and wait for each other.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let want = alone(graph, numerics);
    let jobs = jobs(engine_vocab(graph));
    for (job, answer) in jobs.iter().zip(&want) {
        assert_eq!(Some(answer.len()), job.request.max_new_tokens, "no job ends early");
    }
    for threads in 1..=3 {
        let device = device(threads).with_kv(caches(numerics));
        for (i, step_tokens) in [7, 64, 256].into_iter().enumerate() {
            // Every pair of threads, chunk and page size comes up, if not every triple.
            let page_size = if (threads + i) % 2 == 0 { 16 } else { 32 };
            // With 64 tokens a step, jobs also wait for others to leave.
            let sequences = if step_tokens == 64 { 3 } else { 5 };
            let options = PlanOptions { step_tokens, page_size, sequences, ..options(numerics) };
            let got = run(&mut engine(graph, &device, &options), &jobs);
            let at = format!("{numerics:?}, {threads} threads, steps of {step_tokens}, pages of {page_size}");
            for (j, (got, want)) in got.iter().zip(&want).enumerate() {
                same(got, want, &format!("{at}: job {j}"));
            }
        }
    }
}

fn same(got: &Answer, want: &Answer, at: &str) {
    for (t, ((got_token, got), (want_token, want))) in got.iter().zip(want).enumerate() {
        let differ = got.iter().zip(want).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 0, "{at}: {differ} of {} logits of answer token {t} differ", want.len());
        assert_eq!(got_token, want_token, "{at}: answer token {t}");
    }
    assert_eq!(got.len(), want.len(), "{at}: length of the answer");
}

#[test]
fn the_built_in_model_in_fast_mode() {
    company_changes_nothing(&graph(None), Numerics::Fast);
}

#[test]
fn the_built_in_model_in_exact_mode() {
    company_changes_nothing(&graph(None), Numerics::Exact);
}

#[test]
fn a_float_package() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("package");
    let checkpoint = shared("goldens/qwen3_moe/checkpoint");
    convert(&checkpoint, &Target::new(&package), &Options::float(FloatType::F32), &mut Silent).unwrap();
    let graph = graph(Some(&package));
    company_changes_nothing(&graph, Numerics::Fast);
    company_changes_nothing(&graph, Numerics::Exact);
}

#[test]
fn quantized_windows_and_sinks() {
    let graph = graph(Some(&shared("goldens/gpt_oss/package-genai-int4")));
    company_changes_nothing(&graph, Numerics::Fast);
}

#[test]
fn windows_and_sinks() {
    let graph = graph(Some(&shared("goldens/gpt_oss/package-genai-fp32")));
    assert!(graph.groups.iter().any(|g| g.window.is_some()), "some layers have a window");
    company_changes_nothing(&graph, Numerics::Fast);
    company_changes_nothing(&graph, Numerics::Exact);
}

/// Recurrent and convolution states beside a cache; with 64 tokens a step, slots go from one job to the next.
#[test]
fn recurrent_layers() {
    let graph = graph(Some(&shared("goldens/qwen3_next/package-mobius")));
    assert_eq!((graph.states.len(), graph.groups.len()), (6, 1));
    company_changes_nothing(&graph, Numerics::Exact);
}
