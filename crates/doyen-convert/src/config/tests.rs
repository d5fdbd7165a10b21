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

fn refusal(changes: Value) -> String {
    parse(changes).unwrap_err().to_string()
}

#[test]
fn fields_the_graph_depends_on() {
    let c = parse(json!({
        "norm_topk_prob": true, "mlp_only_layers": [3], "decoder_sparse_step": 2, "tie_word_embeddings": true,
    }))
    .unwrap();
    assert_eq!(c.layers.iter().map(|l| l.moe).collect::<Vec<_>>(), [false, true, false, false]);
    assert!(c.tied && c.attention.qk_norm && !c.attention.qkv_bias);
    assert_eq!(c.moe, Some(Moe { experts: 8, top_k: 2, intermediate: 32, norm_topk: true }));
    assert_eq!(c.tokens.eos.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(c.rope, Rope { theta: 10000.0, scaling: RopeScaling::Default });
}

#[test]
fn families_differ() {
    let dense = |arch: &str, more: Value| {
        let mut changes = json!({"architectures": [arch], "num_experts": null, "head_dim": null});
        changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(changes)
    };
    let qwen2 = dense("Qwen2ForCausalLM", json!({})).unwrap().attention;
    assert!(qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm && qwen2.head_dim == 16);
    let llama = dense("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true})).unwrap();
    assert!(llama.attention.output_bias && llama.mlp_bias);
    assert_eq!(dense("Qwen3ForCausalLM", json!({})).unwrap().attention.head_dim, 128);
    let slides = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 3});
    let windows = dense("Qwen2ForCausalLM", slides).unwrap().layers;
    assert_eq!(windows.iter().map(|l| l.window).collect::<Vec<_>>(), [None, None, None, Some(16)]);
    let e = dense("LlamaForCausalLM", json!({"sliding_window": 16})).unwrap_err().to_string();
    assert!(e.contains("sliding_window is 16"), "{e}");
}

#[test]
fn unsupported_values_are_named() {
    for (changes, field, found) in [
        (json!({"hidden_act": "gelu"}), "hidden_act", "gelu"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "quantization_config", "gptq"),
        (json!({"rope_scaling": {"rope_type": "longrope"}}), "rope_scaling.rope_type", "longrope"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor", "absent"),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}),
            "mrope_section",
            "present",
        ),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "0.5"),
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
    assert!(e.contains("MambaForCausalLM") && e.contains("LlamaForCausalLM, Qwen2ForCausalLM"), "{e}");
}

#[test]
fn both_spellings_of_rope() {
    let old = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}});
    let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}});
    let expected = Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 4.0 } };
    assert_eq!(parse(old).unwrap().rope, expected);
    assert_eq!(parse(new).unwrap().rope, expected);
    assert_eq!(parse(json!({"rope_parameters": {"rope_type": "default"}})).unwrap().rope.theta, 10000.0);
}

#[test]
fn llama3_keeps_high_divides_low_and_blends_between() {
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 32.0 };
    let (scaled, factor) = Rope { theta: 5e5, scaling }.frequencies(32);
    let (plain, _) = Rope { theta: 5e5, scaling: RopeScaling::Default }.frequencies(32);
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
    let rope = parse(yarn).unwrap().rope;
    let (scaled, factor) = rope.frequencies(128);
    let (plain, _) = Rope { theta: 1e6, scaling: RopeScaling::Default }.frequencies(128);
    assert!((factor - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
    // 128 ln(32768 / (32 * 2 pi)) / (2 ln 1e6) = 23.6 and 128 ln(32768 / 2 pi) / (2 ln 1e6) = 39.6.
    assert_eq!(scaled[23], plain[23]);
    assert!(scaled[24] < plain[24]);
    assert!(scaled[39] > plain[39] / 4.0);
    assert!((scaled[40] - plain[40] / 4.0).abs() <= f32::EPSILON * plain[40]);
}
