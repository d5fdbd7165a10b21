#!/usr/bin/env bash
# A release: the program with compiled kernels for every supported card and PTX for later ones inside, licences, in an archive. Needs
# no card.
#
# Usage: scripts/package.sh [OUT]        OUT: where the archive goes, target/package unless told
# Kernels are compiled with the oldest NVRTC supported, so that the oldest driver takes their PTX; those whose sources did not change
# since the last time are kept. A kernel that the program knows and the release lacks is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(realpath "$target")
out=${1:-$target/package}
oldest=13.0.88
venv=$target/cuda-nvrtc/$oldest
[ -d "$venv" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc==$oldest"
library=$(find "$venv" -name 'libnvrtc.so.13' -print -quit)
[ -n "$library" ] || { echo "no libnvrtc.so.13 in $venv" >&2; exit 1; }
cargo build --release --quiet -p doyen-cuda --example compile
kernels=$target/release-kernels
LD_LIBRARY_PATH=$(dirname "$library") "$target/release/examples/compile" --package "$kernels/packed" "$kernels/$oldest" | tail -1
DOYEN_KERNELS=$kernels/packed cargo build --release --quiet -p doyen --features kernels
name=doyen-$(cargo pkgid -p doyen | sed 's/.*[#@]//')-$(rustc -vV | sed -n 's/^host: //p')
folder=$out/$name
rm -rf "$folder"
mkdir -p "$folder"
cp "$target/release/doyen" README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$folder"
strip --strip-debug "$folder/doyen"
tar -C "$out" -cJf "$out/$name.tar.xz" "$name"
(cd "$out" && sha256sum "$name.tar.xz" | tee "$name.tar.xz.sha256")
