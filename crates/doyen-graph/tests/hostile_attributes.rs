//! Attributes that no operator can mean: every one is refused with its name, what is allowed and what was found.

use doyen_graph::{
    ir::{Attr, Attrs, Dim, Fact},
    ops::Op,
};
use doyen_tensor::DType;

const MS: &str = "com.microsoft";

/// What makes a node valid, before an attribute is replaced.
fn valid(op: &str) -> Attrs {
    let mut a = Attrs::default();
    let ints: &[(&str, i64)] = match op {
        "GroupQueryAttention" => &[("num_heads", 4), ("kv_num_heads", 2)],
        "MultiHeadAttention" => &[("num_heads", 4)],
        "LinearAttention" => &[("q_num_heads", 4), ("kv_num_heads", 2)],
        "MatMulNBits" => &[("K", 64), ("N", 8), ("block_size", 32)],
        _ => &[],
    };
    for &(name, v) in ints {
        a.set(name, v);
    }
    a
}

fn refusal(domain: &str, op: &str, name: &str, value: &Attr) -> String {
    let mut attrs = valid(op);
    attrs.set(name, value.clone());
    match Op::parse(domain, op, 24, &attrs) {
        Ok(op) => panic!("{op:?} takes {name} {value:?}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn integers_out_of_range_are_refused_by_value() {
    let huge = 1i64 << 40;
    let cases: &[(&str, &str, &str, &[i64])] = &[
        (MS, "QMoE", "k", &[0, -1, huge, i64::MIN, i64::MAX]),
        (MS, "QMoE", "expert_weight_bits", &[0, 1, 3, 5, 16, -4, huge]),
        (MS, "QMoE", "fc1_expert_weight_bits", &[0, 3, -2]),
        (MS, "QMoE", "fc2_expert_weight_bits", &[0, 3, -2]),
        (MS, "QMoE", "block_size", &[1, 8, 15, 24, 48, huge + 1]),
        (MS, "QMoE", "swiglu_fusion", &[-1, 3, huge]),
        (MS, "QMoE", "normalize_routing_weights", &[-1, 2]),
        (MS, "QMoE", "use_sparse_mixer", &[-1, 2]),
        (MS, "QMoE", "weights_prepacked", &[-2, 1, 2]),
        (MS, "QMoE", "accuracy_level", &[-1, 5]),
        (MS, "MoE", "k", &[0, -1, huge]),
        (MS, "MatMulNBits", "K", &[0, -1]),
        (MS, "MatMulNBits", "N", &[0, -1]),
        (MS, "MatMulNBits", "bits", &[0, 3, 7, -4]),
        (MS, "MatMulNBits", "block_size", &[0, -32, 8, 24, i64::MAX]),
        (MS, "MatMulNBits", "weight_prepacked", &[1, 2, -1]),
        (MS, "MatMulNBits", "accuracy_level", &[-1, 5]),
        (MS, "GatherBlockQuantized", "bits", &[0, 3, -4]),
        (MS, "GatherBlockQuantized", "block_size", &[0, -128, 8, 96]),
        (MS, "GroupQueryAttention", "num_heads", &[0, -1, huge, 3]),
        (MS, "GroupQueryAttention", "kv_num_heads", &[0, -1, huge, i64::MAX]),
        (MS, "GroupQueryAttention", "local_window_size", &[-2, i64::MIN]),
        (MS, "GroupQueryAttention", "smooth_softmax", &[-2, 2]),
        (MS, "GroupQueryAttention", "qk_output", &[-1, 3]),
        (MS, "GroupQueryAttention", "rotary_embedding_dim", &[-1, i64::MIN]),
        (MS, "GroupQueryAttention", "kv_cache_bit_width", &[2, 8, -8]),
        (MS, "MultiHeadAttention", "num_heads", &[0, -1, huge]),
        (MS, "MultiHeadAttention", "unidirectional", &[2, -1]),
        (MS, "LinearAttention", "q_num_heads", &[0, -1, huge]),
        (MS, "LinearAttention", "kv_num_heads", &[0, -1, huge]),
        (MS, "LinearAttention", "state_window", &[1, -1]),
        (MS, "CausalConvWithState", "dilation", &[0, -1]),
        (MS, "CausalConvWithState", "ndim", &[0, 2, -1]),
        (MS, "RotaryEmbedding", "num_heads", &[-1, huge]),
        (MS, "RotaryEmbedding", "rotary_embedding_dim", &[-2, 3, huge]),
        ("", "RotaryEmbedding", "num_heads", &[-1, huge]),
        ("", "Attention", "q_num_heads", &[0, -1, huge]),
        ("", "Attention", "kv_num_heads", &[0, -1, huge]),
        ("", "Attention", "qk_matmul_output_mode", &[-1, 4]),
        ("", "Attention", "softmax_precision", &[0, 7]),
    ];
    for &(domain, op, name, values) in cases {
        for &v in values {
            let said = refusal(domain, op, name, &Attr::Int(v));
            // An odd number of heads is refused over the others, by the same name.
            assert!(said.starts_with(&format!("attribute {name}: expected ")), "{op}: {said}");
            assert!(said.contains(&format!("found {v}")), "{op}: {said}");
        }
    }
}

#[test]
fn floats_that_mean_nothing_are_refused() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let cases: &[(&str, &str, &str, &[f32])] = &[
        (MS, "QMoE", "activation_alpha", &[nan, inf]),
        (MS, "QMoE", "activation_beta", &[nan, -inf]),
        (MS, "QMoE", "swiglu_limit", &[nan, -1.0, -inf]),
        (MS, "GroupQueryAttention", "scale", &[nan, inf]),
        (MS, "GroupQueryAttention", "softcap", &[nan, inf, -1.0]),
        (MS, "GroupQueryAttention", "qk_norm_epsilon", &[nan, -1e-6]),
        (MS, "MultiHeadAttention", "scale", &[nan, inf]),
        (MS, "MultiHeadAttention", "mask_filter_value", &[nan]),
        (MS, "LinearAttention", "scale", &[nan, inf]),
        ("", "Attention", "scale", &[nan, inf]),
        ("", "Attention", "softcap", &[nan, -0.5]),
        ("", "RMSNormalization", "epsilon", &[nan, inf, -1e-5]),
        ("", "LayerNormalization", "epsilon", &[nan, -1e-5]),
        (MS, "SkipSimplifiedLayerNormalization", "epsilon", &[nan, -1e-5]),
        (MS, "GatedRMSNorm", "epsilon", &[nan, -1e-5]),
        ("", "Swish", "alpha", &[nan]),
        ("", "Gemm", "alpha", &[nan]),
    ];
    for &(domain, op, name, values) in cases {
        for &v in values {
            let said = refusal(domain, op, name, &Attr::Float(v));
            assert!(said.starts_with(&format!("attribute {name}: expected ")), "{op}: {said}");
            assert!(said.contains(&format!("found {v}")), "{op}: {said}");
        }
    }
    // Without a limit is infinite, and hidden keys may be hidden for good.
    for (op, name, v) in [("QMoE", "swiglu_limit", inf), ("MultiHeadAttention", "mask_filter_value", -inf)] {
        let mut attrs = valid(op);
        attrs.set(name, v);
        Op::parse(MS, op, 1, &attrs).unwrap();
    }
}

#[test]
fn attributes_of_another_kind_and_unknown_ones_are_refused() {
    let said = refusal(MS, "QMoE", "k", &Attr::Float(2.0));
    assert_eq!(said, "attribute k: expected an int, found float");
    let said = refusal(MS, "GroupQueryAttention", "num_heads", &Attr::from("four"));
    assert_eq!(said, "attribute num_heads: expected an int, found string");
    assert_eq!(
        refusal(MS, "QMoE", "zero_point_offset", &Attr::Int(1)),
        "unknown attribute zero_point_offset"
    );
    let said = refusal(MS, "GroupQueryAttention", "k_quant_type", &Attr::from("PER_TENSOR"));
    assert!(said.contains("v_quant_type: expected PER_TENSOR or PER_CHANNEL"), "{said}");
}

fn facts(shapes: &[Option<(DType, &[usize])>]) -> Vec<Option<Fact>> {
    let fact =
        |&(t, s): &(DType, &[usize])| Fact::new(t, s.iter().map(|&d| Dim::Known(d)).collect::<Vec<_>>());
    shapes.iter().map(|s| s.as_ref().map(fact)).collect()
}

/// Codes of one width under an attribute of another: the shape tells which.
#[test]
fn a_width_that_the_shapes_contradict_is_named() {
    let (f, b) = (DType::F32, DType::U8);
    let mut attrs = Attrs::default();
    attrs.set("expert_weight_bits", 2i64).set("block_size", 16i64).set("activation_type", "silu");
    let four_bits: &[Option<(DType, &[usize])>] = &[
        Some((f, &[3, 32])),
        Some((f, &[3, 2])),
        Some((b, &[2, 48, 16])),
        Some((f, &[2, 48, 2])),
        None,
        Some((b, &[2, 32, 24])),
        Some((f, &[2, 32, 3])),
    ];
    let op = Op::parse(MS, "QMoE", 1, &attrs).unwrap();
    let all = facts(four_bits);
    let said = op.infer(&all.iter().map(Option::as_ref).collect::<Vec<_>>()).unwrap_err().to_string();
    assert_eq!(
        said,
        "attribute fc1_expert_weight_bits: expected 4, as fc1_experts_weights has 16 bytes for the 32 columns of a row, \
         found 2 (an absent attribute inherits expert_weight_bits)"
    );
    let mut attrs = valid("MatMulNBits");
    attrs.set("bits", 8i64);
    let op = Op::parse(MS, "MatMulNBits", 1, &attrs).unwrap();
    let all = facts(&[Some((f, &[1, 64])), Some((b, &[8, 2, 16])), Some((f, &[8, 2]))]);
    let said = op.infer(&all.iter().map(Option::as_ref).collect::<Vec<_>>()).unwrap_err().to_string();
    assert_eq!(said, "attribute bits: expected 4, as B has 16 bytes for a block of 32, found 8");
}

/// Heads of no channels.
#[test]
fn empty_heads_are_refused() {
    let f = DType::F32;
    let refuse = |domain: &str, op: &str, inputs: &[Option<(DType, &[usize])>]| {
        let mut attrs = valid(op);
        if op == "Attention" {
            attrs.set("q_num_heads", 2i64).set("kv_num_heads", 2i64);
        }
        let all = facts(inputs);
        let op = Op::parse(domain, op, 24, &attrs).unwrap();
        let said = op.infer(&all.iter().map(Option::as_ref).collect::<Vec<_>>()).unwrap_err().to_string();
        assert!(said.contains("a hidden size that is a multiple of"), "{said}");
    };
    let none: Option<(DType, &[usize])> = Some((f, &[1, 3, 0]));
    refuse(
        MS,
        "GroupQueryAttention",
        &[none, none, none, None, None, Some((DType::I32, &[1])), Some((DType::I32, &[]))],
    );
    refuse(MS, "MultiHeadAttention", &[none, none, none]);
    refuse("", "Attention", &[none, none, none]);
}
