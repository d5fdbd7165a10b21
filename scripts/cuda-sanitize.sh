#!/usr/bin/env bash
# compute-sanitizer on a machine with a card: memcheck, racecheck, synccheck and initcheck over the operator cases in exact and fast
# numerics, over comparisons of random shapes, and over tokens of the built-in model with caches of every kind. All at once, a table last.
#
# Usage: scripts/cuda-sanitize.sh BIN [CASES] [OUT]
#   BIN    folder with doyen, and with check where comparisons of random shapes are wanted (examples of doyen-cuda)
#   CASES  folder of operator cases
#   OUT    where logs go, a new folder unless told
# SECONDS_EACH caps every run, 300 unless told; comparisons that were not reached are not counted as clean.
set -uo pipefail
bin=$(realpath "${1:?folder with doyen}")
cases=${2:-}
out=${3:-$(mktemp -d)}
mkdir -p "$out"
command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not in the path; it comes with CUDA's toolkit" >&2; exit 1; }
cubins=${XDG_CACHE_HOME:-$HOME/.cache}/doyen/cubins

# judge TOOL NAME COMMAND...: in the background. Memory that is refused is part of the comparisons, so that errors of calls are not counted.
judge() {
    local tool=$1 name=$2
    shift 2
    (
        start=$SECONDS
        timeout "${SECONDS_EACH:-300}" compute-sanitizer --tool "$tool" --error-exitcode 3 $([ "$tool" = memcheck ] && echo --report-api-errors no) \
            "$@" > "$out/$tool-$name.log" 2>&1
        echo "rc $?, $((SECONDS - start)) s" >> "$out/$tool-$name.log"
    ) &
}

prompt='To sort a list in Python'
for tool in memcheck racecheck synccheck initcheck; do
    if [ -n "$cases" ]; then
        judge $tool cases-exact "$bin/doyen" conformance "$cases" --backend cuda
        judge $tool cases-fast "$bin/doyen" conformance "$cases" --backend cuda --numerics fast
    fi
    for kv in f32 f16 bf16 int8; do
        compute=bf16
        [ $kv != f16 ] || compute=f16
        judge $tool tokens-$kv "$bin/doyen" run --device cuda --compute-dtype $compute --kv-dtype $kv -p "$prompt" --temperature 0 -n 6
    done
done
if [ -x "$bin/check" ]; then
    for tool in memcheck racecheck; do
        for part in past prompts draws products experts; do judge $tool check-$part "$bin/check" "$cubins" --every 11 $part; done
    done
fi
wait
bad=0
for log in "$out"/*.log; do
    said=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|comparisons,|[0-9]+ passed' "$log" | sed 's/^=* *//' | tail -2 | tr '\n' ' ')
    printf '%-26s %-14s %s\n' "$(basename "$log" .log)" "$(tail -1 "$log")" "${said:0:160}"
    # In fast numerics the cases' tolerances, which are those of float32, do not hold; what the sanitizer finds is 3.
    fine=0
    [[ $log != *cases-fast.log ]] || fine='[01]'
    tail -1 "$log" | grep -q "^rc $fine," || bad=1
done
exit $bad
