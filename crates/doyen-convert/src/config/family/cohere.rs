//! Cohere's decoders: both halves of a layer take the same norm of mean and variance, rotated pairs are neighbours.

use super::{biased_attention, plain};
use crate::{
    ConvertError,
    config::{Attention, Fields, LayerNorms, ModelConfig, NormKind, Rope, windows},
};

pub(super) fn cohere(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let attention = biased_attention(f)?;
    let rope = attention.rope.map(|r| Rope { interleaved: true, ..r });
    let mut c = plain(f, Attention { rope, ..attention })?;
    c.norm.kind = NormKind::MeanVariance { bias: false };
    c.norm.eps = f.number("layer_norm_eps", 1e-5)? as f32;
    c.head.divisor = (1.0 / f.number("logit_scale", 0.0625)?) as f32;
    for layer in &mut c.layers {
        layer.norms = LayerNorms { before_ffn: None, ..LayerNorms::PRE };
        layer.parallel = true;
    }
    Ok(c)
}

/// Layers with windows rotate, the others do not.
pub(super) fn cohere2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = cohere(f)?;
    f.says("position_embedding_type", &["rope_gptj"])?;
    f.says("order_of_interleaved_layers", &["local_attn_first"])?;
    let pattern = f.optional_size("sliding_window_pattern")?.unwrap_or(4);
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| !(i + 1).is_multiple_of(pattern))?);
    for (_, attention) in c.attentions_mut().filter(|(_, a)| a.window.is_none()) {
        attention.rope = None;
    }
    Ok(c)
}
