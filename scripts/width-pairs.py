"""Loss and size of every pair of expert widths, by Doyen and by an implementation of its own.

    scripts/python.sh width-pairs.py CHECKPOINT --text FILE --work DIR [--doyen target/release/doyen] [--windows 64]
                      [--block N|row] [--numerics exact|fast]

Converts the checkpoint nine times into DIR, evaluates each package with `doyen eval` and with loss-dequantized.py, and
prints a table. Exit code 1 when the two losses of a pair differ by more than 0.003. In fast mode, whose activations are
rounded to int8, a few windows are not enough for that.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

TOLERANCE = 0.003
WIDTHS = [2, 4, 8]


def run(*command):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def main():
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--doyen", type=Path, default=here.parent / "target/release/doyen")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--block", default="32")
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    args = parser.parse_args()

    args.work.mkdir(parents=True, exist_ok=True)
    options = ["--text", args.text, "--windows", args.windows, "--json"]
    failed = False
    print("| fc1 | fc2 | experts | package | loss (Doyen) | loss (dequantized, float64) | difference |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for fc1 in WIDTHS:
        for fc2 in WIDTHS:
            package = args.work / f"fc1-{fc1}-fc2-{fc2}"
            if package.exists():
                sys.exit(f"{package} is in the way")
            convert = [args.doyen, "convert", args.checkpoint, "-o", package, "--block", args.block, "--json"]
            parts = json.loads(run(*convert, "--experts", f"fc1={fc1},fc2={fc2}"))["parts"]
            experts = sum(n for name, n in parts.items() if name.startswith("experts"))
            ours = json.loads(run(args.doyen, "eval", package, *options, "--numerics", args.numerics))["nll"]
            reference = json.loads(run(sys.executable, here / "loss-dequantized.py", package, *options))["mean_nll"]
            failed |= not abs(ours - reference) <= TOLERANCE
            size = sum(f.stat().st_size for f in package.iterdir())
            mib = lambda n: f"{n / 2**20:.2f} MiB"
            print(f"| {fc1} | {fc2} | {mib(experts)} | {mib(size)} | {ours:.4f} | {reference:.4f} | {ours - reference:+.5f} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
