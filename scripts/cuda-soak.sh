#!/usr/bin/env bash
# Loads a card for some minutes with one process and watches its memory: it must stay as it was after the first minute.
#
# Usage: scripts/cuda-soak.sh DOYEN [MINUTES] [PACKAGE]     10 minutes and the built-in model unless told
set -uo pipefail
doyen=$(realpath "${1:?the program}")
minutes=${2:-10}
log=$(mktemp)
# More repetitions than there is time for; it is ended.
"$doyen" bench ${3:+"$3"} --device cuda --batch 16 --prompt 200 --gen 200 --repetitions 1000000 > "$log" 2>&1 &
pid=$!
used() { nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits | awk -F', *' -v p=$pid '$1 == p {print $2}'; }
total() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -1; }
samples=()
end=$((SECONDS + minutes * 60))
while [ $SECONDS -lt $end ] && kill -0 $pid 2>/dev/null; do
    sleep 5
    now=$(used)
    # Inside of a container the driver may not tell processes apart.
    samples+=("${now:-$(total)}")
done
if ! kill -0 $pid 2>/dev/null; then
    echo "the process ended early:"
    tail -3 "$log"
    exit 1
fi
# Not interrupted: a background process of a script ignores that.
kill $pid
wait $pid
warm=$((${#samples[@]} / 5))
printf '%s\n' "${samples[@]:$warm}" | sort -n | awk -v n=$minutes '
    NR == 1 {least = $1} {most = $1}
    END {printf "%d minutes, device memory %d to %d MiB after the first fifth: %s\n", n, least, most, most - least <= 2 ? "flat" : "NOT FLAT"; exit most - least > 2}'
