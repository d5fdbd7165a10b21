#!/usr/bin/env bash
# All tests: those of the scripts, the workspace's own, and on every instruction set of this machine ONNX's node tests and the operator conformance cases. Needs cargo, git and python3.
set -euo pipefail
cd "$(dirname "$0")/.."
shared=${DOYEN_SHARED:-../shared}

echo "== scripts/bench-compare"
PYTHONDONTWRITEBYTECODE=1 python3 -m unittest discover --start-directory scripts/bench_compare --top-level-directory scripts
scripts/onnx-node-tests.sh target/onnx-node-tests
cargo build --release --quiet
doyen=${CARGO_TARGET_DIR:-target}/release/doyen
echo "== conformance cases on reference"
"$doyen" conformance "$shared/conformance" --backend reference
echo "== ONNX node tests on reference"
"$doyen" conformance target/onnx-node-tests --backend reference
levels=$("$doyen" doctor --json | python3 -c 'import json, sys; print(*json.load(sys.stdin)["machine"]["isa"])')
for level in $levels; do
    echo "== conformance cases on cpu, $level"
    DOYEN_CPU=$level "$doyen" conformance "$shared/conformance" --backend cpu
    echo "== ONNX node tests on cpu, $level"
    DOYEN_CPU=$level "$doyen" conformance target/onnx-node-tests --backend cpu
done
cargo test --workspace
