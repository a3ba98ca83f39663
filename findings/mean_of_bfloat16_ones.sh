#!/usr/bin/env bash
# NumPy 2.4.6 with ml_dtypes 0.6.0: the mean of 100,000 bfloat16 ones is 0.00256.
#
# mean() of float16 is summed in float32 and is 1. For bfloat16 NumPy does not do that: the sum runs in bfloat16, where
# 256 + 1 is 256, so it stays at 256 for any longer vector, and 256 / 100,000 is the mean. Neither warns. A loss or a
# gradient that is averaged so is smaller the longer the batch is.
#
# Seen: sum 256, mean 0.00256348 (bfloat16), 1 (float16), 1 (bfloat16 with dtype=float32).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip -q install --no-deps ml_dtypes==0.6.0 numpy==2.4.6
seen=$("$work/v/bin/python" -W error - <<'PY'
import ml_dtypes, numpy
x = numpy.ones(100_000, dtype=ml_dtypes.bfloat16)
means = (x.mean(), numpy.ones(100_000, dtype=numpy.float16).mean(), x.mean(dtype=numpy.float32))
print(f"{float(x.sum()):g}", *(f"{float(m):.6g}" for m in means))
PY
)
expected='256 0.00256348 1 1'
echo "sum, mean of bfloat16, mean of float16, mean of bfloat16 in float32"
echo "seen:     $seen"
echo "expected: $expected"
[ "$seen" = "$expected" ]
