//! Packages of another producer against the reference interpreter, which runs the graph as exported: caches whose extents
//! the file leaves open, rolling caches of a window, sinks, quantized and float experts.

use crate::common::{device, shared, tokens};
use doyen::{
    model::{lowered, source},
    verify::reference,
};
use doyen_graph::{
    device::Numerics,
    ir::{Attr, Attrs, Graph},
    lowered::LOp,
    ops::Op,
    package::Package,
};
use doyen_tensor::Tensor;
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

/// Dense experts whose products have codes: a bank of the codes where they lie on the kernels, every expert on the
/// interpreter.
#[test]
fn dense_experts_with_codes_give_the_logits_of_the_reference() {
    let folder = shared("goldens/qwen3_moe/package-mobius");
    let mut package = Package::open(source(Some(&folder)).unwrap()).unwrap();
    give_experts_codes(&mut package.graph);
    let graph = Arc::new(lowered(&package).unwrap());
    let quantized = |op: &LOp| matches!(op, LOp::Experts(e) if matches!(e.op, Op::QMoe(_)));
    assert_eq!(graph.nodes.iter().filter(|n| quantized(&n.op)).count(), 3, "one a layer");
    let prompt = tokens(11, 20, 1000);
    let recorded = reference::record(&package, &prompt).unwrap();
    let d = reference::compare(&recorded, &graph, &device(2), Numerics::Exact).unwrap().logits;
    assert_eq!((d.rows, d.top1), (20, 20), "{d:?}");
    assert!(d.max_abs < 5e-5, "{d:?}");
}

/// Rounds the weights of experts to 4 bits, of their down projections to 8, in blocks of 32.
fn give_experts_codes(graph: &mut Graph) {
    const BLOCK: usize = 32;
    for node in std::mem::take(&mut graph.nodes) {
        let weight = node.inputs.get(1).copied().flatten().filter(|_| node.op_type == "MatMul");
        let Some(weight) = weight.filter(|w| graph.value(*w).name.contains(".experts.")) else {
            graph.nodes.push(node);
            continue;
        };
        let name = graph.value(weight).name.clone();
        let values = graph.value(weight).fact.constant.as_ref().unwrap().to_tensor().unwrap();
        let (k, n) = (values.shape()[0], values.shape()[1]);
        let values = values.to_f32().unwrap();
        let bits = if name.contains("down_proj") { 8 } else { 4 };
        let middle = (1u32 << (bits - 1)) as f32;
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for row in 0..n {
            let column: Vec<f32> = (0..k).map(|i| values[i * n + row]).collect();
            for block in column.chunks(BLOCK) {
                let scale = block.iter().fold(1e-9f32, |m, v| m.max(v.abs())) / (middle - 1.0);
                let code = |v: &f32| ((v / scale).round() + middle) as u8;
                match bits {
                    8 => codes.extend(block.iter().map(code)),
                    _ => codes.extend(block.chunks(2).map(|pair| code(&pair[0]) | code(&pair[1]) << 4)),
                }
                scales.push(scale);
            }
        }
        let shape = [n, k / BLOCK, BLOCK * bits / 8];
        let codes = graph.add_constant(&format!("{name}.codes"), Tensor::from_slice(shape, &codes).unwrap());
        let scales = graph
            .add_constant(&format!("{name}.scales"), Tensor::from_slice([scales.len()], &scales).unwrap());
        let attrs: Attrs = [("K", k), ("N", n), ("bits", bits), ("block_size", BLOCK)]
            .map(|(name, v)| (name, Attr::Int(v as i64)))
            .into();
        let output = graph.value(node.outputs[0].unwrap()).name.clone();
        let inputs = [node.inputs[0], Some(codes), Some(scales)];
        graph.add_node(&node.name, ("com.microsoft", "MatMulNBits"), attrs, &inputs, &[&output]).unwrap();
    }
}
