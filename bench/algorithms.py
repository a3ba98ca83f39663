#!/usr/bin/env python3
"""Times every algorithm of all_reduce beside the one selected by the tuning table, interleaved in one run on one machine.

    algorithms.py [--bin build/release/bin] [--ranks 2] [--transport auto|shm|tcp] [--sizes 1024,...] [--rounds 5]
                  [--extra '-R 2']

Within a node one_shot and two_shot are the intra-node algorithms in shared memory; all others are schedules over the
transport. Times are in microseconds, out of place, float sum, medians over rounds. "table": the default algorithm;
"cost": time of the fastest algorithm that sums in rank order (required by `deterministic`), divided by that of the
fastest of all."""
import argparse, os, shlex, statistics, subprocess, sys

ORDERED, OTHERS = ['one_shot', 'two_shot', 'chain'], ['ring', 'halving_doubling', 'tree']

def run(o, algorithm, size):
    iterations = 2000 if size <= 65536 else 200 if size <= 4 << 20 else 10
    env = dict(os.environ, RZ_TRANSPORT=o.transport)
    if algorithm != 'table': env.update(RZ_ALGORITHM=algorithm, RZ_DETERMINISTIC='0')
    command = [f'{o.bin}/rzrun', '-n', str(o.ranks), f'{o.bin}/all_reduce_perf', '-b', str(size), '-e', str(size), '-n', str(iterations),
               '-w', str(max(2, iterations // 20)), '-c', '1'] + shlex.split(o.extra)
    r = subprocess.run(command, env=env, capture_output=True, text=True)
    if r.returncode: sys.exit(f'algorithms.py: {" ".join(command)} with {algorithm} ended with {r.returncode}: {r.stderr.strip()}')
    row = [l.split() for l in r.stdout.splitlines() if l.strip()[:1].isdigit()][-1]
    return float(row[5])

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/release/bin'); a.add_argument('--ranks', type=int, default=2)
    a.add_argument('--transport', choices=['auto', 'shm', 'tcp'], default='auto'); a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--sizes', default='8,1024,8192,65536,524288,4194304,33554432'); a.add_argument('--extra', default='')
    o = a.parse_args()
    names, sizes = ['table'] + ORDERED + OTHERS, [int(s) for s in o.sizes.split(',')]
    times = {(n, s): [] for n in names for s in sizes}
    for r in range(o.rounds):
        for s in sizes:
            for n in names:
                if sys.stderr.isatty(): print(f'\rround {r + 1} of {o.rounds}: {n}, {s} bytes            ', end='', file=sys.stderr, flush=True)
                times[n, s].append(run(o, n, s))
    if sys.stderr.isatty(): print(file=sys.stderr)
    print(f'# all_reduce, {o.ranks} ranks, {o.transport}, float sum, medians of {o.rounds} rounds, microseconds')
    print('%10s' % 'bytes' + ''.join('%18s' % n for n in names) + '%8s' % 'cost')
    for s in sizes:
        m = {n: statistics.median(times[n, s]) for n in names}
        cost = min(m[n] for n in ORDERED) / min(m[n] for n in ORDERED + OTHERS)
        print('%10d' % s + ''.join('%18.2f' % m[n] for n in names) + '%8.2f' % cost)

if __name__ == '__main__': main()
