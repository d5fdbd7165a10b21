#!/usr/bin/env bash
# Operator cases on the CUDA kernels without a card, lane by lane on the host (tools/cuda-emulator).
#
# Usage: scripts/cuda-emulate.sh CASES [OPTIONS of doyen conformance]
set -euo pipefail
cases=$(realpath "${1:?folder of operator cases}")
shift
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet -p doyen
emulator=$target/cuda-emulator
tools/cuda-emulator/build.sh "$emulator"
# What was compiled is kept while kernels and emulator stay as they are.
version=$(cat tools/cuda-emulator/* | sha256sum | cut -c1-16)
export XDG_CACHE_HOME=$(realpath "$emulator")/cache-$version LD_LIBRARY_PATH=$(realpath "$emulator"):${LD_LIBRARY_PATH:-}
"$target/debug/doyen" conformance "$cases" --backend cuda "$@"
