"""Single operators in ONNX Runtime: one-node models with random weights in enough copies to be cold, and their calls."""

import time

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from .cases import WEIGHT_STD, Attention, MatMul, QMoe
from .measure import Samples

MS = "com.microsoft"
# Bytes of weights that calls cycle through, so that none finds those of an earlier call in a cache.
COLD_BYTES = 512 << 20


def raw(name, array):
    kind = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.float32): TensorProto.FLOAT}[array.dtype]
    return helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)


def random_rows(rng, lead, columns, fmt):
    """Codes [lead..., bytes] and f32 scales [lead..., blocks] of random weights."""
    codes = np.frombuffer(rng.bytes(int(np.prod(lead)) * columns * fmt.bits // 8), np.uint8)
    # Uniform codes of b bits deviate by 2^b / sqrt(12) steps.
    step = WEIGHT_STD * 12**0.5 / 2**fmt.bits
    scales = step * rng.uniform(0.5, 1.5, (*lead, columns // fmt.block)).astype(np.float32)
    return codes.reshape(*lead, -1), scales


def qmoe_model(case: QMoe, accuracy: int, rng):
    e, h, i, f = case.experts, case.hidden, case.inter, case.format
    w1, s1 = random_rows(rng, (e, 2 * i), h, f)
    w2, s2 = random_rows(rng, (e, h), i, f)
    node = helper.make_node(
        "QMoE",
        ["x", "router", "w1", "s1", "", "w2", "s2"],
        ["y"],
        domain=MS,
        k=case.top_k,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        normalize_routing_weights=1,
        expert_weight_bits=f.bits,
        block_size=f.block,
        accuracy_level=accuracy,
    )
    return one_node(
        node, [("x", ["t", h]), ("router", ["t", e])], [("y", ["t", h])], {"w1": w1, "s1": s1, "w2": w2, "s2": s2}
    )


def matmul_model(case: MatMul, accuracy: int, rng):
    n, k, f = case.rows, case.columns, case.format
    codes, scales = random_rows(rng, (n,), k, f)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "w", "s"],
        ["y"],
        domain=MS,
        K=k,
        N=n,
        bits=f.bits,
        block_size=f.block,
        accuracy_level=accuracy,
    )
    weights = {"w": codes.reshape(n, k // f.block, -1), "s": scales}
    return one_node(node, [("x", ["t", k])], [("y", ["t", n])], weights)


def attention_model(case: Attention):
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_key", "past_value", "seqlens", "total"],
        ["y", "present_key", "present_value"],
        domain=MS,
        num_heads=case.heads,
        kv_num_heads=case.kv_heads,
    )
    cache = [1, case.kv_heads, "p", case.head_size]
    wide, narrow = case.heads * case.head_size, case.kv_heads * case.head_size
    inputs = [
        ("q", [1, "s", wide]),
        ("k", [1, "s", narrow]),
        ("v", [1, "s", narrow]),
        ("past_key", cache),
        ("past_value", cache),
    ]
    outputs = [("y", [1, "s", wide]), ("present_key", cache), ("present_value", cache)]
    integers = [("seqlens", [1]), ("total", [])]
    return one_node(node, inputs, outputs, {}, integers)


def one_node(node, inputs, outputs, weights, integers=(), bytes_=()):
    def value(kind):
        return lambda pair: helper.make_tensor_value_info(pair[0], kind, pair[1])

    floats = value(TensorProto.FLOAT)
    graph = helper.make_graph(
        [node],
        "one",
        [*map(floats, inputs), *map(value(TensorProto.INT32), integers), *map(value(TensorProto.UINT8), bytes_)],
        [*map(floats, outputs)],
        [raw(name, array) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def make_pool(threads: int):
    """The one pool that all sessions share: workers of their own would spin beside those of the next (which cost
    half the speed). To be called once, before the first session."""
    ort.set_global_thread_pool_sizes(threads, 1)


def session(model: bytes):
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def copies_for(case) -> int:
    return max(2, -(-COLD_BYTES // case.copy_bytes(4)))


class Weights:
    """Sessions over copies of the weights of a group of cases (which differ in tokens alone)."""

    def __init__(self, case, accuracy: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        build = {QMoe: qmoe_model, MatMul: matmul_model}[type(case)]
        self.rng = rng
        # The bytes may be equal: every session holds its own, at addresses of its own.
        model = build(case, accuracy, rng)
        self.sessions = [session(model) for _ in range(copies_for(case))]
        self.turn = 0

    def call(self, case):
        """Seconds of a call with new inputs, and the bytes of weights and f32 scales that it had to read."""
        self.turn = (self.turn + 1) % len(self.sessions)
        columns = case.hidden if isinstance(case, QMoe) else case.columns
        feeds = {"x": self.rng.standard_normal((case.tokens, columns), np.float32)}
        moved = case.copy_bytes(4)
        if isinstance(case, QMoe):
            logits = feeds["router"] = self.rng.standard_normal((case.tokens, case.experts), np.float32)
            chosen = np.argpartition(-logits, case.top_k, axis=-1)[:, : case.top_k]
            moved = len(np.unique(chosen)) * case.expert_bytes(4)
        start = time.perf_counter()
        self.sessions[self.turn].run(None, feeds)
        return time.perf_counter() - start, moved


class Caches:
    """GroupQueryAttention with caches bound to past and present at once, as its own generation loop does."""

    def __init__(self, case: Attention):
        rng = np.random.default_rng(0)
        self.session = session(attention_model(case))
        count = copies_for(case) if case.tokens == 1 else 1
        shape = (1, case.kv_heads, case.context, case.head_size)
        narrow, wide = case.kv_heads * case.head_size, case.heads * case.head_size
        fill = rng.standard_normal((1 << 20) + 7, np.float32)
        caches = [[ort.OrtValue.ortvalue_from_numpy(np.resize(fill, shape)) for _ in "kv"] for _ in range(count)]
        q = rng.standard_normal((1, case.tokens, wide), np.float32)
        k, v = rng.standard_normal((2, 1, case.tokens, narrow), np.float32)
        self.bindings = []
        for key, value in caches:
            binding = self.session.io_binding()
            for name, array in {"q": q, "k": k, "v": v}.items():
                binding.bind_cpu_input(name, array)
            binding.bind_cpu_input("seqlens", np.array([case.context - 1], np.int32))
            binding.bind_cpu_input("total", np.array(case.context, np.int32))
            for side, cache in (("key", key), ("value", value)):
                binding.bind_ortvalue_input(f"past_{side}", cache)
                binding.bind_ortvalue_output(f"present_{side}", cache)
            binding.bind_output("y")
            self.bindings.append(binding)
        self.turn = 0

    def call(self, case):
        self.turn = (self.turn + 1) % len(self.bindings)
        start = time.perf_counter()
        self.session.run_with_iobinding(self.bindings[self.turn])
        return time.perf_counter() - start, case.copy_bytes()


def sample(weights, case, seconds: float = 0.2, calls: int = 3) -> Samples:
    """Calls for about `seconds`, `calls` at least, one right after the other, so that its workers stay awake. The first does
    not count."""
    samples, spent = Samples(), 0.0
    weights.call(case)
    while spent < seconds or len(samples.seconds) < calls:
        time_, moved = weights.call(case)
        samples.add(time_, moved)
        spent += time_
    return samples
