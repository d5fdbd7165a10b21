"""Mixed widths, which ONNX Runtime's CPU provider has not implemented: what they cost beside the uniform ones.

Reading is what a token costs, so a layer of two widths should take the time of its bytes at the rates of the uniform
widths; `expected` is that time, from the uniform cases of the same process.
"""

from . import doyen
from .cases import Format, QMoe
from .measure import quantiles

WIDTHS = (2, 4, 8)


def parts(pair, block, scale_bytes):
    """Bytes of an expert's FC1 and FC2."""
    case = QMoe(Format(4, block), 1)
    fc1 = 2 * case.inter * Format(pair[0], block).row_bytes(case.hidden, scale_bytes)
    return fc1, case.hidden * Format(pair[1], block).row_bytes(case.inter, scale_bytes)


def measure(args, block: int = 32) -> list:
    """One dictionary a pair of widths: ms, share of the floor, and the time over the expected one."""
    variant = doyen.Variant("fast", "f16")
    pairs = [(a, b) for a in WIDTHS for b in WIDTHS]
    milliseconds, shares, over = ({p: [] for p in pairs} for _ in range(3))
    for _ in range(args.rounds):
        command = [
            args.doyen,
            "bench",
            "--op",
            "qmoe",
            "--tokens",
            1,
            "--block",
            block,
            "--scales",
            variant.scales,
            "--json",
        ]
        command += ["--bits", ",".join(f"{a}/{b}" for a, b in pairs), "--threads", args.threads]
        cases = {(c["fc1"], c["fc2"]): c for c in doyen.call([*command, "--repetitions", args.calls])["cases"]}
        time = {p: cases[p]["ms"]["median"] for p in pairs}
        # Milliseconds a byte at each uniform width.
        pace = {w: time[w, w] / sum(parts((w, w), block, variant.scale_bytes)) for w in WIDTHS}
        for pair in pairs:
            fc1, fc2 = parts(pair, block, variant.scale_bytes)
            milliseconds[pair].append(time[pair])
            shares[pair].append(cases[pair]["share_of_read"]["median"])
            over[pair].append(time[pair] / (fc1 * pace[pair[0]] + fc2 * pace[pair[1]]))
    return [
        {
            "fc1": pair[0],
            "fc2": pair[1],
            "block": block,
            "scales": variant.scales,
            "ms": quantiles(milliseconds[pair]),
            "share_of_floor": quantiles(shares[pair]),
            "over_expected": quantiles(over[pair]),
        }
        for pair in pairs
    ]
