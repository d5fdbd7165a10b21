//! The conformance cases, lowered: each must pass as the reference does.

use crate::{
    check::check,
    ir::{Attr, Attrs, Dim, Fact, Graph},
    naive::NaiveRunner,
    testkit::{Case, Model, Reference, Runner, Tolerance, Verdict, compare, run_case},
};
use doyen_tensor::{DType, Tensor};
use std::path::PathBuf;

fn cases() -> Vec<Case> {
    let shared = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    Case::find(&shared.join("conformance/cases")).unwrap()
}

#[test]
fn what_the_reference_passes_passes_lowered() {
    let all: Vec<Case> =
        cases().into_iter().filter(|c| matches!(run_case(c, &Reference), Verdict::Passed)).collect();
    assert!(all.len() > 250, "only {} cases pass on the reference", all.len());
    let failed: Vec<String> = all
        .iter()
        .filter_map(|c| match run_case(c, &NaiveRunner) {
            Verdict::Failed(why) => Some(format!("{}: {why}", c.name)),
            _ => None,
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Nodes before and after the attention, where every batch row fills its tokens.
#[test]
fn attention_between_other_nodes_lowers() {
    let mut g = Graph::new("g", [("", 24), ("com.microsoft", 1)]);
    let shape = |d: [usize; 3]| Fact::new(DType::F32, d.map(Dim::from));
    let x = g.add_input("x", shape([2, 3, 32]));
    let seqlens = g.add_constant("seqlens", Tensor::from_slice([2], &[2i32, 2]).unwrap());
    let total = g.add_constant("total", Tensor::scalar(3i32));
    let weight = |n: usize| (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 200.0).collect::<Vec<f32>>();
    let qkv = g.add_constant("qkv", Tensor::from_slice([32, 64], &weight(32 * 64)).unwrap());
    let out = g.add_constant("out", Tensor::from_slice([32, 8], &weight(32 * 8)).unwrap());
    let packed =
        g.add_node("before", ("", "MatMul"), Attrs::default(), &[Some(x), Some(qkv)], &["p"]).unwrap()[0];
    let attrs = Attrs::from([("num_heads", Attr::Int(2)), ("kv_num_heads", Attr::Int(1))]);
    let inputs = [Some(packed), None, None, None, None, Some(seqlens), Some(total)];
    let op = ("com.microsoft", "GroupQueryAttention");
    let made = g.add_node("attention", op, attrs, &inputs, &["a", "k", "v"]).unwrap();
    let y = g
        .add_node("after", ("", "MatMul"), Attrs::default(), &[Some(made[0]), Some(out)], &["y"])
        .unwrap()[0];
    for v in [y, made[0], made[2]] {
        g.add_output(v);
    }
    check(&mut g).unwrap();
    let model = Model { graph: g };
    let input = [Tensor::from_slice([2, 3, 32], &weight(2 * 3 * 32)).unwrap()];
    let want = Reference.run(&model, &input).unwrap();
    let got = NaiveRunner.run(&model, &input).unwrap();
    for (got, want) in got.iter().zip(&want) {
        compare(got, want, Tolerance { rtol: 1e-5, atol: 1e-5, nan_is_free: true }).unwrap();
    }
    assert_eq!(got.len(), 3);
}
