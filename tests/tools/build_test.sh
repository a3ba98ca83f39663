#!/usr/bin/env bash
# tools/build.sh: it reports progress, and prints what the compiler wrote of a step that failed. A script replaces
# cmake.
#   build_test.sh SOURCE_DIR
set -euo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wrong() { echo "$*" >&2; exit 1; }
mkdir "$work/tools" "$work/path"
cp "$source/tools/build.sh" "$source/tools/cache_folder.sh" "$work/tools"
export PATH=$work/path:$PATH

stand_in() {  # standard input is the output of `cmake --build`, $1 its status
  cat >"$work/output"
  printf '#!/bin/sh\ncase $1 in --build) cat %q; exit %s ;; esac\necho "configured $*"\n' "$work/output" "$1" >"$work/path/cmake"
  chmod +x "$work/path/cmake"
}

# Forty steps: a line per tenth, and all of the output in the log.
{ echo '[1/2] Re-running CMake...'; for i in $(seq 40); do echo "[$i/40] Building CXX object error.cpp.o"; done; } | stand_in 0
"$work/tools/build.sh" host >"$work/shown" 2>&1 || wrong "a good build failed: $(cat "$work/shown")"
[ "$(grep -c '^  [0-9]*%  ' "$work/shown")" = 10 ] || wrong "not a line per tenth: $(cat "$work/shown")"
grep -q '^  50%  20 of 40 steps, ' "$work/shown" || wrong "half is not 50%: $(cat "$work/shown")"
grep -q '^\[40/40\] Building' "$work/build/host.log" || wrong "the log lacks the output"
grep -q '^configured --preset host' "$work/build/host.log" || wrong "the log lacks the configuration"

# A failed step: its errors, without its command line and without other steps.
stand_in 1 <<'END'
[1/40] Building CXX object good.cpp.o
[2/40] Building CXX object bad.cpp.o
FAILED: bad.cpp.o
/usr/bin/c++ -c bad.cpp
bad.cpp:7:1: error: expected a semicolon
[3/40] Building CXX object error.cpp.o
ninja: build stopped: subcommand failed.
END
status=0
"$work/tools/build.sh" host >"$work/shown" 2>"$work/errors" || status=$?
[ "$status" = 1 ] || wrong "a build that failed left with $status"
printf '%s\n' 'FAILED: bad.cpp.o' 'bad.cpp:7:1: error: expected a semicolon' \
  'build.sh: the build failed; the whole log is build/host.log' | diff - "$work/errors" || wrong "that is not what went wrong"

# No output of Ninja: the end of the log.
stand_in 1 <<<'cmake: no such preset'
! "$work/tools/build.sh" host >/dev/null 2>"$work/errors" || wrong "an unknown preset is not an error"
grep -q 'no such preset' "$work/errors" || wrong "the end of the log is not shown: $(cat "$work/errors")"

# On a terminal one line is redrawn.
if command -v script >/dev/null; then
  echo '[20/40] Building CXX object a.cpp.o' | stand_in 0
  script -qec "$work/tools/build.sh host" /dev/null </dev/null >"$work/shown"
  grep -q $'\r\033\[K  50%  20 of 40 steps' "$work/shown" || wrong "the line is not redrawn: $(cat -v "$work/shown")"
fi
