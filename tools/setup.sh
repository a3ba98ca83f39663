#!/usr/bin/env bash
# Installs what building and testing ringzero needs, from Debian's packages, and only what is missing.
set -euo pipefail

packages=(cmake ninja-build g++ ccache pkg-config git python3 libgtest-dev libhwloc-dev libhwy-dev
          libopenblas-pthread-dev nlohmann-json3-dev libcli11-dev libopenmpi-dev openmpi-bin)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "Usage: tools/setup.sh    installs, where missing: ${packages[*]}"
  exit
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup.sh: no apt-get here; install by other means what these Debian packages hold: ${packages[*]}" >&2
  echo "setup.sh: going on in the hope that they are there" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) == 'install ok installed' ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "setup.sh: run as root: apt-get install ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "setup.sh: installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${as_root[@]}" apt-get update -q &&
       "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
     } >"$log" 2>&1 </dev/null; then
  tail -n 20 "$log" >&2
  echo "setup.sh: apt-get failed" >&2
  exit 1
fi
