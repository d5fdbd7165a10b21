#!/usr/bin/env python3
"""Tiny random checkpoints of model families, and what `transformers` computes from them.

    scripts/make-goldens.py OUT [FAMILY...]

Writes OUT/FAMILY/ with config.json, model.safetensors (BF16, as `save_pretrained` lays out a release; score corrections in
F32) and golden.safetensors: prompt_k int64 [n], logits_k float32 [n, vocab], greedy_k int64 [24]. Weights are rounded to
BF16 first and all is computed in float32 with eager attention and eager experts; greedy tokens come from full
recomputation and ignore EOS. A seed is passed over when a greedy token is nearly a tie or a router nearly chooses another
expert, so that rounding cannot change either.

Not part of CI. Needs an environment of its own: pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0
The references in crates/doyen-convert/tests/data/families were made by it.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

VOCAB = 128
LENGTHS = (5, 12, 20)
# Of families whose sequences are all longer than the context before stretching.
LONG_LENGTHS = (33, 36, 40)
GREEDY = 24
# Smallest distance between the first and second greedy token, and between the last chosen expert and the next.
TOKEN_GAP = 0.005
ROUTER_GAP = 5e-4

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HALF = {"head_dim": 32, "partial_rotary_factor": 0.5}
SIGMOID = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
}

# Name: configuration class, fields. Values differ from defaults where that could hide a field that is not read.
FAMILIES = {
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "smollm3": (
        "SmolLM3Config",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": False, "rope_theta": 5e5},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 8, **HALF}),
    "phi3_longrope": (
        "Phi3Config",
        {
            "head_dim": 32,
            "hidden_size": 128,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
            },
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3_long_context": (
        "Phi3Config",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "gemma": ("GemmaConfig", {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3_linear": (
        "Gemma3TextConfig",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "glm": ("GlmConfig", {"attention_bias": True, **HALF}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 2, "rope_theta": 3e5}),
    "ernie": ("Ernie4_5Config", {"tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "mixtral_fused": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "clip_qkv": 1.5, "head_dim": None,
         "hidden_size": 64},
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "attention_bias": True,
            "lm_head_bias": True,
            "head_dim": None,
            "hidden_size": 64,
            # Wide enough for several experts to be close to the best.
            "router_jitter_noise": 0.3,
        },
    ),
    "granite_moe": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "head_dim": None,
            "hidden_size": 64,
        },
    ),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "head_dim": None,
            "hidden_size": 64,
        },
    ),
    "glm4_moe_groups": (
        "Glm4MoeConfig",
        {**SIGMOID, **HALF, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True},
    ),
    "hunyuan_dense": ("HunYuanDenseV1Config", {"rope_theta": 2e4}),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 3, "intermediate_size": 32}),
    "deepseek_v2_groups": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": 28,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **SIGMOID,
            **LATENT,
            "q_lora_rank": 32,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.2,
                "mscale_all_dim": 0.8,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "dots1": ("Dots1Config", {**SIGMOID, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    "ernie_moe": (
        "Ernie4_5_MoeConfig",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
}

DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
SHORT = {"num_hidden_layers": 3, "head_dim": None, "hidden_size": 64, "tie_word_embeddings": True}
FAMILIES |= {
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "linear_num_value_heads": 2}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            "linear_num_value_heads": 6,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "intermediate_size": None,
        },
    ),
    "lfm2": ("Lfm2Config", {**SHORT, "conv_bias": True, "conv_L_cache": 4, "layer_types": ["conv", "full_attention", "conv"],
                            "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **SHORT,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
}

WIDE = {"head_dim": None, "hidden_size": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES |= {
    "olmo3": (
        "Olmo3Config",
        {
            **WIDE, **WINDOWS,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2, "rope_theta": 3e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "flex_olmo": ("FlexOlmoConfig", {**WIDE, "num_experts": 7, "num_experts_per_tok": 5, "intermediate_size": 32}),
    "exaone4": ("Exaone4Config", {**WINDOWS, "rope_parameters": LLAMA3}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "moe_intermediate_size": 32,
         "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse"],
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "seed_oss": ("SeedOssConfig", {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True}),
    "ministral3": (
        "Ministral3Config",
        {"sliding_window": 8, "rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 0.5,
                                                  "llama_4_scaling_beta": 0.1}},
    ),
    "cohere": ("CohereConfig", {**WIDE, "logit_scale": 0.3, "attention_bias": True}),
    "cohere2": ("Cohere2Config", {**WIDE, **WINDOWS, "logit_scale": 0.3, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2Config", {**WIDE, "sliding_window": 8, "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", {**WIDE, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm_parallel": ("StableLmConfig", {**WIDE, "use_parallel_residual": True}),
    "phi": ("PhiConfig", WIDE),
    # Rotated channels of which the operator of attention takes no count: 12 of 24.
    "nemotron": ("NemotronConfig", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2Config", WIDE),
    "arcee": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True}),
    "helium": ("HeliumConfig", {**WIDE, "head_dim": 16}),
    "cwm": ("CwmConfig", {**WINDOWS, "rope_parameters": LLAMA3}),
    "vault_gemma": (
        "VaultGemmaConfig",
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 4.0},
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {**WIDE, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.6},
    ),
    "youtu": ("YoutuConfig", {**LATENT, "q_lora_rank": 28, "rope_interleave": False}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**{k: v for k, v in SIGMOID.items() if k != "first_k_dense_replace"}, **LATENT, "q_lora_rank": 28},
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {**WIDE, "num_local_experts": 0, "shared_intermediate_size": 48, "position_embedding_type": "nope",
         "layer_types": ["full_attention"] * 2, "mamba_n_heads": 32, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybridConfig",
        {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 48,
         "position_embedding_type": "rope", "layer_types": ["full_attention"] * 2, "mamba_n_heads": 32,
         "attention_multiplier": 0.2},
    ),
    "afmoe": (
        "AfmoeConfig",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_dense_layers": 1,
         "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "route_scale": 1.5,
         "mup_enabled": True},
    ),
    "hunyuan3": (
        "HYV3Config",
        {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1,
         "router_scaling_factor": 1.5},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": 32, "rotary_dim": 16},
    ),
    "solar_open": (
        "SolarOpenConfig",
        {k: v for k, v in {**SIGMOID, "attention_bias": True, "rope_parameters": {**YARN, "rope_theta": 1e5}}.items()
         if k != "first_k_dense_replace"},
    ),
}

SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}
VISUAL = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48}
DEEPSTACK = {**VISUAL, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SECTIONS = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 3, 3]}

# Text models inside of multimodal ones: configuration class, fields of the text model, fields of the tower, others.
WRAPPED = {
    "gemma3_in_wrapper": (
        "Gemma3Config",
        {"num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        SIGLIP,
        {"tie_word_embeddings": True, "mm_tokens_per_image": 4, "eos_token_id": [2, 9]},
    ),
    "mistral_in_wrapper": (
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e8}},
        {**SIGLIP, "model_type": "pixtral"},
        {"tie_word_embeddings": False},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig", {"head_dim": None, "hidden_size": 64, "rope_parameters": SECTIONS},
        {**VISUAL, "out_hidden_size": 64}, {"tie_word_embeddings": True},
    ),
    "qwen3_vl": ("Qwen3VLConfig", {"rope_parameters": SECTIONS}, DEEPSTACK, {}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {"rope_parameters": SECTIONS, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
        DEEPSTACK, {},
    ),
    "qwen3_5_moe_in_wrapper": (
        "Qwen3_5MoeConfig",
        {k: v for k, v in FAMILIES["qwen3_5_moe"][1].items()},
        {k: v for k, v in DEEPSTACK.items() if k != "deepstack_visual_indexes"}, {},
    ),
}


def configuration(family):
    """The configuration, and the class that makes its model."""
    if family in FAMILIES:
        name, fields = FAMILIES[family]
        fields = {k: v for k, v in {**COMMON, **fields}.items() if v is not None}
        return getattr(transformers, name)(**fields), transformers.AutoModelForCausalLM
    name, text, tower, fields = WRAPPED[family]
    text = {k: v for k, v in {**COMMON, **text}.items() if v is not None or k == "sliding_window"}
    config = getattr(transformers, name)(text_config=text, vision_config=tower, **fields)
    config.text_config._experts_implementation = "eager"
    return config, transformers.AutoModelForImageTextToText


def build(family, seed):
    config, maker = configuration(family)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = maker.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point() or "inv_freq" in key or "embed_scale" in key:
                continue
            noise = torch.randn(value.shape, generator=generator)
            if "correction_bias" in key:
                value.copy_(0.1 * noise)
            elif value.dim() >= 2:
                gain = 2.0 if "gate.weight" in key or "router" in key else 1.0
                value.copy_((gain * noise / value.shape[-1] ** 0.5).bfloat16())
            elif key.endswith("bias") or "gemma" in family:
                value.copy_((0.2 * noise).bfloat16())
            else:
                value.copy_((1.0 + 0.2 * noise).bfloat16())
    return config, model.eval()


class Gaps:
    """Distances between the last chosen expert's score and the next one's, of every router."""

    def __init__(self, model):
        self.least = float("inf")
        for module in model.modules():
            if type(module).__name__.endswith(("TopKRouter", "TopkRouter", "TopKGating", "Router", "Gate")):
                module.register_forward_hook(self.hook)

    def hook(self, module, _inputs, outputs):
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        k = getattr(module, "top_k", 2)
        if logits.dim() == 2 and logits.shape[-1] > k and logits.is_floating_point():
            scores = logits.float()
            bias = getattr(module, "e_score_correction_bias", None)
            if bias is not None:
                scores = scores.sigmoid() + bias
            best = scores.topk(k + 1, dim=-1).values
            self.least = min(self.least, (best[:, k - 1] - best[:, k]).min().item())


@torch.no_grad()
def golden(model, seed, lengths):
    generator = torch.Generator().manual_seed(1000 + seed)
    gaps = Gaps(model)
    out, token_gap = {}, float("inf")
    for k, length in enumerate(lengths):
        prompt = torch.randint(3, VOCAB, (length,), generator=generator)
        ids = prompt.clone()
        logits = model(ids[None], use_cache=False).logits[0].float()
        out[f"prompt_{k}"], out[f"logits_{k}"] = prompt, logits.contiguous()
        for _ in range(GREEDY):
            row = model(ids[None], use_cache=False).logits[0, -1].float()
            best = row.topk(2)
            token_gap = min(token_gap, (best.values[0] - best.values[1]).item())
            if token_gap < TOKEN_GAP or gaps.least < ROUTER_GAP:
                return None
            ids = torch.cat([ids, best.indices[:1]])
        out[f"greedy_{k}"] = ids[length:].clone()
    return out, token_gap, gaps.least


def write(family, out):
    for seed in range(1, 200):
        config, model = build(family, seed)
        if (found := golden(model, seed, LONG_LENGTHS if family.endswith("_long_context") else LENGTHS)) is not None:
            break
    else:
        raise SystemExit(f"{family}: every seed has a near tie")
    reference, token_gap, router_gap = found
    folder = out / family
    shutil.rmtree(folder, ignore_errors=True)
    corrections = {k: v for k, v in model.state_dict().items() if "correction_bias" in k}
    model = model.bfloat16()
    for key, value in corrections.items():
        owner, name = key.rsplit(".", 1)
        module = model.get_submodule(owner)
        if name in module._parameters:
            module._parameters[name].data = value.float()
        else:
            module._buffers[name] = value.float()
    model.save_pretrained(folder, save_original_format=not family.endswith("_fused"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    save_file(reference, folder / "golden.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{family}: seed {seed}, token gap {token_gap:.3f}, router gap {router_gap:.2g}, {size >> 10} KiB", flush=True)


def main():
    # Models this small lose more to waiting threads than they gain.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("family", nargs="*", help=f"of {', '.join([*FAMILIES, *WRAPPED])}")
    args = parser.parse_args()
    for family in args.family or [*FAMILIES, *WRAPPED]:
        write(family, args.out)


if __name__ == "__main__":
    main()
