"""A Hugging Face checkpoint from the GGUF file of a Llama model, to convert the very weights that llama.cpp runs."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3


def unpermute(weight, heads):
    """llama.cpp pairs neighbouring channels of a head in the rotation, Hugging Face those half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer_json(field):
    """A byte-level BPE tokenizer; digits are split one by one, as SmolLM's are."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    added = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, (t, kind) in enumerate(zip(tokens, kinds))
        if kind == CONTROL
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_]},
        "post_processor": None,
        "decoder": dict(bytes_, add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": field("tokenizer.ggml.merges"),
        },
    }


def from_gguf(path: Path, folder: Path):
    """Writes config.json, model.safetensors (f32), tokenizer.json and tokenizer_config.json."""
    reader = gguf.GGUFReader(path)

    def field(name):
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise SystemExit(f"{path}: architecture {field('general.architecture')}; only llama is read here")
    heads, kv_heads = int(field("llama.attention.head_count")), int(field("llama.attention.head_count_kv"))
    tensors = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem, kind = tensor.name.rsplit(".", 1)
        if stem in WHOLE:
            name = WHOLE[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{LAYER[part]}"
            if part in ("attn_q", "attn_k"):
                value = unpermute(value, heads if part == "attn_q" else kv_heads)
        tensors[f"{name}.{kind}"] = np.ascontiguousarray(value)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": int(field("llama.embedding_length")),
        "intermediate_size": int(field("llama.feed_forward_length")),
        "num_hidden_layers": int(field("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": int(field("llama.context_length")),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "vocab_size": int(field("llama.vocab_size")),
        "tie_word_embeddings": "output.weight" not in {t.name for t in reader.tensors},
        "bos_token_id": int(field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field("tokenizer.ggml.eos_token_id")),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(field)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": field("tokenizer.chat_template")}))
