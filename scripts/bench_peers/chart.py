"""Bars of the figures that matter most, as SVG for the README."""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLORS = {"Doyen": "#c2410c", "llama.cpp": "#475569", "onnxruntime-genai": "#94a3b8", "ORT": "#94a3b8"}


def bars(axis, groups, title, names_at_bars=False):
    """Groups of (label, [(who, value)]), a cluster of horizontal bars each; colours or names say whose they are."""
    y, ticks, labels, seen = 0.0, [], [], set()
    for label, pairs in groups:
        if not names_at_bars:
            ticks.append(y + (len(pairs) - 1) / 2)
            labels.append(label)
        for who, value in pairs:
            axis.barh(y, value, 0.85, color=COLORS[who], label=None if who in seen else who)
            axis.text(value, y, f" {value:.0f}", va="center", fontsize=7)
            seen.add(who)
            if names_at_bars:
                ticks.append(y)
                labels.append(who)
            y += 1
        y += 0.7
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12)
    if not names_at_bars:
        axis.legend(fontsize=8, frameon=False, ncols=len(seen), loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)


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
    """A panel of operators over the whole width, then a row of decode and prefill for each model."""
    operators, models = operator_groups(figures.get("operators", [])), figures.get("models", [])
    heights = [len(operators) * 2.7 + 2] if operators else []
    heights += [len(model_groups([m], "decode")[0][1]) + 2 for m in models]
    plt.rcParams["svg.hashsalt"] = "doyen"
    figure = plt.figure(figsize=(8, 0.19 * sum(heights)))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if operators:
        bars(figure.add_subplot(grid[0, :]), operators, "One token, % of the read loop's bandwidth")
    for row, model in enumerate(models, len(heights) - len(models)):
        for column, kind in enumerate(("decode", "prefill")):
            axis = figure.add_subplot(grid[row, column])
            bars(axis, model_groups([model], kind), f"{model['model']}, {kind}, tok/s", names_at_bars=True)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
