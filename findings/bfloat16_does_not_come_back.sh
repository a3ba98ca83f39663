#!/usr/bin/env bash
# bfloat16 of ml_dtypes 0.6.0 does not survive NumPy 2.4.6's files, nor those of safetensors.numpy 0.8.0.
#
# numpy.save() writes the type as '<V2', two bytes without a meaning: numpy.load() returns raw bytes, without an error,
# and float8 becomes '|V1' likewise, so that its two forms cannot be told apart. safetensors.numpy writes "BF16", which
# is right, and cannot read what it has just written: KeyError 'BF16'.
#
# Seen: "V2 V1 KeyError('BF16')".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/python" -m pip -q install --no-deps ml_dtypes==0.6.0 numpy==2.4.6 safetensors==0.8.0
seen=$("$work/v/bin/python" - <<'PY'
import io, ml_dtypes, numpy, safetensors.numpy as s
def through_npy(dtype):
    file = io.BytesIO()
    numpy.save(file, numpy.array([1.5, -2], dtype=dtype))
    file.seek(0)
    return numpy.load(file).dtype.str.lstrip("|<")
words = [through_npy(ml_dtypes.bfloat16), through_npy(ml_dtypes.float8_e4m3fn)]
written = s.save({"x": numpy.array([1.5, -2], dtype=ml_dtypes.bfloat16)})
assert b'"dtype":"BF16"' in written
try:
    words.append(repr(s.load(written)["x"].dtype))
except KeyError as e:
    words.append(repr(e))
print(*words)
PY
)
expected="V2 V1 KeyError('BF16')"
echo "seen:     $seen"
echo "expected: $expected"
[ "$seen" = "$expected" ]
