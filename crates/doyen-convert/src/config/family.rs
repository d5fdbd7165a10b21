//! The architectures with a recipe, and how they differ in what `config.json` means.

use super::{Attention, Fields, Moe};
use crate::ConvertError;

/// A family of decoders that share a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Family {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

const KNOWN: [(&str, Family); 4] = [
    ("LlamaForCausalLM", Family::Llama),
    ("Qwen2ForCausalLM", Family::Qwen2),
    ("Qwen3ForCausalLM", Family::Qwen3),
    ("Qwen3MoeForCausalLM", Family::Qwen3Moe),
];

impl Family {
    pub(super) fn of(f: &Fields) -> Result<(Self, String), ConvertError> {
        let names: Vec<&str> = match f.value("architectures") {
            None => Vec::new(),
            Some(v) => v
                .as_array()
                .and_then(|a| a.iter().map(|s| s.as_str()).collect())
                .ok_or_else(|| f.wrong("architectures", v, "a list of names"))?,
        };
        let known = || KNOWN.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
        let found = names.first().copied().unwrap_or("none (no architectures)");
        KNOWN
            .iter()
            .find(|(n, _)| names.contains(n))
            .map(|(n, family)| (*family, (*n).to_owned()))
            .ok_or_else(|| ConvertError::Architecture { found: found.to_owned(), known: known() })
    }

    /// The `model.type` that ONNX Runtime GenAI knows for a decoder with these ports. It has none for Qwen3-MoE text
    /// models; `qwen3` has the same inputs, outputs and cache.
    pub const fn genai_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 | Self::Qwen3Moe => "qwen3",
        }
    }

    pub(super) fn attention(self, f: &Fields, hidden: usize) -> Result<Attention, ConvertError> {
        let heads = f.size("num_attention_heads")?;
        let kv_heads = f.optional_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(f.wrong(
                "num_key_value_heads",
                kv_heads,
                format!("a divisor of num_attention_heads = {heads}"),
            ));
        }
        let head_dim = match (f.optional_size("head_dim")?, self) {
            (Some(d), _) => d,
            // The default of the released Qwen3 configuration class.
            (None, Self::Qwen3) => 128,
            (None, _) if hidden.is_multiple_of(heads) => hidden / heads,
            (None, _) => {
                let expected = format!("a multiple of num_attention_heads = {heads}, or head_dim given");
                return Err(f.wrong("hidden_size", hidden, expected));
            }
        };
        // The rotary caches of GroupQueryAttention must have a multiple of 8 columns, half a head each.
        if !head_dim.is_multiple_of(16) || head_dim > 1 << 16 {
            return Err(f.wrong("head_dim", head_dim, "a multiple of 16 up to 65536"));
        }
        let bias = f.flag("attention_bias", false)?;
        Ok(Attention {
            heads,
            kv_heads,
            head_dim,
            qkv_bias: bias || self == Self::Qwen2,
            output_bias: bias && self != Self::Qwen2,
            qk_norm: matches!(self, Self::Qwen3 | Self::Qwen3Moe),
        })
    }

    pub(super) fn mlp_bias(self, f: &Fields) -> Result<bool, ConvertError> {
        let bias = f.flag("mlp_bias", false)?;
        if bias && self != Self::Llama {
            return Err(f.wrong("mlp_bias", bias, "false in this architecture"));
        }
        Ok(bias)
    }

    pub(super) fn moe(self, f: &Fields) -> Result<Option<Moe>, ConvertError> {
        if self != Self::Qwen3Moe {
            if let Some(n) = f.value("num_experts") {
                return Err(f.wrong("num_experts", n, "nothing in this architecture"));
            }
            return Ok(None);
        }
        let experts = f.size("num_experts")?;
        let top_k = f.size("num_experts_per_tok")?;
        if top_k > experts {
            return Err(f.wrong("num_experts_per_tok", top_k, format!("at most num_experts = {experts}")));
        }
        Ok(Some(Moe {
            experts,
            top_k,
            intermediate: f.size("moe_intermediate_size")?,
            norm_topk: f.flag("norm_topk_prob", false)?,
        }))
    }

    /// Which layers have experts: every `decoder_sparse_step`-th, those in `mlp_only_layers` excepted.
    pub(super) fn sparse_layers(self, f: &Fields, layers: usize) -> Result<Vec<bool>, ConvertError> {
        if self != Self::Qwen3Moe {
            return Ok(vec![false; layers]);
        }
        let step = f.optional_size("decoder_sparse_step")?.unwrap_or(1);
        let dense = f.indices("mlp_only_layers")?;
        if let Some(i) = dense.iter().find(|&&i| i >= layers) {
            return Err(f.wrong("mlp_only_layers", i, format!("layers 0 to {}", layers - 1)));
        }
        Ok((0..layers).map(|i| (i + 1).is_multiple_of(step) && !dense.contains(&i)).collect())
    }

    /// The attention window of every layer.
    ///
    /// Qwen2 and Qwen3 use windows from layer `max_window_layers` on, when `use_sliding_window` says so; newer files
    /// spell the result out in `layer_types`, which then decides. Releases of the Qwen3-MoE code disagree about
    /// `max_window_layers`, so there windows need `layer_types`.
    pub(super) fn windows(self, f: &Fields, layers: usize) -> Result<Vec<Option<usize>>, ConvertError> {
        let window = f.optional_size("sliding_window")?;
        let used = f.flag("use_sliding_window", false)?;
        let types = layer_types(f, layers)?;
        if self == Self::Llama {
            if let Some(w) = window.filter(|_| types.as_ref().is_none_or(|t| t.contains(&true))) {
                return Err(f.wrong("sliding_window", w, "nothing in this architecture"));
            }
            return Ok(vec![None; layers]);
        }
        let slides = match types {
            Some(types) => types,
            None if !used => vec![false; layers],
            None if self == Self::Qwen3Moe => {
                return Err(f.wrong(
                    "use_sliding_window",
                    used,
                    "false, or layer_types that name every layer",
                ));
            }
            None => {
                let first = f.count("max_window_layers", 28)?;
                (0..layers).map(|i| i >= first).collect()
            }
        };
        if let (None, true) = (window, slides.contains(&true)) {
            return Err(f.wrong("sliding_window", "absent", "a positive integer, since layers slide"));
        }
        Ok(slides.into_iter().map(|s| window.filter(|_| s)).collect())
    }
}

/// Whether each layer slides, by `layer_types`.
fn layer_types(f: &Fields, layers: usize) -> Result<Option<Vec<bool>>, ConvertError> {
    const FULL: &str = "full_attention";
    const SLIDING: &str = "sliding_attention";
    let Some(v) = f.value("layer_types") else { return Ok(None) };
    let types = v.as_array().ok_or_else(|| f.wrong("layer_types", v, "a list"))?;
    if types.len() != layers {
        return Err(f.wrong("layer_types", format!("{} entries", types.len()), format!("{layers} entries")));
    }
    types
        .iter()
        .map(|t| match t.as_str() {
            Some(FULL) => Ok(false),
            Some(SLIDING) => Ok(true),
            _ => Err(f.wrong("layer_types", t, format!("{FULL:?} or {SLIDING:?}"))),
        })
        .collect::<Result<_, _>>()
        .map(Some)
}
