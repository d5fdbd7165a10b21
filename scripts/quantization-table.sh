#!/usr/bin/env bash
# Loss and bytes of every pair of expert widths: scripts/quantization-table.sh CHECKPOINT_DIR TEXT [WINDOWS]
#
# Converts the checkpoint at each FC1/FC2 pair of 2, 4 and 8 bits (defaults otherwise), evaluates the package in exact and
# in fast mode, and checks both against a float64 evaluation of the dequantized weights that shares no code with Doyen.
# Prints the table of docs/quantization.md; fails when a loss is further than 0.003 nats/token from the float64 one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkpoint=${1:?usage: scripts/quantization-table.sh CHECKPOINT_DIR TEXT [WINDOWS]}
text=${2:?usage: scripts/quantization-table.sh CHECKPOINT_DIR TEXT [WINDOWS]}
windows=${3:-12}
doyen=${DOYEN:-${CARGO_TARGET_DIR:-$here/../target}/release/doyen}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nll() {
    "$doyen" eval "$1" --text "$text" --windows "$windows" --numerics "$2" --json |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["nll"])'
}
"$doyen" convert "$checkpoint" -o "$work/float" --float --dtype f32 >"$work/log" 2>&1
float=$(nll "$work/float" exact)
printf 'float32: %.4f nats/token over %s windows of 512\n\n' "$float" "$windows"
echo '| fc1/fc2 | package MB | loss, exact | loss, fast | float64 of the dequantized weights | fast against float32 |'
echo '|---|---|---|---|---|---|'
status=0
for fc1 in 8 4 2; do
    for fc2 in 8 4 2; do
        package=$work/$fc1-$fc2
        "$doyen" convert "$checkpoint" -o "$package" --experts "fc1=$fc1,fc2=$fc2" >"$work/log" 2>&1
        exact=$(nll "$package" exact)
        fast=$(nll "$package" fast)
        bytes=$(du -sb "$package" | cut -f1)
        reference=$("$here/python.sh" loss-dequantized.py "$package" --text "$text" --windows "$windows" --json |
            python3 -c 'import json, sys; print(json.load(sys.stdin)["mean_nll"])')
        python3 - "$fc1/$fc2" "$bytes" "$exact" "$fast" "$reference" "$float" <<'P' || status=1
import sys
pair, rest = sys.argv[1], [float(v) for v in sys.argv[2:]]
size, exact, fast, reference, plain = rest
print(f"| {pair} | {size / 1e6:.1f} | {exact:.4f} | {fast:.4f} | {reference:.4f} | {fast - plain:+.4f} |", flush=True)
sys.exit(max(abs(exact - reference), abs(fast - reference)) > 0.003)
P
        rm -rf "$package"
    done
done
[ $status -eq 0 ] || echo "a loss is further than 0.003 from the float64 evaluation" >&2
exit $status
