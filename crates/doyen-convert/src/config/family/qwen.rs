//! Qwen 2 and 3, dense and with experts.

use super::{biased_attention, plain};
use crate::{
    ConvertError,
    config::{
        Attention, ExpertNames, Fields, Fused, Mlp, MlpNames, ModelConfig, Moe, QkNorm, Routing, Shared,
        windows,
    },
};

/// Biases on query, key and value.
pub(super) fn qwen2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    f.flag("attention_bias", true)?;
    let mut c = plain(f, Attention { qkv_bias: true, ..Attention::read(f)? })?;
    c.set_windows(&windows::qwen(f, c.layers.len(), false)?);
    Ok(c)
}

/// Norms of query and key heads.
pub(super) fn qwen3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention { qk_norm: Some(QkNorm::Heads), ..biased_attention(f)? })?;
    c.set_windows(&windows::qwen(f, c.layers.len(), false)?);
    Ok(c)
}

/// A shared expert behind a sigmoid gate.
pub(super) fn qwen2_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut moe = experts(f)?;
    let names = MlpNames::at("mlp.shared_expert");
    let intermediate = f.size("shared_expert_intermediate_size")?;
    let mlp = Mlp { names, intermediate, ..Mlp::read(f)? };
    moe.shared = Some(Shared { mlp, gate: Some("mlp.shared_expert_gate") });
    let attention = Attention { qkv_bias: f.flag("qkv_bias", true)?, ..Attention::read(f)? };
    let mut c = with_experts(f, attention, &moe)?;
    c.set_windows(&windows::qwen(f, c.layers.len(), true)?);
    Ok(c)
}

pub(super) fn qwen3_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let attention = Attention { qk_norm: Some(QkNorm::Heads), ..biased_attention(f)? };
    let mut c = with_experts(f, attention, &experts(f)?)?;
    // Read, so that they are known to say nothing.
    let _ = (f.value("sliding_window"), f.value("max_window_layers"));
    c.set_windows(&windows::unused(f, c.layers.len())?);
    Ok(c)
}

fn experts(f: &Fields) -> Result<Moe, ConvertError> {
    let moe = Moe::read(f, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
    let routing = Routing { normalize: f.flag("norm_topk_prob", false)?, ..Routing::SOFTMAX };
    let fused = match f.string("model_type")? {
        Some("qwen3_vl_moe_text") => Fused::TransposedHalves,
        _ => Fused::Halves,
    };
    Ok(Moe { routing, names: ExpertNames { fused, ..ExpertNames::QWEN }, ..moe })
}

/// Experts in every `decoder_sparse_step`-th layer, those in `mlp_only_layers` excepted.
fn with_experts(f: &Fields, attention: Attention, moe: &Moe) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, attention)?;
    let layers = c.layers.len();
    let step = f.optional_size("decoder_sparse_step")?.unwrap_or(1);
    let dense = f.indices("mlp_only_layers")?;
    if let Some(i) = dense.iter().find(|&&i| i >= layers) {
        return Err(f.wrong("mlp_only_layers", i, format!("layers 0 to {}", layers - 1)));
    }
    c.set_moe(moe, |i| (i + 1).is_multiple_of(step) && !dense.contains(&i));
    Ok(c)
}
