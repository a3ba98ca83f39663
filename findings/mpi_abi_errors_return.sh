#!/usr/bin/env bash
# Intel MPI 2021.19.0 and MPICH 5.0.2 (PyPI: impi-devel, mpich): MPI_ERRORS_RETURN is another constant in each of the
# two mpi_abi.h, though both declare MPI_ABI_VERSION 1.
#
# The standard ABI of MPI 5.0 exists so that a program compiled with one header runs over another library. In MPICH's
# header MPI_ERRORS_ABORT is 0x142 and MPI_ERRORS_RETURN is 0x143; in Intel's they are the other way round. What a
# program asks for by one header means the opposite by the other, which only its first error would show. The other
# handles that a reduction needs (MPI_SUM, MPI_FLOAT, MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL) have the same values in both.
#
# Seen: both versions 1; RETURN 0x143 and 0x142, ABORT 0x142 and 0x143; the other four handles equal.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
command -v cc >/dev/null || { echo 'needs a C compiler' >&2; exit 2; }
python3 -m pip -q install --no-deps --target mpich mpich==5.0.2 2>pip.log || { cat pip.log >&2; exit 2; }
python3 -m pip -q install --no-deps --target impi impi-devel==2021.19.0 2>pip.log || { cat pip.log >&2; exit 2; }
cat >constants.c <<'C'
#include "mpi_abi.h"
#include <stdio.h>
#define SHOW(name) printf("%s %#lx\n", #name, (unsigned long)(name))
int main(void) {
  SHOW(MPI_ABI_VERSION); SHOW(MPI_ERRORS_RETURN); SHOW(MPI_ERRORS_ABORT); SHOW(MPI_ERRORS_ARE_FATAL);
  SHOW(MPI_SUM); SHOW(MPI_FLOAT); SHOW(MPI_COMM_WORLD);
}
C
for library in mpich impi; do
  # A wheel puts the header below data folders whose names differ by version of pip.
  header=$(find "$library" -name mpi_abi.h | head -n 1)
  [ -n "$header" ] || { echo "$library has no mpi_abi.h" >&2; exit 1; }
  cc -I "$(dirname "$header")" constants.c -o "show_$library"
  "./show_$library" >"$library.txt"
done
diff mpich.txt impi.txt >differences.txt || true
expected='2,3c2,3
< MPI_ERRORS_RETURN 0x143
< MPI_ERRORS_ABORT 0x142
---
> MPI_ERRORS_RETURN 0x142
> MPI_ERRORS_ABORT 0x143'
echo "mpich < > impi:"
cat differences.txt
[ "$(cat differences.txt)" = "$expected" ] && [ "$(head -n 1 mpich.txt)" = 'MPI_ABI_VERSION 0x1' ]
