#!/bin/sh
# Runs a Python script of this folder in its own virtual environment, made under target/ on first use.
#   scripts/python.sh ort-parity.py PACKAGE --golden FILE
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${CARGO_TARGET_DIR:-$here/../target}/scripts-venv
if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    # Last, so that an interrupted install is made again.
    cp "$here/requirements.txt" "$venv/requirements.txt"
fi
script=$1
shift
exec "$venv/bin/python" "$here/$script" "$@"
