#!/usr/bin/env bash
# Configures and builds a preset. Reports progress: on a terminal in one line that is redrawn, elsewhere in a line for every
# tenth of the steps. Prints the compiler's output only if something is wrong.
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

# Copies Ninja's output to the log, and shows how many of its steps are done: its lines begin with "[DONE/ALL] ".
follow() {
  local line tenth=0 count='^\[([0-9]+)/([0-9]+)\] '
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    [[ $line =~ $count && $line != *'] Re-'* ]] || continue  # Re-running CMake counts by itself
    local steps=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
    [ "$terminal" ] || [ $((steps * 10 / all)) -gt "$tenth" ] || continue
    tenth=$((steps * 10 / all))
    show "  $((steps * 100 / all))%  $steps of $all steps, $SECONDS s"
  done
  [ -z "$terminal" ] || printf '\r\033[K'
}

# What the compiler wrote of the first step that failed, without its command line; else the end of the log.
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
