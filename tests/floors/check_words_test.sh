#!/usr/bin/env bash
# The word check passes the tree as it is, and refuses a retired word in code, in a comment and in a document.
#   check_words_test.sh SOURCE_DIR
set -u
check="python3 $1/tools/check_words.py"
$check "$1" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/comm" "$work/docs"
printf 'int most%s = 1;\n' _bytes >"$work/comm/code.h"
printf '// A rank reads the next %ster.\n' let >"$work/comm/comment.cpp"
printf 'A rank waits in %s.\n' vain >"$work/docs/document.md"
out=$($check "$work") && { echo "accepted: $out"; exit 1; }
for file in comm/code.h comm/comment.cpp docs/document.md; do
  grep -q "^$file:1: " <<<"$out" || { echo "$file is not named: $out"; exit 1; }
done
