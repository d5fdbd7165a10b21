//! Granite, dense and with experts: factors on embeddings, residuals, scores and logits.

use super::{biased_attention, plain};
use crate::{
    ConvertError,
    config::{Attention, ExpertNames, Fields, Mlp, MlpNames, ModelConfig, Moe, RouterNames, Shared, Tensors},
};

pub(super) fn granite(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let attention = biased_attention(f)?;
    let scale = f.positive_float("attention_multiplier", Some(1.0))? as f32;
    let mut c = plain(f, Attention { scale, ..attention })?;
    c.set_mlp_bias(f.flag("mlp_bias", false)?);
    c.embedding_scale = f.positive_float("embedding_multiplier", Some(1.0))? as f32;
    c.residual_scale = f.positive_float("residual_multiplier", Some(1.0))? as f32;
    c.head.divisor = f.positive_float("logits_scaling", Some(1.0))? as f32;
    Ok(c)
}

/// Experts in every layer; shared ones where `shared_intermediate_size` is set.
pub(super) fn granite_moe(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = granite(f)?;
    let mut moe = Moe {
        modules: &["block_sparse_moe"],
        names: ExpertNames { all: ["input_linear.weight", "output_linear.weight"], ..ExpertNames::QWEN },
        router: RouterNames { module: "router.layer", bias: false },
        ..Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?
    };
    let intermediate = f.count("shared_intermediate_size", 0)?;
    if intermediate > 0 {
        let names =
            MlpNames { module: "shared_mlp", gate_up: Tensors::Fused("input_linear"), down: "output_linear" };
        moe.shared = Some(Shared { mlp: Mlp { names, intermediate, ..Mlp::read(f)? }, gate: None });
    }
    c.set_moe(&moe, |_| true);
    Ok(c)
}
