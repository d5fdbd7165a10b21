"""The command line of scripts/bench-peers."""

import argparse
import json
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from . import llama

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """\
what is measured:
  setup    nothing: fetches and builds the peers
  smoke    nothing: Doyen's outputs against ONNX Runtime's on the same tensors; ops and all begin with it
  ops      QMoE, MatMulNBits and GroupQueryAttention beside ONNX Runtime and a read loop
  models   SmolLM2-135M-Instruct and docmoe beside llama.cpp and onnxruntime-genai
  all      everything

examples:
  scripts/bench-peers all --json figures.json --svg docs/peers.svg
  scripts/bench-peers ops --quick
  scripts/bench-peers setup --llama-cpu avx512"""


def arguments():
    kind = argparse.RawDescriptionHelpFormatter
    about = "Doyen beside its peers in one run: contenders take turns, figures are medians."
    parser = argparse.ArgumentParser("bench-peers", description=about, epilog=EPILOG, formatter_class=kind)
    parser.add_argument("what", nargs="?", default="all", choices=["setup", "smoke", "ops", "models", "all"])
    parser.add_argument("--doyen", type=Path, default=ROOT / "target/release/doyen", help="[target/release/doyen]")
    parser.add_argument("--cache", type=Path, default=ROOT / "target/bench-peers", help="[target/bench-peers]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender [5]")
    parser.add_argument("--calls", type=int, default=9, help="calls of an operator in a turn of Doyen's [9]")
    parser.add_argument("--repetitions", type=int, default=2, help="of a model in a turn [2]")
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="one operator case of each kind")
    parser.add_argument("--only", help="operator cases whose name holds this")
    parser.add_argument("--docmoe", type=Path, default=ROOT.parent / "shared/models/docmoe-hf", help="its checkpoint")
    parser.add_argument("--llama-bench", type=Path, help="use this one instead of building it")
    parser.add_argument("--llama-cpu", choices=llama.CPUS, default="native", help="what to build it for")
    parser.add_argument("--genai-package", type=Path, help="an int4 package by ONNX Runtime GenAI's builder")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--svg", type=Path, help="write a chart here")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    args.cache, args.doyen = args.cache.resolve(), args.doyen.resolve()
    if args.what != "setup" and not args.doyen.exists():
        parser.error(
            f"{args.doyen} is not there: build it with `cargo build --release`, or say where it is with --doyen"
        )
    return args


def main():
    args = arguments()
    # After the arguments: help needs none of the packages that these do.
    from . import chart, mixed, models, operators, ort_ops, report, smoke

    args.versions = {p: version(p) for p in ("onnxruntime", "onnxruntime-genai", "gguf")}
    args.versions |= {"llama.cpp": llama.PACKAGE}
    if args.what == "setup":
        print(llama.setup(args.cache, args.llama_cpu, args.threads))
        return
    args.versions["doyen"] = subprocess.run(
        [args.doyen, "--version"], check=False, capture_output=True, text=True
    ).stdout.split()[-1]
    if args.what in ("smoke", "ops", "all"):
        ort_ops.make_pool(args.threads)
        with tempfile.TemporaryDirectory(dir=args.cache) as folder:
            if failures := smoke.run(args.doyen, Path(folder)):
                raise SystemExit("\n".join(failures))
    rows, read, pairs, measured = [], None, [], []
    if args.what in ("ops", "all"):
        rows, read = operators.measure(args)
        pairs = [] if args.quick or args.only else mixed.measure(args)
    if args.what in ("models", "all"):
        measured = models.measure(args)
    print(
        "\n"
        + ", ".join(f"{k} {v}" for k, v in args.versions.items())
        + f"; {args.threads} threads, {args.rounds} rounds\n"
    )
    if rows:
        print(report.operators(rows, read) + "\n")
    if pairs:
        print(report.mixed(pairs) + "\n")
    if measured:
        print(report.models(measured))
    figures = report.as_json(args, rows, read, pairs, measured)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.svg and (rows or measured):
        chart.draw(figures, args.svg)


if __name__ == "__main__":
    main()
