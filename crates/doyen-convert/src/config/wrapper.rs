//! Models that hold a text model beside towers for images or sounds: `text_config` as a configuration of its own.
//!
//! Which text models are known goes by `text_config.model_type`; the tensors are found by `source`. Files leave out of a
//! nested configuration whatever its class assumes, extents included, so the classes' defaults are here. Text models that see
//! their prompt in both directions (PaliGemma's), or that other layers of the wrapper reach into (Mllama's), have types that are
//! not here.

use super::{
    Fields,
    Given::{self, Count, Flag, Number},
};
use crate::ConvertError;
use serde_json::Value;
use std::collections::BTreeMap;

/// The text model of a wrapper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrapper {
    /// The wrapper's architecture.
    pub architecture: String,
    /// Whether the head is the embedding, where a file says so.
    pub tied: Option<bool>,
}

impl Wrapper {
    /// What becomes of the wrapper; `left` has the modules that were left out, with their tensors.
    pub(crate) fn told(&self, left: &BTreeMap<String, usize>) -> String {
        let modules: Vec<String> = left.iter().map(|(module, n)| format!("{module} ({n})")).collect();
        let out = match modules.as_slice() {
            [] => "there are no other tensors".to_owned(),
            some => format!("left out, with their tensors: {}", some.join(", ")),
        };
        format!("the text model of {} is converted, for text alone; {out}", self.architecture)
    }
}

/// A type of text models.
struct TextModel {
    /// Its `model_type`.
    kind: &'static str,
    /// The architecture whose recipe it has.
    architecture: &'static str,
    defaults: &'static [(&'static str, Given)],
}

const fn text(
    kind: &'static str,
    architecture: &'static str,
    defaults: &'static [(&'static str, Given)],
) -> TextModel {
    TextModel { kind, architecture, defaults }
}

const TEXT_MODELS: &[TextModel] = &[
    text("gemma3_text", "Gemma3ForCausalLM", GEMMA3),
    text("llama", "LlamaForCausalLM", LLAMA),
    text("mistral", "MistralForCausalLM", MISTRAL),
    text("ministral3", "Ministral3ForCausalLM", &[]),
    text("mixtral", "MixtralForCausalLM", &[]),
    text("phi3", "Phi3ForCausalLM", &[]),
    text("phimoe", "PhimoeForCausalLM", &[]),
    text("smollm3", "SmolLM3ForCausalLM", &[]),
    text("qwen2", "Qwen2ForCausalLM", QWEN2),
    text("qwen2_vl_text", "Qwen2ForCausalLM", QWEN2_VL),
    text("qwen2_5_vl_text", "Qwen2ForCausalLM", QWEN2_VL),
    text("qwen2_moe", "Qwen2MoeForCausalLM", &[]),
    text("qwen3", "Qwen3ForCausalLM", QWEN3),
    text("qwen3_moe", "Qwen3MoeForCausalLM", &[]),
    text("qwen3_vl_text", "Qwen3ForCausalLM", QWEN3_VL),
    text("qwen3_vl_moe_text", "Qwen3MoeForCausalLM", QWEN3_VL_MOE),
    text("qwen3_next", "Qwen3NextForCausalLM", &[]),
    text("qwen3_5_text", "Qwen3_5ForCausalLM", QWEN3_5),
    text("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN3_5_MOE),
    text("glm4", "Glm4ForCausalLM", &[]),
    text("glm4v_text", "Glm4ForCausalLM", GLM4V),
    text("glm4_moe", "Glm4MoeForCausalLM", &[]),
    text("glm4v_moe_text", "Glm4MoeForCausalLM", GLM4V_MOE),
    text("granite", "GraniteForCausalLM", GRANITE),
    text("granitemoe", "GraniteMoeForCausalLM", &[]),
    text("ernie4_5", "Ernie4_5ForCausalLM", &[]),
    text("deepseek_v2", "DeepseekV2ForCausalLM", &[]),
    text("deepseek_v3", "DeepseekV3ForCausalLM", &[]),
    text("lfm2", "Lfm2ForCausalLM", LFM2),
    text("lfm2_moe", "Lfm2MoeForCausalLM", &[]),
    text("olmo2", "Olmo2ForCausalLM", &[]),
    text("gpt_oss", "GptOssForCausalLM", &[]),
];

/// Wrappers whose text model's fields may lie among their own, as early releases have them.
const FLAT: [(&str, &str); 2] = [
    ("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
];

const TIED: &str = "tie_word_embeddings";
const HIDDEN: &str = "hidden_size";
const INNER: &str = "intermediate_size";
const LAYERS: &str = "num_hidden_layers";
const HEADS: &str = "num_attention_heads";
const KV_HEADS: &str = "num_key_value_heads";
const POSITIONS: &str = "max_position_embeddings";
const VOCAB: &str = "vocab_size";
const EPS: &str = "rms_norm_eps";
const THETA: &str = "rope_theta";

const GEMMA3: &[(&str, Given)] = &[
    (VOCAB, Count(262_208)),
    (HIDDEN, Count(2304)),
    (INNER, Count(9216)),
    (LAYERS, Count(26)),
    (HEADS, Count(8)),
    (KV_HEADS, Count(4)),
    (POSITIONS, Count(131_072)),
];
const LLAMA: &[(&str, Given)] = &[
    (VOCAB, Count(32_000)),
    (HIDDEN, Count(4096)),
    (INNER, Count(11_008)),
    (LAYERS, Count(32)),
    (HEADS, Count(32)),
    (POSITIONS, Count(2048)),
];
const GRANITE: &[(&str, Given)] = LLAMA;
const MISTRAL: &[(&str, Given)] = &[
    (VOCAB, Count(32_000)),
    (HIDDEN, Count(4096)),
    (INNER, Count(14_336)),
    (LAYERS, Count(32)),
    (HEADS, Count(32)),
    (KV_HEADS, Count(8)),
    (POSITIONS, Count(131_072)),
    ("sliding_window", Count(4096)),
];
const QWEN2: &[(&str, Given)] = &[
    (VOCAB, Count(151_936)),
    (HIDDEN, Count(4096)),
    (INNER, Count(22_016)),
    (LAYERS, Count(32)),
    (HEADS, Count(32)),
    (KV_HEADS, Count(32)),
    (POSITIONS, Count(32_768)),
];
const QWEN3: &[(&str, Given)] = QWEN2;
const QWEN2_VL: &[(&str, Given)] = &[
    (VOCAB, Count(152_064)),
    (HIDDEN, Count(8192)),
    (INNER, Count(29_568)),
    (LAYERS, Count(80)),
    (HEADS, Count(64)),
    (KV_HEADS, Count(8)),
    (POSITIONS, Count(32_768)),
    (EPS, Number(1e-5)),
    (THETA, Number(1e6)),
];
const QWEN3_VL: &[(&str, Given)] = &[
    (VOCAB, Count(151_936)),
    (HIDDEN, Count(4096)),
    (INNER, Count(22_016)),
    (LAYERS, Count(32)),
    (HEADS, Count(32)),
    (KV_HEADS, Count(32)),
    ("head_dim", Count(128)),
    (POSITIONS, Count(128_000)),
    (THETA, Number(5e5)),
];
// The chosen experts' weights are always renormalised, which the class has no field for. (The number of experts has two names,
// so that a default for one would hide the other.)
const QWEN3_VL_MOE: &[(&str, Given)] = &[
    (VOCAB, Count(151_936)),
    (HIDDEN, Count(2048)),
    (INNER, Count(5632)),
    (LAYERS, Count(24)),
    (HEADS, Count(16)),
    (KV_HEADS, Count(16)),
    ("head_dim", Count(128)),
    (POSITIONS, Count(128_000)),
    (THETA, Number(5e5)),
    ("num_experts_per_tok", Count(4)),
    ("moe_intermediate_size", Count(1408)),
    ("norm_topk_prob", Flag(true)),
];
const QWEN3_5: &[(&str, Given)] = &[
    (VOCAB, Count(248_320)),
    (HIDDEN, Count(4096)),
    (INNER, Count(12_288)),
    (LAYERS, Count(32)),
    (HEADS, Count(16)),
    (KV_HEADS, Count(4)),
    (POSITIONS, Count(32_768)),
    ("linear_conv_kernel_dim", Count(4)),
    ("linear_key_head_dim", Count(128)),
    ("linear_value_head_dim", Count(128)),
    ("linear_num_key_heads", Count(16)),
    ("linear_num_value_heads", Count(32)),
];
const QWEN3_5_MOE: &[(&str, Given)] = &[
    (VOCAB, Count(248_320)),
    (HIDDEN, Count(2048)),
    (LAYERS, Count(40)),
    (HEADS, Count(16)),
    (KV_HEADS, Count(2)),
    (POSITIONS, Count(32_768)),
    ("linear_conv_kernel_dim", Count(4)),
    ("linear_key_head_dim", Count(128)),
    ("linear_value_head_dim", Count(128)),
    ("linear_num_key_heads", Count(16)),
    ("linear_num_value_heads", Count(32)),
    ("num_experts", Count(256)),
    ("num_experts_per_tok", Count(8)),
    ("moe_intermediate_size", Count(512)),
    ("shared_expert_intermediate_size", Count(512)),
];
const GLM4V: &[(&str, Given)] = &[
    (VOCAB, Count(151_552)),
    (HIDDEN, Count(4096)),
    (INNER, Count(13_696)),
    (LAYERS, Count(40)),
    (HEADS, Count(32)),
    (KV_HEADS, Count(2)),
    (POSITIONS, Count(32_768)),
    (EPS, Number(1e-5)),
];
const GLM4V_MOE: &[(&str, Given)] = &[
    (VOCAB, Count(151_424)),
    (HIDDEN, Count(4096)),
    (INNER, Count(10_944)),
    (LAYERS, Count(46)),
    (HEADS, Count(96)),
    (KV_HEADS, Count(8)),
    (POSITIONS, Count(65_536)),
    ("attention_bias", Flag(true)),
    ("moe_intermediate_size", Count(1408)),
    ("num_experts_per_tok", Count(8)),
    ("n_routed_experts", Count(128)),
];
const LFM2: &[(&str, Given)] = &[
    (VOCAB, Count(65_536)),
    (HIDDEN, Count(2560)),
    (INNER, Count(12_288)),
    (LAYERS, Count(32)),
    (HEADS, Count(32)),
    (KV_HEADS, Count(8)),
    (POSITIONS, Count(128_000)),
];

/// The configuration of the text model in a file whose own architecture is not known, as that of an architecture that is.
///
/// # Errors
/// When there is a text model, and it is none with a recipe.
pub(super) fn text_model(f: &Fields, architecture: &str) -> Result<Option<(Fields, Wrapper)>, ConvertError> {
    let (inner, kind) = match f.object("text_config")? {
        Some(inner) => {
            let kind = kind(&inner)?;
            (inner, kind)
        }
        None => match FLAT.iter().find(|(name, _)| *name == architecture) {
            Some((_, kind)) => (f.clone(), (*kind).to_owned()),
            None => return Ok(None),
        },
    };
    if f.flag("is_encoder_decoder", false)? {
        return Err(f.wrong("is_encoder_decoder", true, "a decoder alone"));
    }
    let Some(text) = TEXT_MODELS.iter().find(|t| t.kind == kind) else {
        let known: Vec<&str> = TEXT_MODELS.iter().map(|t| t.kind).collect();
        let expected =
            format!("a text model with a recipe, to convert that of {architecture}: {}", known.join(", "));
        return Err(inner.wrong("model_type", format!("{kind:?}"), expected));
    };
    // What belongs to the whole stands outside, in some files inside, or in both.
    let said = |f: &Fields| f.value(TIED).map(|_| f.flag(TIED, false)).transpose();
    let tied = match (said(&inner)?, said(f)?) {
        (Some(a), Some(b)) => Some(a || b),
        (a, b) => a.or(b),
    };
    let mut merged = inner.with_defaults(text.defaults);
    for name in ["bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"] {
        if let Some(v) = f.value(name) {
            merged.set(name, v.clone());
        }
    }
    if let Some(tied) = tied {
        merged.set(TIED, tied.into());
    }
    merged.set("architectures", Value::from(vec![text.architecture]));
    Ok(Some((merged, Wrapper { architecture: architecture.to_owned(), tied })))
}

/// The type of a nested text model.
fn kind(inner: &Fields) -> Result<String, ConvertError> {
    inner
        .string("model_type")?
        .map(str::to_owned)
        .ok_or_else(|| inner.wrong("model_type", "absent", "the type of the text model"))
}
