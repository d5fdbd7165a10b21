//! Attention with positions and a bias given as values: the CPU kernels and the plain executor against the reference
//! operator.

use super::*;
use crate::model::cpu;
use doyen_graph::{
    check::check,
    ir::{Attr, Attrs, Dim, Fact, Graph},
    naive::{Naive, NaiveRunner, NewTokens},
    ops::gqa::input as at,
    testkit::{Reference, Tolerance, compare},
};
use proptest::prelude::*;
use std::num::NonZeroUsize;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_SIZE: usize = 24;
/// Rows of the rotary caches, and frequencies.
const ROTARY: [usize; 2] = [32, 8];

/// One attention over several sequences.
#[derive(Debug, Clone)]
struct Setup {
    /// New tokens of a batch row.
    seq: usize,
    /// Positions before the step; none makes a first prompt.
    past: Vec<usize>,
    /// New tokens that count, in a first prompt.
    valid: Vec<usize>,
    /// Rows of the past beyond those in use.
    slack: usize,
    ids: bool,
    /// Whether there is a bias, and one for all sequences or heads.
    bias: Option<[bool; 2]>,
    attrs: Vec<(&'static str, Attr)>,
    seed: u64,
}

fn setups() -> impl Strategy<Value = Setup> {
    let rows = (1usize..4).prop_flat_map(|b| {
        (prop::collection::vec(0usize..20, b), prop::collection::vec(1usize..6, b), any::<bool>())
    });
    let form = (prop::option::of(1i64..7), any::<bool>(), any::<bool>(), 0u8..3);
    (rows, 1usize..6, 0usize..3, any::<bool>(), any::<Option<[bool; 2]>>(), form, any::<u64>()).prop_map(
        |((mut past, mut valid, first), seq, slack, ids, bias, (window, full, interleaved, cap), seed)| {
            if first {
                past.fill(0);
                for v in &mut valid {
                    *v = (*v).min(seq);
                }
            } else {
                past[0] += 1;
                valid.fill(seq);
            }
            let window = window.filter(|_| !full).unwrap_or(-1);
            let attrs = vec![
                ("num_heads", Attr::Int(HEADS as i64)),
                ("kv_num_heads", Attr::Int(KV_HEADS as i64)),
                ("do_rotary", Attr::Int(1)),
                ("rotary_interleaved", Attr::Int(interleaved.into())),
                ("local_window_size", Attr::Int(window)),
                ("causal", Attr::Int((!full).into())),
                ("softcap", Attr::Float(f32::from(cap) * 2.0)),
                ("smooth_softmax", Attr::Int((cap == 1).into())),
            ];
            Setup { seq, past, valid, slack, ids, bias, attrs, seed }
        },
    )
}

/// Numbers in -2..2.
struct Noise(u64);

impl Noise {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    fn floats<const N: usize>(&mut self, shape: [usize; N]) -> Tensor {
        let v: Vec<f32> = (0..shape.iter().product()).map(|_| self.next(2001) as f32 / 500.0 - 2.0).collect();
        Tensor::from_slice(shape, &v).unwrap()
    }
}

impl Setup {
    fn is_first(&self) -> bool {
        self.past.iter().all(|&p| p == 0)
    }

    fn lengths(&self) -> Vec<usize> {
        self.past.iter().zip(&self.valid).map(|(p, v)| p + v).collect()
    }

    /// The model, and its inputs.
    fn case(&self) -> (Model, Vec<Tensor>) {
        let (mut noise, b, s) = (Noise(self.seed), self.past.len(), self.seq);
        let longest = self.past.iter().max().copied().unwrap_or(0);
        let mut given: Vec<(usize, Tensor)> = vec![
            (at::QUERY, noise.floats([b, s, HEADS * HEAD_SIZE])),
            (at::KEY, noise.floats([b, s, KV_HEADS * HEAD_SIZE])),
            (at::VALUE, noise.floats([b, s, KV_HEADS * HEAD_SIZE])),
        ];
        if !self.is_first() {
            let past = [b, KV_HEADS, longest + self.slack, HEAD_SIZE];
            given.extend([(at::PAST_KEY, noise.floats(past)), (at::PAST_VALUE, noise.floats(past))]);
        }
        let last: Vec<i32> = self.lengths().iter().map(|&l| l as i32 - 1).collect();
        let total = longest + s;
        given.extend([
            (at::SEQLENS_K, Tensor::from_slice([b], &last).unwrap()),
            (at::TOTAL_SEQUENCE_LENGTH, Tensor::scalar(total as i32)),
            (at::COS_CACHE, noise.floats(ROTARY)),
            (at::SIN_CACHE, noise.floats(ROTARY)),
        ]);
        if self.ids {
            let below = (ROTARY[0] - s) as u64;
            let ids: Vec<i64> = (0..b * s).map(|_| noise.next(below) as i64).collect();
            given.push((at::POSITION_IDS, Tensor::from_slice([b, s], &ids).unwrap()));
        }
        if let Some([sequences, heads]) = self.bias {
            let shape = [if sequences { b } else { 1 }, if heads { HEADS } else { 1 }, s, total];
            let mut v = noise.floats(shape).to_f32().unwrap();
            for v in v.iter_mut().filter(|_| noise.next(4) == 0) {
                *v = f32::NEG_INFINITY;
            }
            given.push((at::ATTENTION_BIAS, Tensor::from_slice(shape, &v).unwrap()));
        }
        let mut g = Graph::new("g", [("", 21), ("com.microsoft", 1)]);
        let mut operands = vec![None; 16];
        for (i, t) in &given {
            let dims: Vec<Dim> = t.shape().iter().map(|&d| Dim::from(d)).collect();
            operands[*i] = Some(g.add_input(&format!("i{i}"), Fact::new(t.dtype(), dims)));
        }
        let mut attrs = Attrs::default();
        for (name, value) in &self.attrs {
            attrs.set(*name, value.clone());
        }
        let op = ("com.microsoft", "GroupQueryAttention");
        for v in g.add_node("attention", op, attrs, &operands, &["y", "k", "v"]).unwrap() {
            g.add_output(v);
        }
        check(&mut g).unwrap();
        (Model { graph: g }, given.into_iter().map(|(_, t)| t).collect())
    }

    /// What the reference gives, with NaN where nothing is specified: padding, and rows past a sequence's length.
    fn expected(&self, model: &Model, inputs: &[Tensor]) -> Vec<Tensor> {
        let results = Reference.run(model, inputs).unwrap();
        let lengths = self.lengths();
        let mask = |t: &Tensor, rows: usize, size: usize, counts: &dyn Fn(usize) -> usize| {
            let mut v = t.to_f32().unwrap();
            let per_batch = v.len() / self.past.len();
            for (i, v) in v.iter_mut().enumerate() {
                if i / size % rows >= counts(i / per_batch) {
                    *v = f32::NAN;
                }
            }
            Tensor::from_slice(t.shape().clone(), &v).unwrap()
        };
        let cache = |t: &Tensor| mask(t, t.shape()[2], HEAD_SIZE, &|b| lengths[b]);
        let y = mask(&results[0], self.seq, HEADS * HEAD_SIZE, &|b| self.valid[b]);
        vec![y, cache(&results[1]), cache(&results[2])]
    }
}

fn device() -> DeviceRunner {
    DeviceRunner::new(Box::new(cpu(NonZeroUsize::new(2)).unwrap()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn given_positions_and_bias_are_those_of_the_operator(setup in setups()) {
        let (model, inputs) = setup.case();
        let want = setup.expected(&model, &inputs);
        let tolerance = Tolerance { rtol: 1e-4, atol: 2e-5, nan_is_free: true };
        for runner in [&NaiveRunner as &dyn Runner, &device()] {
            let got = runner.run(&model, &inputs).unwrap();
            prop_assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(&want) {
                let equal = compare(got, want, tolerance);
                prop_assert!(equal.is_ok(), "{}: {:?}", runner.name(), equal);
            }
        }
    }
}

/// A first prompt of two sequences, lowered, with everything given.
fn lowered() -> LoweredCase {
    let attrs = vec![
        ("num_heads", Attr::Int(HEADS as i64)),
        ("kv_num_heads", Attr::Int(KV_HEADS as i64)),
        ("do_rotary", Attr::Int(1)),
    ];
    let (past, valid, bias) = (vec![0; 2], vec![3, 2], Some([true; 2]));
    let setup = Setup { seq: 3, past, valid, slack: 0, ids: true, bias, attrs, seed: 5 };
    let (model, inputs) = setup.case();
    lower_case(&model.graph, &inputs).unwrap()
}

/// What the plain executor says.
fn naive(case: &LoweredCase) -> Result<Vec<Tensor>, String> {
    let ids: Vec<Vec<u32>> = case.sequences.iter().map(|s| vec![0; s.new]).collect();
    let new = |(sequence, tokens)| NewTokens { sequence, tokens };
    let batch: Vec<NewTokens<'_>> = ids.iter().map(Vec::as_slice).enumerate().map(new).collect();
    Naive::new(case.graph.clone())?.step(&batch, &[], &case.inputs)
}

#[test]
fn positions_outside_of_the_rotary_caches_are_run_errors() {
    let good = lowered();
    let i = good.inputs.iter().position(|t| t.dtype() == DType::I64).unwrap();
    let ids = good.inputs[i].to_i64().unwrap();
    naive(&good).unwrap();
    device().step(&good).unwrap();
    for bad in [-1, ROTARY[0] as i64, 1 << 32, i64::MIN, i64::MAX] {
        let (mut case, mut ids) = (good.clone(), ids.clone());
        ids[4] = bad;
        case.inputs[i] = Tensor::from_slice([1, 5], &ids).unwrap();
        let errors = [naive(&case).unwrap_err(), format!("{:#}", device().step(&case).unwrap_err())];
        for e in errors {
            assert!(e.contains("position_ids") && e.contains(&bad.to_string()), "{e}");
        }
    }
}

#[test]
fn a_bias_that_does_not_cover_the_step_is_refused() {
    let mut case = lowered();
    let i = case.inputs.iter().position(|t| t.shape().len() == 4).unwrap();
    for shape in [[2, HEADS, 3, 2], [2, HEADS, 2, 3], [3, 1, 3, 3], [1, 2, 3, 3]] {
        case.inputs[i] = Noise(1).floats(shape);
        let e = naive(&case).unwrap_err();
        assert!(e.contains("attention_bias"), "{e}");
    }
}
