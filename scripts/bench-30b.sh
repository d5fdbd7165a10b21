#!/usr/bin/env bash
# Doyen and llama.cpp on the CPU with a model of Qwen3-30B-A3B's geometry and random weights, side by side:
#
#     scripts/bench-30b.sh DOYEN LLAMA_BENCH [--threads 16,8,4,1] [--layers 48] [--dir DIR] [--tmpfs] [--seconds 520]
#
# LLAMA_BENCH comes from `scripts/bench-peers setup --llama-cpu avx512` on any machine. Writes the package and the GGUF file
# (about 17 GB each) to DIR, checks results against the reference, and takes turns. Needs python3 with numpy and onnx,
# 40 GB of disk (or, with --tmpfs, of memory, where root may mount one) and 40 GB of memory.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
doyen=${1:?usage: scripts/bench-30b.sh DOYEN LLAMA_BENCH [options]}
llama=${2:?usage: scripts/bench-30b.sh DOYEN LLAMA_BENCH [options]}
shift 2
exec python3 "$here/bench_peers/big.py" --doyen "$doyen" --llama "$llama" "$@"
