//! Gemma 1 to 3: scaled embeddings, zero-centred norms, gelu.

use super::plain;
use crate::{
    ConvertError,
    config::{Attention, Fields, LayerNorms, ModelConfig, QkNorm, Rope, windows},
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
    start(f, Attention::read(f)?)
}

fn start(f: &Fields, attention: Attention) -> Result<ModelConfig, ConvertError> {
    let bias = f.flag("attention_bias", false)?;
    let mut c = plain(f, Attention { qkv_bias: bias, output_bias: bias, ..attention })?;
    c.norm.zero_centred = !f.flag(WHOLE_NORMS, false)?;
    c.embedding_scale = (c.hidden as f64).sqrt() as f32;
    c.head.softcap = softcap(f, "final_logit_softcapping")?;
    Ok(c)
}

/// Scores and logits are capped; every other layer slides.
pub(super) fn gemma2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = gemma(f)?;
    let scale = scale(f)?;
    let cap = softcap(f, "attn_logit_softcapping")?;
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| i.is_multiple_of(2))?);
    for layer in &mut c.layers {
        layer.norms = SANDWICH;
    }
    for (_, attention) in c.attentions_mut() {
        (attention.scale, attention.softcap) = (scale, cap);
    }
    Ok(c)
}

/// Norms of query and key heads; layers that slide have a rotation of their own.
pub(super) fn gemma3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let global = |f: &Fields, head_dim| Rope::read_kind(f, "full_attention", head_dim);
    let mut c = start(f, Attention::rotated(f, global)?)?;
    let scale = scale(f)?;
    let cap = softcap(f, "attn_logit_softcapping")?;
    let pattern = match f.optional_size("sliding_window_pattern")? {
        Some(n) => n,
        None => f.optional_size("_sliding_window_pattern")?.unwrap_or(6),
    };
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| !(i + 1).is_multiple_of(pattern))?);
    let head_dim = f.size("head_dim")?;
    let global = global(f, head_dim)?;
    let nested = f.object("rope_parameters")?.is_some_and(|p| p.value("sliding_attention").is_some());
    let local_theta = f.positive_float("rope_local_base_freq", None)?;
    let local = if nested {
        Rope::read_kind(f, "sliding_attention", head_dim)?
    } else {
        Rope::unscaled(local_theta, global.dim)
    };
    for layer in &mut c.layers {
        layer.norms = SANDWICH;
    }
    for (_, attention) in c.attentions_mut() {
        attention.qk_norm = Some(QkNorm::Heads);
        (attention.scale, attention.softcap) = (scale, cap);
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
