#!/usr/bin/env bash
# Runs the fuzz targets one after the other, with coverage feedback, on the stable toolchain.
#   scripts/fuzz.sh [SECONDS] [TARGET...]     default: 60 seconds each, all targets
# A crash stops the script; its input is left in fuzz/artifacts/TARGET. Corpora grow in fuzz/corpus/TARGET; models and
# manifests of the shared data (DOYEN_SHARED, default ../shared) are seeds. Needs a C++ compiler for libFuzzer.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(onnx_decode manifest safetensors_header gguf chat_template)
shared=${DOYEN_SHARED:-../shared}
host=$(rustc -vV | sed -n 's/^host: //p')
built=${CARGO_TARGET_DIR:-fuzz/target}/fuzz

# What cargo-fuzz passes, without the sanitizers, which need a nightly toolchain and find what unsafe code does.
# --target keeps the flags away from build scripts and macros.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Clink-dead-code" \
    cargo build --release --quiet --manifest-path fuzz/Cargo.toml --target "$host" --target-dir "$built"

for target in "${targets[@]}"; do
    corpus=fuzz/corpus/$target
    mkdir -p "$corpus" "fuzz/artifacts/$target"
    seeds=()
    [ "$target" != gguf ] || cp crates/doyen-convert/tests/data/*.gguf "$corpus"
    if [ -d "$shared" ]; then
        case $target in
        onnx_decode) seeds=("$shared/conformance/cases") ;;
        manifest) find "$shared/goldens" \( -name genai_config.json -o -name inference_metadata.yaml \) | while read -r f; do
            cp "$f" "$corpus/$(echo "$f" | md5sum | cut -c1-16)"
        done ;;
        chat_template) find "$shared/goldens" "$shared/models" -name chat_template.jinja | while read -r f; do
            cp "$f" "$corpus/$(echo "$f" | md5sum | cut -c1-16)"
        done ;;
        esac
    fi
    echo "== $target"
    "$built/$host/release/$target" "$corpus" "${seeds[@]}" -max_total_time="$seconds" -timeout=20 \
        -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 -print_funcs=0 -verbosity=0 \
        -artifact_prefix="fuzz/artifacts/$target/"
done
