#!/usr/bin/env bash
# The main job on two ranks of this machine: topology, all_reduce_perf, and a small GPT-2 trained with ZeRO-3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

help() {
  cat <<'TEXT'
Usage: tools/run.sh [--data FILE|DIR] [--model CONFIG.json] [--config DS.json] [--ranks N] [TRAIN_GPT_OPTIONS…]

Installs what is missing, builds, prints the machine's topology, measures all_reduce on N ranks (2), and trains
a small GPT-2 with ZeRO-3 on text: by default on this repository's own sources and documents. At the end it
prints a sample and saves the model under out/model. About two minutes after the build on two cores.

  --data    what to train on; default: the sources and documents of this repository
  --model   a Hugging Face GPT-2 configuration; default: tools/configs/gpt2_small_bytes.json
  --config  a DeepSpeed configuration; default: tools/configs/ds_zero3.json
  --ranks   default 2; train_batch_size must be a multiple
Everything else goes to train_gpt (see build/release/bin/train_gpt --help), e.g. --steps 1000 --sample "int main"
TEXT
}

ranks=2
model=tools/configs/gpt2_small_bytes.json
config=tools/configs/ds_zero3.json
data=
steps=(--steps 400)
sample=(--sample '/// ')
save=(--save out/model)
rest=()
while (($#)); do
  case $1 in
    -h | --help) help; exit ;;
    --ranks | --model | --config | --data)
      (($# > 1)) || { echo "run.sh: $1 needs a value; see --help" >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2 ;;
    *)
      case $1 in
        --steps | --steps=*) steps=() ;;
        --sample | --sample=*) sample=() ;;
        --save | --save=*) save=() ;;
      esac
      rest+=("$1")
      shift ;;
  esac
done
tokens=" ${rest[*]-} "
if [[ -z $data && $tokens != *" --tokens"* ]]; then data=.; fi

tools/setup.sh
tools/build.sh release rzrun topology all_reduce_perf train_gpt
bin=build/release/bin

echo
echo "== Topology"
"$bin/topology"
echo
echo "== all_reduce on $ranks ranks"
"$bin/rzrun" -n "$ranks" "$bin/all_reduce_perf" -b 8 -e 32M -f 8
echo
echo "== Training on $ranks ranks"
mkdir -p out
exec "$bin/rzrun" -n "$ranks" "$bin/train_gpt" --model "$model" --config "$config" ${data:+--data "$data"} \
  --strategy zero3 --log out/metrics.jsonl "${steps[@]}" "${sample[@]}" "${save[@]}" "${rest[@]}"
