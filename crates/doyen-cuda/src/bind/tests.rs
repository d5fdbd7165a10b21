//! Plans of nodes, made without a card.

use super::*;
use doyen_graph::{
    ir::{Attr, Attrs, Constant},
    lowered::{ConstId, Experts, LConst, LValueId, Route},
};
use doyen_tensor::FloatType;
use std::sync::Arc;

const SETTING: Setting = Setting {
    operand: Some(Operand::Bf16),
    kv: KvType::Float(FloatType::BF16),
    shared: 99 << 10,
    dense: 1 << 30,
    all_dense: false,
};
const LIMITS: Limits = Limits { tokens: 16, rows: 4, sequences: 4, context: 1024, page_size: 32 };

fn value(graph: &mut Lowered, dtype: DType, dims: &[Extent]) -> LValueId {
    let id = LValueId(graph.values.len() as u32);
    graph.values.push(LValue { name: format!("v{}", id.0), dtype, declared: dtype, dims: dims.to_vec() });
    id
}

fn constant(graph: &mut Lowered, t: Tensor) -> Input {
    let id = ConstId(graph.constants.len() as u32);
    graph.constants.push(LConst { name: format!("c{}", id.0), data: Arc::new(Constant::from(t)) });
    Input::Const(id)
}

fn bind(graph: &Lowered, node: &LNode, setting: Setting) -> Result<Box<dyn Kernel>, String> {
    Binder::new(graph, node, setting).bind().map(|k| k.expect("no view"))
}

/// A QMoE node of 4 experts, 64 hidden and 32 intermediate channels, FC1 at `b1` and FC2 at `b2` bits, blocks of 16.
fn experts((b1, b2): (usize, usize)) -> (Lowered, LNode) {
    let mut graph = Lowered::default();
    let tokens = Extent::Tokens(1);
    let x = value(&mut graph, DType::F32, &[tokens, Extent::Fixed(64)]);
    let ids = value(&mut graph, DType::I32, &[tokens, Extent::Fixed(2)]);
    let mix = value(&mut graph, DType::F32, &[tokens, Extent::Fixed(2)]);
    let y = value(&mut graph, DType::F32, &[tokens, Extent::Fixed(64)]);
    let attrs = Attrs::from([
        ("k", Attr::Int(2)),
        ("activation_type", Attr::from("swiglu")),
        ("swiglu_fusion", Attr::Int(1)),
        ("expert_weight_bits", Attr::Int(b2 as i64)),
        ("fc1_expert_weight_bits", Attr::Int(b1 as i64)),
        ("fc3_expert_weight_bits", Attr::Int(b1 as i64)),
        ("block_size", Attr::Int(16)),
    ]);
    let op = Op::parse("com.microsoft", "QMoE", 1, &attrs).unwrap();
    let codes = |rows: usize, bytes: usize| {
        Tensor::from_slice([4, rows, bytes], &vec![0u8; 4 * rows * bytes]).unwrap()
    };
    let scales = |rows: usize, blocks: usize| {
        Tensor::from_slice([4, rows, blocks], &vec![1f32; 4 * rows * blocks]).unwrap()
    };
    let w1 = constant(&mut graph, codes(64, 64 * b1 / 8));
    let s1 = constant(&mut graph, scales(64, 4));
    let w2 = constant(&mut graph, codes(64, 32 * b2 / 8));
    let s2 = constant(&mut graph, scales(64, 2));
    let inputs = vec![
        Some(Input::Value(x)),
        Some(Input::Value(ids)),
        Some(Input::Value(mix)),
        Some(w1),
        Some(s1),
        None,
        Some(w2),
        Some(s2),
    ];
    let op = LOp::Experts(Experts { op, experts: 4, k: 2 });
    (graph, LNode { name: "experts".into(), op, inputs, outputs: vec![Some(y)] })
}

#[test]
fn every_pair_of_widths_has_kernels() {
    for b1 in [2, 4, 8] {
        for b2 in [2, 4, 8] {
            let (graph, node) = experts((b1, b2));
            let kernel = bind(&graph, &node, SETTING).unwrap();
            assert_eq!(kernel.name(), format!("experts {b1}b / {b2}b bf16 tensor cores"));
            let codes = 4 * (64 * 64 * b1 + 64 * 32 * b2) / 8;
            assert_eq!(kernel.resident(), codes + 4 * 4 * (64 * 4 + 64 * 2));
            // FC1 rows of every route, and activated ones.
            assert!(kernel.scratch(&LIMITS) >= 4 * 32 * (64 + 32));
        }
    }
}

#[test]
fn exact_numerics_keep_to_float32() {
    let (graph, node) = experts((4, 4));
    let kernel = bind(&graph, &node, Setting { operand: None, ..SETTING }).unwrap();
    assert_eq!(kernel.name(), "experts 4b / 4b f32");
}

#[test]
fn routing_checks_its_numbers() {
    let mut graph = Lowered::default();
    let logits = value(&mut graph, DType::F32, &[Extent::Tokens(1), Extent::Fixed(8)]);
    let ids = value(&mut graph, DType::I32, &[Extent::Tokens(1), Extent::Fixed(9)]);
    let mix = value(&mut graph, DType::F32, &[Extent::Tokens(1), Extent::Fixed(9)]);
    let node = |k| LNode {
        name: "route".into(),
        op: LOp::Route(Route { experts: 8, k, normalize: true, sparse_mixer: false }),
        inputs: vec![Some(Input::Value(logits)), None],
        outputs: vec![Some(ids), Some(mix)],
    };
    assert_eq!(bind(&graph, &node(2), SETTING).unwrap().name(), "route top-2 of 8");
    assert!(bind(&graph, &node(9), SETTING).map(|_| ()).unwrap_err().contains('9'));
}

/// What has no kernel runs on the host, and says so.
#[test]
fn operators_without_a_kernel_are_named() {
    let mut graph = Lowered::default();
    let dims = [Extent::Tokens(1), Extent::Fixed(8)];
    let (x, y) = (value(&mut graph, DType::F32, &dims), value(&mut graph, DType::F32, &dims));
    let node = |op: &str| LNode {
        name: "n".into(),
        op: LOp::Op(Op::parse("", op, 22, &Attrs::default()).unwrap()),
        inputs: vec![Some(Input::Value(x)); if op == "Pow" { 2 } else { 1 }],
        outputs: vec![Some(y)],
    };
    assert_eq!(bind(&graph, &node("Tanh"), SETTING).unwrap().name(), "tanh");
    assert_eq!(bind(&graph, &node("Pow"), SETTING).unwrap().name(), "host reference n");
}
