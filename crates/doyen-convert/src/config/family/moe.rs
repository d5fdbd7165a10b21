//! Decoders with experts that differ from a dense relative by little else.

use super::{
    biased_attention,
    dense::{self, ernie_attention},
    glm::{scored_experts, sigmoid_experts},
    olmo::exaone_windows,
    plain,
};
use crate::{
    ConvertError,
    config::{
        Attention, Correction, ExpertNames, Fields, Gate, LayerNorms, Mlp, MlpNames, ModelConfig, Moe,
        NormKind, QkNorm, Rope, RouterNames, Routing, Score, Shared, experts::always_normalized, windows,
    },
};

/// Module of Mixtral's experts in its releases, and as `transformers` 5 holds it.
const MIXTRAL_MODULES: &[&str] = &["block_sparse_moe", "mlp"];

pub(super) fn mixtral(f: &Fields) -> Result<ModelConfig, ConvertError> {
    always_normalized(f)?;
    let mut c = plain(f, Attention::read(f)?)?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    let moe = Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    c.set_moe(&Moe { modules: MIXTRAL_MODULES, names: ExpertNames::MIXTRAL, ..moe }, |_| true);
    Ok(c)
}

/// Norms over all query and all key heads.
pub(super) fn olmoe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let clip = f.float("clip_qkv")?.map(|c| c as f32);
    let attention = Attention { qk_norm: Some(QkNorm::Whole), clip, ..biased_attention(f)? };
    let mut c = plain(f, attention)?;
    olmoe_experts(f, &mut c)?;
    Ok(c)
}

/// Experts in every layer, weighted by the softmax over all of them.
pub(super) fn olmoe_experts(f: &Fields, c: &mut ModelConfig) -> Result<(), ConvertError> {
    let moe = Moe::read(f, ["num_experts", "num_experts_per_tok", "intermediate_size"])?;
    let routing = Routing { normalize: f.flag("norm_topk_prob", false)?, ..Routing::SOFTMAX };
    c.set_moe(&Moe { routing, ..moe }, |_| true);
    Ok(())
}

/// Norms over all query and all key heads, partial rotation, experts by sigmoid scores with a correction.
pub(super) fn minimax_m2(f: &Fields) -> Result<ModelConfig, ConvertError> {
    always_normalized(f)?;
    f.says_flag("use_qk_norm", true)?;
    f.says_flag("use_routing_bias", true)?;
    f.says("qk_norm_type", &["per_layer"])?;
    f.says("scoring_func", &["sigmoid"])?;
    if let Some(kind) = f.indices("attn_type_list")?.into_iter().find(|kind| *kind != 1) {
        return Err(f.wrong("attn_type_list", kind, "1, for full attention"));
    }
    let mut f = f.clone();
    if let Some(dim) = f.optional_size("rotary_dim")? {
        let share = Rope::share(dim, f.size("head_dim")?);
        if f.value("partial_rotary_factor").is_none() {
            f.set("partial_rotary_factor", share.into());
        }
    }
    let f = &f;
    let attention = Attention { qk_norm: Some(QkNorm::Whole), ..Attention::partly_rotated(f)? };
    let mut c = plain(f, attention)?;
    let moe = Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    let routing = Routing {
        score: Score::Sigmoid,
        correction: Some(Correction { tensors: &["e_score_correction_bias"], row: false }),
        ..Routing::SOFTMAX
    };
    c.set_moe(&Moe { modules: MIXTRAL_MODULES, names: ExpertNames::MIXTRAL, routing, ..moe }, |_| true);
    Ok(c)
}

/// Norms of query and key heads, windows and rotation as EXAONE 4 has them, experts as DeepSeek-V3 chooses them.
pub(super) fn exaone(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention { qk_norm: Some(QkNorm::Heads), ..Attention::read(f)? })?;
    exaone_windows(f, &mut c)?;
    sigmoid_experts(f, &mut c)?;
    Ok(c)
}

/// Norms of mean and variance, a head with a bias, and two experts chosen by SparseMixer.
pub(super) fn phimoe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, biased_attention(f)?)?;
    c.set_windows(&windows::all(f, c.layers.len())?);
    c.norm.kind = NormKind::MeanVariance { bias: true };
    c.head.bias = f.flag("lm_head_bias", false)?;
    let moe = Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    if moe.top_k != 2 {
        return Err(f.wrong("num_experts_per_tok", moe.top_k, "2, as SparseMixer chooses"));
    }
    let jitter = f.positive_float("router_jitter_noise", None)? as f32;
    let routing = Routing { score: Score::SparseMixer { jitter }, normalize: false, ..Routing::SOFTMAX };
    c.set_moe(&Moe { modules: MIXTRAL_MODULES, names: ExpertNames::MIXTRAL, routing, ..moe }, |_| true);
    Ok(c)
}

/// Softmax scores with a correction; experts from one layer to another, every so many.
pub(super) fn ernie(f: &Fields) -> Result<ModelConfig, ConvertError> {
    always_normalized(f)?;
    let mut c = plain(f, ernie_attention(f)?)?;
    let mut moe = Moe::read(f, ["moe_num_experts", "moe_k", "moe_intermediate_size"])?;
    moe.routing.correction =
        Some(Correction { tensors: &["moe_statics.e_score_correction_bias"], row: true });
    let shared = f.count("moe_num_shared_experts", 0)?;
    if shared > 0 {
        let intermediate = moe.intermediate * shared;
        let mlp = Mlp { names: MlpNames::at("mlp.shared_experts"), intermediate, ..Mlp::read(f)? };
        moe.shared = Some(Shared { mlp, gate: None });
    }
    if let Some(least) = f.float("moe_norm_min")?.filter(|least| *least > 1e-6) {
        return Err(f.wrong("moe_norm_min", least, "no more than 1e-6: no bound on the weights' sum"));
    }
    let first = f.count("moe_layer_start_index", 1)?;
    let interval = f.optional_size("moe_layer_interval")?.unwrap_or(1);
    // The releases write -1 for "to the last".
    let last = match f.value("moe_layer_end_index").and_then(serde_json::Value::as_i64) {
        Some(-1) | None => usize::MAX,
        Some(_) => f.count("moe_layer_end_index", 0)?,
    };
    c.set_moe(&moe, |i| (first..=last).contains(&i) && (i + 1).is_multiple_of(interval));
    Ok(c)
}

/// Norms of query and key heads; experts as DeepSeek-V3 chooses them.
pub(super) fn dots1(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention { qk_norm: Some(QkNorm::Heads), ..biased_attention(f)? })?;
    let first = f.count("max_window_layers", 0)?;
    let windowed = f.value("sliding_window").is_some();
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| windowed && i >= first)?);
    sigmoid_experts(f, &mut c)?;
    Ok(c)
}

/// Norms of query and key heads, experts by sigmoid scores with a correction, shared ones.
pub(super) fn hunyuan3(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention { qk_norm: Some(QkNorm::Heads), ..biased_attention(f)? })?;
    let scale = f.positive_float("router_scaling_factor", None)?;
    scored_experts(f, &mut c, ("router.gate", "mlp.shared_mlp"), scale)?;
    Ok(c)
}

/// Norms around both halves, a gate on attention, layers with windows rotate and the others do not.
pub(super) fn afmoe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let gate = Some(Gate::Module("gate_proj"));
    let mut c = plain(f, Attention { qk_norm: Some(QkNorm::Heads), gate, ..biased_attention(f)? })?;
    if f.flag("mup_enabled", false)? {
        c.embedding_scale = (c.hidden as f64).sqrt() as f32;
    }
    f.says("score_func", &["sigmoid"])?;
    f.says_flag("route_norm", true)?;
    let every = f.optional_size("global_attn_every_n_layers")?.unwrap_or(4);
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| !(i + 1).is_multiple_of(every))?);
    for layer in &mut c.layers {
        layer.norms = LayerNorms {
            before_mixer: Some("input_layernorm"),
            after_mixer: Some("post_attention_layernorm"),
            before_ffn: Some("pre_mlp_layernorm"),
            after_ffn: Some("post_mlp_layernorm"),
        };
    }
    for (_, attention) in c.attentions_mut().filter(|(_, a)| a.window.is_none()) {
        attention.rope = None;
    }
    let scale = f.number("route_scale", 1.0)?;
    scored_experts(f, &mut c, ("router.gate", "mlp.shared_experts"), scale)?;
    Ok(c)
}

/// A shared expert as wide as the routed ones; counts may be lists of one for each layer.
pub(super) fn hunyuan(f: &Fields) -> Result<ModelConfig, ConvertError> {
    always_normalized(f)?;
    let f = &f.with_uniform(&["num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"])?;
    let mut c = dense::hunyuan(f)?;
    let width = if f.value("moe_intermediate_size").is_some() {
        "moe_intermediate_size"
    } else {
        "intermediate_size"
    };
    let mut moe = Moe::read(f, ["num_experts", "moe_topk", width])?;
    moe.router = RouterNames { module: "gate.wg", bias: false };
    let intermediate = f.size("intermediate_size")? * f.count("num_shared_expert", 1)?;
    let mlp = Mlp { names: MlpNames::at("mlp.shared_mlp"), intermediate, ..Mlp::read(f)? };
    moe.shared = Some(Shared { mlp, gate: None });
    c.set_moe(&moe, |_| true);
    Ok(c)
}
