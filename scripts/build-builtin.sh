#!/usr/bin/env bash
# Makes the built-in model anew from its checkpoint: scripts/build-builtin.sh CHECKPOINT_DIR
#
# Widths were chosen by held-out loss (12 windows of 512 tokens, fast mode; float32 is 2.7253 nats/token) under 16 MB:
# every expert projection at 4 bits, block 128, is 2.7697 at 16.7 MB; layer 1 loses least at 2 bits in FC1 (+0.004, other
# layers +0.02 to +0.06), and attention at 4 bits costs least in the first layers (+0.012). Together 2.7851 at 15.95 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
checkpoint=${1:?usage: scripts/build-builtin.sh CHECKPOINT_DIR}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# The binary embeds the package, so an old one must be there to build it.
cargo run --quiet --release -p doyen -- convert "$checkpoint" -o "$out/package" \
    --experts 4 --block 128 --embed 4 --lm-head 4 --attention 8 --layers '1:fc1=2;0-2:attention=4'
for file in genai_config.json model.onnx model.onnx.data tokenizer.json; do
    cp "$out/package/$file" crates/doyen/builtin/
done
