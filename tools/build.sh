#!/usr/bin/env bash
# Configures and builds a preset; prints the compiler's output only if something is wrong.
#   tools/build.sh [PRESET] [TARGET…]        (default: release, everything)
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
shift || true
log=build/$preset.log
tools/cache_folder.sh build
echo "building ($preset, log in $log) …"
targets=()
[ $# -gt 0 ] && targets=(--target "$@")
if ! { cmake --preset "$preset" && cmake --build --preset "$preset" "${targets[@]}"; } >"$log" 2>&1; then
  grep -nE 'error|Error|FAILED' "$log" | head -n 40 >&2 || tail -n 40 "$log" >&2
  echo "build.sh: the build failed; the whole log is $log" >&2
  exit 1
fi
