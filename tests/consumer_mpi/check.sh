#!/usr/bin/env bash
# Installs a build into a fresh prefix, builds a consumer of ringzero::mpi through find_package and through pkg-config, and
# one that loads it, and runs them under mpirun.
#   check.sh BUILD_DIR MPIRUN [flags to link with]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
flags=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$1" --prefix "$work/prefix" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmake -S "$here" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_EXE_LINKER_FLAGS="$flags" >"$work/log" 2>&1 &&
  cmake --build "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$here/../mpi/run.sh" "$2" 2 "$work/build/consumer_mpi"
"$here/../mpi/run.sh" "$2" 2 env RZ_BACKEND=mpi "$work/build/loads_mpi" | grep '^2 over mpi'

pc=$(find "$work/prefix" -name ringzero-mpi.pc)
export PKG_CONFIG_PATH=$(dirname "$pc")
g++ $(pkg-config --cflags ringzero-mpi) -c -o "$work/main.o" "$here/main.cpp"
g++ $flags -o "$work/consumer_mpi" "$work/main.o" $(pkg-config --libs ringzero-mpi) -Wl,-rpath,"$(dirname "$PKG_CONFIG_PATH")"
"$here/../mpi/run.sh" "$2" 2 "$work/consumer_mpi"
# Installed programs find the library beside themselves.
"$here/../mpi/run.sh" "$2" 2 "$work/prefix/bin/all_reduce_perf" -b 8 -e 8 --backend mpi | grep -q 'Out of bounds values : 0 OK'
