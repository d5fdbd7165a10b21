//! Gemma 1 to 3: scaled embeddings, zero-centred norms, gelu.

use super::plain;
use crate::{
    ConvertError,
    config::{Activation, Attention, Ffn, Fields, LayerNorms, ModelConfig, QkNorm, Rope, windows},
};

/// Norms around both halves.
const SANDWICH: LayerNorms = LayerNorms {
    before_mixer: Some("input_layernorm"),
    after_mixer: Some("post_attention_layernorm"),
    before_ffn: Some("pre_feedforward_layernorm"),
    after_ffn: Some("post_feedforward_layernorm"),
};

/// A file's norms may have been made whole by its writer (GGUF); the field of that is ours.
pub(crate) const WHOLE_NORMS: &str = "doyen_whole_norms";

pub(super) fn gemma(f: &Fields) -> Result<ModelConfig, ConvertError> {
    // The first releases write "gelu" and were trained with its approximation.
    let meant = |a: Activation| if a == Activation::Gelu { Activation::GeluTanh } else { a };
    let [own, also] = ["hidden_activation", "hidden_act"].map(|name| Activation::named(f, name));
    if let (Some(own), Some(also)) = (own?, also?)
        && meant(own) != meant(also)
    {
        let found = format!("{:?}", f.string("hidden_activation")?.unwrap_or_default());
        return Err(f.wrong(
            "hidden_activation",
            found,
            "what hidden_act says: releases differ in which counts",
        ));
    }
    let mut c = start(f, Attention::read(f)?)?;
    for layer in &mut c.layers {
        if let Ffn::Dense(mlp) = &mut layer.ffn {
            mlp.activation = meant(mlp.activation);
        }
    }
    Ok(c)
}

fn start(f: &Fields, attention: Attention) -> Result<ModelConfig, ConvertError> {
    let bias = f.flag("attention_bias", false)?;
    let mut c = plain(f, Attention { qkv_bias: bias, output_bias: bias, ..attention })?;
    c.norm.zero_centred = !f.flag(WHOLE_NORMS, false)?;
    c.embedding_scale = (c.hidden as f64).sqrt() as f32;
    Ok(c)
}

/// Scores and logits are capped; every other layer slides.
pub(super) fn gemma2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    alternating(f, SANDWICH)
}

/// Gemma 2 without norms of what the halves put out.
pub(super) fn vault_gemma(f: &Fields) -> Result<ModelConfig, ConvertError> {
    alternating(f, LayerNorms { after_mixer: None, after_ffn: None, ..SANDWICH })
}

fn alternating(f: &Fields, norms: LayerNorms) -> Result<ModelConfig, ConvertError> {
    let mut c = start(f, Attention::read(f)?)?;
    let scale = scale(f)?;
    let cap = softcap(f, "attn_logit_softcapping")?;
    c.head.softcap = softcap(f, "final_logit_softcapping")?;
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| i.is_multiple_of(2))?);
    for layer in &mut c.layers {
        layer.norms = norms;
    }
    for (_, attention) in c.attentions_mut() {
        (attention.scale, attention.softcap) = (scale, cap);
    }
    Ok(c)
}

/// Norms of query and key heads; layers that slide have a rotation of their own.
pub(super) fn gemma3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let head_dim = Attention::head_dim(f)?;
    let [global, local] = Rope::by_kind(f, head_dim, f.positive_float("rope_local_base_freq", None)?)?;
    let mut c = start(f, Attention::rotated(f, |_, _| Ok(global.clone()))?)?;
    let scale = scale(f)?;
    c.head.softcap = softcap(f, "final_logit_softcapping")?;
    let pattern = f.optional_size("sliding_window_pattern")?.unwrap_or(6);
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| !(i + 1).is_multiple_of(pattern))?);
    for layer in &mut c.layers {
        layer.norms = SANDWICH;
    }
    for (_, attention) in c.attentions_mut() {
        attention.qk_norm = Some(QkNorm::Heads);
        attention.scale = scale;
        attention.rope = Some(if attention.window.is_some() { local.clone() } else { global.clone() });
    }
    Ok(c)
}

fn scale(f: &Fields) -> Result<f32, ConvertError> {
    Ok(f.positive_float("query_pre_attn_scalar", None)?.powf(-0.5) as f32)
}

fn softcap(f: &Fields, name: &str) -> Result<Option<f32>, ConvertError> {
    match f.float(name)? {
        None => Ok(None),
        Some(_) => Ok(Some(f.positive_float(name, None)? as f32)),
    }
}
