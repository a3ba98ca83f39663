#!/usr/bin/env bash
# Makes a folder, unless it is there, for what a build makes; its CACHEDIR.TAG says so to back-ups and to train_gpt --data DIR.
#   tools/cache_folder.sh FOLDER
set -euo pipefail
[ -d "$1" ] && exit 0
mkdir -p "$1"
echo 'Signature: 8a477f597d28d172789f06886806bc55' >"$1/CACHEDIR.TAG"
