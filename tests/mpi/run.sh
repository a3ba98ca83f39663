#!/usr/bin/env bash
# Runs a program under mpirun, as a container's root too; 77 and a reason if there is no mpirun.
#   run.sh MPIRUN N PROGRAM [ARGUMENT…]
set -u
mpirun=$1
ranks=$2
shift 2
command -v "$mpirun" >/dev/null || { echo "skipped: no mpirun (Debian: openmpi-bin)"; exit 77; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
# More ranks than cores: ranks that wait inside MPI yield.
export OMPI_MCA_mpi_yield_when_idle=1
# MPI does not free its allocations, and memory that MPI may still use after a failure is leaked.
export ASAN_OPTIONS=detect_leaks=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}
exec "$mpirun" -n "$ranks" "$@"
