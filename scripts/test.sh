#!/usr/bin/env bash
# All tests: the workspace's own, ONNX's node tests and the operator conformance cases. Needs cargo, git and python3.
set -euo pipefail
cd "$(dirname "$0")/.."
shared=${DOYEN_SHARED:-../shared}

scripts/onnx-node-tests.sh target/onnx-node-tests
cargo build --release --quiet
doyen=${CARGO_TARGET_DIR:-target}/release/doyen
for backend in reference cpu; do
    echo "== conformance cases on $backend"
    "$doyen" conformance "$shared/conformance" --backend "$backend"
    echo "== ONNX node tests on $backend"
    "$doyen" conformance target/onnx-node-tests --backend "$backend"
done
cargo test --workspace
