//! What is read, what is refused and how the refusal reads.

use super::*;
use serde_json::{Value, json};

fn base() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100,
        "max_position_embeddings": 128, "hidden_act": "silu", "rope_scaling": null, "eos_token_id": [2, 3]
    })
}

fn parse(changes: Value) -> Result<ModelConfig, ConvertError> {
    let (Value::Object(mut map), Value::Object(changes)) = (base(), changes) else { unreachable!() };
    map.extend(changes);
    ModelConfig::parse(&Fields::new(map), None)
}

fn attention(c: &ModelConfig) -> &Attention {
    c.attentions().next().unwrap().1
}

fn rope(changes: Value) -> Rope {
    attention(&parse(changes).unwrap()).rope.clone().unwrap()
}

fn refusal(changes: Value) -> String {
    parse(changes).unwrap_err().to_string()
}

#[test]
fn fields_the_graph_depends_on() {
    let c = parse(json!({
        "norm_topk_prob": true, "mlp_only_layers": [3], "decoder_sparse_step": 2, "tie_word_embeddings": true,
    }))
    .unwrap();
    let sparse: Vec<bool> = c.layers.iter().map(|l| matches!(l.ffn, Ffn::Moe(_))).collect();
    assert_eq!(sparse, [false, true, false, false]);
    let attention = attention(&c);
    assert!(c.head.tied && attention.qk_norm == Some(QkNorm::Heads) && !attention.qkv_bias);
    let Ffn::Moe(moe) = &c.layers[1].ffn else { unreachable!() };
    assert_eq!((moe.experts, moe.top_k, moe.intermediate, moe.routing), (8, 2, 32, Routing::SOFTMAX));
    assert_eq!(c.tokens.eos.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(attention.rope, Some(Rope::unscaled(10000.0, 32)));
}

#[test]
fn families_differ() {
    let dense = |arch: &str, more: Value| {
        let mut changes = json!({"architectures": [arch], "num_experts": null, "head_dim": null});
        changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(changes)
    };
    let c = dense("Qwen2ForCausalLM", json!({})).unwrap();
    let qwen2 = attention(&c);
    assert!(qwen2.qkv_bias && !qwen2.output_bias && qwen2.qk_norm.is_none() && qwen2.head_dim == 16);
    let llama = dense("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true})).unwrap();
    assert!(attention(&llama).output_bias && matches!(llama.layers[0].ffn, Ffn::Dense(m) if m.bias));
    let mut bare = json!({"architectures": ["Qwen3ForCausalLM"], "num_experts": null});
    bare.as_object_mut().unwrap().extend(base().as_object().unwrap().clone().into_iter().filter(|(n, _)| {
        !matches!(n.as_str(), "architectures" | "head_dim" | "num_experts" | "num_experts_per_tok")
    }));
    let Value::Object(bare) = bare else { unreachable!() };
    assert_eq!(attention(&ModelConfig::parse(&Fields::new(bare), None).unwrap()).head_dim, 128);
    let slides = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 3});
    let c = dense("Qwen2ForCausalLM", slides).unwrap();
    assert_eq!(c.attentions().map(|(_, a)| a.window).collect::<Vec<_>>(), [None, None, None, Some(16)]);
    let e = dense("LlamaForCausalLM", json!({"sliding_window": 16})).unwrap_err().to_string();
    assert!(e.contains("sliding_window is 16"), "{e}");
}

#[test]
fn unsupported_values_are_named() {
    for (changes, field, found) in [
        (json!({"hidden_act": "gelu"}), "hidden_act", "gelu"),
        (
            json!({"quantization_config": {"quant_method": "bitsandbytes"}}),
            "quantization_config.quant_method",
            "bitsandbytes",
        ),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 3}}),
            "quantization_config.bits",
            "3",
        ),
        (json!({"rope_scaling": {"rope_type": "dynamic"}}), "rope_scaling.rope_type", "dynamic"),
        (
            json!({"rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 64
            }}),
            "rope_scaling.short_factor",
            "1 numbers",
        ),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor", "absent"),
        (json!({"partial_rotary_factor": 0.25}), "partial_rotary_factor", "0.25"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor", "1.5"),
        (json!({"num_experts_per_tok": 9}), "num_experts_per_tok", "9"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads", "3"),
        (json!({"hidden_size": -4}), "hidden_size", "-4"),
        (json!({"vocab_size": "many"}), "vocab_size", "many"),
        (json!({"eos_token_id": 100}), "eos_token_id", "100"),
        (json!({"head_dim": 20}), "head_dim", "20"),
        (json!({"mlp_only_layers": [4]}), "mlp_only_layers", "4"),
        (json!({"use_sliding_window": true, "sliding_window": 8}), "use_sliding_window", "true"),
        (json!({"layer_types": ["linear_attention", "", "", ""]}), "layer_types", "linear_attention"),
        (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping", "30"),
    ] {
        let e = refusal(changes);
        assert!(e.contains(field) && e.contains(found) && e.contains("expected"), "{e}");
    }
    let e = refusal(json!({"architectures": ["MambaForCausalLM"]}));
    assert!(e.contains("MambaForCausalLM") && e.contains("Qwen2ForCausalLM, Qwen3ForCausalLM"), "{e}");
}

#[test]
fn both_spellings_of_rope() {
    let old = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}});
    let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}});
    let expected = Rope { scaling: RopeScaling::Linear { factor: 4.0 }, ..Rope::unscaled(5e5, 32) };
    assert_eq!(rope(old), expected);
    assert_eq!(rope(new), expected);
    assert_eq!(rope(json!({"rope_parameters": {"rope_type": "default"}})).theta, 10000.0);
}

#[test]
fn llama3_keeps_high_divides_low_and_blends_between() {
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 32.0 };
    let (scaled, factor) = Rope { scaling, ..Rope::unscaled(5e5, 32) }.frequencies();
    let (plain, _) = Rope::unscaled(5e5, 32).frequencies();
    assert_eq!((scaled[0], factor), (plain[0], 1.0));
    assert_eq!(scaled[15], plain[15] / 8.0);
    // Pair 2 has wavelength 2 pi 5e5^(1/8) = 32.4 > 32, pair 1 has 14.3: between 8 and 32.
    assert_eq!(scaled[2], plain[2] / 8.0);
    let f = f64::from(plain[1]);
    let smooth = (32.0 * f / (2.0 * std::f64::consts::PI) - 1.0) / 3.0;
    assert!((f64::from(scaled[1]) - f * (smooth + (1.0 - smooth) / 8.0)).abs() < 1e-8);
}

#[test]
fn yarn_ramp_and_attention_factor() {
    let yarn = json!({"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
    }, "rope_theta": 1e6, "head_dim": 128});
    let (scaled, factor) = rope(yarn).frequencies();
    let (plain, _) = Rope::unscaled(1e6, 128).frequencies();
    assert!((factor - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
    // 128 ln(32768 / (32 * 2 pi)) / (2 ln 1e6) = 23.6 and 128 ln(32768 / 2 pi) / (2 ln 1e6) = 39.6.
    assert_eq!(scaled[23], plain[23]);
    assert!(scaled[24] < plain[24]);
    assert!(scaled[39] > plain[39] / 4.0);
    assert!((scaled[40] - plain[40] / 4.0).abs() <= f32::EPSILON * plain[40]);
}
