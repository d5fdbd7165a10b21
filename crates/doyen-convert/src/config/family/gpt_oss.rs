//! GPT-OSS: sinks, alternating windows, biased experts with clipped SwiGLU.

use super::{biased_attention, plain};
use crate::{
    ConvertError,
    config::{Attention, ExpertNames, Fields, Fused, ModelConfig, Moe, RouterNames, SwiGlu, windows},
};

pub(super) fn gpt_oss(f: &Fields) -> Result<ModelConfig, ConvertError> {
    let mut c = plain(f, Attention { sinks: true, ..biased_attention(f)? })?;
    c.set_windows(&windows::by_layer(f, c.layers.len(), |i| i.is_multiple_of(2))?);
    let moe = Moe::read(f, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    let moe = Moe {
        names: ExpertNames { fused: Fused::TransposedPairs, ..ExpertNames::QWEN },
        router: RouterNames { module: "router", bias: true },
        bias: true,
        // The released code fixes alpha and the addition; only the limit is a field.
        activation: SwiGlu {
            alpha: 1.702,
            beta: 1.0,
            limit: Some(f.positive_float("swiglu_limit", Some(7.0))? as f32),
        },
        ..moe
    };
    c.set_moe(&moe, |_| true);
    Ok(c)
}
