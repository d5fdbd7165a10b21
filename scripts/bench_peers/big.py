"""Doyen beside llama.cpp on a large model of random weights; started by scripts/bench-30b.sh. Standard library only.

Whatever the time allows is measured: the most threads first, and again at the end, so that a drift of the machine shows.
The table comes last, so that the end of the output holds what matters.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent


class Clock:
    def __init__(self, seconds):
        self.begin, self.end = time.monotonic(), time.monotonic() + seconds

    def left(self):
        return self.end - time.monotonic()

    def say(self, text):
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)


def command(clock, words, **options):
    """Standard output of a program that ends in time, or None with its words printed."""
    words = [str(w) for w in words]
    try:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=max(clock.left(), 1), **options
        )
    except subprocess.TimeoutExpired:
        clock.say(f"out of time: {' '.join(words)}")
        return None
    if done.returncode:
        clock.say(f"failed ({done.returncode}): {' '.join(words)}\n{done.stderr[-1500:]}{done.stdout[-1500:]}")
        return None
    return done.stdout


def machine(clock):
    out = command(clock, ["lscpu"]) or ""
    keep = ("Model name", "CPU(s):", "L2", "L3", "NUMA node(s)")
    for line in out.splitlines():
        if line.strip().startswith(keep):
            clock.say(" ".join(line.split()))
    flags = next((line for line in out.splitlines() if line.startswith("Flags")), "").split()
    clock.say("features: " + " ".join(f for f in flags if f.startswith(("avx", "amx"))))


def smoke(args, clock):
    """The built-in model and a small one of the same kind against the reference, on this machine's kernels."""
    small = args.dir / "smoke"
    shape = "--layers 4 --hidden 512 --inter 256 --expert-count 16 --heads 8 --kv-heads 2 --head-size 64 --vocab 2048"
    make = [sys.executable, SCRIPTS / "random-moe.py", "--doyen", args.doyen, "--package", small, *shape.split()]
    if command(clock, make) is None:
        return False
    for package in ([], [small]):
        out = command(clock, [args.doyen, "verify", *package])
        if out is None:
            return False
        for line in out.splitlines():
            if line.strip().startswith("logits"):
                clock.say(f"verify {package[0].name if package else 'built-in'}: {' '.join(line.split())}")
    return True


def generate(args, clock):
    maker = [sys.executable, SCRIPTS / "random-moe.py", "--layers", args.layers]
    jobs = {
        args.package: [*maker, "--doyen", args.doyen, "--package", args.package],
        args.gguf: [*maker, "--gguf", args.gguf],
    }
    started = [subprocess.Popen([str(w) for w in job]) for path, job in jobs.items() if not path.exists()]
    return not any(job.wait() for job in started)


def run_doyen(args, clock, threads, repetitions):
    sizes = ["--prompt", args.prompt, "--gen", args.gen, "--repetitions", repetitions]
    out = command(clock, [args.doyen, "bench", args.package, *sizes, "--threads", threads, "--json"])
    if out is None:
        return None
    r = json.loads(out)
    return {
        "prefill": r["prefill_tok_s"]["median"],
        "decode": r["decode_tok_s"]["median"],
        "read": r["read_gb_s"]["median"],
        "share": r["share_of_read"]["median"],
        "bytes": r["bytes_per_token"]["total"],
        "first": r["load_to_first_token_ms"],
        "peak": r["memory"]["peak_bytes"],
        "kernels": r["kernels"],
        "device": r["device"],
    }


def run_llama(args, clock, threads, repetitions):
    sizes = ["-p", args.prompt, "-n", args.gen, "-r", repetitions, "-ngl", 0, "-fa", args.attention]
    out = command(clock, [args.llama, "-m", args.gguf, "-t", threads, *sizes, "-o", "json"])
    if out is None:
        return None
    best = {}
    for test in json.loads(out):
        kind = "prefill" if test["n_prompt"] else "decode"
        rate = statistics.median(test.get("samples_ts") or [test["avg_ts"]])
        if rate > best.get(kind, (0, ""))[0]:
            best[kind] = (rate, str(test["flash_attn"]))
    return {k: v[0] for k, v in best.items()} | {"attention": "/".join(v[1] for v in best.values())}


def rounds(args, clock):
    """Rows of (threads, Doyen's figures, llama.cpp's figures)."""
    rows, turns = [], [*args.threads, args.threads[0]]
    for threads in turns:
        begin = time.monotonic()
        repetitions = max(1, min(3, round(3 * threads / args.threads[0])))
        ours = run_doyen(args, clock, threads, repetitions)
        theirs = run_llama(args, clock, threads, repetitions)
        if theirs:
            # Only what was the faster of the two at something is tried again.
            args.attention = ",".join(sorted(set(theirs["attention"].split("/"))))
        rows.append((threads, ours, theirs))
        spent = time.monotonic() - begin
        clock.say(f"{threads} threads took {spent:.0f} s: doyen {brief(ours)}, llama.cpp {brief(theirs)}")
        if clock.left() < 10:
            break
    return rows


def brief(figures):
    return "nothing" if not figures else f"prefill {figures['prefill']:.0f}, decode {figures['decode']:.1f} tok/s"


def table(rows, args):
    print(f"\n{args.layers} layers, prompt {args.prompt}, {args.gen} generated, tok/s")
    print(
        f"package {size(args.package):.1f} GiB; GGUF {size(args.gguf):.1f} GiB, Q4_0, flash attention {args.attention}"
    )
    print(
        "threads | decode Doyen, llama.cpp, ratio | share of read loop | prefill Doyen, llama.cpp, ratio | first token"
    )
    for threads, ours, theirs in rows:
        cells = [f"{threads:7}"]
        for kind in ("decode", "prefill"):
            mine, other = ((f or {}).get(kind, float("nan")) for f in (ours, theirs))
            cells.append(f"{mine:8.1f} {other:8.1f} {mine / other:6.2f}x")
            if kind == "decode":
                cells.append(f"{100 * ours['share']:4.0f} % of {ours['read']:5.1f} GB/s" if ours else "-")
        cells.append(f"{ours['first']:6.0f} ms" if ours else "-")
        print(" | ".join(cells))
    if ours := next((o for _, o, _ in rows if o), None):
        print(f"{ours['device']}; {ours['bytes'] / 2**20:.0f} MiB a token, peak {ours['peak'] / 2**30:.2f} GiB")
        for kernel, count in ours["kernels"].items():
            print(f"  {count:5} x {kernel}")


def size(path):
    files = path.iterdir() if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files) / 2**30


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--doyen", type=Path, required=True)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--threads", type=lambda s: [int(t) for t in s.split(",")], default=[16, 8, 4, 1])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--dir", type=Path, default=Path("target/bench-30b"))
    parser.add_argument("--tmpfs", action="store_true", help="mount a memory file system at DIR")
    parser.add_argument("--keep", action="store_true", help="leave the files for another run")
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    clock = Clock(args.seconds)
    args.attention = "0,1"
    args.doyen, args.llama = args.doyen.resolve(), args.llama.resolve()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.tmpfs:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48g", "tmpfs", args.dir], check=True)
    args.package, args.gguf = args.dir / f"random-{args.layers}", args.dir / f"random-{args.layers}.gguf"
    machine(clock)
    try:
        if not smoke(args, clock):
            sys.exit("results are wrong here; nothing is timed")
        clock.say("verified; writing the models")
        if not generate(args, clock):
            sys.exit("the models could not be written")
        clock.say(f"written, {shutil.disk_usage(args.dir).free / 2**30:.0f} GiB of disk left")
        rows = rounds(args, clock)
        table(rows, args)
        if args.json:
            args.json.write_text(
                json.dumps([{"threads": t, "doyen": ours, "llama": theirs} for t, ours, theirs in rows], indent=1)
            )
    finally:
        shutil.rmtree(args.dir / "smoke", ignore_errors=True)
        if not args.keep and not args.tmpfs:
            shutil.rmtree(args.package, ignore_errors=True)
            args.gguf.unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
