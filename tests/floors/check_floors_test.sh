#!/usr/bin/env bash
# The room check accepts the tree. It rejects an include of a higher floor, of a sibling floor and of another room of the
# same floor, and a folder that is no room.
#   check_floors_test.sh SOURCE_DIR
set -u
check="python3 $1/tools/check_floors.py"
$check "$1" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/comm/core" "$work/comm/transport" "$work/comm/misc" "$work/tensor"
echo '#include "comm/communicator.h"' >"$work/comm/core/up.h"
echo '#include "../communicator.h"' >"$work/comm/core/relative.h"
touch "$work/comm/communicator.h"
echo '#include "comm/work.h"' >"$work/tensor/sideways.cpp"
echo '#include "comm/intranode/engine.h"' >"$work/comm/transport/room.h"
echo '#include "comm/transport/transport.h"' >"$work/comm/public.h"
echo '#include <vector>' >"$work/comm/misc/no_room.h"
out=$($check "$work") && { echo "accepted: $out"; exit 1; }
for file in comm/core/up.h comm/core/relative.h tensor/sideways.cpp comm/transport/room.h comm/public.h comm/misc/no_room.h; do
  grep -q "^$file:1: " <<<"$out" || { echo "$file is not named: $out"; exit 1; }
done
