#!/usr/bin/env bash
# One visit to a machine with a card: correctness first, then times, a short table last. Builds nothing there.
#
# Usage: scripts/cuda-visit.sh BIN [DATA] [OUT]
#   BIN   folder with doyen, check and bench: cargo build --release -p doyen, and --examples -p doyen-cuda
#   DATA  folder with conformance/ (cases), heldout.txt, families/ (crates/doyen-convert/tests/data/families) and goldens/NAME/, what is
#         there of it; in the last golden.safetensors, and a package or package-PRODUCER with golden-ort.safetensors
#   OUT   where full logs go, a new folder unless told
# NVRTC is taken from the loader's path, or from any Python or CUDA installation found.
set -uo pipefail
bin=$(realpath "${1:?folder with doyen, check and bench}")
data=${2:-}
out=${3:-$(mktemp -d)}
mkdir -p "$out"
summary=()

library=$(ldconfig -p | awk '/libnvrtc\.so\.13/ {print $NF; exit}')
[ -n "$library" ] || library=$(find /usr/local/cuda*/ /opt /usr/lib -name 'libnvrtc.so.13' -print -quit 2>/dev/null)
[ -n "$library" ] && export LD_LIBRARY_PATH=$(dirname "$library"):${LD_LIBRARY_PATH:-}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
echo "NVRTC: ${library:-not found}"

# step NAME SECONDS COMMAND...: runs it, keeps its log, notes what came of it.
step() {
    local name=$1 limit=$2 start=$SECONDS rc=0
    shift 2
    timeout "$limit" "$@" > "$out/$name.log" 2>&1 || rc=$?
    summary+=("$(printf '%-26s rc %-3s %4d s  %s' "$name" "$rc" $((SECONDS - start)) "$(grep -v '^$' "$out/$name.log" | tail -1 | cut -c1-110)")")
    return $rc
}

# What is compiled is kept for the steps that follow.
cubins=${XDG_CACHE_HOME:-$HOME/.cache}/doyen/cubins
step check 60 "$bin/check" "$cubins"
prompt='To sort a list in Python'
step run 40 "$bin/doyen" run --device cuda -v -p "$prompt" --temperature 0 -n 64
# Greedy and drawn tokens in exact mode are the CPU's: the card chooses as the host does.
for how in "--temperature 0" "--temperature 1.3 --top-k 20 --seed 5" "--temperature 0.8 --top-p 0.95 --min-p 0.02 --seed 9"; do
    name=$(tr -dc 'a-z0-9' <<< "$how")
    # shellcheck disable=SC2086 # several arguments
    step "cuda-$name" 40 "$bin/doyen" run --device cuda --numerics exact --kv-dtype f32 -p "$prompt" $how -n 64 --stats none
    # shellcheck disable=SC2086
    step "cpu-$name" 40 "$bin/doyen" run --numerics exact -p "$prompt" $how -n 64 --stats none
    same=DIFFERENT
    cmp -s "$out/cuda-$name.log" "$out/cpu-$name.log" && same=equal
    summary+=("tokens of the built-in model, $how: $same to the CPU's")
done
step verify 40 "$bin/doyen" verify --device cuda
step doctor 30 "$bin/doyen" doctor --device cuda
if [ -d "$data/conformance" ]; then
    step conformance 90 "$bin/doyen" conformance "$data/conformance" --backend cuda
fi
# Kernels are compiled by now.
if command -v compute-sanitizer > /dev/null; then
    step sanitizer 330 "$(dirname "$0")/cuda-sanitize.sh" "$bin" "$([ -d "$data/conformance" ] && echo "$data/conformance")" "$out/sanitizer"
fi
# family FOLDER: a reference of the converter, converted here and compared in exact and fast mode, packed and dense.
family() {
    local from=$1 name work
    name=family-$(basename "$from") work=$(mktemp -d)
    cp "$from/config.json" "$from/model.safetensors" "$work"
    echo '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}' > "$work/tokenizer.json"
    "$bin/doyen" convert "$work" -o "$work/package" --float --dtype f32 > "$out/$name.log" 2>&1 &&
        step "$name" 40 "$bin/doyen" verify "$work/package" --golden "$from/golden.safetensors" --device cuda
    grep -H 'greedy differs' "$out/$name.log" >> "$out/near-ties.txt"
    rm -rf "$work"
}
for reference in "$data"/families/*/; do
    [ -f "$reference/config.json" ] && family "$reference"
done
[ -s "$out/near-ties.txt" ] && sort -u "$out/near-ties.txt"
for package in "$data"/goldens/*/package*/; do
    [ -f "$package/genai_config.json" ] || [ -f "$package/model.onnx" ] || continue
    golden=$package/golden-ort.safetensors
    [ -f "$golden" ] || golden=$(dirname "$package")/golden.safetensors
    name=golden-$(basename "$(dirname "$package")")-$(basename "$package")
    step "$name" 40 "$bin/doyen" verify "$package" --golden "$golden" --device cuda
done
if [ -f "$data/heldout.txt" ]; then
    step eval-cuda 40 "$bin/doyen" eval --device cuda --text "$data/heldout.txt" --window 256 --windows 8
    step eval-cpu 40 "$bin/doyen" eval --numerics exact --text "$data/heldout.txt" --window 256 --windows 8
fi
step bench 60 "$bin/bench" "$cubins"

for name in check run verify conformance sanitizer; do
    [ -f "$out/$name.log" ] && { echo "== $name"; tail -25 "$out/$name.log" | cut -c1-180; }
done
echo "== bench"
cat "$out/bench.log"
echo "== summary"
printf '%s\n' "${summary[@]}"
