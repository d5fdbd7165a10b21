"""Do both sides compute the same? Operator cases whose expected outputs are ONNX Runtime's, run by `doyen conformance`.

A speed of something wrong is worth nothing, so this comes before any timing. Exact expectations come from the same
numbers as 8-bit codes with explicit zero points, given as graph inputs: ONNX Runtime then computes with float
activations at every width (with 8-bit initializers, and 2-bit ones in blocks of 32, it quantizes them whatever it is told).
"""

import json
import subprocess
from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from .cases import Attention, Format, MatMul, QMoe
from .ort_ops import MS, attention_model, matmul_model, one_node, qmoe_model, session

# Of the largest output: what float sums in another order may differ by, and what int8 activations may.
EXACT, INT8 = 1e-4, 3e-2


def unpack(codes, bits):
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((codes[..., None] >> shifts) & (2**bits - 1)).reshape(*codes.shape[:-1], -1)


def exact_qmoe(case: QMoe, model, feeds):
    """ONNX Runtime's output of the model's own numbers with float activations."""
    import onnx

    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load_from_string(model).graph.initializer}
    bits, inputs = case.format.bits, dict(feeds)
    for w, s, z in (("w1", "s1", "z1"), ("w2", "s2", "z2")):
        inputs[w], inputs[s] = unpack(weights[w], bits), weights[s]
        inputs[z] = np.full(weights[s].shape, 1 << (bits - 1), np.uint8)
    node = helper.make_node(
        "QMoE",
        ["x", "router", "w1", "s1", "", "w2", "s2", "", "", "", "", "z1", "z2"],
        ["y"],
        domain=MS,
        k=case.top_k,
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        expert_weight_bits=8,
        block_size=case.format.block,
    )
    floats = [(n, inputs[n].shape) for n in ("x", "router", "s1", "s2")]
    oracle = one_node(
        node, floats, [("y", feeds["x"].shape)], {}, (), [(n, inputs[n].shape) for n in ("w1", "w2", "z1", "z2")]
    )
    return session(oracle).run(["y"], inputs)


def write_case(folder: Path, op: str, model: bytes, feeds: dict, outputs, tolerance: float):
    data = folder / "test_data_set_0"
    data.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model)
    for kind, tensors in (("input", feeds.items()), ("output", enumerate(outputs))):
        for i, (name, array) in enumerate(tensors):
            (data / f"{kind}_{i}.pb").write_bytes(numpy_helper.from_array(array, str(name)).SerializeToString())
    atol = tolerance * max(1.0, float(np.abs(outputs[0]).max()))
    case = {
        "op": op,
        "domain": MS,
        "since": 1,
        "rtol": tolerance if tolerance == EXACT else 0.0,
        "atol": atol,
        "oracle": "ort",
        "expect": "ok",
    }
    case |= {"match": "", "why": "outputs of ONNX Runtime", "tags": [], "checked": ["ort"]}
    (folder / "case.json").write_text(json.dumps(case, indent=1))


def qmoe_cases(root: Path, rng):
    for bits in (2, 4, 8):
        for block in (32, 128):
            for tokens in (1, 8):
                case = QMoe(Format(bits, block), tokens, experts=8, top_k=4, hidden=512, inter=256)
                feeds = {
                    "x": rng.standard_normal((tokens, case.hidden), np.float32),
                    "router": rng.standard_normal((tokens, case.experts), np.float32),
                }
                model = qmoe_model(case, 4, rng)
                name = f"qmoe-{bits}-{block}-m{tokens}"
                expected = exact_qmoe(case, model, feeds)
                write_case(root / "exact" / name, "QMoE", model, feeds, expected, EXACT)
                # Both sides with int8 activations, each in its own way.
                write_case(root / "fast" / name, "QMoE", model, feeds, session(model).run(["y"], feeds), INT8)


def other_cases(root: Path, rng):
    for bits in (2, 4, 8):
        case = MatMul(Format(bits, 32), 8, 512, 1024)
        feeds = {"x": rng.standard_normal((8, case.columns), np.float32)}
        model = matmul_model(case, 0, rng)
        write_case(
            root / "exact" / f"matmulnbits-{bits}",
            "MatMulNBits",
            model,
            feeds,
            session(model).run(["y"], feeds),
            EXACT,
        )
    case = Attention(16, 16, heads=8, kv_heads=2, head_size=64)
    wide, narrow = case.heads * case.head_size, case.kv_heads * case.head_size
    empty = np.zeros((1, case.kv_heads, 0, case.head_size), np.float32)
    feeds = {
        "q": rng.standard_normal((1, 16, wide), np.float32),
        "k": rng.standard_normal((1, 16, narrow), np.float32),
        "v": rng.standard_normal((1, 16, narrow), np.float32),
        "past_key": empty,
        "past_value": empty,
        "seqlens": np.array([15], np.int32),
        "total": np.array(16, np.int32),
    }
    model = attention_model(case)
    write_case(
        root / "exact" / "gqa-prefill", "GroupQueryAttention", model, feeds, session(model).run(None, feeds), EXACT
    )


def run(doyen: Path, root: Path) -> list[str]:
    """Writes the cases and runs them; what did not agree, in words."""
    rng = np.random.default_rng(7)
    qmoe_cases(root, rng)
    other_cases(root, rng)
    failures = []
    for numerics in ("exact", "fast"):
        command = [doyen, "conformance", root / numerics, "--backend", "cpu", "--numerics", numerics]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        print(f"{numerics}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()}")
        if done.returncode:
            failures.append(f"{numerics} outputs differ from ONNX Runtime's:\n{done.stdout}{done.stderr}")
    return failures
