#!/usr/bin/env bash
# safetensors 0.8.0 with NumPy 2.4.6: save_file() of an array in Fortran order writes its memory as if it were in C
# order. The file is valid, has the right shape, and holds another matrix.
#
# safetensors.torch refuses tensors that are not contiguous, and names the remedy. safetensors.numpy reads memory from
# the address of the array and does not look at its strides. A transposed weight, which x.T makes without a copy, comes
# back transposed in its numbers, not in its shape.
#
# Seen: [[0, 1, 2], [3, 4, 5]] in Fortran order is read back as [[0, 3, 1], [4, 2, 5]].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip -q install --no-deps safetensors==0.8.0 numpy==2.4.6
seen=$("$work/v/bin/python" - <<'PY'
import numpy, safetensors.numpy as s
x = numpy.asfortranarray(numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
y = s.load(s.save({"x": x}))["x"]
same = s.load(s.save({"x": numpy.ascontiguousarray(x)}))["x"]
print(x.astype(int).tolist(), y.astype(int).tolist(), same.astype(int).tolist())
PY
)
expected='[[0, 1, 2], [3, 4, 5]] [[0, 3, 1], [4, 2, 5]] [[0, 1, 2], [3, 4, 5]]'
echo "array, read back, read back after ascontiguousarray"
echo "seen:     $seen"
echo "expected: $expected"
[ "$seen" = "$expected" ]
