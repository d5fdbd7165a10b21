"""Tables of what was measured, with ratios to the best peer and shares of the floor; and the same as one JSON object."""

import numpy as np

from .measure import quantiles


def number(value, digits=3):
    """About three significant digits, without exponents."""
    if value is None or not np.isfinite(value):
        return "-"
    return f"{value:.{max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))}f}" if value else "0"


def spread(q, unit=1.0):
    """Median, and how far half of the samples lie around it."""
    return f"{number(q['median'] * unit)} ({number(q['p25'] * unit)}-{number(q['p75'] * unit)})"


def aligned(header, rows):
    """A Markdown table whose columns line up."""
    cells = [header, *rows]
    widths = [max(len(str(r[i])) for r in cells) for i in range(len(header))]

    def line(r):
        return "| " + " | ".join(str(c).ljust(w) for c, w in zip(r, widths)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


def best(rows, ours: bool):
    """The fastest row of Doyen or of the peers."""
    mine = [r for r in rows if r["contender"].startswith("Doyen") == ours]
    return min(mine, key=lambda r: r["ms"]["median"], default=None)


def operators(rows, read) -> str:
    rows = [r.json() for r in rows]
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        group = [r for r in rows if r["case"] == case]
        peer = best(group, False)
        for r in group:
            share = r.get("share_of_floor")
            lines.append(
                [
                    case,
                    r["contender"],
                    r["scales"],
                    spread(r["ms"]),
                    number(r["gb_s"]["median"]) if share else "-",
                    f"{100 * share['median']:.0f} % ({100 * share['p25']:.0f}-{100 * share['p75']:.0f})"
                    if share
                    else "-",
                    number(r["gflop_s"]),
                    f"{peer['ms']['median'] / r['ms']['median']:.2f}x" if peer else "-",
                ]
            )
    header = [
        "case",
        "contender",
        "scales/KV",
        "ms (quartiles)",
        "GB/s",
        "share of floor",
        "GFLOP/s",
        "speed / best ORT",
    ]
    floor = f"Read loop: {spread(read, 1e-9)} GB/s. Shares are of its rate in the same round.\n\n"
    return floor + aligned(header, lines)


def mixed(rows) -> str:
    header = ["QMoE FC1/FC2 M=1", "scales", "ms (quartiles)", "share of floor", "time / byte-weighted uniform"]
    lines = [
        [
            f"{r['fc1']}/{r['fc2']} block {r['block']}",
            r["scales"],
            spread(r["ms"]),
            f"{100 * r['share_of_floor']['median']:.0f} %",
            spread(r["over_expected"]),
        ]
        for r in rows
    ]
    return aligned(header, lines)


KINDS = {"prefill": 1, "decode": 1, "first_token": 1e3, "peak_bytes": 2**-20}


def model_figures(runtime) -> dict:
    out = {"runtime": runtime.name, "package": runtime.package, "package_bytes": runtime.bytes}
    for kind in (*KINDS, "share", "read"):
        values = [r[kind] for r in runtime.results if r.get(kind) is not None]
        if values:
            out[kind] = quantiles(values)
    return out


def models(models_) -> str:
    lines = []
    for model in models_:
        figures = [model_figures(r) for r in model.runtimes]
        peers = [f for f in figures if f["runtime"] != "Doyen"]
        top = {k: max((f[k]["median"] for f in peers if k in f), default=None) for k in ("prefill", "decode")}
        for f in figures:
            ratios = {k: f"{f[k]['median'] / t:.2f}x" if t else "-" for k, t in top.items()}
            lines.append(
                [
                    model.name,
                    f["runtime"],
                    f"{f['package']}, {number(f['package_bytes'] / 2**20)} MiB",
                    spread(f["prefill"]),
                    ratios["prefill"],
                    spread(f["decode"]),
                    ratios["decode"],
                    f"{100 * f['share']['median']:.0f} %" if "share" in f else "-",
                    number(f["first_token"]["median"] * 1e3),
                    number(f["peak_bytes"]["median"] / 2**20),
                ]
            )
    header = ["model", "runtime", "package", "prefill tok/s", "/ best peer", "decode tok/s", "/ best peer"]
    return aligned([*header, "share of floor", "first token ms", "peak MiB"], lines)


def as_json(args, rows, read, pairs, models_) -> dict:
    out = {"threads": args.threads, "rounds": args.rounds, "versions": args.versions}
    if rows:
        out |= {"read_bytes_s": read, "operators": [r.json() for r in rows]}
    if pairs:
        out["mixed_widths"] = pairs
    if models_:
        out["models"] = [{"model": m.name, "runtimes": [model_figures(r) for r in m.runtimes]} for m in models_]
    return out
