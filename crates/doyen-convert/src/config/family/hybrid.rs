//! Decoders in which most layers keep a state of fixed size: Qwen3-Next and Qwen3.5 (gated delta net), LFM2 (short
//! convolution).

use super::biased;
use crate::{
    ConvertError,
    config::{
        Activation, Attention, AttentionNames, Correction, DeltaNet, DeltaProjections, ExpertNames, Fields,
        Gate, Inner, LayerNorms, Mixer, Mlp, MlpNames, ModelConfig, Moe, QkNorm, Routing, Score, Shared,
        ShortConv, Tensors, experts::always_normalized,
    },
};

/// Experts with a shared one behind a sigmoid gate, projections of the delta net in two tensors.
pub(super) fn qwen3_next(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = delta_hybrid(f, DeltaProjections::ByKeyHead)?;
    let moe = experts(f, f.flag("norm_topk_prob", true)?)?;
    let step = f.optional_size("decoder_sparse_step")?.unwrap_or(1);
    let dense = f.indices("mlp_only_layers")?;
    if let Some(i) = dense.iter().find(|&&i| i >= c.layers.len()) {
        return Err(f.wrong("mlp_only_layers", i, format!("layers 0 to {}", c.layers.len() - 1)));
    }
    c.set_moe(&moe, |i| (i + 1).is_multiple_of(step) && !dense.contains(&i));
    Ok(c)
}

/// Dense, a tensor for each projection.
pub(super) fn qwen3_5(f: &Fields) -> Result<ModelConfig, ConvertError> {
    delta_hybrid(f, DeltaProjections::Apart)
}

/// Experts in every layer.
pub(super) fn qwen3_5_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    always_normalized(f)?;
    let mut c = delta_hybrid(f, DeltaProjections::Apart)?;
    let moe = experts(f, true)?;
    c.set_moe(&moe, |_| true);
    Ok(c)
}

fn experts(f: &Fields, normalize: bool) -> Result<Moe, ConvertError> {
    let mut moe = Moe::read(f, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
    moe.routing = Routing { normalize, ..Routing::SOFTMAX };
    let intermediate = f.size("shared_expert_intermediate_size")?;
    let mlp = Mlp { names: MlpNames::at("mlp.shared_expert"), ..Mlp::of(f, intermediate)? };
    moe.shared = Some(Shared { mlp, gate: Some("mlp.shared_expert_gate") });
    Ok(moe)
}

/// Norms centred on zero, gated attention with partial rotation in every so many layers, delta nets in the others.
fn delta_hybrid(f: &Fields, projections: DeltaProjections) -> Result<ModelConfig, ConvertError> {
    if !f.flag("attn_output_gate", true)? {
        return Err(f.wrong("attn_output_gate", false, "true, as the released code computes it"));
    }
    let attention = biased(f, Attention::partly_rotated(f)?)?;
    let attention = Attention { qk_norm: Some(QkNorm::Heads), gate: Some(Gate::InQuery), ..attention };
    let intermediate = f.optional_size("intermediate_size")?.or(f.optional_size("moe_intermediate_size")?);
    let mut c = ModelConfig::plain(f, attention, silu(f, intermediate.unwrap_or(1))?)?;
    c.norm.zero_centred = true;
    let layers = c.layers.len();
    let interval = f.optional_size("full_attention_interval")?.unwrap_or(4);
    let linear = f
        .layer_kinds("layer_types", layers, ["full_attention", "linear_attention"])?
        .unwrap_or_else(|| (0..layers).map(|i| !(i + 1).is_multiple_of(interval)).collect());
    let delta = DeltaNet::read(f, projections)?;
    for (layer, _) in c.layers.iter_mut().zip(linear).filter(|(_, linear)| *linear) {
        layer.mixer = Mixer::DeltaNet(delta);
    }
    Ok(c)
}

/// Layers named by `layer_types` or `full_attn_idxs`; a feed-forward of two thirds of the given size, rounded up.
pub(super) fn lfm2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let size = f.optional_size("block_ff_dim")?.map_or_else(|| f.size("intermediate_size"), Ok)?;
    let multiple = f.optional_size("block_multiple_of")?.unwrap_or(256);
    let factor = f.number("block_ffn_dim_multiplier", 1.0)?;
    let intermediate = if f.flag("block_auto_adjust_ff_dim", true)? {
        ((factor * (2 * size / 3) as f64) as usize).next_multiple_of(multiple)
    } else {
        size
    };
    lfm2_layers(f, intermediate)
}

/// The first layers dense, experts chosen by sigmoid scores with a correction in the others.
pub(super) fn lfm2_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = lfm2_layers(f, f.size("intermediate_size")?)?;
    let moe = Moe::read(f, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
    let corrected = f.flag("use_expert_bias", true)?;
    let routing = Routing {
        score: Score::Sigmoid,
        correction: corrected.then_some(Correction { tensors: &["expert_bias"], row: false }),
        groups: None,
        normalize: f.flag("norm_topk_prob", true)?,
        scale: f.number("routed_scaling_factor", 1.0)? as f32,
    };
    let names = ExpertNames { each: ["w1", "w3", "w2"], ..ExpertNames::QWEN };
    let dense = f.count("num_dense_layers", 2)?;
    c.set_moe(&Moe { modules: &["feed_forward"], names, routing, ..moe }, |i| i >= dense);
    Ok(c)
}

/// A feed-forward of so many rows, of these architectures' only activation, which the convolutions have, too.
fn silu(f: &Fields, intermediate: usize) -> Result<Mlp, ConvertError> {
    let mlp = Mlp::of(f, intermediate)?;
    if mlp.activation == Activation::Silu {
        return Ok(mlp);
    }
    let found = f.string("hidden_act")?.unwrap_or("another").to_owned();
    Err(f.wrong("hidden_act", format!("{found:?}"), "\"silu\""))
}

fn lfm2_layers(f: &Fields, intermediate: usize) -> Result<ModelConfig, ConvertError> {
    const NAMES: AttentionNames =
        AttentionNames { output: "out_proj", norms: ["q_layernorm", "k_layernorm"], ..AttentionNames::LLAMA };
    let attention = Attention { names: NAMES, qk_norm: Some(QkNorm::Heads), ..Attention::read(f)? };
    let mlp = silu(f, intermediate)?;
    let names =
        MlpNames { module: "feed_forward", inner: Inner::Gated(Tensors::Each(["w1", "w3"])), down: "w2" };
    let mut c = ModelConfig::plain(f, attention, Mlp { names, ..mlp })?;
    c.norm.eps = f.number("norm_eps", 1e-5)? as f32;
    c.final_norm = "model.embedding_norm";
    c.head.tied = f.flag("tie_embedding", c.head.tied)?;
    let layers = c.layers.len();
    let conv = match f.layer_kinds("layer_types", layers, ["full_attention", "conv"])? {
        Some(conv) => conv,
        None if f.value("full_attn_idxs").is_none() => vec![false; layers],
        None => {
            let attends = f.indices("full_attn_idxs")?;
            (0..layers).map(|i| !attends.contains(&i)).collect()
        }
    };
    let short = ShortConv::read(f)?;
    for (layer, conv) in c.layers.iter_mut().zip(conv) {
        layer.norms = LayerNorms {
            before_mixer: Some("operator_norm"),
            before_ffn: Some("ffn_norm"),
            ..LayerNorms::PRE
        };
        if conv {
            layer.mixer = Mixer::ShortConv(short);
        }
    }
    Ok(c)
}
