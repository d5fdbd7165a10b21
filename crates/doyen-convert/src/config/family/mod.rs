//! The architectures with a recipe: one row each, and a function that says how it differs from a plain decoder.
//!
//! A family starts from [`ModelConfig::plain`] and sets what its fields mean; it names no operators and reads no
//! tensors. `docs/adding-a-family.md` shows how one is added.

mod deepseek;
mod dense;
mod gemma;
mod glm;
mod gpt_oss;
mod granite;
mod hybrid;
mod moe;
mod qwen;

pub(crate) use gemma::WHOLE_NORMS;

use super::{
    Attention, Ffn, Fields, Given,
    Given::{Count, Flag, Number, Text},
    Mlp, ModelConfig, Moe,
};
use crate::ConvertError;

/// A family of decoders.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    /// Name in `architectures`.
    pub architecture: &'static str,
    /// The `model.type` that ONNX Runtime GenAI knows for a decoder with these ports, its own or one with the same inputs,
    /// outputs and cache.
    pub genai_type: &'static str,
    /// What its configuration class assumes where a file leaves a field out.
    pub defaults: &'static [(&'static str, Given)],
    /// Reads its fields.
    pub read: fn(&Fields) -> Result<ModelConfig, ConvertError>,
}

const fn family(
    architecture: &'static str,
    genai_type: &'static str,
    defaults: &'static [(&'static str, Given)],
    read: fn(&Fields) -> Result<ModelConfig, ConvertError>,
) -> Family {
    Family { architecture, genai_type, defaults, read }
}

const EPS5: (&str, Given) = ("rms_norm_eps", Number(1e-5));
const TIED: (&str, Given) = ("tie_word_embeddings", Flag(true));

const FAMILIES: &[Family] = &[
    family("LlamaForCausalLM", "llama", &[], dense::llama),
    family("MistralForCausalLM", "mistral", &[], dense::mistral),
    family("Qwen2ForCausalLM", "qwen2", &[], qwen::qwen2),
    family("Qwen3ForCausalLM", "qwen3", &[("head_dim", Count(128))], qwen::qwen3),
    family("SmolLM3ForCausalLM", "smollm3", &[("rope_theta", Number(2e6)), TIED], dense::smollm3),
    family("Phi3ForCausalLM", "phi3", &[EPS5], dense::phi3),
    family("GemmaForCausalLM", "gemma", &[GELU, TIED, ("head_dim", Count(256))], gemma::gemma),
    family("Gemma2ForCausalLM", "gemma2", GEMMA2, gemma::gemma2),
    family("Gemma3ForCausalLM", "gemma3_text", GEMMA3, gemma::gemma3),
    family("GlmForCausalLM", "llama", GLM, glm::glm),
    family("Glm4ForCausalLM", "llama", GLM, glm::glm4),
    family("GraniteForCausalLM", "granite", &[], granite::granite),
    family("Ernie4_5ForCausalLM", "ernie4_5", ERNIE, dense::ernie),
    family("Olmo2ForCausalLM", "olmo", &[EPS5, ("rope_theta", Number(5e5))], dense::olmo2),
    family("Qwen2MoeForCausalLM", "qwen2", &[("qkv_bias", Flag(true))], qwen::qwen2_moe),
    family("Qwen3MoeForCausalLM", "qwen3", &[], qwen::qwen3_moe),
    family("MixtralForCausalLM", "mistral", &[EPS5, ("rope_theta", Number(1e6))], moe::mixtral),
    family("OlmoeForCausalLM", "olmo", &[EPS5], moe::olmoe),
    family("PhimoeForCausalLM", "phimoe", PHIMOE, moe::phimoe),
    family("PhiMoEForCausalLM", "phimoe", PHIMOE, moe::phimoe),
    family("GraniteMoeForCausalLM", "granite", &[], granite::granite_moe),
    family("GraniteMoeSharedForCausalLM", "granite", &[], granite::granite_moe),
    family("Glm4MoeForCausalLM", "llama", GLM4_MOE, glm::glm4_moe),
    family("GptOssForCausalLM", "gptoss", GPT_OSS, gpt_oss::gpt_oss),
    family("Ernie4_5_MoeForCausalLM", "ernie4_5", ERNIE, moe::ernie),
    family("HunYuanDenseV1ForCausalLM", "llama", &[EPS5], dense::hunyuan),
    family("HunYuanMoEV1ForCausalLM", "llama", &[EPS5], moe::hunyuan),
    family("Qwen3NextForCausalLM", "qwen3_5_moe_text", QWEN3_NEXT, hybrid::qwen3_next),
    family("Qwen3_5ForCausalLM", "qwen3_5_text", QWEN3_NEXT, hybrid::qwen3_5),
    family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN3_NEXT, hybrid::qwen3_5_moe),
    family("Lfm2ForCausalLM", "lfm2", LFM2, hybrid::lfm2),
    family("Lfm2MoeForCausalLM", "lfm2_moe", LFM2, hybrid::lfm2_moe),
    family("DeepseekV2ForCausalLM", "deepseek_v2", &[], deepseek::deepseek_v2),
    family("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK_V3, deepseek::deepseek_v3),
    family("Dots1ForCausalLM", "llama", &[("routed_scaling_factor", Number(1.0))], moe::dots1),
];

const QWEN3_NEXT: &[(&str, Given)] = &[("head_dim", Count(256)), ("partial_rotary_factor", Number(0.25))];
const LFM2: &[(&str, Given)] = &[TIED, ("rope_theta", Number(1e6))];
const GELU: (&str, Given) = ("hidden_activation", Text("gelu_pytorch_tanh"));
const GEMMA2: &[(&str, Given)] = &[
    GELU,
    TIED,
    ("head_dim", Count(256)),
    ("query_pre_attn_scalar", Count(256)),
    ("sliding_window", Count(4096)),
    ("attn_logit_softcapping", Number(50.0)),
    ("final_logit_softcapping", Number(30.0)),
];
const GEMMA3: &[(&str, Given)] = &[
    GELU,
    TIED,
    ("head_dim", Count(256)),
    ("query_pre_attn_scalar", Count(256)),
    ("sliding_window", Count(4096)),
    ("rope_theta", Number(1e6)),
    ("rope_local_base_freq", Number(1e4)),
];
const GLM: &[(&str, Given)] =
    &[("head_dim", Count(128)), ("partial_rotary_factor", Number(0.5)), ("rms_norm_eps", Number(1.5625e-7))];
const GLM4_MOE: &[(&str, Given)] = &[
    EPS5,
    ("head_dim", Count(128)),
    ("partial_rotary_factor", Number(0.5)),
    ("norm_topk_prob", Flag(true)),
    ("first_k_dense_replace", Count(1)),
    ("n_shared_experts", Count(1)),
];
const DEEPSEEK_V3: &[(&str, Given)] = &[
    ("first_k_dense_replace", Count(3)),
    ("n_group", Count(8)),
    ("topk_group", Count(4)),
    ("n_shared_experts", Count(1)),
    ("norm_topk_prob", Flag(true)),
    ("routed_scaling_factor", Number(2.5)),
];
const GPT_OSS: &[(&str, Given)] = &[
    EPS5,
    ("attention_bias", Flag(true)),
    ("rope_theta", Number(150_000.0)),
    ("sliding_window", Count(128)),
    ("swiglu_limit", Number(7.0)),
];
const ERNIE: &[(&str, Given)] = &[EPS5, TIED, ("rope_theta", Number(5e5))];
const PHIMOE: &[(&str, Given)] = &[EPS5, ("rope_theta", Number(1e6)), ("router_jitter_noise", Number(0.01))];

/// Names of all architectures with a recipe.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|f| f.architecture)
}

/// The family of the first known name in `architectures`.
pub(super) fn find(f: &Fields) -> Result<&'static Family, ConvertError> {
    let names: Vec<&str> = match f.value("architectures") {
        None => Vec::new(),
        Some(v) => v
            .as_array()
            .and_then(|a| a.iter().map(|s| s.as_str()).collect())
            .ok_or_else(|| f.wrong("architectures", v, "a list of names"))?,
    };
    FAMILIES.iter().find(|family| names.contains(&family.architecture)).ok_or_else(|| {
        let found = names.first().copied().unwrap_or("none (no architectures)").to_owned();
        ConvertError::Architecture { found, known: architectures().collect::<Vec<_>>().join(", ") }
    })
}

/// A plain decoder with these biases.
fn plain(f: &Fields, attention: Attention) -> Result<ModelConfig, ConvertError> {
    ModelConfig::plain(f, attention, Mlp::read(f)?)
}

/// Llama's attention with biases on all projections where `attention_bias` says so.
fn biased_attention(f: &Fields) -> Result<Attention, ConvertError> {
    let bias = f.flag("attention_bias", false)?;
    Ok(Attention { qkv_bias: bias, output_bias: bias, ..Attention::read(f)? })
}

impl ModelConfig {
    fn set_windows(&mut self, windows: &[Option<usize>]) {
        for (i, attention) in self.attentions_mut() {
            attention.window = windows.get(i).copied().flatten();
        }
    }

    /// Puts experts into the layers that `sparse` names.
    fn set_moe(&mut self, moe: &Moe, sparse: impl Fn(usize) -> bool) {
        for (_, layer) in self.layers.iter_mut().enumerate().filter(|(i, _)| sparse(*i)) {
            layer.ffn = Ffn::Moe(Box::new(moe.clone()));
        }
    }

    fn set_mlp_bias(&mut self, bias: bool) {
        for layer in &mut self.layers {
            if let Ffn::Dense(mlp) = &mut layer.ffn {
                mlp.bias = bias;
            }
        }
    }
}
