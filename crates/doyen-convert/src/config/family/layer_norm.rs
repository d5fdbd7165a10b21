//! Dense decoders with norms of mean and variance that have biases: StarCoder 2, StableLM, Phi 1 and 2, Nemotron, Jais 2.

use super::{biased, biased_attention};
use crate::{
    ConvertError,
    config::{
        Attention, AttentionNames, Fields, Inner, LayerNorms, Mlp, MlpNames, ModelConfig, NormKind, windows,
    },
};

/// A plain decoder with these norms, whose epsilon is in the field `eps`.
fn start(f: &Fields, attention: Attention, mlp: Mlp, eps: &str) -> Result<ModelConfig, ConvertError> {
    let mut c = ModelConfig::plain(f, attention, mlp)?;
    c.norm.kind = NormKind::MeanVariance { bias: true };
    c.norm.eps = f.number(eps, 1e-5)? as f32;
    Ok(c)
}

/// No gate; biases everywhere.
pub(super) fn starcoder2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let bias = f.flag("use_bias", true)?;
    let attention = Attention { qkv_bias: bias, output_bias: bias, ..Attention::read(f)? };
    let names = MlpNames { inner: Inner::Plain("c_fc"), down: "c_proj", ..MlpNames::LLAMA };
    let mut c = start(f, attention, Mlp { names, bias, ..Mlp::read(f)? }, "norm_epsilon")?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    Ok(c)
}

/// Partial rotation; both halves of a layer may take the same norm.
pub(super) fn stablelm(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let qkv_bias = f.flag("use_qkv_bias", false)?;
    let attention = Attention { qkv_bias, ..Attention::partly_rotated(f)? };
    let mut c = start(f, attention, Mlp::read(f)?, "layer_norm_eps")?;
    if f.flag("use_parallel_residual", false)? {
        share_norm(&mut c);
    }
    Ok(c)
}

fn share_norm(c: &mut ModelConfig) {
    for layer in &mut c.layers {
        layer.norms = LayerNorms { before_ffn: None, ..LayerNorms::PRE };
        layer.parallel = true;
    }
}

/// Partial rotation, no gate, biases everywhere, one norm for both halves of a layer.
pub(super) fn phi(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let names = AttentionNames { output: "dense", ..AttentionNames::LLAMA };
    let attention = Attention { names, qkv_bias: true, output_bias: true, ..Attention::partly_rotated(f)? };
    let names = MlpNames { inner: Inner::Plain("fc1"), down: "fc2", ..MlpNames::LLAMA };
    let mut c = start(f, attention, Mlp { names, bias: true, ..Mlp::read(f)? }, "layer_norm_eps")?;
    share_norm(&mut c);
    c.final_norm = "model.final_layernorm";
    c.head.bias = true;
    Ok(c)
}

/// Partial rotation, no gate, weights of norms stored as the difference to 1.
pub(super) fn nemotron(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let attention = biased(f, Attention::partly_rotated(f)?)?;
    let mut c = start(f, attention, ungated(f)?, "norm_eps")?;
    c.norm.zero_centred = true;
    Ok(c)
}

/// No gate.
pub(super) fn jais2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    start(f, biased_attention(f)?, ungated(f)?, "layer_norm_eps")
}

fn ungated(f: &Fields) -> Result<Mlp, ConvertError> {
    Ok(Mlp { names: MlpNames::PLAIN, bias: f.flag("mlp_bias", false)?, ..Mlp::read(f)? })
}
