#!/usr/bin/env bash
# hwloc 2.9.0 (Debian 12: hwloc): with a topology from HWLOC_SYNTHETIC or HWLOC_XMLFILE, every call that binds succeeds,
# and none binds.
#
# Such a topology describes another machine, so hwloc replaces its binding calls by ones that do nothing and return
# success, with --strict too, and answers questions from the description: a process asks where it is bound and gets the
# whole description back. A rank that inherits such a variable believes that it is pinned. Only
# hwloc_topology_is_thissystem() shows it.
#
# Seen: hwloc-bind --strict core:3 of a machine of four described cores ends with 0, --get says 0x0000000f, and the
# processors that Linux lets the process use are those from before.
set -euo pipefail
need() { echo "$1" >&2; exit 2; }
command -v hwloc-bind >/dev/null || need 'install hwloc (apt-get install hwloc=2.9.0-1)'
[ "$(hwloc-bind --version)" = 'hwloc-bind 2.9.0' ] || need "of another version: $(hwloc-bind --version)"
allowed() { grep Cpus_allowed_list /proc/self/status; }
export -f allowed
before=$(bash -c allowed)
export HWLOC_SYNTHETIC='package:1 core:4 pu:1'
status=0
after=$(hwloc-bind --strict core:3 -- bash -c allowed) || status=$?
got=$(hwloc-bind --strict core:3 -- hwloc-bind --get)
echo "seen:     status $status, $got, processors $([ "$before" = "$after" ] && echo unchanged || echo "$after")"
echo "expected: status 0, 0x0000000f, processors unchanged"
[ "$status" = 0 ] && [ "$got" = 0x0000000f ] && [ "$before" = "$after" ]
