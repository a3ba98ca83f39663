#!/usr/bin/env bash
# A feature that is ON and missing is an error that names it; OFF omits it. A missing requirement is an error
# that names the package.
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
# All that pkg-config finds here, except hwloc.
mkdir "$work/pkgconfig"
for module in libhwy openblas; do cp "$(pkg-config --variable=pcfiledir $module)/$module.pc" "$work/pkgconfig"; done
PKG_CONFIG_LIBDIR=$work/pkgconfig refused 'needs hwloc, not found by pkg-config (Debian: libhwloc-dev)' -DRZ_CUDA=OFF -DRZ_NCCL=OFF -DRZ_MPI=OFF
