"""GGUF files of Qwen3-MoE models in Q4_0, which is what llama.cpp runs fastest on a CPU."""

import json
from pathlib import Path

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
Q4_0 = gguf.GGMLQuantizationType.Q4_0


def bf16_tensors(folder: Path) -> dict:
    """Every bf16 tensor of the safetensors files of a folder, in f32; numpy has no bf16 of its own."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        header = int(data[:8].view("<u8")[0])
        for name, entry in json.loads(bytes(data[8 : 8 + header])).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}; only BF16 is read here")
            start, end = (8 + header + o for o in entry["data_offsets"])
            wide = data[start:end].view("<u2").astype(np.uint32) << 16
            tensors[name] = wide.view(np.float32).reshape(entry["shape"])
    return tensors


def from_checkpoint(folder: Path, path: Path):
    """Writes the checkpoint's weights in Q4_0, norms and routers in f32."""
    config, tensors = json.loads((folder / "config.json").read_text()), bf16_tensors(folder)
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    head = config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)

    def add(name, value):
        if value.ndim > 1 and "gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(value, Q4_0), raw_dtype=Q4_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))

    add("token_embd.weight", tensors["model.embed_tokens.weight"])
    add("output_norm.weight", tensors["model.norm.weight"])
    if not config["tie_word_embeddings"]:
        add("output.weight", tensors["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for theirs, ours in LAYER.items():
            add(f"blk.{layer}.{ours}.weight", tensors[f"{prefix}.{theirs}.weight"])
        for theirs, ours in EXPERTS.items():
            experts = [tensors[f"{prefix}.mlp.experts.{e}.{theirs}.weight"] for e in range(config["num_experts"])]
            add(f"blk.{layer}.{ours}.weight", np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def add_tokenizer(writer, tokenizer, config):
    vocab = tokenizer["model"]["vocab"]
    special = {t["id"] for t in tokenizer["added_tokens"]}
    names = {i: t for t, i in vocab.items()} | {t["id"]: t["content"] for t in tokenizer["added_tokens"]}
    tokens = [names.get(i, f"[unused{i}]") for i in range(config["vocab_size"])]
    kinds = gguf.TokenType
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokens))])
    writer.add_token_merges(merges)
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos if isinstance(eos, int) else eos[0])
