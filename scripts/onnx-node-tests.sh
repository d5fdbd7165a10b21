#!/bin/sh
# Writes the ONNX project's own node tests that apply here (onnx-node-tests.txt, by operator) into a folder, as
# test_NAME/{model.onnx,test_data_set_0/...}.
#   scripts/onnx-node-tests.sh [DIR]          default: target/onnx-node-tests
# The tests come from the pinned onnx package in a virtual environment of its own, made under target/ on first use.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../target}
out=${1:-$target/onnx-node-tests}
venv=$target/onnx-venv

mkdir -p "$out"
stamp=$out/made-from
recipe=$(cat "$here/onnx-node-tests.requirements.txt" "$here/onnx-node-tests.txt" "$here/onnx-node-tests.py")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$recipe" ]; then
    exit 0
fi
if ! cmp -s "$here/onnx-node-tests.requirements.txt" "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/onnx-node-tests.requirements.txt"
    # Last, so that an interrupted install is made again.
    cp "$here/onnx-node-tests.requirements.txt" "$venv/requirements.txt"
fi
rm -rf "$out"/test_* "$stamp"
"$venv/bin/python" -W ignore::RuntimeWarning "$here/onnx-node-tests.py" "$here/onnx-node-tests.txt" "$out"
# Last, so that an interrupted run is made again.
printf '%s\n' "$recipe" > "$stamp"
