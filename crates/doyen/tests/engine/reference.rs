//! Packages of another producer against the reference interpreter, which runs the graph as exported: caches whose extents
//! the file leaves open, rolling caches of a window, sinks, quantized and float experts.

use crate::common::{device, shared, tokens};
use doyen::{
    model::{lowered, source},
    verify::reference,
};
use doyen_graph::{device::Numerics, package::Package};
use std::sync::Arc;

#[test]
fn packages_give_the_logits_of_the_reference() {
    let device = device(2);
    for name in ["gpt_oss/package-genai-fp32", "gpt_oss/package-genai-int4", "llama/package-genai-int4"] {
        let folder = shared(&format!("goldens/{name}"));
        let package = Package::open(source(Some(&folder)).unwrap()).unwrap();
        let graph = Arc::new(lowered(&package).unwrap());
        // Longer than the window of 16.
        let prompt = tokens(11, 20, 1000);
        let recorded = reference::record(&package, &prompt).unwrap();
        let outcome = reference::compare(&recorded, &graph, &device, Numerics::Exact).unwrap();
        let d = outcome.logits;
        assert_eq!((d.rows, d.top1), (20, 20), "{name}: {d:?}");
        // f32 sums in another order; measured 5e-6 to 8e-6.
        assert!(d.max_abs < 5e-5, "{name}: {d:?}");
        let attention = outcome.nodes.iter().filter(|n| n.kind == "attention").count();
        assert!(attention >= 3, "{name}: every layer is compared, not {attention}");
    }
}
