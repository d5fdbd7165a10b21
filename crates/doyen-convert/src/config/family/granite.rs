//! Granite, dense and with experts: factors on embeddings, residuals, scores and logits.

use super::{biased_attention, plain};
use crate::{
    ConvertError,
    config::{
        Attention, ExpertNames, Ffn, Fields, Inner, LayerNorms, Mlp, MlpNames, ModelConfig, Moe, RouterNames,
        Shared, Tensors, experts::always_normalized,
    },
};
use serde_json::Value;

pub(super) fn granite(f: &Fields) -> Result<ModelConfig, ConvertError> {
    start(f, Some(1.0))
}

/// With this factor on scores where the file has none; without that, the usual one.
fn start(f: &Fields, scale: Option<f64>) -> Result<ModelConfig, ConvertError> {
    let attention = biased_attention(f)?;
    let scale =
        f.positive_float("attention_multiplier", Some(scale.unwrap_or(attention.scale.into())))? as f32;
    let mut c = plain(f, Attention { scale, ..attention })?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    c.embedding_scale = f.number("embedding_multiplier", 1.0)? as f32;
    c.residual_scale = f.number("residual_multiplier", 1.0)? as f32;
    c.head.divisor = f.number("logits_scaling", 1.0)? as f32;
    Ok(c)
}

/// Norms of what both halves put out, too; a factor on logits instead of a divisor.
pub(super) fn hyperclovax(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = start(f, None)?;
    c.head.divisor = 1.0 / c.head.divisor;
    if f.flag("use_post_norm", true)? {
        for layer in &mut c.layers {
            layer.norms = LayerNorms {
                after_mixer: Some("post_norm1"),
                after_ffn: Some("post_norm2"),
                ..LayerNorms::PRE
            };
        }
    }
    Ok(c)
}

/// Layers of attention alone, with and without rotation; a feed-forward in the place of shared experts.
pub(super) fn granite_hybrid(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let name = if f.value("layer_types").is_some() || f.value("layers_block_type").is_none() {
        "layer_types"
    } else {
        "layers_block_type"
    };
    let layers = f.size("num_hidden_layers")?;
    let attends = |t: &Value| matches!(t.as_str(), Some("attention" | "full_attention"));
    let found = match f.value(name).and_then(Value::as_array) {
        None => Some("no list".to_owned()),
        Some(types) if types.len() != layers => Some(format!("{} entries", types.len())),
        Some(types) => types.iter().find(|t| !attends(t)).map(ToString::to_string),
    };
    if let Some(found) = found {
        let expected = format!("\"attention\" for all {layers} layers: there is no block for Mamba's");
        return Err(f.wrong(name, found, expected));
    }
    // Read, so that it is known to say nothing.
    let _ = f.value("mamba_d_state");
    let mut c = if f.count("num_local_experts", 8)? > 0 {
        granite_moe(f)?
    } else {
        let mut c = granite(f)?;
        let mlp = shared_mlp(f, f.size("shared_intermediate_size")?)?;
        for layer in &mut c.layers {
            layer.ffn = Ffn::Dense(mlp);
        }
        c
    };
    match f.string("position_embedding_type")? {
        Some("rope") => {}
        None | Some("nope") => c.attentions_mut().for_each(|(_, a)| a.rope = None),
        Some(other) => {
            return Err(f.wrong("position_embedding_type", format!("{other:?}"), "\"rope\" or \"nope\""));
        }
    }
    Ok(c)
}

/// The feed-forward that every token goes through.
fn shared_mlp(f: &Fields, intermediate: usize) -> Result<Mlp, ConvertError> {
    let inner = Inner::Gated(Tensors::Fused("input_linear"));
    let names = MlpNames { module: "shared_mlp", inner, down: "output_linear" };
    Ok(Mlp { names, ..Mlp::of(f, intermediate)? })
}

/// Experts in every layer; shared ones where `shared_intermediate_size` is set.
pub(super) fn granite_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    always_normalized(f)?;
    let mut c = granite(f)?;
    let mut moe = Moe {
        modules: &["block_sparse_moe"],
        names: ExpertNames { all: ["input_linear.weight", "output_linear.weight"], ..ExpertNames::QWEN },
        router: RouterNames { module: "router.layer", bias: false },
        ..Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?
    };
    let intermediate = f.count("shared_intermediate_size", 0)?;
    if intermediate > 0 {
        moe.shared = Some(Shared { mlp: shared_mlp(f, intermediate)?, gate: None });
    }
    c.set_moe(&moe, |_| true);
    Ok(c)
}
