#!/usr/bin/env bash
# Operator cases on the CUDA kernels without a card, lane by lane on the host (tools/cuda-emulator).
#
# Usage: scripts/cuda-emulate.sh [--release] CASES [OPTIONS of doyen conformance]
#   --release  as a release runs: kernels that the program carries, where there is no compiler, so that it fails when a kernel is
#              asked for that releases do not have
set -euo pipefail
release=
[ "${1:-}" != --release ] || { release=1; shift; }
cases=$(realpath "${1:?folder of operator cases}")
shift
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
doyen=$target/debug/doyen
mkdir -p "$target/cuda-emulator"
emulator=$(realpath "$target/cuda-emulator")
tools/cuda-emulator/build.sh "$emulator"
# What was compiled is kept while kernels and emulator stay as they are.
version=$(cat tools/cuda-emulator/* | sha256sum | cut -c1-16)
libraries=$emulator
if [ -n "$release" ]; then
    cargo build --quiet -p doyen-cuda --example compile
    kernels=$emulator/release-$version
    LD_LIBRARY_PATH=$emulator "$target/debug/examples/compile" --cards 80 --package "$kernels/packed" "$kernels" | tail -1
    DOYEN_KERNELS=$kernels/packed cargo build --quiet -p doyen --features kernels
    libraries=$emulator/driver
    mkdir -p "$libraries"
    ln -f "$emulator/libcuda.so.1" "$libraries"
else
    cargo build --quiet -p doyen
fi
XDG_CACHE_HOME=$emulator/cache-$version LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$doyen" conformance "$cases" --backend cuda "$@"
