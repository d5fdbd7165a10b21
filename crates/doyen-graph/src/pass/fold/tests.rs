use super::*;
use crate::ir::Attrs;

#[test]
fn identities_of_constants_share_their_bytes() {
    let mut g = Graph::new("g", [("", 21)]);
    let w = g.add_constant("w", Tensor::from_slice([2], &[1f32, 2.0]).unwrap());
    let y = g.add_node("n", ("", "Identity"), Attrs::default(), &[Some(w)], &["y"]).unwrap()[0];
    g.add_output(y);
    let report = fold(&mut g, FoldLimits::default()).unwrap();
    assert_eq!(report, Folded { views: 1, evaluated: 0, made: ByteCount(0) });
    assert!(g.nodes.is_empty());
    let bytes = |v| g.value(v).fact.constant.as_ref().unwrap().parts()[0].bytes.as_ptr();
    assert_eq!(bytes(w), bytes(y));
}
