#!/usr/bin/env bash
# Builds for the GPUs at hand and runs everything that needs one: the device tests, compute-sanitizer on them, the bench tools on
# 1, 2 and 4 ranks of a card, and a training benchmark. Ends with a summary; all output goes to a folder.
#   tests/gpu/run.sh [--deps DIR] [--out DIR] [--only PART…]
# Parts: build test sanitize bench train (default: all, in this order).
# --deps DIR: packages made by tests/gpu/pack.sh, for a machine without a network. --out DIR: default build/gpu/results.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD deps='' out=$PWD/build/gpu/results parts=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
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
  local name=$1; shift
  if "$@" >"$out/$name.txt" 2>&1; then tail -n 3 "$out/$name.txt"; else
    failed+=("$name"); echo "FAILED: $name (rc $?)"; tail -n 25 "$out/$name.txt"; fi
}

unpack_dependencies() {
  local prefix=$root/build/deps triplet
  triplet=$(gcc -print-multiarch)
  if [ ! -d "$prefix/usr" ]; then
    for package in "$deps"/*.deb; do dpkg-deb -x "$package" "$prefix" || return 1; done
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
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRZ_CUDA=ON -DRZ_MPI=OFF \
    -DCMAKE_CUDA_ARCHITECTURES="${RZ_GPU_ARCHITECTURES:-90}" -DCMAKE_CUDA_COMPILER="${CUDACXX:-/usr/local/cuda/bin/nvcc}" &&
    cmake --build "$build" --target gpu_tests programs
}

ranks_on_a_card() {  # every bench tool on 1, 2 and 4 ranks that share the card
  for ranks in 1 2 4; do
    for tool in "$bin"/*_perf; do
      echo "== $(basename "$tool"), $ranks ranks on a card"
      "$tool" --backend peer_cuda -g "$ranks" -b 8 -e 256M -f 4 -n 20 -w 2 -R 1 -T 20 || return 1
    done
  done
}

one() { command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || true; nvcc --version; uname -a; nproc; }

[ -z "$deps" ] || unpack_dependencies || { echo "run.sh: the packages in $deps cannot be unpacked" >&2; exit 2; }
export PATH=$PATH:/usr/local/cuda/bin
try machine one
for part in "${parts[@]}"; do
  stage "$part"
  case $part in
    build) try build build_all ;;
    test) try test ctest --test-dir "$build" -L '^gpu$' --output-on-failure --timeout 120 --no-tests=error ;;
    sanitize)
      for tool in memcheck racecheck; do
        for test in "$bin"/gpu_*_test; do
          try "$tool-$(basename "$test")" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$test" --gtest_brief=1
        done
      done ;;
    bench) try bench ranks_on_a_card ;;
    train) try train python3 bench/train_gpu.py --bin "$bin" --out "$out" ;;
    *) echo "run.sh: no part '$part'; see --help" >&2; exit 2 ;;
  esac
done
stage summary
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}; everything is in $out"; exit 1; fi
echo "all passed; everything is in $out"
