#!/usr/bin/env bash
# Configures and builds a preset. Shows progress: on a terminal in one line that is redrawn, elsewhere one line per
# tenth of the steps. Prints the output of the compiler only if something fails.
#   tools/build.sh [PRESET] [TARGET…]        (default: release, everything)
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
preset=${1:-release}
shift || true
log=build/$preset.log
terminal=; [ ! -t 1 ] || terminal=yes
tools/cache_folder.sh build

show() {  # TEXT: redrawn in place on a terminal
  if [ "$terminal" ]; then printf '\r\033[K%s' "$1"; else printf '%s\n' "$1"; fi
}

# Copies the output of Ninja to the log, and shows progress from its lines "[DONE/ALL] …".
follow() {
  local line tenth=0 count='^\[([0-9]+)/([0-9]+)\] '
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    [[ $line =~ $count && $line != *'] Re-'* ]] || continue  # skip re-runs of CMake, which count separately
    local steps=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
    [ "$terminal" ] || [ $((steps * 10 / all)) -gt "$tenth" ] || continue
    tenth=$((steps * 10 / all))
    show "  $((steps * 100 / all))%  $steps of $all steps, $SECONDS s"
  done
  [ -z "$terminal" ] || printf '\r\033[K'
}

# Prints the compiler output of the first failed step, without its command line, or else the end of the log.
explain() {
  local what
  what=$(awk '/^FAILED: /{found = 1; print; getline; next} found && /^\[[0-9]+\/[0-9]+\] /{exit} found' "$log" | head -n 40)
  [ -n "$what" ] || what=$(tail -n 40 "$log")
  printf '%s\n' "$what" >&2
  echo "build.sh: the build failed; the whole log is $log" >&2
  exit 1
}

echo "building ($preset, log in $log) …"
targets=()
[ $# -eq 0 ] || targets=(--target "$@")
SECONDS=0
cmake --preset "$preset" >"$log" 2>&1 || explain
unset NINJA_STATUS
cmake --build --preset "$preset" "${targets[@]}" 2>&1 | follow || explain
