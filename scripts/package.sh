#!/usr/bin/env bash
# A release: program, compiled kernels for every supported card and PTX for later ones, licences, in an archive. Needs no card.
#
# Usage: scripts/package.sh [OUT]        OUT: where the archive goes, target/package unless told
# Kernels are compiled with the oldest NVRTC supported, so that the oldest driver takes their PTX; those of the last release
# whose sources did not change are taken from it. What the release lacks of the kernels that the program knows is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=${1:-$target/package}
cargo build --release --quiet -p doyen
cargo build --release --quiet -p doyen-cuda --example compile
compile=$target/release/examples/compile
venv=$target/cuda-nvrtc/13.0.88
[ -d "$venv" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc==13.0.88'
library=$(find "$venv" -name 'libnvrtc.so.13' -print -quit)
[ -n "$library" ] || { echo "no libnvrtc.so.13 in $venv" >&2; exit 1; }
name=doyen-$(cargo pkgid -p doyen | sed 's/.*[#@]//')-$(rustc -vV | sed -n 's/^host: //p')
folder=$out/$name
mkdir -p "$folder/kernels"
find "$folder" -mindepth 1 -maxdepth 1 ! -name kernels -exec rm -r {} +
LD_LIBRARY_PATH=$(dirname "$library") "$compile" --package "$folder/kernels" | tail -1
"$compile" --check "$folder/kernels"
cp "$target/release/doyen" README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$folder"
strip --strip-debug "$folder/doyen"
tar -C "$out" -cJf "$out/$name.tar.xz" "$name"
(cd "$out" && sha256sum "$name.tar.xz" | tee "$name.tar.xz.sha256")
