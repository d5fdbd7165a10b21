#!/usr/bin/env bash
# A release: program, compiled kernels for every supported card and PTX for later ones, licences, in an archive. Needs no card.
#
# Usage: scripts/package.sh [OUT]        OUT: where the archive goes, target/package unless told
# Kernels are compiled with the oldest NVRTC supported, so that the oldest driver takes their PTX.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=${1:-$target/package}
cargo build --release --quiet -p doyen
cargo build --release --quiet -p doyen-cuda --example compile
venv=$target/cuda-nvrtc/13.0.88
[ -d "$venv" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc==13.0.88'
library=$(find "$venv" -name 'libnvrtc.so.13' -print -quit)
[ -n "$library" ] || { echo "no libnvrtc.so.13 in $venv" >&2; exit 1; }
name=doyen-$(cargo pkgid -p doyen | sed 's/.*[#@]//')-$(rustc -vV | sed -n 's/^host: //p')
folder=$out/$name
rm -rf "$folder"
mkdir -p "$folder"
LD_LIBRARY_PATH=$(dirname "$library") "$target/release/examples/compile" --package "$folder/kernels" | tail -1
cp "$target/release/doyen" README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$folder"
tar -C "$out" -cJf "$out/$name.tar.xz" "$name"
(cd "$out" && sha256sum "$name.tar.xz" | tee "$name.tar.xz.sha256")
