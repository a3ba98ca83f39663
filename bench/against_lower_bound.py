#!/usr/bin/env python3
"""Compares all_reduce_perf with the lower bound of this machine for two ranks (lower_bound_bench), interleaved in one run.

    against_lower_bound.py [--bin build/release/bin] [--rounds 5] [--sizes 8,64,1024,...] [--memory ordinary,symmetric]
                           [--extra '...'] [--json OUT]

--bin     folder of lower_bound_bench, all_reduce_perf and rzrun
--rounds  pairs of consecutive runs, the bound and ours, for each size and memory; the table shows medians over them
--sizes   bytes, separated by commas
--memory  ordinary: ordinary memory, compared with the bound of copying through shared slots; symmetric:
          all_reduce_perf -R 2, compared with the bound of memory mapped by both ranks (or of slots, if that is faster)
--launch  command that starts a program on two ranks; default '{bin}/rzrun -n 2'
--extra   more flags for all_reduce_perf
--json    file for the rows as JSON, which bench/plot.py draws

Times are in microseconds, float sum. "bound" and "ours" are medians over rounds of the median iteration; the time of an
iteration is that of its slower rank (lower_bound_bench; all_reduce_perf --percentiles). "p99" is the median over rounds
of ours. "bound/ours" is the median over rounds of the ratio of a round: 1 at the bound, 0.5 at twice its time.

The processors of a virtual machine migrate: they may be two threads of one core, two cores that share a cache, or far
apart, which changes times of small sizes by a factor of five. So lower_bound_bench times 4 KiB before and after each of
our runs; that time, relative to the best one, shows the distance of the processors. A pair of runs between which it
changed by more than 30% is discarded and repeated, up to three times as often as there are rounds. "near" is the number
of rounds in the table whose 4 KiB time was within 30% of the best."""
import argparse, json, os, shlex, statistics, subprocess, sys, tempfile
import outputs

MEMORY = {'ordinary': ([], ['staged']), 'symmetric': (['-R', '2'], ['staged', 'mapped'])}
PLACES = {'out_of_place': '', 'in_place': '_in_place'}

def fail(status, line):
    print(f'against_lower_bound.py: {line}', file=sys.stderr)
    sys.exit(status)

class Parser(argparse.ArgumentParser):
    def error(self, message): fail(2, message + '; see --help')

def run(command, output):
    p = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if p.returncode: fail(1, f'{" ".join(command)} ended with {p.returncode}: {p.stderr.strip()}')
    with open(output) as f: return json.load(f)

PROBE = 4096  # bytes; the time of this size shows how close the processors are
ALIKE = 1.3

def bounds_of(o, sizes, methods, tmp):
    return run([f'{o.bin}/lower_bound_bench', '--sizes', ','.join(map(str, sizes)), '--rounds', '1', '--json', f'{tmp}/bound', *methods], f'{tmp}/bound')['rows']

def probe_in(rows): return min(r['median'] for r in rows if r['size'] == PROBE and r['method'] == 'staged')

def bound(o, size, tmp):
    """The rows of lower_bound_bench, by method, and its 4 KiB time."""
    rows = bounds_of(o, {PROBE, size}, [], tmp)
    return {r['method']: r for r in rows if r['size'] == size}, probe_in(rows)

def ours(o, size, memory, tmp):
    iterations = 2000 if size <= 64 << 10 else 200 if size <= 1 << 20 else 100 if size <= 8 << 20 else 20 if size <= 64 << 20 else 6
    command = o.launch + [f'{o.bin}/all_reduce_perf', '-b', str(size), '-e', str(size), '-n', str(iterations), '-w', str(max(2, iterations // 20)), '-c', '1',
                          '--percentiles', '-J', f'{tmp}/ours'] + MEMORY[memory][0] + o.extra
    return run(command, f'{tmp}/ours')['results'][0]

class Pairs:
    """Pairs of consecutive runs: (row of the bound, our result, 4 KiB time before and after), by size, memory and place."""
    def __init__(self, o):
        self.o, self.found = o, {(s, m, p): [] for s in o.sizes for m in o.memory for p in PLACES}

    def time(self, size, memory, tmp):
        bounds, before = bound(self.o, size, tmp)
        figure = ours(self.o, size, memory, tmp)
        after = probe_in(bounds_of(self.o, {PROBE}, ['--methods', 'staged'], tmp))
        for p, suffix in PLACES.items():
            best = min((bounds[m + suffix] for m in MEMORY[memory][1]), key=lambda row: row['median'])
            self.found[size, memory, p].append((best, figure[p]['percentiles'], before, after))

    def like(self, key):
        """The pairs between whose runs the 4 KiB time did not change, each with a flag for near processors."""
        best = min((pair[2] for pairs in self.found.values() for pair in pairs), default=0)
        return [(bound, figure, max(a, b) < ALIKE * best) for bound, figure, a, b in self.found[key] if max(a, b) < ALIKE * min(a, b)]

    def lacking(self):
        return [k for k in self.found if len(self.like(k)) < self.o.rounds and len(self.found[k]) < 3 * self.o.rounds]

def measure(o):
    pairs = Pairs(o)
    with tempfile.TemporaryDirectory() as tmp:
        while lacking := dict.fromkeys((s, m) for s, m, _ in pairs.lacking()):
            for s, m in lacking:
                if sys.stderr.isatty(): print(f'\r{len(lacking)} rows still to time: {s} bytes, {m}            ', end='', file=sys.stderr, flush=True)
                pairs.time(s, m, tmp)
    if sys.stderr.isatty(): print(file=sys.stderr)
    for key in pairs.found:
        if not pairs.like(key): print(f'# {key[0]} bytes, {key[1]}: processors migrated within every pair; the row is not reliable', file=sys.stderr)
    return {key: pairs.like(key)[:o.rounds] or [(*pair[:2], False) for pair in pairs.found[key][-o.rounds:]] for key in pairs.found}

def row(size, memory, place, rounds):
    lower_bound_us, ours_us = (statistics.median(x) for x in zip(*[(l['median'], f['p50']) for l, f, _ in rounds]))
    variants = [l['variant'] for l, *_ in rounds]
    return dict(collective='all_reduce', bytes=size, memory=memory, place=place, lower_bound_us=lower_bound_us, ours_us=ours_us,
                lower_bound_us_of_rounds=[l['median'] for l, *_ in rounds], ours_us_of_rounds=[f['p50'] for _, f, _ in rounds],
                ours_p99_us=statistics.median(f['p99'] for _, f, _ in rounds), rounds=len(rounds), near=sum(near for *_, near in rounds),
                ratio=statistics.median(l['median'] / f['p50'] for l, f, _ in rounds), variant=max(set(variants), key=variants.count))

def options():
    a = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/release/bin'); a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--sizes', default='8,64,1024,8192,65536,524288,4194304,33554432'); a.add_argument('--memory', default='ordinary,symmetric')
    a.add_argument('--launch', default='{bin}/rzrun -n 2'); a.add_argument('--extra', default=''); a.add_argument('--json')
    o = a.parse_args()
    for program in ('lower_bound_bench', 'all_reduce_perf'):
        if not os.access(f'{o.bin}/{program}', os.X_OK): fail(2, f'--bin: no {program} in {o.bin}; build it first')
    if not all(s.isdigit() and int(s) > 0 and int(s) % 4 == 0 for s in o.sizes.split(',')): fail(2, f"--sizes: '{o.sizes}' must be multiples of 4 bytes")
    o.sizes, o.memory = [int(s) for s in o.sizes.split(',')], o.memory.split(',')
    unknown = [m for m in o.memory if m not in MEMORY]
    if unknown: fail(2, f"--memory: '{unknown[0]}' is none of {', '.join(MEMORY)}")
    if o.rounds < 1: fail(2, f'--rounds {o.rounds}: at least 1')
    o.launch, o.extra = shlex.split(o.launch.format(bin=o.bin)), shlex.split(o.extra)
    return o

def main():
    o = options()
    outputs.empty('--json', o.json)
    found = measure(o)
    rows = [row(s, m, p, found[s, m, p]) for m in o.memory for p in PLACES for s in o.sizes]
    print(f'# all_reduce, 2 ranks, float sum, medians of {o.rounds} rounds, microseconds')
    print('#%9s %10s %13s %10s %10s %10s %11s %7s  %s' %
          ('bytes', 'memory', 'place', 'bound', 'ours', 'p99', 'bound/ours', 'near', "the bound's variant"))
    for r in rows:
        print('%10d %10s %13s %10.2f %10.2f %10.2f %11.2f %7s  %s' %
              (r['bytes'], r['memory'], r['place'], r['lower_bound_us'], r['ours_us'], r['ours_p99_us'], r['ratio'], f"{r['near']} of {r['rounds']}", r['variant']))
    ratios = [r['ratio'] for r in rows]
    print(f'# bound/ours: min {min(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}')
    if o.json:
        with open(o.json, 'w') as f: json.dump(dict(tool='against_lower_bound', ranks=2, rounds=o.rounds, rows=rows), f, indent=1)

if __name__ == '__main__': main()
