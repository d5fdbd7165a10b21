//! `config.json` as a typed description of a decoder.
//!
//! Every field that the graph depends on is read, with the defaults of the released implementations; a field whose
//! value the recipes do not implement is refused by name. Nothing else of the crate looks into the JSON.

mod family;
mod fields;
mod rope;
mod tokens;

pub use family::Family;
pub(crate) use fields::Fields;
pub use rope::{Rope, RopeScaling};
pub use tokens::SpecialTokens;

use crate::ConvertError;
use std::path::Path;

/// Bounds on what is allocated before any tensor has confirmed it: far above every released model.
const MOST_LAYERS: usize = 1 << 14;
const MOST_POSITIONS: usize = 1 << 26;

/// A decoder as `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Which recipe family.
    pub family: Family,
    /// The architecture name as written.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Longest context.
    pub max_positions: usize,
    /// Epsilon of every norm.
    pub norm_eps: f32,
    /// Whether the head reads the embedding's weights.
    pub tied: bool,
    /// Attention, the same in every layer but for its window.
    pub attention: Attention,
    /// Rotary embedding.
    pub rope: Rope,
    /// Routed experts, when a layer has them.
    pub moe: Option<Moe>,
    /// Rows of the dense feed-forward's gate and up projections.
    pub intermediate: usize,
    /// Whether the dense feed-forward has biases.
    pub mlp_bias: bool,
    /// What differs from layer to layer.
    pub layers: Vec<Layer>,
    /// Special tokens.
    pub tokens: SpecialTokens,
}

/// Attention dimensions and variations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Whether query and key heads are normalised before the rotation.
    pub qk_norm: bool,
}

/// Routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moe {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts a token is sent to.
    pub top_k: usize,
    /// Rows of an expert's gate and up projections.
    pub intermediate: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub norm_topk: bool,
}

/// One layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    /// Positions a query sees, itself included; `None` for all.
    pub window: Option<usize>,
    /// Whether the feed-forward is a mixture of experts.
    pub moe: bool,
}

impl ModelConfig {
    /// Reads `config.json` and, for the special tokens, `generation_config.json`.
    ///
    /// # Errors
    /// When a file is missing or malformed, the architecture is not known, or a field has a value that the recipes do
    /// not implement.
    pub fn read(checkpoint: &Path) -> Result<Self, ConvertError> {
        let path = checkpoint.join("config.json");
        if !path.is_file() {
            let needed = "a checkpoint folder holds the model's description in it".into();
            return Err(ConvertError::Missing { path, needed });
        }
        let fields = Fields::read(&path)?;
        let generation = checkpoint.join("generation_config.json");
        let generation = if generation.is_file() { Some(Fields::read(&generation)?) } else { None };
        Self::parse(&fields, generation.as_ref())
    }

    pub(crate) fn parse(f: &Fields, generation: Option<&Fields>) -> Result<Self, ConvertError> {
        let (family, architecture) = Family::of(f)?;
        refuse_other_features(f)?;
        let hidden = f.size("hidden_size")?;
        let attention = family.attention(f, hidden)?;
        let layer_count = f.size_up_to("num_hidden_layers", MOST_LAYERS)?;
        let moe = family.moe(f)?;
        let windows = family.windows(f, layer_count)?;
        let sparse = family.sparse_layers(f, layer_count)?;
        let layers = windows.into_iter().zip(sparse).map(|(window, moe)| Layer { window, moe }).collect();
        let vocab = f.size("vocab_size")?;
        Ok(Self {
            family,
            architecture,
            hidden,
            vocab,
            max_positions: f.size_up_to("max_position_embeddings", MOST_POSITIONS)?,
            norm_eps: f.positive_float("rms_norm_eps", Some(1e-6))? as f32,
            tied: f.flag("tie_word_embeddings", false)?,
            attention,
            rope: Rope::read(f)?,
            moe,
            intermediate: f.size("intermediate_size")?,
            mlp_bias: family.mlp_bias(f)?,
            layers,
            tokens: SpecialTokens::read(f, generation, vocab)?,
        })
    }
}

/// Fields of other architectures that change the computation; a checkpoint that sets one is not what its
/// architecture name says.
fn refuse_other_features(f: &Fields) -> Result<(), ConvertError> {
    if let Some(act) = f.string("hidden_act")?
        && act != "silu"
    {
        return Err(ConvertError::config("hidden_act", format!("{act:?}"), "\"silu\""));
    }
    if let Some(q) = f.value("quantization_config") {
        let method = q.get("quant_method").and_then(|m| m.as_str()).unwrap_or("unknown");
        return Err(ConvertError::config(
            "quantization_config",
            format!("present (quant_method {method:?})"),
            "nothing: only unquantized checkpoints are read",
        ));
    }
    for field in [
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "no_rope_layers",
        "attention_chunk_size",
        "num_nextn_predict_layers",
    ] {
        if let Some(v) = f.value(field)
            && v.as_f64() != Some(0.0)
        {
            return Err(ConvertError::config(field, v, "nothing: no recipe here implements it"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
