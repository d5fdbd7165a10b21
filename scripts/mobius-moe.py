#!/usr/bin/env python3
"""A random Qwen3-MoE as mobius exports it: experts written out densely, in float32 or as codes.

    scripts/mobius-moe.py OUT [--experts 64] [--top-k 4] [--hidden 1024] [--inter 768] [--layers 2] [--bits 4]

Makes a checkpoint of random weights, exports it with `mobius build`, and copies the tokenizer beside. With --bits, the
products with constant weights become MatMulNBits nodes (blocks of 32 with zero points), but for routers and the head, as
quantizers of ONNX files make them. For `cargo run --release -p doyen --example dense-experts OUT`. Not part of CI; needs an
environment of its own: pip install mobius-onnx==0.1.0 torch==2.15.0 transformers==5.24.0 safetensors==0.8.0
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import save_file

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 2, 64, 512


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inter", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="width of projections; float32 without")
    return parser.parse_args()


def checkpoint(folder, args):
    random = np.random.default_rng(1)
    hidden, tensors = args.hidden, {}

    def add(name, *shape):
        scale = 1 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        tensors[f"{name}.weight"] = values if len(shape) > 1 else values + 1

    add("model.embed_tokens", VOCAB, hidden)
    add("lm_head", VOCAB, hidden)
    add("model.norm", hidden)
    for layer in range(args.layers):
        at = f"model.layers.{layer}"
        add(f"{at}.input_layernorm", hidden)
        add(f"{at}.post_attention_layernorm", hidden)
        for name, rows in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)]:
            add(f"{at}.self_attn.{name}_proj", rows * HEAD_DIM, hidden)
        add(f"{at}.self_attn.o_proj", hidden, HEADS * HEAD_DIM)
        add(f"{at}.self_attn.q_norm", HEAD_DIM)
        add(f"{at}.self_attn.k_norm", HEAD_DIM)
        add(f"{at}.mlp.gate", args.experts, hidden)
        for e in range(args.experts):
            for name in ("gate", "up"):
                add(f"{at}.mlp.experts.{e}.{name}_proj", args.inter, hidden)
            add(f"{at}.mlp.experts.{e}.down_proj", hidden, args.inter)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "intermediate_size": 4 * args.inter, "moe_intermediate_size": args.inter, "num_experts": args.experts,
        "num_experts_per_tok": args.top_k, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": args.layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 1024, "rope_theta": 1e6, "vocab_size": VOCAB,
        "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
        "attention_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": tokens, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def coded(weight, bits, block=32):
    """Codes, scales and zero points of a matrix [K, N], as MatMulNBits takes them."""
    rows = weight.T.reshape(weight.shape[1], -1, block)
    low, high = np.minimum(rows.min(-1), 0), np.maximum(rows.max(-1), 0)
    top = 2**bits - 1
    scales = np.maximum((high - low) / top, np.finfo(np.float32).tiny)
    zeros = np.clip(np.rint(-low / scales), 0, top)
    codes = np.clip(np.rint(rows / scales[..., None]) + zeros[..., None], 0, top).astype(np.uint8)
    return packed(codes, bits), scales.astype(np.float32), packed(zeros.astype(np.uint8), bits)


def packed(codes, bits):
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4


def quantize(path, bits):
    model = onnx.load(path)
    graph = model.graph
    constants = {c.name: c for c in graph.initializer}
    for node in graph.node:
        name = node.input[1] if node.op_type == "MatMul" else ""
        if "_proj" not in name or name not in constants:
            continue
        weight = onnx.numpy_helper.to_array(constants.pop(name))
        names = [f"{name}_{part}" for part in ("codes", "scales", "zero_points")]
        for part, values in zip(names, coded(weight, bits)):
            constants[part] = onnx.numpy_helper.from_array(values, part)
        new = onnx.helper.make_node(
            "MatMulNBits", [node.input[0], *names], node.output, node.name, domain="com.microsoft",
            K=weight.shape[0], N=weight.shape[1], bits=bits, block_size=32,
        )
        node.CopyFrom(new)
    del graph.initializer[:]
    graph.initializer.extend(constants.values())
    for old in (path, path.with_name(f"{path.name}.data")):
        old.unlink()
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)


def main():
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="mobius-moe-", dir=args.out.absolute().parent) as work:
        folder = Path(work)
        checkpoint(folder, args)
        build = ["-m", "mobius", "build", "--config", folder, args.out, "--dtype", "f32", "--ep", "cpu", "--runtime", "ort-genai"]
        # Its last step may ask the hub for a tokenizer; the package is whole by then.
        subprocess.run([sys.executable, *build], check=False)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, args.out / name)
    if not (args.out / "model.onnx").exists():
        sys.exit("mobius made no package")
    if args.bits is not None:
        quantize(args.out / "model.onnx", args.bits)


if __name__ == "__main__":
    main()
