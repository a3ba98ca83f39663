#!/usr/bin/env bash
# Installs a build into a fresh prefix, then builds and runs consumers through find_package and through pkg-config.
#   check.sh BUILD_DIR CUDA [flags to link with]        (CUDA: 1 if the build has it, else 0)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$1 cuda=$2 flags=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

cmake -S "$here" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_EXE_LINKER_FLAGS="$flags" >"$work/log" 2>&1 &&
  cmake --build "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/build/consumer"
"$work/build/train"

pc=$(find "$work/prefix" -name ringzero-comm.pc)
export PKG_CONFIG_PATH=$(dirname "$pc")
embed() {  # PROGRAM SOURCE PACKAGE
  g++ -I"$here/own" $(pkg-config --cflags "$3") -c -o "$work/$1.o" "$2" && g++ $flags -o "$work/$1" "$work/$1.o" $(pkg-config --libs "$3")
}
embed consumer "$here/main.cpp" ringzero-comm
"$work/consumer"
# Nor is a file of the project hidden by one of ours that stands before it on the include path.
g++ $(pkg-config --cflags ringzero-comm) -I"$here/own" -fsyntax-only "$here/main.cpp"
# Strings of another layout would link.
if error=$(g++ $(pkg-config --cflags ringzero-comm) -D_GLIBCXX_USE_CXX11_ABI=0 -fsyntax-only -I"$here/own" "$here/main.cpp" 2>&1) ||
    ! grep -q 'error: #error "ringzero uses the C++11 ABI' <<<"$error"; then
  echo "the old ABI of libstdc++ is not refused: $error" >&2
  exit 1
fi
refused() {  # TEXT PROGRAM: it does not compile, for a reason that has this text
  if error=$(g++ $(pkg-config --cflags ringzero) -fsyntax-only -x c++ - <<<"$2" 2>&1) ||
      ! grep -q "error: static assertion failed: .*$1" <<<"$error"; then
    echo "the compiler does not say '$1': $error" >&2
    exit 1
  fi
}
refused 'not an element type of ringzero, which are float, .* {pointer, bytes, rz::DType::u8}' '#include <ringzero/comm/communicator.h>
void f(rz::Communicator& c, short* x) { c.all_reduce({x, 4}); }'
refused 'forward(tape, batch) returns the loss of the micro-batch: an nn::Loss, or a scalar' '#include <ringzero/sharding/engine/engine.h>
void f(rz::Engine& e, rz::Loader& l) { e.train_batch(l, [](rz::Tape&, rz::Batch&) { return 1.0; }); }'
embed train "$here/train.cpp" ringzero
"$work/train"

# A guide, whose program the build has copied out of it, and an installed launcher.
embed own_model "$build/tests/guide/own_model.cpp" ringzero
"$here/../guide/check.py" "$here/../../docs/guide/own_model.md" "$work/own_model" "$work/prefix/bin"

# Only installations of a build with CUDA need its toolkit.
asked=0
grep -q '^CUDAToolkit_VERSION\|^CUDAToolkit_BIN_DIR\|^CUDA_CUDART' "$work/build/CMakeCache.txt" && asked=1
named=$(pkg-config --libs --static ringzero | grep -c cudart_static || true)
[ "$asked $named" = "$cuda $cuda" ] || { echo "CUDA: built $cuda, find_package asked for it $asked, pkg-config names it $named" >&2; exit 1; }
