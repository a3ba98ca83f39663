#!/usr/bin/env bash
# Builds for the GPUs at hand and runs everything that needs one, in parts that each end within nine minutes on 16 cores and a card.
#   tests/gpu/run.sh [--deps DIR] [--bin DIR] [--out DIR] [PART…]      (default: all parts, in this order)
#   build      the tests and programs, with nvcc
#   kernels    every kernel by itself
#   threads    ranks that are threads of one process, and training: kernels that wait for each other
#   processes  ranks that are processes
#   sanitize   compute-sanitizer on the kernels, and on collectives and training of few ranks
#   bench      the bench tools on 1, 2 and 4 ranks of a card
#   train      a training benchmark
# Without a card the tests skip, and the last three parts are omitted. A step without time left in its part counts as failed.
# --deps DIR: packages made by tests/gpu/pack.sh, for a machine without a network. --bin DIR: programs built elsewhere (default
# build/gpu/bin). --out DIR (default build/gpu/results): receives one archive, PART.tgz, or all.tgz.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD deps='' out=$PWD/build/gpu/results bin=$PWD/build/gpu/bin parts=()
all=(build kernels threads processes sanitize bench train)
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --deps | --out | --bin)
      [ $# -ge 2 ] || { echo "run.sh: $1 needs a folder" >&2; exit 2; }
      declare "${1#--}=$(realpath -m "$2")"; shift 2 ;;
    -*) echo "run.sh: unknown argument $1; see --help" >&2; exit 2 ;;
    *)
      [[ " ${all[*]} " == *" $1 "* ]] || { echo "run.sh: no part '$1'; choose of: ${all[*]}" >&2; exit 2; }
      parts+=("$1"); shift ;;
  esac
done
archive=$(IFS=-; echo "${parts[*]:-all}").tgz
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
mkdir -p "$out"
results=$(mktemp -d)
failed=() part='' ends=0
budget=${RZ_GPU_PART_SECONDS:-540}

begin_part() {
  part=$1 ends=$((SECONDS + budget))
  printf '\n=== %s (%s s)\n' "$part" "$SECONDS"
  mkdir -p "$results/$part"
}
try() {  # NAME LIMIT COMMAND…: runs it for at most LIMIT seconds and what the part has left, keeps its output, notes a failure
  local name=$1 limit=$2 rc=0 at=$SECONDS left=$((ends - SECONDS)) log=$results/$part/$1.txt; shift 2
  if [ "$left" -lt $((budget / 50 + 1)) ]; then failed+=("$part/$name"); echo "no time is left for $name"; return; fi
  timeout -k 5 $((limit < left ? limit : left)) "$@" >"$log" 2>&1 || rc=$?
  printf '%-34s rc %3d %4d s  %s\n' "$name" $rc $((SECONDS - at)) "$(grep -aE '^\[  (PASSED|FAILED|SKIPPED) *\]' "$log" | head -n 2 | tr '\n' ' ')"
  [ $rc -eq 0 ] || { failed+=("$part/$name"); tail -n 25 "$log"; }
}

unpack_dependencies() {
  local prefix=$root/build/deps triplet
  triplet=$(gcc -print-multiarch)
  if [ ! -d "$prefix" ]; then
    rm -rf "$prefix.part" && mkdir -p "$prefix.part" || return 1
    for package in "$deps"/*.deb; do dpkg-deb -x "$package" "$prefix.part" || return 1; done
    mv "$prefix.part" "$prefix" || return 1
  fi
  # The links that the packages' own scripts would make.
  ln -sfn openblas-pthread/libopenblas.so.0 "$prefix/usr/lib/$triplet/libopenblas.so.0"
  ln -sfn openblas-pthread/libopenblas.so "$prefix/usr/lib/$triplet/libopenblas.so"
  command -v pkg-config >/dev/null || ln -sfn pkgconf "$prefix/usr/bin/pkg-config"
  export PATH=$PATH:$prefix/usr/bin
  export LD_LIBRARY_PATH=$prefix/usr/lib/$triplet:$prefix/usr/lib/$triplet/openblas-pthread:${LD_LIBRARY_PATH:-}
  export PKG_CONFIG_SYSROOT_DIR=$prefix
  export PKG_CONFIG_PATH=$prefix/usr/lib/$triplet/pkgconfig:$prefix/usr/lib/$triplet/openblas-pthread/pkgconfig:$prefix/usr/share/pkgconfig
  export CMAKE_PREFIX_PATH=$prefix/usr:${CMAKE_PREFIX_PATH:-}
}

part_build() {
  try configure 120 cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DRZ_CUDA=ON -DRZ_MPI=OFF -DRZ_EMULATED_GPU=OFF \
    -DCMAKE_CUDA_ARCHITECTURES="${RZ_GPU_ARCHITECTURES:-90}" -DCMAKE_CUDA_COMPILER="${CUDACXX:-/usr/local/cuda/bin/nvcc}"
  try compile 540 cmake --build build/gpu --target gpu_tests programs
}

# A process a subject: making a context takes longer than most tests. tests/tools/gpu_run_test.sh compares these lists with the tests.
kernels=(memory caching_allocator ops losses element_ops shape_ops image_ops linear attention rotary conversion grad_norm optimizer_kernels peer_kernels)
threads=(peer_cuda collectives loader muon power_sgd training hybrid graph_training mixed_precision engine offload)
processes=(peer_cuda_processes nccl_processes)
tests() {  # LIMIT SUBJECT…
  local limit=$1 subject; shift
  for subject in "$@"; do try "$subject" "$limit" "$bin/gpu_${subject}_test"; done
}
part_kernels() { tests 120 "${kernels[@]}"; }
part_threads() { tests 180 "${threads[@]}"; }
part_processes() { tests 270 "${processes[@]}"; }

# Tools slow kernels down a hundredfold: only kernels with many access patterns, and for races those with shared memory.
part_sanitize() {
  command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/compute-sanitizer
  local subject
  check() {  # TOOL SUBJECT FILTER
    "$bin/gpu_$2_test" --gtest_list_tests --gtest_filter="$3" | grep '^ ' >/dev/null ||
      { failed+=("$part/$1-$2"); echo "gpu_$2_test has no test $3"; return; }
    try "$1-$2" 90 compute-sanitizer --tool "$1" --error-exitcode 9 "$bin/gpu_$2_test" --gtest_brief=1 --gtest_filter="$3"
  }
  for subject in "${kernels[@]}"; do check memcheck "$subject" '*'; done
  check racecheck attention '*SeveralHeads*:*HeadsOf128'
  check racecheck ops '*Norms*:*Embedding*'
  check racecheck losses '*Labels*:*CrossEntropy*'
  check racecheck linear '*BiasGradient*'
  check racecheck optimizer_kernels '*'
  check racecheck grad_norm '*'
  check memcheck collectives 'PeerCuda/*/0'
  check memcheck peer_cuda '*AGraphIsReplayed*'
  check memcheck training '*peer_cuda_ranks1_ddp'
  check memcheck mixed_precision 'Overflow.*'
}

part_bench() {  # every bench tool on ranks that share the card
  local ranks tool name
  for ranks in 1 2 4; do
    for tool in "$bin"/*_perf; do
      name=$(basename "$tool")-$ranks
      try "$name" 60 "$tool" --backend peer_cuda -g "$ranks" -b 8 -e 256M -f 4 -n 20 -w 2 -R 1 -T 20 -J "$results/$part/$name.json"
    done
  done
}

part_train() { try train_gpu 540 python3 bench/train_gpu.py --bin "$bin" --out "$results/$part"; }

about() {
  if $card; then nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv; else echo "no GPU"; fi
  nvcc --version || echo "no nvcc"
  uname -a
  nproc
}

[ -z "$deps" ] || unpack_dependencies || { echo "run.sh: the packages in $deps cannot be unpacked" >&2; exit 2; }
export PATH=$PATH:/usr/local/cuda/bin
card=false
nvidia-smi -L >/dev/null 2>&1 && card=true
about >"$results/machine.txt" 2>&1
head -n 3 "$results/machine.txt"
for part in "${parts[@]}"; do
  begin_part "$part"
  case $part in
    build) part_build; continue ;;
    sanitize | bench | train) $card || { echo "left out: no GPU here"; continue; } ;;
  esac
  if [ -x "$bin/gpu_ops_test" ]; then "part_$part"; else
    failed+=("$part"); echo "nothing is built in $bin; run the part build first"
  fi
done
tar -C "$results" -czf "$out/$archive" . && rm -rf "$results"
printf '\n=== summary\n'
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}; everything is in $out/$archive"; exit 1; fi
echo "all passed; everything is in $out/$archive"
