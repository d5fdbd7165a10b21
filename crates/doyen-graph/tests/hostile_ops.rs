//! Operators over hostile inputs: valid nodes with some of their inputs and attributes replaced by others. Whatever
//! comes, `parse`, `infer`, `eval` and `trace` return; they never panic and never reserve without bound.

use bytes::Bytes;
use doyen_graph::{
    ir::{Attr, Attrs, Dim, Fact},
    ops::{Op, TokenAxis, Trace, Traced},
};
use doyen_tensor::{DType, Shape, Tensor};
use proptest::prelude::*;

type Input = Option<(DType, &'static [usize])>;

/// A node that is valid, by types and shapes.
struct Template {
    op: (&'static str, &'static str),
    attrs: Vec<(&'static str, Attr)>,
    inputs: Vec<Input>,
}

fn t(op: (&'static str, &'static str), attrs: &[(&'static str, i64)], inputs: &[Input]) -> Template {
    let attrs = attrs.iter().map(|&(n, v)| (n, Attr::Int(v))).collect();
    Template { op, attrs, inputs: inputs.to_vec() }
}

const MS: &str = "com.microsoft";

#[allow(clippy::unnecessary_wraps)] // lists mix them with absent inputs
fn f(shape: &'static [usize]) -> Input {
    Some((DType::F32, shape))
}

#[allow(clippy::unnecessary_wraps)] // lists mix them with absent inputs
fn b(shape: &'static [usize]) -> Input {
    Some((DType::U8, shape))
}

#[allow(clippy::unnecessary_wraps)] // lists mix them with absent inputs
fn l(shape: &'static [usize]) -> Input {
    Some((DType::I64, shape))
}

#[allow(clippy::unnecessary_wraps)] // lists mix them with absent inputs
fn i(shape: &'static [usize]) -> Input {
    Some((DType::I32, shape))
}

fn templates() -> Vec<Template> {
    weights().into_iter().chain(activations()).collect()
}

/// Operators over quantized and expert weights.
fn weights() -> Vec<Template> {
    let mut moe = t(
        (MS, "QMoE"),
        &[("k", 2), ("block_size", 16), ("swiglu_fusion", 1)],
        &[
            f(&[3, 32]),
            f(&[3, 2]),
            b(&[2, 32, 16]),
            f(&[2, 32, 2]),
            f(&[2, 32]),
            b(&[2, 32, 8]),
            f(&[2, 32, 1]),
            f(&[2, 32]),
            None,
            None,
            None,
            b(&[2, 32, 1]),
            b(&[2, 32, 1]),
            None,
            f(&[3, 2]),
        ],
    );
    moe.attrs.push(("activation_type", Attr::Str("swiglu".into())));
    vec![
        moe,
        t(
            (MS, "QMoE"),
            &[("expert_weight_bits", 2)],
            &[
                f(&[1, 2, 8]),
                f(&[2, 2]),
                b(&[2, 4, 2]),
                f(&[2, 4]),
                None,
                b(&[2, 8, 1]),
                f(&[2, 8]),
                None,
                b(&[2, 4, 2]),
                f(&[2, 4]),
                None,
                b(&[2, 1]),
                b(&[2, 2]),
                b(&[2, 1]),
            ],
        ),
        t(
            (MS, "MoE"),
            &[("k", 1)],
            &[f(&[3, 4]), f(&[3, 2]), f(&[2, 5, 4]), f(&[2, 5]), f(&[2, 4, 5]), f(&[2, 4])],
        ),
        t(
            (MS, "MatMulNBits"),
            &[("K", 40), ("N", 3), ("block_size", 16)],
            &[f(&[2, 40]), b(&[3, 3, 8]), f(&[3, 3]), b(&[3, 2]), None, f(&[3])],
        ),
        t(
            (MS, "MatMulNBits"),
            &[("K", 32), ("N", 2), ("block_size", 16), ("bits", 2)],
            &[f(&[32]), b(&[2, 2, 4]), f(&[4]), None, i(&[32])],
        ),
        t((MS, "GatherBlockQuantized"), &[("block_size", 16)], &[l(&[2, 2]), l(&[3]), f(&[2, 3])]),
        t(
            (MS, "GatherBlockQuantized"),
            &[("block_size", 16)],
            &[b(&[4, 16]), l(&[3]), f(&[4, 2]), b(&[4, 1])],
        ),
    ]
}

/// Attention, positions and norms.
fn activations() -> Vec<Template> {
    vec![
        t(
            (MS, "GroupQueryAttention"),
            &[("num_heads", 2), ("kv_num_heads", 1), ("do_rotary", 1)],
            &[
                f(&[1, 2, 32]),
                f(&[1, 2, 16]),
                f(&[1, 2, 16]),
                f(&[1, 1, 3, 16]),
                f(&[1, 1, 3, 16]),
                i(&[1]),
                i(&[]),
                f(&[4, 8]),
                f(&[4, 8]),
                l(&[1, 2]),
                None,
                f(&[2]),
                None,
                None,
                f(&[16]),
                f(&[16]),
            ],
        ),
        t(
            (MS, "GroupQueryAttention"),
            &[("num_heads", 1), ("kv_num_heads", 1), ("local_window_size", 2), ("sliding_window_cache", 1)],
            &[f(&[2, 1, 12]), None, None, f(&[2, 1, 3, 4]), f(&[2, 1, 3, 4]), i(&[2]), i(&[1])],
        ),
        t((MS, "RotaryEmbedding"), &[], &[f(&[1, 2, 8]), l(&[1, 2]), f(&[3, 2]), f(&[3, 2])]),
        t(("", "RotaryEmbedding"), &[("num_heads", 2)], &[f(&[1, 2, 8]), f(&[3, 2]), f(&[3, 2]), l(&[1, 2])]),
        t((MS, "MRotaryEmbedding"), &[], &[f(&[1, 2, 8]), l(&[3, 1, 2]), f(&[3, 2]), f(&[3, 2])]),
        t(("", "LayerNormalization"), &[], &[f(&[2, 3]), f(&[3]), f(&[3])]),
        t(("", "RMSNormalization"), &[("axis", 1)], &[f(&[2, 3, 2]), f(&[3, 2])]),
        t((MS, "SkipLayerNormalization"), &[], &[f(&[1, 2, 4]), f(&[1, 2, 4]), f(&[4]), f(&[4]), f(&[4])]),
        t(("", "LpNormalization"), &[("axis", 0)], &[f(&[2, 3])]),
        t((MS, "GatedRMSNorm"), &[], &[f(&[2, 4]), f(&[2]), f(&[2, 4])]),
        t((MS, "GatedAdd"), &[], &[f(&[2, 4]), f(&[2, 4]), f(&[2, 1])]),
        t((MS, "LinearAttentionGate"), &[], &[f(&[1, 2, 3]), f(&[3]), f(&[3]), f(&[1, 2, 3])]),
        t(
            ("", "Attention"),
            &[("q_num_heads", 2), ("kv_num_heads", 1), ("is_causal", 1)],
            &[f(&[1, 2, 4]), f(&[1, 3, 2]), f(&[1, 3, 3]), f(&[2, 3]), None, None, l(&[1])],
        ),
        t(
            ("", "Attention"),
            &[("qk_matmul_output_mode", 2)],
            &[
                f(&[1, 2, 2, 4]),
                f(&[1, 1, 3, 4]),
                f(&[1, 1, 3, 2]),
                f(&[1, 1, 2, 4]),
                f(&[1, 1, 1, 4]),
                f(&[1, 1, 1, 2]),
            ],
        ),
    ]
}

const ATTRS: [&str; 23] = [
    "k",
    "block_size",
    "expert_weight_bits",
    "fc1_expert_weight_bits",
    "K",
    "N",
    "bits",
    "gather_axis",
    "axis",
    "quantize_axis",
    "num_heads",
    "kv_num_heads",
    "rotary_embedding_dim",
    "interleaved",
    "local_window_size",
    "q_num_heads",
    "qk_output",
    "swiglu_fusion",
    "use_sparse_mixer",
    "kv_cache_bit_width",
    "causal",
    "left_window_size",
    "softcap",
];

fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0usize..5, 2 => prop_oneof![Just(8), Just(16), Just(32)], 1 => any::<usize>()]
}

fn dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(vec![
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F64,
        DType::U8,
        DType::I8,
        DType::I32,
        DType::I64,
        DType::Bool,
        DType::U4,
        DType::I4,
    ])
}

/// A change to one input: absent, or of another type, or of another shape.
#[derive(Debug, Clone)]
enum Change {
    Absent,
    Type(DType),
    Shape(Vec<usize>),
    Extent(usize, usize),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        1 => Just(Change::Absent),
        2 => dtype().prop_map(Change::Type),
        2 => proptest::collection::vec(extent(), 0..5).prop_map(Change::Shape),
        4 => (0usize..4, extent()).prop_map(|(a, e)| Change::Extent(a, e)),
    ]
}

/// A tensor of pseudo-random bytes, mixed with small numbers; `None` when the shape cannot be held.
fn tensor(dtype: DType, shape: &[usize], seed: u64) -> Option<Tensor> {
    let len = Shape::from(shape).bytes(dtype).ok().filter(|&n| n < 1 << 12)?;
    let mut state = seed | 1;
    let small = seed.is_multiple_of(3);
    let size = (dtype.bits() / 8).max(1);
    let bytes: Vec<u8> = (0..len)
        .map(|at| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let byte = (state >> 40) as u8;
            match dtype {
                DType::I32 | DType::I64 if small => {
                    if at % size == 0 {
                        byte % 4
                    } else {
                        0
                    }
                }
                _ => byte,
            }
        })
        .collect();
    Tensor::from_bytes(dtype, shape.to_vec(), Bytes::from(bytes)).ok()
}

fn call(template: &Template, attrs: &[(usize, i64)], changes: &[(usize, Change)], seed: u64) {
    let mut a = Attrs::default();
    for (n, v) in &template.attrs {
        a.set(*n, v.clone());
    }
    if template.op.1 == "MRotaryEmbedding" {
        a.set("mrope_section", vec![1i64, 1, (seed % 3) as i64 - 1]);
    }
    for &(n, v) in attrs {
        a.set(ATTRS[n], v);
    }
    let Ok(op) = Op::parse(template.op.0, template.op.1, 25, &a) else { return };
    let mut inputs: Vec<Option<(DType, Vec<usize>)>> =
        template.inputs.iter().map(|i| i.map(|(t, s)| (t, s.to_vec()))).collect();
    for (at, change) in changes {
        let at = at % inputs.len();
        inputs[at] = match (inputs[at].take(), change.clone()) {
            (_, Change::Absent) | (None, Change::Extent(..)) => None,
            (Some((_, s)), Change::Type(t)) => Some((t, s)),
            (None, Change::Type(t)) => Some((t, vec![2])),
            (i, Change::Shape(s)) => Some((i.map_or(DType::F32, |i| i.0), s)),
            (Some((t, mut s)), Change::Extent(axis, e)) => {
                if let Some(d) = s.get_mut(axis) {
                    *d = e;
                }
                Some((t, s))
            }
        };
    }
    let facts: Vec<Option<Fact>> = inputs
        .iter()
        .enumerate()
        .map(|(n, i)| {
            let dim =
                |&d: &usize| if (seed >> (n % 60)).is_multiple_of(8) { Dim::Unknown } else { Dim::Known(d) };
            i.as_ref().map(|(t, s)| Fact::new(*t, s.iter().map(dim).collect::<Vec<_>>()))
        })
        .collect();
    let _ = op.infer(&facts.iter().map(Option::as_ref).collect::<Vec<_>>());
    let shapes: Vec<Option<Shape>> =
        inputs.iter().map(|i| i.as_ref().map(|(_, s)| s.clone().into())).collect();
    let traced: Vec<Option<Traced<'_>>> = shapes
        .iter()
        .map(|s| {
            s.as_ref().map(|shape| {
                let axis = (seed % 3) as usize;
                let tokens = axis < shape.len() && seed.is_multiple_of(2);
                let trace = if tokens { Trace::Tokens(TokenAxis { axis, inner: 1 }) } else { Trace::Absent };
                Traced { trace, shape, constant: None }
            })
        })
        .collect();
    if inputs.iter().flatten().all(|(_, s)| s.iter().all(|&d| d < 1 << 12)) {
        let _ = op.trace(&traced, &[shapes.first().cloned().flatten().unwrap_or_default()]);
    }
    let tensors: Option<Vec<Option<Tensor>>> = inputs
        .iter()
        .enumerate()
        .map(|(n, i)| match i {
            None => Some(None),
            Some((t, s)) => tensor(*t, s, seed.wrapping_add(n as u64)).map(Some),
        })
        .collect();
    let Some(tensors) = tensors else { return };
    let _ = op.eval(&tensors.iter().map(Option::as_ref).collect::<Vec<_>>(), (seed % 5) as usize);
}

/// The templates are what they claim to be, as far as shapes go.
#[test]
fn templates_are_accepted() {
    for template in templates() {
        let mut a = Attrs::default();
        for (n, v) in &template.attrs {
            a.set(*n, v.clone());
        }
        if template.op.1 == "MRotaryEmbedding" {
            a.set("mrope_section", vec![1i64, 1, 0]);
        }
        let op = Op::parse(template.op.0, template.op.1, 25, &a).unwrap();
        let facts: Vec<Option<Fact>> = template
            .inputs
            .iter()
            .map(|i| i.map(|(t, s)| Fact::new(t, s.iter().map(|&d| Dim::Known(d)).collect::<Vec<_>>())))
            .collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let result = op.infer(&facts);
        let int64_data = template.inputs[0] == l(&[2, 2]);
        assert_eq!(result.is_err(), int64_data, "{:?}: {result:?}", template.op);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn operators_return(
        template in 0usize..64,
        attrs in proptest::collection::vec(
            (0..ATTRS.len(), prop_oneof![4 => -2i64..20, 1 => any::<i64>()]), 0..2),
        changes in proptest::collection::vec((0usize..16, change()), 0..4),
        seed in any::<u64>(),
    ) {
        let templates = templates();
        call(&templates[template % templates.len()], &attrs, &changes, seed);
    }
}
