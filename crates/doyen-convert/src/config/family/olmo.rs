//! Decoders that norm what their halves put out and not what they take in: OLMo 2 and 3, FlexOlmo, EXAONE 4.

use super::{biased, biased_attention, moe::olmoe_experts, plain};
use crate::{
    ConvertError,
    config::{Attention, Fields, LayerNorms, ModelConfig, QkNorm, Rope, windows},
};

const POST: LayerNorms = LayerNorms {
    before_mixer: None,
    after_mixer: Some("post_attention_layernorm"),
    before_ffn: None,
    after_ffn: Some("post_feedforward_layernorm"),
};

/// Norms after both halves only, and over all query and all key heads.
pub(super) fn olmo2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    post_normed(f, Attention { qk_norm: Some(QkNorm::Whole), ..biased_attention(f)? })
}

fn post_normed(f: &Fields, attention: Attention) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, attention)?;
    for layer in &mut c.layers {
        layer.norms = POST;
    }
    Ok(c)
}

/// OLMo 2 with experts.
pub(super) fn flex_olmo(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = olmo2(f)?;
    olmoe_experts(f, &mut c)?;
    Ok(c)
}

/// OLMo 2 with windows in three of four layers, whose rotation is not stretched.
pub(super) fn olmo3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let theta = f.positive_float("rope_theta", None)?;
    if f.value("rope_parameters").is_none() && theta != 5e5 {
        let expected =
            "500000, or rope_parameters for both kinds of layers: implementations disagree on others";
        return Err(f.wrong("rope_theta", theta, expected));
    }
    let [global, local] = Rope::by_kind(f, Attention::head_dim(f)?, theta)?;
    let attention = biased(f, Attention::rotated(f, |_, _| Ok(global))?)?;
    let mut c = post_normed(f, Attention { qk_norm: Some(QkNorm::Whole), ..attention })?;
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| !(i + 1).is_multiple_of(4))?);
    for (_, attention) in c.attentions_mut().filter(|(_, a)| a.window.is_some()) {
        attention.rope = Some(local.clone());
    }
    Ok(c)
}

/// Norms of query and key heads; where some layers have windows, the others do not rotate.
pub(super) fn exaone4(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = post_normed(f, Attention { qk_norm: Some(QkNorm::Heads), ..Attention::read(f)? })?;
    exaone_windows(f, &mut c)?;
    Ok(c)
}

/// Windows of `sliding_window` where `layer_types` or `sliding_window_pattern` say so, a number or letters, and no rotation in
/// the other layers. The released code for letters has the last layer see everything, whatever its letter.
pub(super) fn exaone_windows(f: &Fields, c: &mut ModelConfig) -> Result<(), ConvertError> {
    const PATTERN: &str = "sliding_window_pattern";
    let layers = c.layers.len();
    if f.value("sliding_window").is_none() {
        // Read, so that it is known to say nothing.
        let _ = f.value(PATTERN);
        c.set_windows(&windows::none(f, layers)?);
        return Ok(());
    }
    let slides: Vec<bool> = match f.value(PATTERN).and_then(|v| v.as_str()).map(str::as_bytes) {
        Some(p) if !p.is_empty() && p.iter().all(|b| matches!(b, b'L' | b'G')) => {
            (0..layers).map(|i| i + 1 < layers && p[i % p.len()] == b'L').collect()
        }
        Some(p) => {
            let found = format!("{:?}", String::from_utf8_lossy(p));
            return Err(f.wrong(PATTERN, found, "letters L and G"));
        }
        None => match f.optional_size(PATTERN)? {
            Some(n) => (0..layers).map(|i| !(i + 1).is_multiple_of(n)).collect(),
            None if f.value("layer_types").is_some() => vec![false; layers],
            None => {
                let expected = "a number or letters, or layer_types: implementations disagree on null";
                return Err(f.wrong(PATTERN, "null", expected));
            }
        },
    };
    c.set_windows(&windows::by_layer(f, layers, |i| slides[i])?);
    for (_, attention) in c.attentions_mut().filter(|(_, a)| a.window.is_none()) {
        attention.rope = None;
    }
    Ok(())
}
