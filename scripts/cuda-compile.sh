#!/usr/bin/env bash
# Compiles every CUDA kernel and variant without a card: with the newest NVRTC from PyPI for every supported card, with the
# oldest supported one for Hopper. Registers, stack, spills and shared memory of every kernel go to
# target/cuda-cubins/VERSION/resources.txt, what spills to the terminal.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet -p doyen-cuda --example compile
target=${CARGO_TARGET_DIR:-target}
for version in newest 13.0.88; do
    venv=$target/cuda-nvrtc/$version
    package=nvidia-cuda-nvrtc
    cards=()
    if [ "$version" = newest ]; then package+='<14'; else package+="==$version"; cards=(--cards 90); fi
    [ -d "$venv" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$package"
    library=$(find "$venv" -name 'libnvrtc.so.13' -print -quit)
    [ -n "$library" ] || { echo "no libnvrtc.so.13 in $venv" >&2; exit 1; }
    out=$target/cuda-cubins/$version
    mkdir -p "$out"
    LD_LIBRARY_PATH=$(dirname "$library") "$target/release/examples/compile" "${cards[@]}" "$out" > "$out/resources.txt" ||
        { tail -1 "$out/resources.txt"; exit 1; }
    head -1 "$out/resources.txt"
    awk 'NF == 7 && $6 > 0' "$out/resources.txt"
    tail -1 "$out/resources.txt"
done
