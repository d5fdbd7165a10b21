//! GPT-OSS: sinks, alternating windows, biased experts with clipped SwiGLU.

use super::{biased_attention, plain, scaling_is_stated};
use crate::{
    ConvertError,
    config::{
        Attention, ExpertNames, Fields, Fused, ModelConfig, Moe, RouterNames, SwiGlu,
        experts::always_normalized, windows,
    },
};

pub(super) fn gpt_oss(f: &Fields) -> Result<ModelConfig, ConvertError> {
    scaling_is_stated(f)?;
    always_normalized(f)?;
    let mut c = plain(f, Attention { sinks: true, ..biased_attention(f)? })?;
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| i.is_multiple_of(2))?);
    let moe = Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    let moe = Moe {
        names: ExpertNames { fused: Fused::TransposedPairs, ..ExpertNames::QWEN },
        router: RouterNames { module: "router", bias: true },
        bias: true,
        activation: SwiGlu {
            alpha: f.positive_float("swiglu_alpha", None)? as f32,
            // Fixed in the released code.
            beta: 1.0,
            limit: Some(f.positive_float("swiglu_limit", None)? as f32),
        },
        ..moe
    };
    c.set_moe(&moe, |_| true);
    Ok(c)
}
