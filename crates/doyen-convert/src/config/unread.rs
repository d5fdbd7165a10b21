//! Fields of `config.json` that no recipe read: those that change the computation are refused by name, those that say
//! nothing about it are passed over, and others are told to the user.

use super::Fields;
use crate::ConvertError;
use serde_json::Value;

/// Fields by which some architecture changes the computation. A family that reads one is never met here; for another a
/// value that does not mean "off" makes the checkpoint something that its architecture name does not say.
const CHANGING: &[&str] = &[
    "attention_bias",
    "attention_chunk_size",
    "attention_multiplier",
    "attention_out_bias",
    "attn_logit_softcapping",
    "attn_output_gate",
    "attn_temperature_tuning",
    "clip_qkv",
    "conv_L_cache",
    "dim_model_base",
    "embedding_multiplier",
    "final_logit_softcapping",
    "first_k_dense_replace",
    "full_attention_interval",
    "kv_lora_rank",
    "layer_types",
    "linear_num_key_heads",
    "lm_head_bias",
    "logit_scale",
    "logits_scaling",
    "mamba_d_state",
    "mlp_bias",
    "mlp_only_layers",
    "moe_k",
    "moe_layer_freq",
    "moe_layer_num_skipped",
    "moe_num_experts",
    "moe_num_shared_experts",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "no_rope_layer_interval",
    "no_rope_layers",
    "norm_topk_prob",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "num_shared_expert",
    "num_shared_experts",
    "partial_rotary_factor",
    "q_lora_rank",
    "qk_norm",
    "quantization_config",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_interleave",
    "rope_interleaved",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "routed_scaling_factor",
    "scale_depth",
    "scale_emb",
    "scoring_func",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "swiglu_limit",
    "topk_group",
    "topk_method",
    "use_bias",
    "use_bidirectional_attention",
    "use_cla",
    "use_mla",
    "use_qk_norm",
    "use_qkv_bias",
    "use_sliding_window",
];

/// Fields that say nothing about the computation of logits.
const INERT: &[&str] = &[
    "_attn_implementation",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "cla_share_factor",
    "classifier_dropout",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
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
    "pad_token_id",
    "pretraining_tp",
    "quantization",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Whether a value means that a feature is off.
fn is_off(name: &str, v: &Value) -> bool {
    let neutral = match name {
        "attention_multiplier" | "query_pre_attn_scalar" => None,
        _ if name.ends_with("multiplier") || name.ends_with("factor") => Some(1.0),
        "logits_scaling" | "logit_scale" | "scale_emb" | "n_group" | "topk_group" | "moe_layer_freq" => {
            Some(1.0)
        }
        _ => Some(0.0),
    };
    match v {
        Value::Bool(b) => !b,
        Value::Array(a) => a.is_empty(),
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
        } else if !INERT.contains(&name) && !matches!(value, Value::String(_)) {
            unknown.push(name);
        }
    }
    if !unknown.is_empty() {
        notices.push(format!("fields of config.json that no recipe reads: {}", unknown.join(", ")));
    }
    Ok(())
}
