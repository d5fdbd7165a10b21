"""Held-out loss of a package's dequantized weights, by an implementation of its own in numpy.

    scripts/python.sh loss-dequantized.py PACKAGE --text FILE [--windows N] [--window 512] [--dtype float64]
                      [--expect NLL] [--tolerance 0.003]

Every quantized weight is expanded to (code - zero point) * scale and the graph is evaluated in float64, node by node, so
the result says what the stored bits mean, apart from any kernel. The text is tokenized whole and cut into consecutive
windows that run alone; the first token of a window is not scored. With --expect, exit code 1 when the mean negative
log-likelihood (nats) is further from it than the tolerance.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# The products here are small; on a busy machine the threads of BLAS spend more time waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import onnx
from onnx import numpy_helper
from tokenizers import Tokenizer


def unpack(data, bits):
    """Codes of the last axis, least significant bits first."""
    per_byte = 8 // bits
    shifts = (np.arange(per_byte) * bits).astype(np.uint8)
    codes = (data[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], data.shape[-1] * per_byte)


def expand(codes, scales, zero_points, columns, block):
    """Codes [..., columns] with one scale and zero point per block of columns."""
    wide = lambda per_block: np.repeat(per_block, block, axis=-1)[..., :columns]
    return (codes[..., :columns].astype(scales.dtype) - wide(zero_points)) * wide(scales)


class Evaluator:
    """Runs prompts of equal length through a decoder graph, without a past."""

    def __init__(self, package, dtype):
        self.dtype = dtype
        graph = onnx.load(package / "model.onnx").graph
        self.nodes = list(graph.node)
        self.constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.attributes = {n.name: {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in self.nodes}
        self.past_inputs = {i.name for i in graph.input}
        self.weights = {}
        for node in self.nodes:
            prepare = getattr(self, "prepare_" + node.op_type, None)
            if prepare:
                self.weights[node.name] = prepare(node, self.attributes[node.name])

    def constant(self, name):
        """A float constant in the type of the evaluation, other constants as they are; None if absent."""
        value = self.constants.get(name)
        return value.astype(self.dtype) if value is not None and value.dtype.kind in "fV" else value

    def source(self, name):
        """A constant, seen through Reshape and Transpose nodes."""
        if name in self.constants:
            return self.constant(name)
        node = next(n for n in self.nodes if name in n.output)
        value = self.source(node.input[0])
        if node.op_type == "Transpose":
            return value.transpose(self.attributes[node.name]["perm"])
        assert node.op_type == "Reshape", node.op_type
        return value.reshape(self.constants[node.input[1]])

    def zero_points(self, name, blocks, bits):
        if not name:
            return np.asarray([1 << (bits - 1)] * blocks, self.dtype)
        return unpack(self.constants[name], bits)[..., :blocks].astype(self.dtype)

    # Weights, expanded once.

    def prepare_MatMulNBits(self, node, a):
        inputs = list(node.input) + [""] * 3
        blocks = -(-a["K"] // a["block_size"])
        codes = unpack(self.source(inputs[1]), a["bits"]).reshape(a["N"], -1)
        zero_points = self.zero_points(inputs[3], blocks, a["bits"])
        weight = expand(codes, self.constant(inputs[2]), zero_points, a["K"], a["block_size"])
        return weight.T.copy(), self.constant(inputs[5]) if inputs[5] else 0

    def prepare_GatherBlockQuantized(self, node, a):
        inputs = list(node.input) + [""]
        codes, scales = unpack(self.constants[inputs[0]], a["bits"]), self.constant(inputs[2])
        zero_points = self.zero_points(inputs[3], scales.shape[1], a["bits"])
        return expand(codes, scales, zero_points, codes.shape[1], a["block_size"])

    def prepare_QMoE(self, node, a):
        inputs = list(node.input) + [""] * 15
        base, block = a["expert_weight_bits"], a.get("block_size", 0)

        def projection(weight, scales, zero_points, bits):
            codes, scales = unpack(self.constants[weight], bits), self.constant(scales)
            experts, rows, columns = codes.shape
            if block:
                zero_points = self.zero_points(zero_points, scales.shape[2], bits)
                return expand(codes, scales, zero_points, columns, block)
            # Row-wise zero points are packed across the rows of an expert.
            zero_points = self.zero_points(zero_points, rows, bits)
            zero_points = np.broadcast_to(zero_points, (experts, rows))
            return (codes - zero_points[..., None]) * scales[..., None]

        fc1 = projection(inputs[2], inputs[3], inputs[11], a.get("fc1_expert_weight_bits", base))
        fc2 = projection(inputs[5], inputs[6], inputs[12], a.get("fc2_expert_weight_bits", base))
        return fc1, fc2

    def prepare_MoE(self, node, a):
        return self.constant(node.input[2]), self.constant(node.input[4])

    def prepare_MatMul(self, node, a):
        return self.source(node.input[1])

    # Operators. Values are float arrays of the evaluation's type; absent inputs are None.

    def op_Identity(self, a, x):
        return x

    def op_Gather(self, a, table, ids):
        return np.take(table, ids, axis=a.get("axis", 0))

    def op_Reshape(self, a, x, shape):
        return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)])

    def op_Transpose(self, a, x):
        return x.transpose(a["perm"])

    def op_Mul(self, a, x, y):
        return x * y

    def op_Add(self, a, x, y):
        return x + y

    def op_Sigmoid(self, a, x):
        return 1 / (1 + np.exp(-x))

    def op_Softmax(self, a, x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def op_TopK(self, a, x, k):
        return -np.sort(-x, axis=-1)[..., : int(k[0])]

    def op_ReduceSum(self, a, x, axes):
        return x.sum(tuple(axes), keepdims=bool(a.get("keepdims", 1)))

    def op_SimplifiedLayerNormalization(self, a, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + a["epsilon"]) * weight

    def op_SkipSimplifiedLayerNormalization(self, a, x, skip, weight):
        total = x + skip
        return self.op_SimplifiedLayerNormalization(a, total, weight), None, None, total

    def rotate(self, x, cos, sin):
        """x [batch, heads, tokens, dim], positions from 0, halves of a head paired."""
        half = cos.shape[1]
        cos, sin = cos[: x.shape[2]], sin[: x.shape[2]]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, first * sin + second * cos, rest], -1)

    def op_GroupQueryAttention(self, a, q, k, v, *rest):
        heads, kv_heads = a["num_heads"], a["kv_num_heads"]
        if k is None:
            dim = q.shape[-1] // (heads + 2 * kv_heads)
            q, k, v = np.split(q, [heads * dim, (heads + kv_heads) * dim], axis=-1)
        batch, tokens, _ = q.shape
        by_head = lambda x, n: x.reshape(batch, tokens, n, -1).swapaxes(1, 2)
        cos, sin = rest[4], rest[5]
        q, k, v = self.rotate(by_head(q, heads), cos, sin), self.rotate(by_head(k, kv_heads), cos, sin), by_head(v, kv_heads)
        k, v = np.repeat(k, heads // kv_heads, 1), np.repeat(v, heads // kv_heads, 1)
        scores = a["scale"] * (q @ k.swapaxes(2, 3))
        distance = np.arange(tokens)[:, None] - np.arange(tokens)
        visible = distance >= 0
        if (window := a.get("local_window_size", -1)) > 0:
            visible &= distance < window
        out = self.op_Softmax({}, np.where(visible, scores, -np.inf)) @ v
        return out.swapaxes(1, 2).reshape(batch, tokens, -1)

    def experts(self, a, x, logits, weights, mixing):
        """Interleaved SwiGLU experts; mixing holds a weight for every expert of every token."""
        fc1, fc2 = weights
        flat = x.reshape(-1, x.shape[-1])
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : a["k"]]
        out = np.zeros_like(flat)
        for e in range(len(fc1)):
            rows = np.nonzero((chosen == e).any(-1))[0]
            if len(rows):
                hidden = flat[rows] @ fc1[e].T
                gate, up = hidden[:, 0::2], hidden[:, 1::2]
                out[rows] += mixing[rows, e, None] * ((gate * self.op_Sigmoid({}, gate) * up) @ fc2[e].T)
        return out.reshape(x.shape)

    def op_MoE(self, a, x, logits, *_, weights):
        mixing = self.op_Softmax({}, logits)
        if a.get("normalize_routing_weights", 0):
            mixing = mixing / -np.sort(-mixing, -1)[:, : a["k"]].sum(-1, keepdims=True)
        return self.experts(a, x, logits, weights, mixing)

    def op_QMoE(self, a, x, logits, *rest, weights):
        given = rest[12] if len(rest) > 12 else None
        if given is None:
            return self.op_MoE(a, x, logits, weights=weights)
        return self.experts(a, x, logits, weights, given)

    def op_MatMul(self, a, x, *_, weights):
        return x @ weights

    def op_MatMulNBits(self, a, x, *_, weights):
        return x @ weights[0] + weights[1]

    def op_GatherBlockQuantized(self, a, table, ids, *_, weights):
        return weights[ids]

    def run(self, ids):
        """Logits [batch, tokens, vocab]."""
        values = {"input_ids": ids}
        for node in self.nodes:
            expanded = node.name in self.weights
            inputs = [values.get(i) if expanded or i in values else self.constant(i) for i in node.input]
            if node.op_type in ("Cast", "Sub", "Shape") or "attention_mask" in node.name:
                continue  # The mask's lengths; without a past every position counts.
            if all(i in self.constants for i in node.input):
                continue  # Views of constants, taken by source().
            extra = {"weights": self.weights[node.name]} if expanded else {}
            result = getattr(self, "op_" + node.op_type)(self.attributes[node.name], *inputs, **extra)
            for name, value in zip(node.output, result if isinstance(result, tuple) else (result,)):
                values[name] = value
        return values["logits"]


def nll(logits, ids):
    """Negative log-likelihood of ids[1:], per window."""
    logits, targets = logits[:, :-1], ids[:, 1:]
    top = logits.max(-1, keepdims=True)
    total = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return (total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--expect", type=float)
    parser.add_argument("--tolerance", type=float, default=0.003)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.package / "tokenizer.json"))
    ids = np.asarray(tokenizer.encode(args.text.read_text(), add_special_tokens=False).ids)
    count = min(args.windows, len(ids) // args.window)
    if not count:
        sys.exit(f"{args.text}: {len(ids)} tokens, fewer than a window of {args.window}")
    ids = ids[: count * args.window].reshape(count, args.window)
    evaluator, start, losses = Evaluator(args.package, np.dtype(args.dtype)), time.time(), []
    for first in range(0, count, args.batch):
        batch = ids[first : first + args.batch]
        losses.extend(nll(evaluator.run(batch), batch).tolist())
        print(f"\r{len(losses)}/{count} windows, {time.time() - start:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    mean = float(np.mean(losses))
    if args.json:
        print(json.dumps({"mean_nll": mean, "perplexity": float(np.exp(mean)), "windows": count, "window_nll": losses}))
    else:
        print(f"mean NLL {mean:.6f}, perplexity {np.exp(mean):.4f}, {count} windows of {args.window}")
    if args.expect is not None and not abs(mean - args.expect) <= args.tolerance:
        sys.exit(f"expected {args.expect:.6f}, {abs(mean - args.expect):.6f} away, tolerance {args.tolerance}")


if __name__ == "__main__":
    main()
