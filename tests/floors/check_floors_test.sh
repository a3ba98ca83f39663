#!/usr/bin/env bash
# The floor check passes the tree as it is, and refuses an include that goes up and one that goes sideways.
#   check_floors_test.sh SOURCE_DIR
set -u
check="python3 $1/tools/check_floors.py"
$check "$1" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/comm/core" "$work/tensor"
echo '#include "comm/communicator.h"' >"$work/comm/core/up.h"
echo '#include "comm/work.h"' >"$work/tensor/sideways.cpp"
out=$($check "$work") && { echo "accepted: $out"; exit 1; }
grep -q '^comm/core/up.h:1: ' <<<"$out" && grep -q '^tensor/sideways.cpp:1: ' <<<"$out" || { echo "not named: $out"; exit 1; }
