//! Dense decoders close to Llama.

use super::{biased, biased_attention, plain, scaling_is_stated};
use crate::{
    ConvertError,
    config::{
        Attention, AttentionNames, Fields, Mlp, MlpNames, ModelConfig, QkNorm, Rope, RopeScaling, Tensors,
        windows,
    },
};

pub(super) fn llama(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, biased_attention(f)?)?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    c.set_windows(&windows::none(f, c.layers.len())?);
    Ok(c)
}

/// Windows in the layers that `layer_types` names, or in every one where `sliding_window` is set.
pub(super) fn mistral(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention::read(f)?)?;
    c.set_windows(&windows::all_or_typed(f, c.layers.len())?);
    Ok(c)
}

/// Windows in every layer where `sliding_window` is set. Queries grow with positions beyond
/// `original_max_position_embeddings`, for which there is no operator.
pub(super) fn ministral3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let name = if f.value("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let params = f.object(name)?.ok_or_else(|| f.wrong("rope_parameters", "absent", "an object"))?;
    let grows = params.float("llama_4_scaling_beta")?.is_some_and(|beta| beta != 0.0);
    let original = RopeScaling::stated_original(f, &params)?;
    if grows && original.is_none() {
        let expected = "a positive integer: queries grow beyond it (llama_4_scaling_beta)";
        return Err(params.wrong("original_max_position_embeddings", "absent", expected));
    }
    let f = &f.without(name, &["llama_4_scaling_beta", "max_position_embeddings"]);
    let mut c = plain(f, Attention::read(f)?)?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    if let Some(original) = original.filter(|n| grows && *n < c.max_positions) {
        c.notices.push(format!(
            "the package's context is {original} positions (original_max_position_embeddings): beyond them queries grow by \
             llama_4_scaling_beta, for which there is no operator"
        ));
        c.max_positions = original;
    }
    Ok(c)
}

/// Windows in three of four layers.
pub(super) fn cwm(f: &Fields) -> Result<ModelConfig, ConvertError> {
    scaling_is_stated(f)?;
    let mut c = plain(f, Attention::read(f)?)?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| !i.is_multiple_of(4))?);
    Ok(c)
}

/// Biases on query, key and value apart from that of the output.
pub(super) fn seed_oss(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let (qkv_bias, output_bias) = (f.flag("attention_bias", true)?, f.flag("attention_out_bias", false)?);
    let mut c = plain(f, Attention { qkv_bias, output_bias, ..Attention::read(f)? })?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    Ok(c)
}

/// No gate.
pub(super) fn arcee(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let bias = f.flag("mlp_bias", false)?;
    ModelConfig::plain(f, biased_attention(f)?, Mlp { names: MlpNames::PLAIN, bias, ..Mlp::read(f)? })
}

/// Rotated pairs are neighbours.
pub(super) fn helium(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let attention = Attention { qkv_bias: f.flag("attention_bias", false)?, ..Attention::read(f)? };
    let rope = attention.rope.map(|r| Rope { interleaved: true, ..r });
    let mut c = plain(f, Attention { rope, ..attention })?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    Ok(c)
}

/// Layers without rotation: `no_rope_layers` has 0 for those, or every `no_rope_layer_interval`-th is one.
pub(super) fn smollm3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, biased_attention(f)?)?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    let layers = c.layers.len();
    let interval = f.optional_size("no_rope_layer_interval")?.unwrap_or(4);
    let rotated: Vec<usize> = match f.value("no_rope_layers") {
        Some(_) => f.indices("no_rope_layers")?,
        None => (0..layers).map(|i| usize::from(!(i + 1).is_multiple_of(interval))).collect(),
    };
    if rotated.len() != layers || rotated.iter().any(|r| *r > 1) {
        let found = format!("{rotated:?}");
        return Err(f.wrong("no_rope_layers", found, format!("{layers} entries of 0 or 1")));
    }
    let used = f.flag("use_sliding_window", false)? && f.value("sliding_window").is_some();
    c.set_windows(&windows::by_layer(f, layers, |i| used && rotated[i] == 0)?);
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
    let attention = Attention { names, ..Attention::partly_rotated(f)? };
    let mut c = ModelConfig::plain(f, attention, Mlp { names: MlpNames::FUSED, ..Mlp::read(f)? })?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    Ok(c)
}

/// Norms of query and key heads after the rotation.
pub(super) fn hunyuan(f: &Fields) -> Result<ModelConfig, ConvertError> {
    f.says_flag("use_qk_norm", true)?;
    let names = AttentionNames { norms: ["query_layernorm", "key_layernorm"], ..AttentionNames::LLAMA };
    let attention = biased(f, Attention::rotated(f, Rope::stretched)?)?;
    plain(f, Attention { names, qk_norm: Some(QkNorm::RotatedHeads), ..attention })
}

/// Rotated pairs are neighbours.
pub(super) fn ernie(f: &Fields) -> Result<ModelConfig, ConvertError> {
    plain(f, ernie_attention(f)?)
}

pub(super) fn ernie_attention(f: &Fields) -> Result<Attention, ConvertError> {
    f.says_flag("use_bias", false)?;
    let attention = Attention::read(f)?;
    let rope = attention.rope.map(|r| Rope { interleaved: true, ..r });
    Ok(Attention { rope, ..attention })
}
