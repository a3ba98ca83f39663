#!/usr/bin/env python3
"""No library has a function-local static with a guard, which a child of fork() may inherit locked for ever.

statics_test.py LIBRARY...

comm/core/lazy.h has what replaces one. A thread-local one has no guard that another thread holds.
"""
import re
import subprocess
import sys

# What a child cannot use anyway, of devices and MPI, and what blocks fork() in other threads.
ALLOWED = r"(ProgressDriver|Heartbeats)::of_process|MpiRuntime::instance|cublas|kernels::.*(library|card|workspace_bytes)\(|cuda::|__device_stub__"

symbols = subprocess.run(["readelf", "-sW", *sys.argv[1:]], capture_output=True, text=True, check=True).stdout
guards = {fields[-1] for fields in map(str.split, symbols.splitlines())
          if len(fields) == 8 and fields[3] == "OBJECT" and fields[6] != "UND" and fields[-1].startswith("_ZGVZ")}
names = subprocess.run(["c++filt"], input="\n".join(guards), capture_output=True, text=True, check=True).stdout
wrong = sorted(n for n in names.splitlines() if " rz::" in n and not re.search(ALLOWED, n))
print("\n".join(wrong) or f"{len(guards)} guards, none of them of this library's own functions")
sys.exit(1 if wrong else 0)
