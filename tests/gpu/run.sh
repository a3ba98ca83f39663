#!/usr/bin/env bash
# Builds for the GPUs at hand and runs everything that needs one: the device tests, compute-sanitizer on some of them, the bench tools on
# 1, 2 and 4 ranks of a card, and a training benchmark. Ends with a summary; all output goes to a folder.
#   tests/gpu/run.sh [--deps DIR] [--out DIR] [--only PART…]
# Parts: build test sanitize bench train (default: all, in this order), each under ten minutes on 16 cores and a card. Without a card the
# tests skip, and the last three are left out.
# --deps DIR: packages made by tests/gpu/pack.sh, for a machine without a network. --out DIR: default build/gpu/results.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD deps='' out=$PWD/build/gpu/results parts=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --deps | --out)
      [ $# -ge 2 ] || { echo "run.sh: $1 needs a folder" >&2; exit 2; }
      declare "${1#--}=$(realpath -m "$2")"; shift 2 ;;
    --only) shift; while [ $# -gt 0 ]; do parts+=("$1"); shift; done ;;
    *) echo "run.sh: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(build test sanitize bench train)
mkdir -p "$out"
build=$root/build/gpu bin=$root/build/gpu/bin
failed=()
stage() { printf '\n=== %s (%s s)\n' "$1" "$SECONDS"; }
try() {  # NAME COMMAND…: runs it, keeps its output, shows the end, notes a failure
  local name=$1 rc=0; shift
  "$@" >"$out/$name.txt" 2>&1 || rc=$?
  if [ $rc -eq 0 ]; then tail -n 3 "$out/$name.txt"; else
    failed+=("$name"); echo "FAILED: $name (rc $rc)"; tail -n 25 "$out/$name.txt"; fi
}

unpack_dependencies() {
  local prefix=$root/build/deps triplet
  triplet=$(gcc -print-multiarch)
  if [ ! -d "$prefix" ]; then
    rm -rf "$prefix.part" && mkdir -p "$prefix.part" || return 1
    for package in "$deps"/*.deb; do dpkg-deb -x "$package" "$prefix.part" || return 1; done
    mv "$prefix.part" "$prefix" || return 1
  fi
  # What the packages' own scripts would have linked.
  ln -sfn openblas-pthread/libopenblas.so.0 "$prefix/usr/lib/$triplet/libopenblas.so.0"
  ln -sfn openblas-pthread/libopenblas.so "$prefix/usr/lib/$triplet/libopenblas.so"
  command -v pkg-config >/dev/null || ln -sfn pkgconf "$prefix/usr/bin/pkg-config"
  export PATH=$PATH:$prefix/usr/bin
  export LD_LIBRARY_PATH=$prefix/usr/lib/$triplet:$prefix/usr/lib/$triplet/openblas-pthread:${LD_LIBRARY_PATH:-}
  export PKG_CONFIG_SYSROOT_DIR=$prefix
  export PKG_CONFIG_PATH=$prefix/usr/lib/$triplet/pkgconfig:$prefix/usr/lib/$triplet/openblas-pthread/pkgconfig:$prefix/usr/share/pkgconfig
  export CMAKE_PREFIX_PATH=$prefix/usr:${CMAKE_PREFIX_PATH:-}
}

build_all() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRZ_CUDA=ON -DRZ_MPI=OFF -DRZ_EMULATED_GPU=OFF \
    -DCMAKE_CUDA_ARCHITECTURES="${RZ_GPU_ARCHITECTURES:-90}" -DCMAKE_CUDA_COMPILER="${CUDACXX:-/usr/local/cuda/bin/nvcc}" &&
    cmake --build "$build" --target gpu_tests programs
}

run_tests() {  # a process a subject: making a context takes longer than most tests
  local rc=0 test
  [ -x "$bin/gpu_ops_test" ] || { echo "nothing is built; run the part build first"; return 1; }
  for test in "$bin"/gpu_*_test; do
    echo "== $(basename "$test")"
    timeout 240 "$test" || { echo "$(basename "$test") ended with $?"; rc=1; }
  done
  return $rc
}
count() { sed -nE "s/^\[ +$1 +\] ([0-9]+) tests?[.,].*/\1/p" "$out/test.txt" | awk '{n += $1} END {print n + 0}'; }

# Tools slow kernels down a hundredfold: what touches memory in the most ways, and half a minute or so of each.
sanitized=(gpu_ops_test gpu_attention_test gpu_linear_test gpu_optimizer_kernels_test gpu_peer_kernels_test gpu_memory_test)
sanitize() {
  local ends=$((SECONDS + 540)) tool test left
  command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/compute-sanitizer
  for tool in memcheck racecheck; do
    for test in "${sanitized[@]}"; do
      left=$((ends - SECONDS))
      [ $left -ge 10 ] || { echo "no time is left for $tool of $test"; failed+=("$tool-$test"); continue; }
      try "$tool-$test" timeout $((left < 90 ? left : 90)) compute-sanitizer --tool "$tool" --error-exitcode 9 "$bin/$test" --gtest_brief=1
    done
  done
}

ranks_on_a_card() {  # every bench tool on 1, 2 and 4 ranks that share the card
  local rc=0 ranks tool name
  for ranks in 1 2 4; do
    for tool in "$bin"/*_perf; do
      name=$(basename "$tool")
      echo "== $name, $ranks ranks on a card"
      timeout 60 "$tool" --backend peer_cuda -g "$ranks" -b 8 -e 256M -f 4 -n 20 -w 2 -R 1 -T 20 -J "$out/$name-$ranks.json" ||
        { rc=1; echo "$name with $ranks ranks ended with $?"; }
    done
  done
  return $rc
}

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
try machine about
for part in "${parts[@]}"; do
  stage "$part"
  case $part in
    sanitize | bench | train) $card || { echo "left out: no GPU here"; continue; } ;;
  esac
  case $part in
    build) try build build_all ;;
    test)
      try test run_tests
      echo "$(count PASSED) tests passed, $(count SKIPPED) were skipped, $(count FAILED) failed" ;;
    sanitize) sanitize ;;
    bench) try bench ranks_on_a_card ;;
    train) try train python3 bench/train_gpu.py --bin "$bin" --out "$out" ;;
    *) echo "run.sh: no part '$part'; see --help" >&2; exit 2 ;;
  esac
done
stage summary
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}; everything is in $out"; exit 1; fi
echo "all passed; everything is in $out"
