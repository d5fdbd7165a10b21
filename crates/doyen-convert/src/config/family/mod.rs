//! The architectures with a recipe: one row each, and a function that says how it differs from a plain decoder.
//!
//! A family starts from [`ModelConfig::plain`] and sets what its fields mean; it names no operators and reads no
//! tensors. `docs/adding-a-family.md` shows how one is added.

mod cohere;
mod deepseek;
mod dense;
mod gemma;
mod glm;
mod gpt_oss;
mod granite;
mod hybrid;
mod layer_norm;
mod moe;
mod olmo;
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
    family("MistralForCausalLM", "mistral", &[("sliding_window", Count(4096))], dense::mistral),
    family("Qwen2ForCausalLM", "qwen2", &[], qwen::qwen2),
    family("Qwen3ForCausalLM", "qwen3", &[("head_dim", Count(128))], qwen::qwen3),
    family("SmolLM3ForCausalLM", "smollm3", &[("rope_theta", Number(2e6)), TIED], dense::smollm3),
    family("Phi3ForCausalLM", "phi3", &[EPS5], dense::phi3),
    family("GemmaForCausalLM", "gemma", GEMMA, gemma::gemma),
    family("Gemma2ForCausalLM", "gemma2", GEMMA2, gemma::gemma2),
    family("Gemma3ForCausalLM", "gemma3_text", GEMMA3, gemma::gemma3),
    family("GlmForCausalLM", "llama", GLM, glm::glm),
    family("Glm4ForCausalLM", "llama", GLM, glm::glm4),
    family("GraniteForCausalLM", "granite", &[], granite::granite),
    family("Ernie4_5ForCausalLM", "ernie4_5", ERNIE_DENSE, dense::ernie),
    family("Olmo2ForCausalLM", "olmo", &[EPS5], olmo::olmo2),
    family("Olmo3ForCausalLM", "olmo", OLMO3, olmo::olmo3),
    family("Exaone4ForCausalLM", "llama", EXAONE, olmo::exaone4),
    family("SeedOssForCausalLM", "llama", &[("head_dim", Count(128))], dense::seed_oss),
    family("MinistralForCausalLM", "mistral", &[("sliding_window", Count(4096))], dense::mistral),
    family("Ministral3ForCausalLM", "mistral", &[EPS5, ("head_dim", Count(128))], dense::ministral3),
    family("CohereForCausalLM", "llama", &[TIED, ("rope_theta", Number(5e5))], cohere::cohere),
    family("Cohere2ForCausalLM", "llama", &[TIED, ("sliding_window", Count(4096))], cohere::cohere2),
    family("Starcoder2ForCausalLM", "llama", STARCODER2, layer_norm::starcoder2),
    family("StableLmForCausalLM", "llama", &[("partial_rotary_factor", Number(0.25))], layer_norm::stablelm),
    family("PhiForCausalLM", "phi", PHI, layer_norm::phi),
    family("NemotronForCausalLM", "nemotron", NEMOTRON, layer_norm::nemotron),
    family("Jais2ForCausalLM", "llama", JAIS2, layer_norm::jais2),
    family("ArceeForCausalLM", "llama", &[EPS5, ("hidden_act", Text("relu2"))], dense::arcee),
    family("HeliumForCausalLM", "llama", HELIUM, dense::helium),
    family("CwmForCausalLM", "llama", CWM, dense::cwm),
    family("VaultGemmaForCausalLM", "gemma2", GEMMA2, gemma::vault_gemma),
    family("HyperCLOVAXForCausalLM", "granite", &[], granite::hyperclovax),
    family("YoutuForCausalLM", "deepseek_v3", &[TIED], deepseek::youtu),
    family("Qwen2MoeForCausalLM", "qwen2", &[("qkv_bias", Flag(true))], qwen::qwen2_moe),
    family("Qwen3MoeForCausalLM", "qwen3", &[], qwen::qwen3_moe),
    family("MixtralForCausalLM", "mistral", &[EPS5, ("rope_theta", Number(1e6))], moe::mixtral),
    family("OlmoeForCausalLM", "olmo", &[EPS5], moe::olmoe),
    family("PhimoeForCausalLM", "phimoe", PHIMOE, moe::phimoe),
    family("PhiMoEForCausalLM", "phimoe", PHIMOE, moe::phimoe),
    family("GraniteMoeForCausalLM", "granite", &[], granite::granite_moe),
    family("GraniteMoeSharedForCausalLM", "granite", &[], granite::granite_moe),
    family("GraniteMoeHybridForCausalLM", "granite", GRANITE_HYBRID, granite::granite_hybrid),
    family("FlexOlmoForCausalLM", "olmo", &[("rope_theta", Number(5e5))], olmo::flex_olmo),
    family("MiniMaxM2ForCausalLM", "llama", MINIMAX_M2, moe::minimax_m2),
    family("AfmoeForCausalLM", "llama", AFMOE, moe::afmoe),
    family("HYV3ForCausalLM", "llama", HUNYUAN3, moe::hunyuan3),
    family("ExaoneMoeForCausalLM", "llama", EXAONE_MOE, moe::exaone),
    family("SolarOpenForCausalLM", "llama", SOLAR, glm::solar),
    family("Glm4MoeLiteForCausalLM", "deepseek_v3", GLM4_MOE_LITE, deepseek::deepseek_v3),
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
    family("DeepseekV2ForCausalLM", "deepseek_v2", &[("n_shared_experts", Count(2))], deepseek::deepseek_v2),
    family("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK_V3, deepseek::deepseek_v3),
    family("Dots1ForCausalLM", "llama", DOTS1, moe::dots1),
];

const OLMO3: &[(&str, Given)] = &[EPS5, ("rope_theta", Number(5e5)), ("sliding_window", Count(4096))];
const EXAONE: &[(&str, Given)] =
    &[EPS5, ("sliding_window", Count(4096)), ("sliding_window_pattern", Count(4))];
const EXAONE_MOE: &[(&str, Given)] = &[
    EPS5,
    ("sliding_window", Count(4096)),
    ("sliding_window_pattern", Count(4)),
    ("first_k_dense_replace", Count(1)),
    ("num_shared_experts", Count(1)),
    ("norm_topk_prob", Flag(true)),
    ("routed_scaling_factor", Number(2.5)),
];
const AFMOE: &[(&str, Given)] = &[
    EPS5,
    ("head_dim", Count(128)),
    ("sliding_window", Count(1024)),
    ("num_dense_layers", Count(1)),
    ("num_shared_experts", Count(2)),
];
const HUNYUAN3: &[(&str, Given)] = &[
    EPS5,
    ("head_dim", Count(128)),
    ("rope_theta", Number(11_158_840.0)),
    ("first_k_dense_replace", Count(1)),
    ("num_shared_experts", Count(1)),
    ("router_scaling_factor", Number(2.826)),
];
const STARCODER2: &[(&str, Given)] = &[TIED, ("hidden_act", Text("gelu_pytorch_tanh"))];
const PHI: &[(&str, Given)] = &[("hidden_act", Text("gelu_new")), ("partial_rotary_factor", Number(0.5))];
const NEMOTRON: &[(&str, Given)] = &[("hidden_act", Text("relu2")), ("partial_rotary_factor", Number(0.5))];
const JAIS2: &[(&str, Given)] =
    &[("hidden_act", Text("relu2")), ("attention_bias", Flag(true)), ("mlp_bias", Flag(true))];
const HELIUM: &[(&str, Given)] =
    &[("head_dim", Count(128)), ("rms_norm_eps", Number(1e-8)), ("rope_theta", Number(1e5))];
const CWM: &[(&str, Given)] =
    &[EPS5, ("head_dim", Count(128)), ("sliding_window", Count(8192)), ("rope_theta", Number(1e6))];
const GRANITE_HYBRID: &[(&str, Given)] = &[("shared_intermediate_size", Count(1024))];
const MINIMAX_M2: &[(&str, Given)] = &[("head_dim", Count(128)), ("rope_theta", Number(5e6))];
const SOLAR: &[(&str, Given)] = &[
    EPS5,
    ("head_dim", Count(128)),
    ("rope_theta", Number(1e6)),
    ("n_shared_experts", Count(1)),
    ("norm_topk_prob", Flag(true)),
];
const GLM4_MOE_LITE: &[(&str, Given)] = &[
    EPS5,
    ("first_k_dense_replace", Count(1)),
    ("n_shared_experts", Count(1)),
    ("norm_topk_prob", Flag(true)),
    ("routed_scaling_factor", Number(1.8)),
];
const QWEN3_NEXT: &[(&str, Given)] = &[("head_dim", Count(256)), ("partial_rotary_factor", Number(0.25))];
const LFM2: &[(&str, Given)] = &[TIED, ("rope_theta", Number(1e6))];
const GELU: (&str, Given) = ("hidden_activation", Text("gelu_pytorch_tanh"));
const GEMMA: &[(&str, Given)] = &[("hidden_act", Text("gelu_pytorch_tanh")), TIED, ("head_dim", Count(256))];
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
const DOTS1: &[(&str, Given)] = &[("sliding_window", Count(4096)), ("max_window_layers", Count(62))];
const GPT_OSS: &[(&str, Given)] = &[
    EPS5,
    ("head_dim", Count(64)),
    ("attention_bias", Flag(true)),
    ("rope_theta", Number(150_000.0)),
    ("sliding_window", Count(128)),
    ("swiglu_alpha", Number(1.702)),
    ("swiglu_limit", Number(7.0)),
];
const ERNIE_DENSE: &[(&str, Given)] = &[EPS5, TIED, ("rope_theta", Number(5e5)), ("head_dim", Count(128))];
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
    biased(f, Attention::read(f)?)
}

/// An attention with biases on all projections where `attention_bias` says so.
fn biased(f: &Fields, attention: Attention) -> Result<Attention, ConvertError> {
    let bias = f.flag("attention_bias", false)?;
    Ok(Attention { qkv_bias: bias, output_bias: bias, ..attention })
}

/// Refuses a file that says nothing of the rotation, where implementations disagree on what that means.
fn scaling_is_stated(f: &Fields) -> Result<(), ConvertError> {
    match f.value("rope_parameters").or_else(|| f.value("rope_scaling")) {
        Some(_) => Ok(()),
        None => Err(f.wrong("rope_scaling", "absent", "an object, for what it means here differs")),
    }
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
