//! Fields of `config.json` that no recipe read: those that change the computation are refused by name, those that say
//! nothing about it are passed over, and others are told to the user.

use super::Fields;
use crate::ConvertError;
use serde_json::Value;

/// Fields by which some architecture changes the computation. A family that reads one is never met here; for another a
/// value that does not mean "off" makes the checkpoint something that its architecture name does not say.
const CHANGING: &[&str] = &[
    "activation_sparsity_pattern",
    "add_bias_linear",
    "alibi",
    "apply_residual_connection_post_layernorm",
    "attention_bias",
    "attention_chunk_size",
    "attention_k_eq_v",
    "attention_multiplier",
    "attention_out_bias",
    "attention_value_scale",
    "attn_logit_softcapping",
    "attn_output_gate",
    "attn_temperature_tuning",
    "clip_qkv",
    "conv_L_cache",
    "conv_bias",
    "decoder_sparse_step",
    "dim_model_base",
    "embedding_multiplier",
    "final_logit_softcapping",
    "first_k_dense_replace",
    "full_attention_interval",
    "gating",
    "global_attn_every_n_layers",
    "hidden_size_per_layer_input",
    "index_topk",
    "interleave_moe_layer_step",
    "intermediate_size_mlp",
    "is_causal",
    "kv_lora_rank",
    "layer_types",
    "linear_num_key_heads",
    "lm_head_bias",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "mamba_d_state",
    "mlp_bias",
    "mlp_layer_types",
    "mlp_only_layers",
    "moe_apply_router_weight_on_input",
    "moe_k",
    "moe_layer_freq",
    "moe_layer_interval",
    "moe_layer_num_skipped",
    "moe_num_experts",
    "moe_num_shared_experts",
    "moe_router_logit_softcapping",
    "mup_enabled",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "no_rope_layer_interval",
    "no_rope_layers",
    "norm_topk_prob",
    "num_dense_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "num_shared_expert",
    "num_shared_experts",
    "parallel_attn",
    "partial_rotary_factor",
    "position_embedding_type",
    "q_lora_rank",
    "qk_layernorm",
    "qk_norm",
    "qkv_bias",
    "quantization_config",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_interleave",
    "rope_interleaved",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rotary_dim",
    "rotary_pct",
    "route_scale",
    "routed_scaling_factor",
    "router_scaling_factor",
    "scale_attn_by_inverse_layer_idx",
    "scale_depth",
    "scale_emb",
    "scale_embedding",
    "scoring_func",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "swiglu_alpha",
    "swiglu_limit",
    "topk_group",
    "topk_method",
    "use_alibi",
    "use_attention_gate",
    "use_bias",
    "use_bidirectional_attention",
    "use_cla",
    "use_double_wide_mlp",
    "use_mla",
    "use_parallel_residual",
    "use_post_norm",
    "use_qk_norm",
    "use_qkv_bias",
    "use_sandwich_norm",
    "use_sliding_window",
    "zero_expert_num",
];

/// Fields that say nothing about the computation of logits.
const INERT: &[&str] = &[
    "_attn_implementation",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "attention_probs_dropout_prob",
    "auto_map",
    "cache_implementation",
    "cla_share_factor",
    "classifier_dropout",
    "dtype",
    "ep_size",
    "experts_implementation",
    "experts_per_token",
    "hidden_dropout_prob",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "input_jitter_noise",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "model_type",
    "norm_type",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",
    "output_router_logits",
    "pretraining_tp",
    "quantization",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Whether a field says nothing about the computation of logits, be it by its kind.
fn is_inert(name: &str) -> bool {
    INERT.contains(&name) || ["_dropout", "_pdrop", "_token_id"].iter().any(|kind| name.ends_with(kind))
}

/// Whether a value means that a feature is off.
fn is_off(name: &str, v: &Value) -> bool {
    let neutral = match name {
        "attention_multiplier" | "query_pre_attn_scalar" => None,
        _ if name.ends_with("multiplier") || name.ends_with("factor") => Some(1.0),
        "attention_value_scale"
        | "decoder_sparse_step"
        | "interleave_moe_layer_step"
        | "logit_scale"
        | "logits_scaling"
        | "moe_layer_freq"
        | "moe_layer_interval"
        | "n_group"
        | "rotary_pct"
        | "route_scale"
        | "scale_emb"
        | "topk_group" => Some(1.0),
        _ => Some(0.0),
    };
    match v {
        Value::Bool(b) => *b == (name == "is_causal"),
        Value::Array(a) => a.iter().all(|v| v == "full_attention"),
        Value::String(s) => name == "position_embedding_type" && s == "rope",
        _ => v.as_f64().is_some() && v.as_f64() == neutral,
    }
}

/// Refuses a field that changes the computation, and tells of those that are not known.
pub(super) fn judge(f: &Fields, notices: &mut Vec<String>) -> Result<(), ConvertError> {
    let mut unknown = Vec::new();
    for (name, value) in f.unread() {
        if CHANGING.contains(&name) {
            if !is_off(name, value) {
                return Err(f.wrong(
                    name,
                    value,
                    "nothing: this architecture's recipe does not implement it",
                ));
            }
        } else if !is_inert(name) && !matches!(value, Value::String(_)) {
            unknown.push(name);
        }
    }
    if !unknown.is_empty() {
        notices.push(format!("fields of config.json that no recipe reads: {}", unknown.join(", ")));
    }
    Ok(())
}
