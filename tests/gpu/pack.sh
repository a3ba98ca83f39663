#!/usr/bin/env bash
# Puts the Debian packages that a build needs into a folder, to be carried to a GPU machine that has a CUDA toolkit, CMake,
# ninja and g++ but no network; tests/gpu/run.sh --deps uses it there. About 20 MiB.
#   tests/gpu/pack.sh DIR
set -euo pipefail
[ $# -eq 1 ] && [ "$1" != --help ] && [ "$1" != -h ] || { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 2; }
packages=(libhwy-dev libhwy1 libopenblas-pthread-dev libopenblas0-pthread libgfortran5 libquadmath0
          nlohmann-json3-dev libxxhash-dev libcli11-dev libonig-dev libonig5 libutf8proc-dev libutf8proc2
          libyaml-dev libyaml-0-2
          libgtest-dev googletest pkgconf pkgconf-bin libpkgconf3)
mkdir -p "$1"
cd "$1"
apt-get download "${packages[@]}"
