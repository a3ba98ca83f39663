#!/usr/bin/env bash
# Installs missing packages that ringzero needs to build and test on Debian 12. Prints nothing if all are installed.
#   tools/setup.sh [PACKAGE…]        (further packages)
set -euo pipefail
packages=(build-essential cmake ninja-build ccache pkg-config git ca-certificates python3
          libhwy-dev libopenblas-pthread-dev libhwloc-dev nlohmann-json3-dev libxxhash-dev libcli11-dev libonig-dev libutf8proc-dev
          libgtest-dev libboost-context-dev
          libopenmpi-dev openmpi-bin lld "$@")

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

command -v apt-get >/dev/null || {
  echo "setup.sh: apt-get was not found; install the equivalents of: ${missing[*]}" >&2
  exit 2
}
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "setup.sh: run as root, or install sudo, to install: ${missing[*]}" >&2; exit 2; }
  sudo=(sudo)
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
install() { "${sudo[@]}" apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
"${sudo[@]}" apt-get update >"$log" 2>&1 && install || {
  echo "setup.sh: apt-get failed:" >&2
  tail -n 20 "$log" >&2
  exit 1
}
rm -f "$log"
