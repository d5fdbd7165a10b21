//! What becomes a view, what is made and counted, what stays, and the limit on made bytes.

use super::*;
use crate::{check::check, interp::Interpreter, ir::Attr, ir::Attrs, ir::ValueId};
use doyen_tensor::DType;

fn graph() -> Graph {
    Graph::new("g", [("", 21)])
}

fn ints(g: &mut Graph, name: &str, values: &[i64]) -> ValueId {
    g.add_constant(name, Tensor::from_slice([values.len()], values).unwrap())
}

fn node<const N: usize>(
    g: &mut Graph,
    op: &str,
    out: &str,
    attrs: [(&str, Attr); N],
    inputs: &[ValueId],
) -> ValueId {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    g.add_node(out, ("", op), Attrs::from(attrs), &inputs, &[out]).unwrap()[0]
}

fn folded(g: &mut Graph) -> Folded {
    check(g).unwrap();
    fold(g, FoldLimits::default()).unwrap()
}

/// Movements of `w` and of one other constant, as exporters write them to interleave and to join weights.
fn movements() -> (Graph, ValueId) {
    let mut g = graph();
    let values: Vec<f32> = (0..24).map(|v| v as f32).collect();
    let w = g.add_constant("w", Tensor::from_slice([4, 6], &values).unwrap());
    let halves = ints(&mut g, "halves", &[2, 2, 6]);
    let split = node(&mut g, "Reshape", "split", [], &[w, halves]);
    let swapped = node(&mut g, "Transpose", "swapped", [("perm", Attr::Ints(vec![1, 0, 2]))], &[split]);
    let (start, end, axis) =
        (ints(&mut g, "start", &[1]), ints(&mut g, "end", &[-1]), ints(&mut g, "axis", &[2]));
    let cut = node(&mut g, "Slice", "cut", [], &[swapped, start, end, axis]);
    let joined = node(&mut g, "Concat", "joined", [("axis", Attr::Int(2))], &[cut, swapped]);
    let sizes = ints(&mut g, "sizes", &[3, 7]);
    let parts = [Some(joined), Some(sizes)];
    let out = g
        .add_node("parts", ("", "Split"), Attrs::from([("axis", Attr::Int(2))]), &parts, &["left", "right"])
        .unwrap()[1];
    g.add_output(out);
    (g, out)
}

#[test]
fn movements_become_views_of_the_same_bytes() {
    let (mut g, out) = movements();
    check(&mut g).unwrap();
    let want = Interpreter::new(&g).run(&[]).unwrap();
    let bytes = g.value(g.find("w").unwrap()).fact.constant.as_ref().unwrap().parts()[0].bytes.as_ptr();
    let report = folded(&mut g);
    assert_eq!(report, Folded { views: 5, evaluated: 0, made: ByteCount(0) });
    assert!(g.nodes.is_empty());
    let c = g.value(out).fact.constant.as_ref().unwrap();
    assert!(c.parts().iter().all(|p| p.bytes.as_ptr() == bytes));
    assert_eq!(c.to_tensor().unwrap(), want[0]);
}

#[test]
fn changes_within_a_row_are_made_and_counted() {
    let mut g = graph();
    let w = g.add_constant("w", Tensor::from_f32(DType::F16, [3, 2], &[1., 2., 3., 4., 5., 6.]).unwrap());
    let wide = node(&mut g, "Cast", "wide", [("to", Attr::Int(1))], &[w]);
    let turned = node(&mut g, "Transpose", "turned", [], &[wide]);
    let y = node(&mut g, "Neg", "negated", [], &[turned]);
    g.add_output(y);
    let report = folded(&mut g);
    // The cast makes 24 bytes, the negation 24 and a contiguous copy of its transposed input.
    assert_eq!(report, Folded { views: 1, evaluated: 2, made: ByteCount(72) });
    let t = g.value(y).fact.constant.as_ref().unwrap().to_tensor().unwrap();
    assert_eq!(t.to_f32().unwrap(), [-1., -3., -5., -2., -4., -6.]);
}

#[test]
fn a_result_over_the_limit_names_the_node_before_it_is_made() {
    let mut g = graph();
    let shape = ints(&mut g, "shape", &[1 << 20, 1 << 20, 64]);
    let y = node(&mut g, "ConstantOfShape", "huge", [], &[shape]);
    g.add_output(y);
    let error = fold(&mut g, FoldLimits::default()).unwrap_err().to_string();
    assert!(error.contains("huge") && error.contains("limit"), "{error}");
}

#[test]
fn values_of_a_run_stay() {
    let mut g = graph();
    let x = g.add_input("x", Fact::new(DType::F32, [2.into()]));
    let w = g.add_constant("w", Tensor::from_slice([2], &[1f32, 2.0]).unwrap());
    let n = node(&mut g, "Neg", "n", [], &[w]);
    let y = node(&mut g, "Add", "y", [], &[x, n]);
    g.add_output(y);
    assert_eq!(folded(&mut g).evaluated, 1);
    assert_eq!(g.nodes.len(), 1);
}
