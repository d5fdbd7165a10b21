"""Bars of the figures that matter most, as SVG for the README."""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLORS = {"Doyen": "#c2410c", "llama.cpp": "#475569", "onnxruntime-genai": "#94a3b8", "ORT": "#94a3b8"}


def bars(axis, groups, unit):
    """Groups of (label, [(who, value)]), a group a cluster of horizontal bars."""
    y, ticks, labels, seen = 0.0, [], [], set()
    for label, pairs in groups:
        ticks.append(y + (len(pairs) - 1) / 2)
        labels.append(label)
        for who, value in pairs:
            axis.barh(y, value, 0.85, color=COLORS[who], label=None if who in seen else who)
            axis.text(value, y, f" {value:.0f}", va="center", fontsize=7)
            seen.add(who)
            y += 1
        y += 0.7
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(unit, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12)
    axis.legend(fontsize=7, frameon=False, loc="lower right")


def operator_groups(rows):
    """Share of the read bandwidth of one token through a layer, best of each side."""
    out = []
    for case in dict.fromkeys(r["case"] for r in rows if "share_of_floor" in r and r["case"].endswith("M=1")):
        group = [r for r in rows if r["case"] == case]
        shares = {
            side: [r["share_of_floor"]["median"] for r in group if r["contender"].startswith(side)]
            for side in ("Doyen", "ORT")
        }
        out.append((case.removesuffix(" M=1"), [(side, 100 * max(s)) for side, s in shares.items() if s]))
    return out


def model_groups(models, kind):
    out = []
    for model in models:
        best = {}
        for r in model["runtimes"]:
            who = next(name for name in COLORS if r["runtime"].startswith(name))
            best[who] = max(best.get(who, 0.0), r[kind]["median"])
        out.append((model["model"], list(best.items())))
    return out


def draw(figures: dict, path):
    panels = []
    if rows := figures.get("operators"):
        panels.append((operator_groups(rows), "one token, % of the read loop's bandwidth"))
    # Models differ by more than a chart can show at once.
    for model in figures.get("models", []):
        for kind in ("decode", "prefill"):
            panels.append((model_groups([model], kind), f"{kind}, tok/s"))
    heights = [sum(len(p) + 0.7 for _, p in groups) + 1.6 for groups, _ in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7, 0.19 * sum(heights) + 0.5 * len(panels)), height_ratios=heights, squeeze=False
    )
    for axis, (groups, unit) in zip(axes.flat, panels):
        bars(axis, groups, unit)
    plt.rcParams["svg.hashsalt"] = "doyen"
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
