//! DeepSeek-V2 and V3: latent attention, experts in groups, shared experts; the first layers are dense.

use super::glm::{behind_dense_layers, sigmoid_experts};
use crate::{
    ConvertError,
    config::{Fields, Groups, Latent, Mixer, Mlp, ModelConfig, Moe, Routing, Score},
};

/// Softmax scores, the best groups by their best expert.
pub(super) fn deepseek_v2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = ModelConfig::with_mixer(f, Mixer::Latent(Latent::read(f)?), Mlp::read(f)?)?;
    every_layer(f)?;
    if !f.flag("rope_interleave", true)? {
        return Err(f.wrong("rope_interleave", false, "true, as the released code rotates"));
    }
    f.says("scoring_func", &["softmax"])?;
    if f.flag("norm_topk_prob", false)? {
        let expected = "false: released implementations of this architecture disagree on what it does";
        return Err(f.wrong("norm_topk_prob", true, expected));
    }
    let mut moe = Moe::read(f, ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
    let groups = match f.string("topk_method")? {
        None | Some("greedy") => {
            // Read, so that they are known to say nothing.
            let _ = (f.optional_size("n_group")?, f.optional_size("topk_group")?);
            None
        }
        Some("group_limited_greedy") => Groups::read(f, moe.experts, moe.top_k, 1)?,
        Some(other) => {
            let expected = "\"greedy\" or \"group_limited_greedy\"";
            return Err(f.wrong("topk_method", format!("{other:?}"), expected));
        }
    };
    moe.routing = Routing {
        score: Score::Softmax,
        correction: None,
        groups,
        normalize: false,
        scale: f.number("routed_scaling_factor", 1.0)? as f32,
    };
    behind_dense_layers(f, &mut c, moe)?;
    Ok(c)
}

/// Sigmoid scores with a correction, the best groups by their two best experts.
pub(super) fn deepseek_v3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = ModelConfig::with_mixer(f, Mixer::Latent(Latent::read(f)?), Mlp::read(f)?)?;
    every_layer(f)?;
    f.says("scoring_func", &["sigmoid"])?;
    f.says("topk_method", &["noaux_tc"])?;
    sigmoid_experts(f, &mut c)?;
    Ok(c)
}

/// V3 without experts.
pub(super) fn youtu(f: &Fields) -> Result<ModelConfig, ConvertError> {
    ModelConfig::with_mixer(f, Mixer::Latent(Latent::read(f)?), Mlp::read(f)?)
}

fn every_layer(f: &Fields) -> Result<(), ConvertError> {
    match f.optional_size("moe_layer_freq")? {
        Some(n) if n != 1 => {
            Err(f.wrong("moe_layer_freq", n, "1: experts in every layer after the dense ones"))
        }
        _ => Ok(()),
    }
}
