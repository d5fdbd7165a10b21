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
        (json!({"rope_scaling": {"rope_type": "proportional"}}), "rope_scaling.rope_type", "proportional"),
        (
            json!({"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_theta": 1e4}}),
            "rope_scaling",
            "linear",
        ),
        (json!({"rope_scaling": {"rope_type": "dynamic", "alpha": 2.0}}), "rope_scaling.alpha", "present"),
        (
            json!({
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64, "factor": 2.0},
                "original_max_position_embeddings": 32
            }),
            "rope_scaling.original_max_position_embeddings",
            "64",
        ),
        (
            json!({"rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "original_max_position_embeddings": 64
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
        (json!({"head_dim": 21}), "head_dim", "21"),
        (json!({"is_causal": false}), "is_causal", "false"),
        (json!({"position_embedding_type": "alibi"}), "position_embedding_type", "alibi"),
        (json!({"layer_types": ["sliding_attention"]}), "layer_types", "1 entries"),
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

/// A decoder of another architecture, with these fields and none of experts.
fn of(architecture: &str, changes: Value) -> Result<ModelConfig, ConvertError> {
    let (Value::Object(mut map), Value::Object(changes)) = (base(), changes) else { unreachable!() };
    map.retain(|name, _| !name.contains("expert"));
    map.insert("architectures".into(), json!([architecture]));
    map.extend(changes);
    ModelConfig::parse(&Fields::new(map), None)
}

fn windows(c: &ModelConfig) -> Vec<Option<usize>> {
    c.attentions().map(|(_, a)| a.window).collect()
}

#[test]
fn a_share_of_a_head_is_rotated_where_the_architecture_does_so() {
    let half = json!({"partial_rotary_factor": 0.5});
    let glm = of("GlmForCausalLM", half.clone()).unwrap();
    assert_eq!(attention(&glm).rope.as_ref().unwrap().dim, 16);
    for architecture in ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"] {
        let e = of(architecture, half.clone()).unwrap_err().to_string();
        assert!(e.contains("partial_rotary_factor is 0.5"), "{e}");
    }
}

#[test]
fn rotations_that_the_operator_cannot_make_stand_before_it() {
    let apart = |head_dim: usize| attention(&parse(json!({"head_dim": head_dim})).unwrap()).rotates_apart();
    assert!(apart(24) && apart(8) && !apart(48));
}

#[test]
fn context_lengths_before_stretching_stand_inside_or_outside() {
    let yarn = |outer: Value, inner: Value| {
        let scaling = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": inner});
        let RopeScaling::Yarn { original, .. } =
            rope(json!({"rope_scaling": scaling, "original_max_position_embeddings": outer})).scaling
        else {
            unreachable!()
        };
        original
    };
    assert_eq!(
        [yarn(json!(32), Value::Null), yarn(Value::Null, json!(32)), yarn(json!(32), json!(32))],
        [32.0; 3]
    );
    assert_eq!(yarn(Value::Null, Value::Null), 128.0);
}

#[test]
fn a_base_that_grows_beyond_the_context_is_the_plain_one_within() {
    let dynamic = rope(json!({"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}}));
    assert_eq!(dynamic, Rope::unscaled(5e5, 32));
}

#[test]
fn both_names_of_eight_bit_floats() {
    for fmt in ["e4m3", "float8_e4m3fn"] {
        let q = json!({"quant_method": "fp8", "fmt": fmt, "weight_block_size": [128, 64]});
        let c = parse(json!({"quantization_config": q})).unwrap();
        assert_eq!(c.quantization, Some(Quantization::Fp8 { tile: Some([128, 64]) }));
    }
    let e = refusal(json!({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}));
    assert!(e.contains("quantization_config.fmt is \"e5m2\""), "{e}");
}

#[test]
fn which_layers_slide() {
    let types = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    let some = [Some(8), None, Some(8), None];
    let typed = json!({"sliding_window": 8, "layer_types": types});
    assert_eq!(windows(&of("MistralForCausalLM", typed.clone()).unwrap()), some);
    for (architecture, field) in [
        ("Phi3ForCausalLM", "layer_types"),
        ("Qwen2ForCausalLM", "use_sliding_window"),
        ("LlamaForCausalLM", "sliding_window"),
    ] {
        let e = of(architecture, typed.clone()).unwrap_err().to_string();
        assert!(e.contains(&format!("{field} is ")), "{e}");
    }
    let e = refusal(
        json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": typed["layer_types"]}),
    );
    assert!(e.contains("use_sliding_window is true"), "{e}");
    let smol = json!({"sliding_window": 8, "use_sliding_window": true, "no_rope_layers": [1, 0, 1, 0]});
    assert_eq!(windows(&of("SmolLM3ForCausalLM", smol).unwrap()), [None, Some(8), None, Some(8)]);
    let letters = json!({"sliding_window": 8, "sliding_window_pattern": "LG"});
    let exaone = of("Exaone4ForCausalLM", letters).unwrap();
    assert_eq!(windows(&exaone), some);
    assert!(exaone.attentions().all(|(_, a)| a.rope.is_some() == a.window.is_some()));
}

#[test]
fn a_rotation_for_each_kind_of_layer() {
    let gemma = |changes: Value| of("Gemma3ForCausalLM", changes);
    let flat = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}});
    let e = gemma(flat).unwrap_err().to_string();
    assert!(e.contains("rope_parameters is one rotation"), "{e}");
    let c = gemma(
        json!({"rope_parameters": {"full_attention": {"rope_theta": 3e4}}, "sliding_window_pattern": 2}),
    );
    let thetas: Vec<f64> = c.unwrap().attentions().map(|(_, a)| a.rope.as_ref().unwrap().theta).collect();
    assert_eq!(thetas, [1e4, 3e4, 1e4, 3e4]);
}

#[test]
fn names_that_releases_gave_to_other_activations() {
    let of = |architecture: &str, changes: Value| match of(architecture, changes).unwrap().layers[0].ffn {
        Ffn::Dense(mlp) => mlp.activation,
        Ffn::Moe(_) => unreachable!(),
    };
    assert_eq!(of("GemmaForCausalLM", json!({"hidden_act": "gelu"})), Activation::GeluTanh);
    assert_eq!(of("LlamaForCausalLM", json!({"hidden_act": "gelu"})), Activation::Gelu);
    assert_eq!(of("LlamaForCausalLM", json!({"hidden_act": "relu2"})), Activation::SquaredRelu);
}

#[test]
fn weights_that_are_always_renormalised() {
    let experts = |normalize: bool| {
        let changes = json!({"num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": normalize});
        of("MixtralForCausalLM", changes)
    };
    assert!(experts(true).is_ok());
    let e = experts(false).unwrap_err().to_string();
    assert!(e.contains("norm_topk_prob is false"), "{e}");
}

#[test]
fn patterns_of_letters_and_none() {
    let experts = json!({"num_experts": 8, "num_experts_per_tok": 2});
    for (architecture, more) in [("Exaone4ForCausalLM", json!({})), ("ExaoneMoeForCausalLM", experts)] {
        let exaone = |pattern: Value| {
            let mut changes = json!({"sliding_window": 8, "sliding_window_pattern": pattern});
            changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            of(architecture, changes)
        };
        let last = exaone(json!("LLLL")).unwrap();
        assert_eq!(windows(&last), [Some(8), Some(8), Some(8), None]);
        assert!(last.attentions().all(|(_, a)| a.rope.is_some() == a.window.is_some()));
        assert_eq!(windows(&exaone(json!(3)).unwrap()), [Some(8), Some(8), None, Some(8)]);
        let e = exaone(Value::Null).unwrap_err().to_string();
        assert!(e.contains("sliding_window_pattern is null"), "{e}");
    }
}

#[test]
fn windows_and_positions_of_ministral() {
    let types = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    let ministral = |[outer, inner]: [Value; 2], types: Value| {
        let rope = json!({
            "rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": inner,
        });
        of(
            "Ministral3ForCausalLM",
            json!({
                "rope_parameters": rope, "original_max_position_embeddings": outer, "sliding_window": 8,
                "layer_types": types,
            }),
        )
    };
    for place in [[json!(32), Value::Null], [Value::Null, json!(32)]] {
        let c = ministral(place, Value::Null).unwrap();
        assert_eq!((c.max_positions, windows(&c)), (32, vec![Some(8); 4]));
    }
    let e = ministral([Value::Null, Value::Null], Value::Null).unwrap_err().to_string();
    assert!(e.contains("rope_parameters.original_max_position_embeddings is absent"), "{e}");
    let e = ministral([json!(32), Value::Null], types).unwrap_err().to_string();
    assert!(e.contains("layer_types is"), "{e}");
}

#[test]
fn short_factors_need_their_context() {
    let factors = vec![1.0; 16];
    let e = refusal(json!({"rope_scaling": {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors
    }}));
    assert!(e.contains("rope_scaling.original_max_position_embeddings is absent"), "{e}");
}

#[test]
fn shares_come_out_as_the_channels_they_were_made_of() {
    for head_dim in 1..=256 {
        for channels in 1..=head_dim {
            assert_eq!((head_dim as f64 * Rope::share(channels, head_dim)) as usize, channels);
        }
    }
    let c = of(
        "MiniMaxM2ForCausalLM",
        json!({"head_dim": 104, "rotary_dim": 30, "num_local_experts": 8, "num_experts_per_tok": 2}),
    );
    assert_eq!(attention(&c.unwrap()).rope.as_ref().unwrap().dim, 30);
}

#[test]
fn fields_of_granite_and_gemma_that_make_no_sense() {
    let short = json!({
        "layers_block_type": ["attention"], "num_local_experts": 0, "shared_intermediate_size": 32
    });
    for (architecture, changes, said) in [
        ("GraniteMoeHybridForCausalLM", short, "layers_block_type is 1 entries"),
        ("GraniteForCausalLM", json!({"attention_multiplier": 0.0}), "attention_multiplier is 0"),
        ("GraniteForCausalLM", json!({"attention_multiplier": -1.0}), "attention_multiplier is -1"),
        (
            "GemmaForCausalLM",
            json!({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}),
            "hidden_activation is \"gelu_pytorch_tanh\"",
        ),
    ] {
        let e = of(architecture, changes).unwrap_err().to_string();
        assert!(e.contains(said), "{e}");
    }
    let same = json!({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"});
    assert!(of("GemmaForCausalLM", same).is_ok());
}

#[test]
fn null_is_not_left_out() {
    let Value::Object(map) = json!({"none": null}) else { unreachable!() };
    let f = Fields::new(map);
    assert_eq!((f.flag("none", true).unwrap(), f.flag("absent", true).unwrap()), (false, true));
    assert_eq!((f.count("none", 0).unwrap(), f.count("absent", 2).unwrap()), (0, 2));
    assert_eq!(f.number("absent", 0.5).unwrap(), 0.5);
    for e in [f.count("none", 2).map(|_| ()), f.number("none", 0.5).map(|_| ())] {
        let e = e.unwrap_err().to_string();
        assert!(e.contains("none") && e.contains("null"), "{e}");
    }
    let e = refusal(json!({"rms_norm_eps": null}));
    assert!(e.contains("rms_norm_eps") && e.contains("null"), "{e}");
}
