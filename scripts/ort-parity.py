"""Runs a package in ONNX Runtime on the CPU and compares its logits with a file of reference outputs.

    scripts/python.sh ort-parity.py PACKAGE --golden FILE [--exact] [--out FILE] [--tolerance X] [--greedy N]

FILE holds prompt_k (int64 [n]), logits_k (float32 [n, vocab], all positions) and greedy_k (int64 [steps]) for
k = 0, 1, ..., as the goldens do; any of logits_k and greedy_k may be absent. --out writes what ONNX Runtime computed in
the same form, so that `doyen verify PACKAGE --golden OUT` compares Doyen with it.

Packages permit int8 activations (accuracy_level 4), and ONNX Runtime uses them; --exact takes the permission away, so
that products run on float activations. (Its QMoE quantizes activations all the same at 8 bits with blocks, and at 2 bits
with blocks of 32 or more when the rows are a multiple of 128.)

Exit code 1 when a logit differs by more than the tolerance, or a greedy token differs where the reference's margin
exceeds it.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from safetensors.numpy import load_file, save_file

FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Decoder:
    """A package's session with its cache ports."""

    def __init__(self, package: Path, exact: bool):
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(package))
        model = onnx.load(package / "model.onnx", load_external_data=False)
        if exact:
            for attribute in (a for n in model.graph.node for a in n.attribute if a.name == "accuracy_level"):
                attribute.i = 0
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.past = [i for i in self.session.get_inputs() if i.name.startswith("past_key_values.")]
        self.outputs = ["logits"] + [p.name.replace("past_key_values", "present") for p in self.past]

    def empty_cache(self):
        return [np.zeros((1, p.shape[1], 0, p.shape[3]), FLOATS[p.type]) for p in self.past]

    def step(self, ids, cache):
        """Logits [n, vocab] of the new tokens, and the cache after them."""
        total = cache[0].shape[2] + len(ids)
        feeds = {p.name: c for p, c in zip(self.past, cache)}
        feeds["input_ids"] = np.asarray(ids, np.int64)[None]
        feeds["attention_mask"] = np.ones((1, total), np.int64)
        logits, *cache = self.session.run(self.outputs, feeds)
        return logits[0].astype(np.float32), cache

    def greedy(self, prompt, steps):
        """Tokens by argmax, end of sequence ignored, and the last row's logits before each."""
        logits, cache = self.step(prompt, self.empty_cache())
        tokens, rows = [], []
        for _ in range(steps):
            rows.append(logits[-1])
            tokens.append(int(rows[-1].argmax()))
            logits, cache = self.step(tokens[-1:], cache)
        return tokens, rows


def first_difference(found, rows, expected):
    """Index of the first token that differs and how far apart both tokens' logits are, or None."""
    for i, (a, b) in enumerate(zip(found, expected)):
        if a != b:
            return i, float(rows[i][a] - rows[i][b])
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--greedy", type=int, help="tokens to generate (default: as many as the reference has)")
    args = parser.parse_args()

    golden = load_file(args.golden)
    decoder = Decoder(args.package, args.exact)
    made, failed = {}, False
    for k in itertools.count():
        prompt = golden.get(f"prompt_{k}")
        if prompt is None:
            break
        logits, _ = decoder.step(prompt, decoder.empty_cache())
        expected = golden.get(f"greedy_{k}")
        steps = args.greedy if args.greedy is not None else 0 if expected is None else len(expected)
        tokens, rows = decoder.greedy(prompt, steps)
        made |= {f"prompt_{k}": prompt, f"logits_{k}": logits}
        if tokens:
            made[f"greedy_{k}"] = np.asarray(tokens, np.int64)
        report = [f"prompt {k}:"]
        if (reference := golden.get(f"logits_{k}")) is not None:
            worst = float(np.abs(logits - reference).max())
            agree = float((logits.argmax(-1) == reference.argmax(-1)).mean())
            failed |= not worst <= args.tolerance
            report.append(f"max abs difference {worst:.3g}, top-1 agreement {agree:.1%}")
        if tokens and expected is not None:
            difference = first_difference(tokens, rows, expected)
            if difference is None:
                report.append(f"{min(steps, len(expected))} greedy tokens equal")
            else:
                failed |= not difference[1] <= args.tolerance
                report.append("greedy token {} differs, margin {:.3g}".format(*difference))
        print(" ".join(report))
    if not made:
        sys.exit(f"{args.golden}: no prompt_0")
    if args.out:
        save_file(made, args.out)
        print(f"wrote {args.out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    try:
        main()
    except ort.capi.onnxruntime_pybind11_state.NotImplemented as e:
        sys.exit(f"ONNX Runtime cannot run this package: {e}")
