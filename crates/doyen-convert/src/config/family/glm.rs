//! GLM-4, dense and with experts: partial rotation.

use super::plain;
use crate::{
    ConvertError,
    config::{
        Attention, Correction, Ffn, Fields, Groups, LayerNorms, Mlp, MlpNames, ModelConfig, Moe, QkNorm,
        Rope, RouterNames, Routing, Score, Shared, experts::always_normalized,
    },
};

/// Rotated pairs are neighbours; gate and up in one tensor.
pub(super) fn glm(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let attention = attention(f)?;
    let rope = attention.rope.clone().map(|r| Rope { interleaved: true, ..r });
    let mlp = Mlp { names: MlpNames::FUSED, ..Mlp::read(f)? };
    ModelConfig::plain(f, Attention { rope, ..attention }, mlp)
}

/// Norms of what both halves put out, too.
pub(super) fn glm4(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = glm(f)?;
    for layer in &mut c.layers {
        layer.norms = LayerNorms {
            after_mixer: Some("post_self_attn_layernorm"),
            after_ffn: Some("post_mlp_layernorm"),
            ..LayerNorms::PRE
        };
    }
    Ok(c)
}

/// Sigmoid scores with a correction, groups, and shared experts; the first layers are dense.
pub(super) fn glm4_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let qk_norm = f.flag("use_qk_norm", false)?.then_some(QkNorm::Heads);
    let mut c = plain(f, Attention { qk_norm, ..attention(f)? })?;
    sigmoid_experts(f, &mut c)?;
    Ok(c)
}

/// Experts in every layer.
pub(super) fn solar(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mlp = Mlp::of(f, f.size("moe_intermediate_size")?)?;
    let attention = Attention { qkv_bias: f.flag("attention_bias", false)?, ..Attention::read(f)? };
    let mut c = ModelConfig::plain(f, attention, mlp)?;
    sigmoid_experts(f, &mut c)?;
    Ok(c)
}

/// Biases on query, key and value.
fn attention(f: &Fields) -> Result<Attention, ConvertError> {
    Ok(Attention { qkv_bias: f.flag("attention_bias", false)?, ..Attention::partly_rotated(f)? })
}

/// The experts that GLM-4.5 and dots share with DeepSeek-V3.
pub(super) fn sigmoid_experts(f: &Fields, c: &mut ModelConfig) -> Result<(), ConvertError> {
    // What the releases call the rule below.
    for name in ["scoring_func", "topk_method"] {
        f.says(name, &["sigmoid", "noaux_tc"])?;
    }
    // EXAONE's name for them.
    let count = if f.value("num_experts").is_some() { "num_experts" } else { "n_routed_experts" };
    let mut moe = Moe::read(f, [count, "num_experts_per_tok", "moe_intermediate_size"])?;
    moe.routing = Routing {
        score: Score::Sigmoid,
        correction: Some(Correction {
            tensors: &["gate.e_score_correction_bias", "e_score_correction_bias"],
            row: false,
        }),
        groups: Groups::read(f, moe.experts, moe.top_k, 2)?,
        normalize: f.flag("norm_topk_prob", false)?,
        scale: f.number("routed_scaling_factor", 1.0)? as f32,
    };
    behind_dense_layers(f, c, moe)
}

/// Experts by renormalised sigmoid scores with a correction, and shared ones, in all layers but the first ones.
pub(super) fn scored_experts(
    f: &Fields,
    c: &mut ModelConfig,
    (router, shared): (&'static str, &'static str),
    scale: f64,
) -> Result<(), ConvertError> {
    always_normalized(f)?;
    let mut moe = Moe::read(f, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
    moe.router = RouterNames { module: router, bias: false };
    moe.routing = Routing {
        score: Score::Sigmoid,
        correction: Some(Correction { tensors: &["expert_bias"], row: false }),
        groups: None,
        normalize: true,
        scale: scale as f32,
    };
    behind_dense_layers(f, c, moe)?;
    for layer in &mut c.layers {
        if let Ffn::Moe(moe) = &mut layer.ffn
            && let Some(experts) = &mut moe.shared
        {
            experts.mlp.names = MlpNames::at(shared);
        }
    }
    Ok(())
}

/// Experts, and those that every token shares, in all layers but the first ones.
pub(super) fn behind_dense_layers(f: &Fields, c: &mut ModelConfig, mut moe: Moe) -> Result<(), ConvertError> {
    let name =
        if f.value("num_shared_experts").is_some() { "num_shared_experts" } else { "n_shared_experts" };
    let shared = f.count(name, 0)?;
    if shared > 0 {
        let intermediate = moe.intermediate * shared;
        let mlp = Mlp { names: MlpNames::at("mlp.shared_experts"), intermediate, ..Mlp::read(f)? };
        moe.shared = Some(Shared { mlp, gate: None });
    }
    // Arcee's name for them.
    let name =
        if f.value("num_dense_layers").is_some() { "num_dense_layers" } else { "first_k_dense_replace" };
    let dense = f.count(name, 0)?;
    let layers = c.layers.len();
    let sparse = f.layer_kinds("mlp_layer_types", layers, ["dense", "sparse"])?;
    let sparse = sparse.unwrap_or_else(|| (0..layers).map(|i| i >= dense).collect());
    c.set_moe(&moe, |i| sparse[i]);
    Ok(())
}
