#!/usr/bin/env bash
# Installs a build into a fresh prefix, then builds and runs a consumer through find_package and through pkg-config.
#   check.sh BUILD_DIR [extra compiler flags]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$1
flags=${2:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

cmake -S "$here" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_FLAGS="$flags" >"$work/log" 2>&1 &&
  cmake --build "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/build/consumer"

pc=$(find "$work/prefix" -name ringzero-comm.pc)
export PKG_CONFIG_PATH=$(dirname "$pc")
g++ $flags -o "$work/consumer" "$here/main.cpp" $(pkg-config --cflags --libs ringzero-comm)
"$work/consumer"
pkg-config --libs ringzero | grep -q lringzero_sharding
