//! Converted packages, lowered to ragged tokens: the same function as the exported graph.

use crate::common::{Checkpoint, Place};
use doyen_convert::Options;
use doyen_graph::{
    interp::Interpreter,
    lowered::{LOp, Lowered},
    naive::{Naive, NewTokens},
    package::{DirSource, Package},
    pass::{
        dead::dead,
        fold::{FoldLimits, fold},
        lower::lower,
    },
};
use doyen_tensor::{FloatType, Tensor};
use std::sync::Arc;

const TOKENS: [u32; 7] = [5, 60, 33, 2, 17, 48, 9];

fn lowered(package: &Package) -> Lowered {
    let mut graph = package.graph.clone();
    let folded = fold(&mut graph, FoldLimits::default()).unwrap();
    dead(&mut graph);
    let lowered = lower(&graph, &package.ports).unwrap_or_else(|e| panic!("{e}"));
    assert!(folded.made.0 < 1 << 10, "folding made {}", folded.made);
    lowered
}

/// Logits of every token, by the interpreter.
fn exported(package: &Package) -> Vec<f32> {
    let n = TOKENS.len();
    let ids: Vec<i64> = TOKENS.iter().map(|&t| i64::from(t)).collect();
    let mut inputs = vec![
        ("input_ids", Tensor::from_slice([1, n], &ids).unwrap()),
        ("attention_mask", Tensor::from_slice([1, n], &vec![1i64; n]).unwrap()),
    ];
    for v in
        package.graph.inputs.iter().map(|&i| package.graph.value(i)).filter(|v| v.name.starts_with("past"))
    {
        let dims = [1, v.fact.dim(1).known().unwrap(), 0, v.fact.dim(3).known().unwrap()];
        inputs.push((&v.name, Tensor::from_f32(v.fact.dtype.unwrap(), dims, &[]).unwrap()));
    }
    Interpreter::new(&package.graph).run(&inputs).unwrap()[0].to_f32().unwrap()
}

fn agrees(place: &Place, options: &Options, tolerance: f32) -> Lowered {
    place.convert(options).unwrap();
    let package = Package::open(Arc::new(DirSource::open(place.package()).unwrap())).unwrap();
    let (want, lowered) = (exported(&package), lowered(&package));
    let mut run = Naive::new(lowered.clone()).unwrap();
    let mut got = Vec::new();
    for chunk in [0..3, 3..4, 4..7] {
        let rows: Vec<u32> = (0..chunk.len() as u32).collect();
        let step = run.step(&[NewTokens { sequence: 0, tokens: &TOKENS[chunk] }], &rows, &[]).unwrap();
        got.extend(step[0].to_f32().unwrap());
    }
    assert_eq!(got.len(), want.len());
    let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0f32, f32::max);
    assert!(worst <= tolerance, "off by {worst}");
    lowered
}

fn count(graph: &Lowered, is: impl Fn(&LOp) -> bool) -> usize {
    graph.nodes.iter().filter(|n| is(&n.op)).count()
}

#[test]
fn qwen3_moe_in_float_and_quantized() {
    for (options, tolerance) in [(Options::float(FloatType::F32), 1e-4), (Options::default(), 2e-2)] {
        let l = agrees(&Checkpoint::qwen3_moe().write(), &options, tolerance);
        assert_eq!(count(&l, |op| matches!(op, LOp::Attention(a) if a.qk_norm.is_some())), 2);
        assert_eq!(count(&l, |op| matches!(op, LOp::Experts(_))), 1);
        assert_eq!(count(&l, |op| *op == LOp::SiluMul), 1);
    }
}

#[test]
fn qwen2_in_float_and_quantized() {
    for (options, tolerance) in [(Options::float(FloatType::F32), 1e-4), (Options::default(), 2e-2)] {
        let l = agrees(&Checkpoint::qwen2().write(), &options, tolerance);
        assert_eq!(count(&l, |op| matches!(op, LOp::Attention(_))), 1);
    }
}
