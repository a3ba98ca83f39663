#!/usr/bin/env bash
# A source that has changed and lacks an include is named; one that has it, and one that has not changed, are not.
#   check_includes_test.sh SOURCE_DIR
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tools" "$work/comm/core"
cp "$1/tools/check_includes.py" "$work/tools"
cd "$work"
git() { command git -c user.name=test -c user.email=test@localhost "$@"; }
git init -q .
echo 'std::vector<int> unchanged;' >comm/core/unchanged.cpp
git add . && git commit -qm first
echo 'std::vector<int> lacks;' >comm/core/lacks.cpp
printf '#include <vector>\nstd::vector<int> has;\n' >comm/core/has.cpp
git add . && git commit -qm second
out=$(python3 tools/check_includes.py) && { echo "accepted: $out"; exit 1; }
grep -q '^comm/core/lacks.cpp: .*vector' <<<"$out" || { echo "not named: $out"; exit 1; }
grep -qE 'unchanged|has.cpp' <<<"$out" && { echo "named: $out"; exit 1; }
sed -i '1i #include <vector>' comm/core/lacks.cpp
python3 tools/check_includes.py
