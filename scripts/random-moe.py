#!/usr/bin/env python3
"""A package and a GGUF file of Qwen3-30B-A3B's geometry with random weights, to time what no one can download.

    scripts/random-moe.py --doyen BIN --package DIR [--gguf FILE] [--layers 48] [--experts 4|fc1=2,fc2=4] ...

The package's graph is the converter's own: `doyen convert` runs on a checkpoint of three layers whose weights are a hole
in a sparse file, the middle layer of its graph is repeated, and random codes and scales take the place of the weights. The
GGUF file holds the same geometry in Q4_0 (norms and routers in f32). Layers share the random numbers, not the bytes: every
tensor has a region of the file to itself. Memory stays flat. Needs numpy and onnx.
"""

import argparse
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

ALIGN = 4096
HUGE_PAGE = 2 << 20
# Bytes of the random numbers that tensors are filled from, again and again.
POOL = 32 << 20
WEIGHT_STD = 0.02
# Where names of nodes and values carry the number of their layer.
LAYER = re.compile(r"\b(layers|past_key_values|present)\.(\d+)")
FLOATS = {1: np.dtype(np.float32), 10: np.dtype(np.float16)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doyen", type=Path, help="the program whose converter lays out the package")
    parser.add_argument("--package", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--gguf", type=Path, help="file to write")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inter", type=int, default=768, help="intermediate size of an expert")
    parser.add_argument("--expert-count", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--size", type=float, metavar="GB", help="as many layers as make about this much")
    parser.add_argument("--experts", default="4", help="width of experts, as `doyen convert` takes it")
    parser.add_argument("--attention", default="4", help="width of attention, embedding and head")
    parser.add_argument("--block", default="32")
    parser.add_argument("--scales", choices=["f16", "f32"], default="f16", help="type of scales and activations")
    parser.add_argument("--zero-points", choices=["on", "off"], default="on")
    args = parser.parse_args()
    if args.package and not args.doyen:
        parser.error("--package needs --doyen")
    if not args.package and not args.gguf:
        parser.error("give --package, --gguf or both")
    if args.size:
        per_weight = 4.5 / 8 / 1e9
        outside = 2 * args.vocab * args.hidden * per_weight
        layer = 3 * args.expert_count * args.hidden * args.inter * per_weight
        args.layers = max(1, round((args.size - outside) / layer))
    return args


# The package.


def tensors(args, layers):
    """Name and shape of every tensor of the checkpoint."""
    h, q, kv = args.hidden, args.heads * args.head_size, args.kv_heads * args.head_size
    yield "model.embed_tokens.weight", [args.vocab, h]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", [h]
        for part, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            yield f"{at}self_attn.{part}_proj.weight", [rows, columns]
        for part in "qk":
            yield f"{at}self_attn.{part}_norm.weight", [args.head_size]
        yield f"{at}mlp.gate.weight", [args.expert_count, h]
        for e in range(args.expert_count):
            for part in ("gate", "up"):
                yield f"{at}mlp.experts.{e}.{part}_proj.weight", [args.inter, h]
            yield f"{at}mlp.experts.{e}.down_proj.weight", [h, args.inter]
    yield "model.norm.weight", [h]
    yield "lm_head.weight", [args.vocab, h]


def write_checkpoint(args, folder, layers):
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_sparse_step": 1,
        "head_dim": args.head_size,
        "hidden_act": "silu",
        "hidden_size": args.hidden,
        "intermediate_size": args.inter,
        "max_position_embeddings": args.context,
        "mlp_only_layers": [],
        "moe_intermediate_size": args.inter,
        "norm_topk_prob": True,
        "num_attention_heads": args.heads,
        "num_experts": args.expert_count,
        "num_experts_per_tok": args.top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": args.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": args.vocab,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Bytes alone: those that print stand for themselves, the others for characters from 256 on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(b) for b in printing] + [chr(256 + i) for i in range(256 - len(printing))]
    special = [{"id": i, "content": f"<|{i}|>", "special": True} for i in range(3)]
    vocab = {t: i for i, t in enumerate([s["content"] for s in special] + characters)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [s | flags for s in special],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    header, at = {}, 0
    for name, shape in tensors(args, layers):
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + at)


def renumber(text, change):
    return LAYER.sub(lambda m: f"{m[1]}.{change(int(m[2]))}", text)


def renumbered(item, change):
    """A copy of a node, initializer, input or output with other layer numbers in its names."""
    copy = type(item)()
    copy.CopyFrom(item)
    copy.name = renumber(copy.name, change)
    for names in (getattr(copy, field, []) for field in ("input", "output")):
        names[:] = [renumber(name, change) for name in names]
    return copy


def repeat_layer(model, layers):
    """Puts copies of layer 1 between the first and the last of three layers."""
    copies, graph = layers - 2, model.graph
    for items in (graph.node, graph.initializer, graph.input, graph.output):
        number = [int(m[2]) if (m := LAYER.search(i.name)) else None for i in items]
        first, end = number.index(1), len(number) - number[::-1].index(1)
        out = list(items[:first])
        for k in range(1, copies + 1):
            # What has no number there is shared by the layers, and its first user brings it.
            group = [i for i, n in zip(items[first:end], number[first:end]) if n == 1 or k == 1]
            out += [renumbered(i, lambda n, k=k: n - 1 + k) for i in group]
        out += [renumbered(i, lambda n: n + copies - 1) for i in items[end:]]
        del items[:]
        items.extend(out)


class Filler:
    """Bytes of tensors by their names."""

    def __init__(self, args):
        self.rng = np.random.default_rng(1)
        self.codes = np.frombuffer(self.rng.bytes(POOL), np.uint8)
        self.args = args
        self.pools = {}

    def bits(self, name):
        """Width of a quantized tensor."""
        if "experts" not in name:
            return int(self.args.attention)
        widths = dict(w.split("=") for w in self.args.experts.split(",") if "=" in w)
        return int(widths.get("fc1" if "gate_up" in name else "fc2", self.args.experts))

    def pool(self, name, kind):
        """A pool of the tensor's kind of values, whole values only, not of a length that rows repeat after."""
        if name.endswith(".zero_points"):
            bits = self.bits(name)
            ones = sum(1 << i for i in range(0, 8, bits))
            middle = ones * ((1 << (bits - 1)) - 1)
            return self.kept(("zp", bits), lambda: (self.codes & ones) + middle)
        if kind == np.uint8:
            return self.codes
        if name.endswith(".scales"):
            step = WEIGHT_STD * 12**0.5 / 2 ** self.bits(name)

            def uniform():
                return step * self.rng.uniform(0.5, 1.5, (4 << 20) + 1)

            return self.kept(("scale", self.bits(name)), lambda: uniform().astype(kind))
        if name.endswith("norm.weight"):
            return np.ones(1 << 16, kind)
        return self.kept("float", lambda: (WEIGHT_STD * self.rng.standard_normal((4 << 20) + 1)).astype(kind))

    def kept(self, key, make):
        if key not in self.pools:
            self.pools[key] = make()
        return self.pools[key]


class InHugePages:
    """A file written from front to back in whole huge pages, which is how the page cache then keeps it."""

    def __init__(self, file):
        self.file, self.at, self.rest = file, 0, bytearray()

    def seek(self, at):
        self.write(bytes(at - self.at))

    def write(self, data):
        self.at += len(data)
        self.rest += data
        if whole := len(self.rest) // HUGE_PAGE * HUGE_PAGE:
            self.file.write(self.rest[:whole])
            del self.rest[:whole]

    def close(self):
        self.file.write(self.rest)


def write_repeated(file, pool, length):
    view = memoryview(np.ascontiguousarray(pool)).cast("B")
    while length > 0:
        piece = min(length, len(view))
        file.write(view[:piece])
        length -= piece


def external(tensor):
    return {e.key: e.value for e in tensor.external_data}


def write_package(args):
    layers = min(args.layers, 3)
    with tempfile.TemporaryDirectory(dir=args.package.parent) as folder:
        folder = Path(folder)
        checkpoint, base = folder / "checkpoint", folder / "base"
        checkpoint.mkdir()
        write_checkpoint(args, checkpoint, layers)
        widths = ["--experts", args.experts, "--attention", args.attention, "--embed", args.attention]
        widths += ["--lm-head", args.attention, "--block", args.block, "--zero-points", args.zero_points]
        convert = [args.doyen, "convert", checkpoint, "-o", base, "--dtype", args.scales, *widths]
        subprocess.run([str(c) for c in convert], check=True, stdout=subprocess.DEVNULL)
        model = onnx.load(base / "model.onnx", load_external_data=False)
        if args.layers > 3:
            repeat_layer(model, args.layers)
        out = folder / "package"
        out.mkdir()
        filler, at = Filler(args), 0
        with open(base / "model.onnx.data", "rb") as source, open(out / "model.onnx.data", "wb", buffering=0) as file:
            data = InHugePages(file)
            for tensor in model.graph.initializer:
                place = external(tensor)
                if not place:
                    continue
                length = int(place["length"])
                at = -(-at // ALIGN) * ALIGN
                data.seek(at)
                if tensor.name.endswith("_cache"):
                    source.seek(int(place["offset"]))
                    data.write(source.read(length))
                else:
                    kind = FLOATS.get(tensor.data_type, np.dtype(np.uint8))
                    write_repeated(data, filler.pool(tensor.name, kind), length)
                for entry in tensor.external_data:
                    if entry.key == "offset":
                        entry.value = str(at)
                at += length
            data.close()
        config = json.loads((base / "genai_config.json").read_text())
        config["model"]["decoder"]["num_hidden_layers"] = args.layers
        (out / "genai_config.json").write_text(json.dumps(config, indent=1))
        shutil.copy(base / "tokenizer.json", out)
        (out / "model.onnx").write_bytes(model.SerializeToString())
        os.rename(out, args.package)
    return at


# The GGUF file.

U32, F32, STRING = 4, 6, 8
GGML_F32, GGML_Q4_0 = 0, 2


def gguf_tensors(args):
    """Name, shape with the contiguous axis last, and type."""
    h, q, kv, e, i = (
        args.hidden,
        args.heads * args.head_size,
        args.kv_heads * args.head_size,
        args.expert_count,
        args.inter,
    )
    yield "token_embd.weight", [args.vocab, h], GGML_Q4_0
    yield "output_norm.weight", [h], GGML_F32
    yield "output.weight", [args.vocab, h], GGML_Q4_0
    for layer in range(args.layers):
        at = f"blk.{layer}."
        for name, shape in {
            "attn_norm": [h],
            "attn_q_norm": [args.head_size],
            "attn_k_norm": [args.head_size],
            "ffn_norm": [h],
            "ffn_gate_inp": [e, h],
        }.items():
            yield f"{at}{name}.weight", shape, GGML_F32
        for name, shape in {
            "attn_q": [q, h],
            "attn_k": [kv, h],
            "attn_v": [kv, h],
            "attn_output": [h, q],
            "ffn_gate_exps": [e, i, h],
            "ffn_up_exps": [e, i, h],
            "ffn_down_exps": [e, h, i],
        }.items():
            yield f"{at}{name}.weight", shape, GGML_Q4_0


def write_gguf(args):
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    arch = "qwen3moe"
    numbers = {
        "context_length": args.context,
        "embedding_length": args.hidden,
        "block_count": args.layers,
        "feed_forward_length": args.inter,
        "expert_feed_forward_length": args.inter,
        "attention.head_count": args.heads,
        "attention.head_count_kv": args.kv_heads,
        "attention.key_length": args.head_size,
        "attention.value_length": args.head_size,
        "expert_count": args.expert_count,
        "expert_used_count": args.top_k,
        "vocab_size": args.vocab,
    }
    entries = [text("general.architecture") + struct.pack("<I", STRING) + text(arch)]
    entries += [text("tokenizer.ggml.model") + struct.pack("<I", STRING) + text("no_vocab")]
    entries += [text(f"{arch}.{k}") + struct.pack("<II", U32, v) for k, v in numbers.items()]
    floats = {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6}
    entries += [text(f"{arch}.{k}") + struct.pack("<If", F32, v) for k, v in floats.items()]

    rng = np.random.default_rng(2)
    blocks = np.zeros(POOL // 18 + 1, [("scale", "<f2"), ("codes", "u1", 16)])
    step = WEIGHT_STD * 12**0.5 / 16
    blocks["scale"] = step * rng.uniform(0.5, 1.5, len(blocks))
    blocks["codes"] = rng.integers(0, 256, (len(blocks), 16), np.uint8)
    ones, router = np.ones(1 << 16, "<f4"), (WEIGHT_STD * rng.standard_normal((1 << 20) + 1)).astype("<f4")

    infos, places, at = [], [], 0
    for name, shape, kind in gguf_tensors(args):
        length = math.prod(shape) * 4 if kind == GGML_F32 else math.prod(shape) // 32 * 18
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(text(name) + dims + struct.pack("<IQ", kind, at))
        pool = blocks if kind == GGML_Q4_0 else router if "gate_inp" in name else ones
        places.append((at, length, pool))
        at = (at + length + 31) // 32 * 32
    header = struct.pack("<IIQQ", 0x46554747, 3, len(infos), len(entries)) + b"".join(entries + infos)
    start = (len(header) + 31) // 32 * 32
    partial = args.gguf.with_suffix(".part")
    with open(partial, "wb", buffering=0) as file:
        file.write(header)
        for offset, length, pool in places:
            file.seek(start + offset)
            write_repeated(file, pool, length)
        file.truncate(start + at)
    partial.rename(args.gguf)
    return start + at


def main():
    args = arguments()
    for path, write in ((args.package, write_package), (args.gguf, write_gguf)):
        if path is None:
            continue
        if path.exists():
            sys.exit(f"{path} is there already; remove it or choose another name")
        begin = time.perf_counter()
        size = write(args)
        seconds = time.perf_counter() - begin
        print(f"{path}: {args.layers} layers, {size / 2**30:.2f} GiB in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
