//! Dense decoders close to Llama.

use super::{biased_attention, plain};
use crate::{
    ConvertError,
    config::{
        Attention, AttentionNames, Fields, LayerNorms, Mlp, MlpNames, ModelConfig, QkNorm, Rope, Tensors,
        windows,
    },
};

pub(super) fn llama(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, biased_attention(f)?)?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    c.set_windows(&windows::none(f, c.layers.len())?);
    Ok(c)
}

/// Windows in every layer where `sliding_window` is set.
pub(super) fn mistral(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention::read(f)?)?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    Ok(c)
}

/// Layers without rotation: `no_rope_layers` has 0 for those, or every `no_rope_layer_interval`-th is one.
pub(super) fn smollm3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, biased_attention(f)?)?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    let layers = c.layers.len();
    let used = f.flag("use_sliding_window", false)?;
    let types = windows::layer_types(f, layers)?;
    let slides = types.filter(|_| used).unwrap_or_else(|| vec![false; layers]);
    c.set_windows(&windows::sized(f, slides)?);
    let interval = f.optional_size("no_rope_layer_interval")?.unwrap_or(4);
    let rotated: Vec<usize> = match f.value("no_rope_layers") {
        Some(_) => f.indices("no_rope_layers")?,
        None => (0..layers).map(|i| usize::from(!(i + 1).is_multiple_of(interval))).collect(),
    };
    if rotated.len() != layers || rotated.iter().any(|r| *r > 1) {
        let found = format!("{rotated:?}");
        return Err(f.wrong("no_rope_layers", found, format!("{layers} entries of 0 or 1")));
    }
    for (i, attention) in c.attentions_mut() {
        if rotated[i] == 0 {
            attention.rope = None;
        }
    }
    Ok(c)
}

/// Query, key and value in one tensor, gate and up in one.
pub(super) fn phi3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let names = AttentionNames { qkv: Tensors::Fused("qkv_proj"), ..AttentionNames::LLAMA };
    let attention = Attention { names, ..Attention::read(f)? };
    let names = MlpNames { gate_up: Tensors::Fused("gate_up_proj"), ..MlpNames::LLAMA };
    let mut c = ModelConfig::plain(f, attention, Mlp { names, ..Mlp::read(f)? })?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    Ok(c)
}

/// Norms after both halves only, and over all query and all key heads.
pub(super) fn olmo2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention { qk_norm: Some(QkNorm::Whole), ..biased_attention(f)? })?;
    for layer in &mut c.layers {
        layer.norms = LayerNorms {
            before_mixer: None,
            after_mixer: Some("post_attention_layernorm"),
            before_ffn: None,
            after_ffn: Some("post_feedforward_layernorm"),
        };
    }
    Ok(c)
}

/// Norms of query and key heads after the rotation.
pub(super) fn hunyuan(f: &Fields) -> Result<ModelConfig, ConvertError> {
    if !f.flag("use_qk_norm", true)? {
        return Err(f.wrong("use_qk_norm", false, "true"));
    }
    let names = AttentionNames { norms: ["query_layernorm", "key_layernorm"], ..AttentionNames::LLAMA };
    plain(f, Attention { names, qk_norm: Some(QkNorm::RotatedHeads), ..biased_attention(f)? })
}

/// Rotated pairs are neighbours.
pub(super) fn ernie(f: &Fields) -> Result<ModelConfig, ConvertError> {
    plain(f, ernie_attention(f)?)
}

pub(super) fn ernie_attention(f: &Fields) -> Result<Attention, ConvertError> {
    if f.flag("use_bias", false)? {
        return Err(f.wrong("use_bias", true, "false"));
    }
    let attention = Attention::read(f)?;
    let rope = attention.rope.map(|r| Rope { interleaved: true, ..r });
    Ok(Attention { rope, ..attention })
}
