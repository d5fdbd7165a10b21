"""Rounds of single operators: ONNX Runtime at both accuracy levels and Doyen's variants, in turn."""

import gc
import statistics
from dataclasses import dataclass

from . import doyen, ort_ops
from .cases import Attention, operator_cases
from .measure import Samples, quantiles

VARIANTS = [
    doyen.Variant("fast", "f32"),
    doyen.Variant("fast", "f16"),
    doyen.Variant("exact", "f32"),
]


@dataclass
class Row:
    """Of one contender in one case."""

    case: object
    contender: str
    # Type of the scales; of keys and values for attention.
    scales: str
    samples: Samples

    def json(self):
        case, s = self.case, quantiles(self.samples.seconds)
        out = {"op": case.op, "case": case.name, "contender": self.contender, "scales": self.scales}
        out["ms"] = {k: v * 1e3 if k != "samples" else v for k, v in s.items()}
        out["gflop_s"] = case.flops() / s["median"] / 1e9
        if case.memory_bound:
            rates = [b / t / 1e9 for b, t in zip(self.samples.bytes, self.samples.seconds)]
            out |= {"gb_s": quantiles(rates), "share_of_floor": quantiles(self.samples.shares)}
        return out


def peers(group):
    """Name -> what has a call(case) of ONNX Runtime."""
    case = group[0]
    if isinstance(case, Attention):
        return {"ORT": ort_ops.Caches(case)}
    return {f"ORT accuracy_level {level}": ort_ops.Weights(case, level) for level in (0, 4)}


def variants(group):
    if isinstance(group[0], Attention):
        return {"Doyen": doyen.Variant("fast", "f32")}
    return {f"Doyen {v.numerics}, {v.scales} scales": v for v in VARIANTS}


def measure_group(group, args) -> tuple:
    """Rows of a group, and the read loop's rates."""
    rows, reads = {}, []
    ours = variants(group)
    theirs = peers(group)

    def row(case, name, scales):
        return rows.setdefault((case, name), Row(case, name, scales, Samples())).samples

    for _ in range(args.rounds):
        for name, weights in theirs.items():
            for case in group:
                row(case, name, "f32").extend(ort_ops.sample(weights, case))
        round_reads = []
        for name, variant in ours.items():
            measured, read = doyen.operator(args.doyen, group, variant, args.threads, args.calls)
            round_reads.append(read)
            for case, samples in measured.items():
                row(case, name, variant.scales).extend(samples)
        for name in theirs:
            for case in group:
                rows[case, name].samples.share(statistics.median(round_reads))
        reads += round_reads
    return [rows[case, name] for case in group for name in (*theirs, *ours)], reads


def measure(args) -> tuple:
    """Rows of all cases, and the quantiles of the read loop in bytes per second."""
    rows, reads = [], []
    for group in operator_cases(args.quick):
        if args.only and args.only not in group[0].name:
            continue
        print(f"{group[0].name} ...", flush=True)
        more, rates = measure_group(group, args)
        rows += more
        reads += rates
        gc.collect()
    return rows, quantiles(reads)
