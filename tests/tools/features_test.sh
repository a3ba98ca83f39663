#!/usr/bin/env bash
# A feature that is ON and missing is an error that names it; OFF omits it. A missing requirement is an error
# that names the package. As a part of another project, ringzero leaves that project's settings alone.
#   features_test.sh SOURCE_DIR
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

configure() {
  cmake -S "$source" -B "$(mktemp -d -p "$work")" -G Ninja -DRZ_TESTS=OFF -DRZ_PROGRAMS=OFF "$@" 2>&1
}

refused() {  # WHAT_IT_SAYS [flags]
  local text=$1 out
  shift
  if out=$(configure "$@"); then echo "accepted: $*"; exit 1; fi
  grep -q "$text" <<<"$out" || { echo "$* does not print '$text':"; echo "$out"; exit 1; }
}

source=$1
refused 'RZ_NCCL=ON, but' -DRZ_NCCL=ON -DRZ_CUDA=OFF -DRZ_MPI=OFF
refused 'RZ_MPI=ON, but' -DRZ_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON -DRZ_CUDA=OFF -DRZ_NCCL=OFF
out=$(configure -DRZ_CUDA=OFF -DRZ_NCCL=OFF -DRZ_MPI=OFF) || { echo "$out"; exit 1; }
grep -q 'MPI no' <<<"$out" || { echo "OFF is not heeded: $out"; exit 1; }
# All that is missing is named at once.
mkdir "$work/pkgconfig"
for module in libhwy openblas; do cp "$(pkg-config --variable=pcfiledir $module)/$module.pc" "$work/pkgconfig"; done
bare=(-DRZ_CUDA=OFF -DRZ_NCCL=OFF -DRZ_MPI=OFF -DRZ_PROGRAMS=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
for text in '  hwloc, openssl, oniguruma, libutf8proc, libxxhash, nlohmann_json, yaml-0.1$' \
    '  apt-get install libhwloc-dev libssl-dev libonig-dev libutf8proc-dev libxxhash-dev nlohmann-json3-dev libyaml-dev$'; do
  PKG_CONFIG_LIBDIR=$work/pkgconfig refused "$text" "${bare[@]}"
done
# What a build needs is in the README, and is installed by setup.sh.
for package in $(sed -n 's/^ *rz_require[a-z_]*(.* \([a-z0-9-]*\))$/\1/p' "$source/cmake/RzTargets.cmake"); do
  for file in README.md tools/setup.sh; do
    grep -q -- "[ (]$package\b" "$source/$file" || { echo "$file does not name the package $package"; exit 1; }
  done
done

# A project that fetches the communicator alone, on a machine without OpenBLAS and JSON, and is installed.
refused 'RZ_COMM_ONLY=ON excludes RZ_TESTS' -DRZ_COMM_ONLY=ON -DRZ_TESTS=ON
# It has files with the names of ours, before them on the include path of all that it builds.
mkdir -p "$work/parent/src/comm/core"
echo 'struct OwnOptions {};' >"$work/parent/src/comm/options.h"
echo '#error that is not the error.h of ringzero' >"$work/parent/src/comm/core/error.h"
cat >"$work/parent/main.cpp" <<END
#include <ringzero/comm/communicator.h>
#include "comm/options.h"
int main() { return rz::CommOptions(), OwnOptions(), 0; }
END
cat >"$work/parent/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(parent CXX)
include_directories(src)
include(FetchContent)
FetchContent_Declare(ringzero SOURCE_DIR "$source")
FetchContent_MakeAvailable(ringzero)
if(NOT TARGET ringzero::comm OR TARGET ringzero::sharding OR NOT "\${CMAKE_BUILD_TYPE}" STREQUAL "")
  message(FATAL_ERROR "not comm alone, or the build type is forced: '\${CMAKE_BUILD_TYPE}'")
endif()
add_executable(parent main.cpp)
target_link_libraries(parent PRIVATE ringzero::comm)
install(FILES CMakeLists.txt DESTINATION share)
END
rm "$work/pkgconfig/openblas.pc"
for module in hwloc openssl libssl libcrypto; do cp "$(pkg-config --variable=pcfiledir $module)/$module.pc" "$work/pkgconfig"; done
fetched=("$work/parent" -G Ninja -DRZ_COMM_ONLY=ON -DRZ_CUDA=OFF -DRZ_NCCL=OFF -DRZ_MPI=OFF -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
out=$(PKG_CONFIG_LIBDIR=$work/pkgconfig cmake -S "${fetched[0]}" -B "$work/fetched" "${fetched[@]:1}" 2>&1 &&
  cmake --install "$work/fetched" --prefix "$work/prefix" 2>&1) || { echo "a project that fetches it: $out"; exit 1; }
grep -q 'ringzero: is built without optimization' <<<"$out" || { echo "nothing is said of the build type: $out"; exit 1; }
[ "$(find "$work/prefix" -type f -printf '%P ')" = 'share/CMakeLists.txt ' ] || { echo "it installs more than its own: $(find "$work/prefix" -type f | head)"; exit 1; }
# Its program and a source of ours, each compiled alone.
out=$(ninja -C "$work/fetched" CMakeFiles/parent.dir/main.cpp.o _deps/ringzero-build/comm/CMakeFiles/ringzero_core.dir/core/error.cpp.o 2>&1) ||
  { echo "files of the project and of ringzero have taken each other's place: $out"; exit 1; }
