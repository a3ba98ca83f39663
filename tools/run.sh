#!/usr/bin/env bash
# The main job on host memory: installs missing packages, builds, shows the machine, times all_reduce between 2 ranks,
# makes a tokenizer of a text, trains a small GPT-2 on it with ZeRO-3 over 2 ranks, generates a sample, and saves the
# model as safetensors.
#   tools/run.sh [--ranks N] [--data FILE|DIR] [--steps N] [--save DIR] [more flags of train_lm]
# Default text: the prose of this repository's documents and headers. Ten minutes on 2 cores, and under 2 minutes
# after the build.
set -euo pipefail
cd "$(dirname "$0")/.."

ranks=2 data= steps=1500 save=out/model extra=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --ranks | --data | --steps | --save)
      [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
      declare "${1#--}=$2"; shift 2 ;;
    *) extra+=("$1"); shift ;;
  esac
done

tools/setup.sh host
tools/build.sh host
bin=build/host/bin

echo
echo "== the machine"
"$bin/topology"
echo
echo "== all_reduce between $ranks ranks"
"$bin/rzrun" -n "$ranks" "$bin/all_reduce_perf" -b 8 -e 16M -f 16 -n 20 -w 3
echo
mkdir -p "$(dirname "$save")"
if [ -z "$data" ]; then  # documents of prose, without tables and code, and the headers' comments on their declarations
  data=$(dirname "$save")/documents.txt
  find README.md CONTRIBUTING.md docs -name '*.md' ! -name configuration.md | LC_ALL=C sort | xargs cat |
    grep -v -e '^ *|' -e '^    ' >"$data"
  find comm tensor autograd_lite sharding -name '*.h' | LC_ALL=C sort | xargs sed -n 's|^ *///* ||p' >>"$data"
fi
echo "== GPT-2 on $data, ZeRO-3 over $ranks ranks"
given() { [[ " ${extra[*]} " == *" $1"[\ =]* ]]; }
unless_given() { given "$1" || extra+=("$1" "$2"); }  # FLAG VALUE: train_lm accepts each flag once
if ! given --model && ! given --tokenizer && ! given --prompt-key && ! given --text-key; then  # a tokenizer of this text
  made=$(mktemp -d)
  trap 'rm -rf "$made"' EXIT
  "$bin/tokenize" --vocab-size 512 --data "$data" --output "$made/tokens"
  extra+=(--model tools/configs/gpt2_small_bpe.json --tokenizer "$made/tokens")
fi
unless_given --model tools/configs/gpt2_small_bytes.json
given --config || unless_given --lr-scheduler-type cosine
given --config || unless_given --warmup-ratio 0.05
unless_given --config tools/configs/ds_zero3.json
unless_given --strategy zero3
unless_given --metrics "$(dirname "$save")/metrics.jsonl"
unless_given --sample 'The'
unless_given --sample-tokens 160
unless_given --sample-temperature 0.3
"$bin/rzrun" -n "$ranks" "$bin/train_lm" --data "$data" --steps "$steps" --save "$save" "${extra[@]}"
