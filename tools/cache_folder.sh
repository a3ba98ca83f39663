#!/usr/bin/env bash
# Creates a folder for build outputs unless it exists. Its CACHEDIR.TAG excludes it from back-ups and train_lm --data.
#   tools/cache_folder.sh FOLDER
set -euo pipefail
[ -d "$1" ] && exit 0
mkdir -p "$1"
echo 'Signature: 8a477f597d28d172789f06886806bc55' >"$1/CACHEDIR.TAG"
