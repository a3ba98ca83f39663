#!/usr/bin/env bash
# With BUILD_SHARED_LIBS=ON and CUDA all libraries share one copy of the CUDA runtime: a kernel that is registered with one
# copy cannot be launched with another. Configures such a build and builds its lowest library; of those with kernels, whose
# compilation takes minutes, it inspects the link command.
#   shared_libraries_test.sh SOURCE_DIR NVCC
set -euo pipefail
source=$1 nvcc=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wrong() { echo "$*" >&2; exit 1; }

cmake -S "$source" -B "$work" -G Ninja -DBUILD_SHARED_LIBS=ON -DRZ_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CUDA_ARCHITECTURES=80 -DCMAKE_UNITY_BUILD=ON -DRZ_MPI=OFF -DRZ_TESTS=OFF -DRZ_PROGRAMS=OFF >"$work/log" 2>&1 &&
  cmake --build "$work" -j2 --target ringzero_core >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

core=$(find "$work" -name 'libringzero_core.so*' -type f)
readelf -d "$core" | grep 'NEEDED.*libcudart\.so' >/dev/null || wrong "libringzero_core.so does not use libcudart.so:
$(readelf -d "$core" | grep NEEDED)"

for library in core comm tensor; do
  link=$(ninja -C "$work" -t commands "ringzero_$library" | grep -- "-o [^ ]*libringzero_$library\.so" | tail -n 1)
  [ -n "$link" ] || wrong "no command links libringzero_$library.so"
  grep -Eq -- '-lcudart( |$)|libcudart\.so' <<<"$link" || wrong "libringzero_$library.so is linked with no CUDA runtime: $link"
  ! grep -q 'cudart_static' <<<"$link" || wrong "libringzero_$library.so has a copy of the CUDA runtime of its own: $link"
done

# Installed files: libraries that find each other and the one runtime, and no copy of it.
grep -q "RPATH.*ORIGIN" "$work/cmake_install.cmake" ||
  wrong "installed libraries do not find each other"
for package in "$(PKG_CONFIG_PATH=$work pkg-config --libs --static ringzero-comm)" "$(cat "$work"/CMakeFiles/Export/*/ringzero-targets*.cmake)"; do
  ! grep -q cudart_static <<<"$package" || wrong "a package hands on a copy of the CUDA runtime: $package"
done
cat >"$work/user.cpp" <<'END'
#include "comm/device/cuda_runtime.h"
int main() { return rz::cuda::device_count() < 0; }
END
g++ -std=c++20 -I"$source" -o "$work/user" "$work/user.cpp" -L"$(dirname "$core")" -lringzero_core -Wl,-rpath,"$(dirname "$core")"
"$work/user"
[ "$(ldd "$work/user" | grep -c libcudart)" = 1 ] || wrong "a program uses not one CUDA runtime: $(ldd "$work/user")"
