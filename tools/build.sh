#!/usr/bin/env bash
# Configures and builds a preset, quietly unless something fails: tools/build.sh [PRESET [TARGET…]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=${1:-release}
shift || true
targets=()
(($#)) && targets=(--target "$@")
log=build/$preset.log
mkdir -p build
begin=$SECONDS
echo "Building $preset (log: $log)"
if ! { cmake --preset "$preset" && cmake --build --preset "$preset" --parallel "${RZ_JOBS:-$(nproc)}" "${targets[@]}"; } \
     >"$log" 2>&1 </dev/null; then
  grep -E -A5 'error|FAILED|Error' "$log" | head -n 60 >&2 || tail -n 40 "$log" >&2
  echo "build.sh: building $preset failed; all of it is in $log" >&2
  exit 1
fi
echo "Built $preset in $((SECONDS - begin)) s"
