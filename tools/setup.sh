#!/usr/bin/env bash
# Installs missing packages that ringzero needs to build and test on Debian 12. Prints nothing if all are installed.
#   tools/setup.sh [host] [PACKAGE…]        (host: those of the preset host alone; further packages)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
packages=(build-essential cmake ninja-build ccache pkg-config ca-certificates
          libhwy-dev libopenblas-pthread-dev libhwloc-dev libssl-dev nlohmann-json3-dev libxxhash-dev libcli11-dev
          libonig-dev libutf8proc-dev libyaml-dev)
if [ "${1:-}" = host ]; then
  shift
else
  packages+=(git python3 libgtest-dev libboost-context-dev libopenmpi-dev openmpi-bin lld)
fi
packages+=("$@")

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
