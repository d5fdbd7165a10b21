#!/usr/bin/env bash
# Builds the emulated driver and compiler: libcuda.so.1 and libnvrtc.so.13 in FOLDER, to be put into LD_LIBRARY_PATH.
#
# Usage: build.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?folder to build into}"
cxx=(${CXX:-g++} -std=c++20 -O2 -Wall -shared -fPIC ${CUDA_EMULATOR_FLAGS:-})
"${cxx[@]}" "$here/driver.cpp" -o "$1/libcuda.so.1" -ldl
"${cxx[@]}" -DEMULATOR_FOLDER="\"$here\"" "$here/nvrtc.cpp" -o "$1/libnvrtc.so.13"
