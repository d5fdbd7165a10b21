#!/usr/bin/env bash
# Uniform widths in ONNX Runtime and in Doyen, logit by logit: scripts/ort-side-by-side.sh CHECKPOINT GOLDEN [DOYEN]
#
# GOLDEN is a file of reference outputs of the checkpoint (prompt_k, logits_k, greedy_k). The float package is compared with
# it in both runtimes; of the quantized ones, ONNX Runtime's logits are recorded and Doyen's compared with them. Left out
# are the formats that ONNX Runtime's CPU kernels run with int8 activations whatever they are told: 8-bit experts in
# blocks, and 2-bit ones in blocks of 32 or more.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkpoint=${1:?usage: scripts/ort-side-by-side.sh CHECKPOINT GOLDEN [DOYEN]}
golden=${2:?usage: scripts/ort-side-by-side.sh CHECKPOINT GOLDEN [DOYEN]}
doyen=${3:-$here/../target/release/doyen}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compare() {
    local name=$1
    shift
    echo "== $name"
    "$doyen" convert "$checkpoint" -o "$work/$name" --dtype f32 "$@" >"$work/$name.log" 2>&1 || {
        cat "$work/$name.log"
        return 1
    }
    local tolerance=(--tolerance 1e9)
    [[ $name != float ]] || tolerance=()
    # A quantized package is far from the float golden; what counts there is that Doyen agrees with ONNX Runtime.
    "$here/python.sh" ort-parity.py "$work/$name" --golden "$golden" --exact --out "$work/$name.safetensors" \
        "${tolerance[@]}" | sed 's/^/ONNX Runtime against the golden, /'
    "$doyen" verify "$work/$name" --golden "$work/$name.safetensors" --numerics exact
}

compare float --float
compare bits-4 --experts 4 --mlp 4 --attention 4 --embed 4 --lm-head 4
compare bits-4-symmetric --experts 4 --mlp 4 --attention 4 --embed 4 --lm-head 4 --zero-points off
compare bits-4-block-128 --experts 4 --mlp 4 --attention 4 --embed 4 --lm-head 4 --block 128
compare bits-2-block-16 --experts 2 --mlp 2 --attention 2 --embed 2 --lm-head 2 --block 16
compare experts-8-row --experts 8 --block row
compare experts-4-row --experts 4 --block row
