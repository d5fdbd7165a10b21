#!/usr/bin/env bash
# Compiles every CUDA kernel and variant for every supported card with the oldest and the newest NVRTC from PyPI. Needs no
# card. Usage: scripts/cuda-compile.sh [VERSION...] (of nvidia-cuda-nvrtc; "newest" for the last published).
set -euo pipefail
cd "$(dirname "$0")/.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(13.0.88 newest)

cargo build --release --quiet -p doyen-cuda --example compile
target=${CARGO_TARGET_DIR:-target}
for version in "${versions[@]}"; do
    venv=$target/cuda-nvrtc/$version
    if [ ! -d "$venv/lib" ] || [ "$version" = newest ]; then
        [ -d "$venv/lib" ] || python3 -m venv "$venv"
        package=nvidia-cuda-nvrtc
        [ "$version" = newest ] || package+="==$version"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$package"
    fi
    library=$(find "$venv" -name 'libnvrtc.so.13' -print -quit)
    [ -n "$library" ] || { echo "no libnvrtc.so.13 in $venv" >&2; exit 1; }
    LD_LIBRARY_PATH=$(dirname "$library") "$target/release/examples/compile" "$target/cuda-cubins/$version"
done
