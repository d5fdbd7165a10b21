#!/usr/bin/env bash
# Loads a card for some minutes with one process and watches its memory and the host's: after the first fifth of the time both must
# stay as they are. Prints a line every half minute; fails when the memory grows or the process ends early.
#
# Usage: scripts/cuda-soak.sh DOYEN [SECONDS] [PACKAGE]     570 seconds and the built-in model unless told
set -uo pipefail
doyen=$(realpath "${1:?the program}")
seconds=${2:-570}
log=$(mktemp)
# More repetitions than there is time for; it is ended.
"$doyen" bench ${3:+"$3"} --device cuda --batch 16 --prompt 200 --gen 200 --repetitions 1000000 > "$log" 2>&1 &
pid=$!
trap 'kill $pid 2>/dev/null' EXIT
used() { nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits | awk -F', *' -v p=$pid '$1 == p {print $2}'; }
total() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -1; }
samples=$(mktemp)
start=$SECONDS
shown=-30
while passed=$((SECONDS - start)); [ $passed -lt "$seconds" ] && kill -0 $pid 2>/dev/null; do
    # Inside of a container the driver may not tell processes apart.
    card=$(used)
    card=${card:-$(total)}
    host=$(awk '/^VmRSS/ {print int($2 / 1024)}' /proc/$pid/status 2>/dev/null)
    echo "$passed $card ${host:-0}" >> "$samples"
    if [ $((passed - shown)) -ge 30 ]; then
        shown=$passed
        printf '%4d s  card %s MiB  host %s MiB\n' "$passed" "$card" "${host:-?}"
    fi
    sleep 5
done
if ! kill -0 $pid 2>/dev/null; then
    echo "the process ended early:"
    tail -3 "$log"
    exit 1
fi
# Not interrupted: a background process of a script ignores that.
kill $pid
wait $pid
awk -v n="$seconds" '
    $1 * 5 < n {next}
    !seen++ {card0 = card1 = $2; host0 = host1 = $3}
    {if ($2 < card0) card0 = $2; if ($2 > card1) card1 = $2; if ($3 < host0) host0 = $3; if ($3 > host1) host1 = $3}
    END {
        flat = seen > 3 && card1 - card0 <= 2 && host1 - host0 <= 64
        printf "%d s, after the first fifth: card %d to %d MiB, host %d to %d MiB, %d samples: %s\n", n, card0, card1, host0, host1, seen, flat ? "flat" : "NOT FLAT"
        exit !flat
    }' "$samples"
