#!/usr/bin/env bash
# Installs missing packages, builds, and runs all tests.
#   tools/test.sh [PRESET] [more flags of ctest, e.g. -R Communicator]      (default preset: release)
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
preset=release
case ${1:-} in release | ci | asan | tsan) preset=$1; shift ;; esac
# Clang compiles code with sanitizers in a half to two thirds of the time that g++ takes.
case $preset in
  asan | tsan) tools/setup.sh clang-19 libclang-rt-19-dev ;;
  *) tools/setup.sh ;;
esac
tools/build.sh "$preset"
# On 2 cores two tests compute. A release build has a third one beside them: those of several hosts wait for minutes.
jobs=2
case $preset in release | ci) jobs=3 ;; esac
ctest --preset "$preset" "-j$jobs" --no-tests=error --output-on-failure "$@"
