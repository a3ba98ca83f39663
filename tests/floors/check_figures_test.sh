#!/usr/bin/env bash
# tools/check_figures.py warns of sections whose commit is old, unknown or absent, and of no others.
#   check_figures_test.sh SOURCE_DIR
set -euo pipefail
check="python3 $1/tools/check_figures.py"
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
git() { command git -C "$root" -c user.name=test -c user.email=test@example.org "$@"; }
git init -q
mkdir "$root/docs" "$root/comm"
commit() { echo "$1" >"$root/comm/file"; git add -A; git commit -q -m "$1"; git rev-parse HEAD; }
section() { printf '## %s\n\n%s\n\n| a |\n|---|\n| 1 |\n\n' "$1" "$2"; }
old=$(commit one)
commit two >/dev/null
new=$(commit three)
{ section fresh "Commit \`${new:0:7}\`."; section stale "Commit \`${old:0:7}\`."; section bare 'No figures of a build.'
  section foreign 'Commit `0123456789`.'; printf '## prose\n\nNo table.\n'; } >"$root/docs/performance.md"
git add -A; git commit -q -m document

out=$($check "$root" --max 1)
expect() { grep -qF "$1" <<<"$out" || { echo "missing: $1"; echo "$out"; exit 1; }; }
expect "\"stale\" is of ${old:0:7}; 2 commits to comm, tensor, autograd_lite, sharding since"
expect '"bare" names no commit'
expect '"foreign" is of 0123456789, which is not in this clone'
expect 'figures: 3 sections of an older build'
[ "$(grep -c warning <<<"$out")" = 3 ]
grep -qF '2 sections' <<<"$($check "$root")"  # two commits are not old
if $check /nonexistent 2>/dev/null; then echo "a folder without git passed"; exit 1; fi
echo "check_figures: as expected"
