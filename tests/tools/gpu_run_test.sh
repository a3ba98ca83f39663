#!/usr/bin/env bash
# tests/gpu/run.sh: its parts cover every test of device code, keep their time, and leave one archive. Scripts replace
# the tests and the card.
#   gpu_run_test.sh SOURCE_DIR PROGRAMS      (PROGRAMS: the folder of the same tests for the emulated device, which list their contents)
set -euo pipefail
source=$1 programs=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wrong() { echo "$*" >&2; exit 1; }
mkdir -p "$work/bin" "$work/path"

cat >"$work/path/nvidia-smi" <<'END'
#!/bin/sh
echo "a card"
END
cat >"$work/path/compute-sanitizer" <<'END'
#!/bin/sh
echo "sanitized: $*"
END
subjects=()
for test in "$source"/tests/gpu/*_test.cpp "$source"/tests/operators/*_test.cpp; do
  subject=$(basename "$test" _test.cpp)
  subjects+=("$subject")
  listed=$programs/emulated_${subject}_test
  [ -x "$listed" ] || listed='echo "  any"'
  printf '#!/bin/sh\ncase $1 in --gtest_list_tests) %s "$@" ;; *) echo "%s" >>"%s/order" ;; esac\n' "$listed" "$subject" "$work" >"$work/bin/gpu_${subject}_test"
done
printf '#!/bin/sh\n' >"$work/bin/all_reduce_perf"
chmod +x "$work"/bin/* "$work"/path/*
export PATH=$work/path:$PATH
run() { "$source/tests/gpu/run.sh" --bin "$work/bin" --out "$work/out" "$@" >"$work/log" 2>&1; }

# Every test once: kernels, then threads, then processes.
run kernels threads processes || wrong "the parts failed: $(cat "$work/log")"
[ "$(sort "$work/order")" = "$(printf '%s\n' "${subjects[@]}" | sort)" ] || wrong "not every test ran once: $(cat "$work/order")"
[ "$(tail -n 2 "$work/order" | sort | tr '\n' ' ')" = "nccl_processes peer_cuda_processes " ] || wrong "processes were not last: $(cat "$work/order")"
[ "$(head -n 1 "$work/order")" = memory ] || wrong "kernels were not first"
[ "$(ls "$work/out")" = kernels-threads-processes.tgz ] || wrong "not one archive: $(ls "$work/out")"
tar -tzf "$work/out/kernels-threads-processes.tgz" | grep 'processes/nccl_processes.txt' >/dev/null || wrong "the archive has not every output"

run sanitize || wrong "the part sanitize failed: $(cat "$work/log")"
[ "$(grep -c '^[a-z]*check-' "$work/log")" -gt 12 ] || wrong "the sanitizers ran on few tests: $(cat "$work/log")"

# A hanging test ends with its part's time; it and the tests behind it count as failed.
printf '#!/bin/sh\nexec sleep 300\n' >"$work/bin/gpu_ops_test"
began=$SECONDS
! RZ_GPU_PART_SECONDS=8 run kernels || wrong "a test that hung passed"
[ $((SECONDS - began)) -lt 60 ] || wrong "the part took $((SECONDS - began)) s of 8"
grep -q '^failed: kernels/ops kernels/losses .*kernels/peer_kernels;' "$work/log" || wrong "the summary is: $(tail -n 1 "$work/log")"
ls "$work/out/kernels.tgz" >/dev/null

status=0
run kernel || status=$?
[ $status = 2 ] && grep -q "no part 'kernel'; choose of: build kernels threads" "$work/log" || wrong "an unknown part: $status, $(cat "$work/log")"
