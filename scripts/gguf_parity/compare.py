"""Token ids of a converted GGUF file against llama.cpp's, and goldens for `doyen verify`.

    compare.py MODEL.gguf PACKAGE LLAMA_DUMP OUT_DIR

Writes OUT_DIR/llama.safetensors (what llama.cpp computes, with its activations of 8 bits) and OUT_DIR/float.safetensors (a
float32 evaluation in numpy of the dequantized weights as the file holds them, for llama, qwen2, qwen3 and gemma3 files).
"""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "In 1969, 3 astronauts flew 384400 km. It's 12:30 -- don't   panic!\n\n\tNext line.",
    "Gr\u00fc\u00dfe aus M\u00fcnchen \u2014 \u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f44d\U0001f3fd",
    "  leading and trailing spaces  \n \n",
    "a  b   c    d\n\n\n\n<b>bold</b> \u2581 <0x41> <unused3>",
    "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
]


def llama_cpp(dump, model, folder):
    """Ids, logits and greedy ids of each text."""
    (folder / "texts").write_bytes(b"".join(t.encode() + b"\0" for t in TEXTS))
    subprocess.run([dump, model, folder / "texts", folder / "dump"], check=True)
    data = (folder / "dump").read_bytes()
    at = 0

    def take(dtype, n):
        nonlocal at
        out = np.frombuffer(data, dtype, n, at)
        at += out.nbytes
        return out

    def count():
        return int(take("<i4", 1)[0])

    results = []
    for _ in TEXTS:
        ids = take("<i4", count())
        vocab = count()
        logits = take("<f4", len(ids) * vocab).reshape(-1, vocab) if len(ids) else np.zeros((0, vocab), "f4")
        results.append((ids, logits, take("<i4", count())))
    return results


class Float:
    """The model in float32, weights and their order as in the file."""

    def __init__(self, path):
        reader = GGUFReader(path)
        self.fields = reader.fields
        self.arch = self.field("general.architecture")
        self.weights = {
            t.name: dequantize(t.data, t.tensor_type).reshape(list(reversed(t.shape.tolist())))
            for t in reader.tensors
        }

    def field(self, key, default=None):
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def size(self, key, default=None):
        return self.field(f"{self.arch}.{key}", default)

    def norm(self, x, name):
        eps = self.size("attention.layer_norm_rms_epsilon")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.weights[f"{name}.weight"]

    def linear(self, x, name):
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def window(self, layer):
        """Positions a query of the layer sees; None for all."""
        slides = self.arch == "gemma3" and (layer + 1) % 6 != 0
        return self.size("attention.sliding_window") if slides else None

    def rotate(self, x, layer):
        """x [tokens, heads, channels]."""
        tokens, _, dim = x.shape
        local = self.window(layer) is not None
        base = 10000.0 if local else self.size("rope.freq_base", 10000.0)
        freq = base ** (-np.arange(0, dim, 2) / dim)
        if "rope_freqs.weight" in self.weights:
            freq = freq / self.weights["rope_freqs.weight"]
        angle = np.arange(tokens)[:, None, None] * freq
        cos, sin = np.cos(angle).astype("f4"), np.sin(angle).astype("f4")
        out = np.empty_like(x)
        if self.arch == "llama":
            first, second = np.s_[..., 0::2], np.s_[..., 1::2]
        else:
            first, second = np.s_[..., : dim // 2], np.s_[..., dim // 2 :]
        out[first] = x[first] * cos - x[second] * sin
        out[second] = x[second] * cos + x[first] * sin
        return out

    def attention(self, x, layer):
        at = f"blk.{layer}"
        heads = self.size("attention.head_count")
        groups = self.size("attention.head_count_kv", heads)
        tokens = len(x)
        q, k, v = (self.linear(x, f"{at}.attn_{n}").reshape(tokens, -1, self.head_dim(heads)) for n in "qkv")
        if f"{at}.attn_q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{at}.attn_q_norm"), self.norm(k, f"{at}.attn_k_norm")
        q, k = self.rotate(q, layer), self.rotate(k, layer)
        k, v = (np.repeat(t, heads // groups, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        visible = np.tri(tokens, dtype=bool)
        if (window := self.window(layer)) is not None:
            visible &= ~np.tri(tokens, k=-window, dtype=bool)
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        return self.linear(np.einsum("hqk,khd->qhd", scores, v).reshape(tokens, -1), f"{at}.attn_output")

    def head_dim(self, heads):
        return self.size("attention.key_length", self.size("embedding_length") // heads)

    def after(self, x, name):
        """The norm of a half's output, where there is one."""
        return self.norm(x, name) if f"{name}.weight" in self.weights else x

    def activation(self, x):
        if self.arch == "gemma3":
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    def logits(self, ids):
        x = self.weights["token_embd.weight"][ids]
        if self.arch == "gemma3":
            x = x * np.float32(np.sqrt(x.shape[-1]))
        for layer in range(self.size("block_count")):
            at = f"blk.{layer}"
            attended = self.attention(self.norm(x, f"{at}.attn_norm"), layer)
            x = x + self.after(attended, f"{at}.post_attention_norm")
            y = self.norm(x, f"{at}.ffn_norm")
            gate, up = self.linear(y, f"{at}.ffn_gate"), self.linear(y, f"{at}.ffn_up")
            down = self.linear(self.activation(gate) * up, f"{at}.ffn_down")
            x = x + self.after(down, f"{at}.post_ffw_norm")
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return (self.norm(x, "output_norm") @ head.T).astype("f4")


def main():
    model, package, dump, folder = sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    results = llama_cpp(dump, model, folder)
    different = 0
    for text, (ids, _, _) in zip(TEXTS, results):
        found = tokenizer.encode(text, add_special_tokens=True).ids
        if found != ids.tolist():
            different += 1
            print(f"token ids of {text!r}: llama.cpp {ids.tolist()}, package {found}")
    print(f"token ids: {len(TEXTS) - different} of {len(TEXTS)} texts equal")
    known = [r for r in results if len(r[0])]
    golden = {}
    for k, (ids, logits, greedy) in enumerate(known):
        golden |= {f"prompt_{k}": ids.astype("i8"), f"logits_{k}": logits, f"greedy_{k}": greedy.astype("i8")}
    save_file(golden, folder / "llama.safetensors")
    reference = Float(model)
    if reference.arch in ("llama", "qwen2", "qwen3", "gemma3"):
        golden = {}
        for k, (ids, logits, _) in enumerate(known):
            ours = reference.logits(ids)
            golden |= {f"prompt_{k}": ids.astype("i8"), f"logits_{k}": ours}
            agree = (ours.argmax(-1) == logits.argmax(-1)).mean()
            print(f"llama.cpp against float, text {k}: max abs {np.abs(ours - logits).max():.3g}, top-1 {agree:.3f}")
        save_file(golden, folder / "float.safetensors")
    return different


if __name__ == "__main__":
    sys.exit(min(main(), 1))
