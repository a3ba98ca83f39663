#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests. Arguments go to ctest: tools/test.sh -R communicator
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  echo "Usage: tools/test.sh [CTEST_OPTIONS…]    e.g. -R communicator, -L sharding; RZ_PRESET=asan for another build"
  exit
fi
preset=${RZ_PRESET:-release}
tools/setup.sh
tools/build.sh "$preset"
exec ctest --preset "$preset" --parallel "${RZ_JOBS:-$(nproc)}" --output-on-failure "$@"
