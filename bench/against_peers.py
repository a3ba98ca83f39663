#!/usr/bin/env python3
"""Compares the _perf programs with collectives of other libraries: median and p99 of iterations, interleaved in one run.

    against_peers.py --peers COMMAND[,COMMAND...] --ranks N [--bin build/release/bin] [--rounds 5] [--sizes 8,1024,...]
                     [--collectives all_reduce,...] [--extra '...'] [--json OUT]

--peers       name=command, a program that times the collectives of a peer library. It is run with BENCH_OPS (ar, ari,
              rs, ag, bc: all_reduce, in place, reduce_scatter, all_gather, broadcast; rd, ga, sc, a2a: reduce, gather,
              scatter, alltoall, out of place, root 0), BENCH_SIZES (bytes, separated by commas), BENCH_PEER and
              BENCH_SHM (a file that its ranks may share) in its environment, and prints lines
              ROW,peer,ranks,op,bytes,iterations,min,median,p99,mean,... in microseconds
--ranks       number of ranks; must equal that of the peer commands
--bin         folder of the _perf programs and rzrun
--collectives default the first four; reduce, gather, scatter and alltoall if the peer programs support them
--rounds      each round times everything once; the table shows medians over rounds
--extra       more flags for our programs, e.g. '-R 2'
--json        file for the rows as JSON

The time of an iteration is that of its slowest rank, for peers and for ours (--percentiles). "p50 ratio" and "p99 ratio"
are the time of the best peer divided by ours; above 1 ours is faster. The broadcast of peers is in place, and is
compared with ours in place.

    against_peers.py --ranks 4 --peers 'ompi=mpirun --oversubscribe -np 4 ./mpi_coll'"""
import argparse, json, os, shlex, statistics, subprocess, sys, tempfile
import outputs

SHORT = {'all_reduce': [('ar', 'out_of_place'), ('ari', 'in_place')], 'reduce_scatter': [('rs', 'out_of_place')], 'all_gather': [('ag', 'out_of_place')],
         'broadcast': [('bc', 'in_place')], 'reduce': [('rd', 'out_of_place')], 'gather': [('ga', 'out_of_place')], 'scatter': [('sc', 'out_of_place')],
         'alltoall': [('a2a', 'out_of_place')]}

def fail(status, line):
    print(f'against_peers.py: {line}', file=sys.stderr)
    sys.exit(status)

class Parser(argparse.ArgumentParser):
    def error(self, message): fail(2, message + '; see --help')

def options():
    a = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    quiet = dict(help=argparse.SUPPRESS)
    a.add_argument('--peers', required=True, **quiet)
    a.add_argument('--ranks', type=int, required=True, **quiet)
    a.add_argument('--bin', default='build/release/bin', **quiet)
    a.add_argument('--rounds', type=int, default=5, **quiet)
    a.add_argument('--sizes', default='8,1024,8192,65536,524288,4194304', **quiet)
    a.add_argument('--collectives', default=','.join(list(SHORT)[:4]), **quiet)
    a.add_argument('--extra', type=shlex.split, default=[], **quiet)
    a.add_argument('--json', **quiet)
    o = a.parse_args()
    o.bin = os.path.abspath(o.bin)
    try:
        o.sizes = [int(x) for x in o.sizes.split(',')]
        o.peers = dict(x.split('=', 1) for x in o.peers.split(','))
    except ValueError as e: fail(2, f'--sizes or --peers: {e}; see --help')
    o.collectives = o.collectives.split(',')
    for c in o.collectives:
        if c not in SHORT: fail(2, f"--collectives: '{c}' is not one of {', '.join(SHORT)}")
        if not os.path.exists(f'{o.bin}/{c}_perf'): fail(2, f'--bin: {o.bin} has no {c}_perf; build it: tools/build.sh')
    return o

def peer_rows(o, name, folder):
    """{(op, bytes): (median, p99)} of one run of a peer."""
    shared = f'{folder}/shared'
    ops = [op for c in o.collectives for op, _ in SHORT[c]]
    environment = dict(os.environ, BENCH_OPS=','.join(ops), BENCH_SIZES=','.join(map(str, o.sizes)), BENCH_PEER=name, BENCH_SHM=shared)
    p = subprocess.run(shlex.split(o.peers[name]), env=environment, capture_output=True, text=True)
    if os.path.exists(shared): os.unlink(shared)
    rows = [line.split(',') for line in p.stdout.splitlines() if line.startswith('ROW,')]
    if p.returncode or not rows: fail(1, f"peer {name} ended with {p.returncode}: {(p.stderr or 'no ROW in its output').strip()}")
    return {(r[3], int(r[4])): (float(r[7]), float(r[8])) for r in rows}

def own_rows(o, collective, size, folder):
    """{place: (p50, p99)} of one run of our program."""
    out = f'{folder}/rows.json'
    iterations = 4000 if size <= 64 << 10 else 400 if size <= 1 << 20 else 100
    iterations //= 1 if o.ranks == 2 else 4
    command = [f'{o.bin}/rzrun', '-n', str(o.ranks), f'{o.bin}/{collective}_perf', '-b', str(size), '-e', str(size), '-n', str(iterations), '-w',
               str(max(2, iterations // 20)), '-c', '1', '--percentiles', '-J', out] + o.extra
    p = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if p.returncode: fail(1, f'{" ".join(command)} ended with {p.returncode}: {p.stderr.strip()}')
    with open(out) as f: row = json.load(f)['results'][0]
    return {place: (row[place]['percentiles']['p50'], row[place]['percentiles']['p99']) for place in ('out_of_place', 'in_place')}

def measure(o):
    """{(op, bytes, library): [(p50, p99), one per round]}"""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for r in range(o.rounds):
            for name in o.peers:
                if sys.stderr.isatty(): print(f'\rround {r + 1} of {o.rounds}: {name}            ', end='', file=sys.stderr, flush=True)
                for (op, size), figures in peer_rows(o, name, folder).items(): found.setdefault((op, size, name), []).append(figures)
            for c in o.collectives:
                for size in o.sizes:
                    if sys.stderr.isatty(): print(f'\rround {r + 1} of {o.rounds}: {c}, {size} bytes    ', end='', file=sys.stderr, flush=True)
                    places = own_rows(o, c, size, folder)
                    for op, place in SHORT[c]: found.setdefault((op, size, 'ours'), []).append(places[place])
    if sys.stderr.isatty(): print('\r' + ' ' * 60 + '\r', end='', file=sys.stderr)
    return found

def main():
    o = options()
    outputs.empty('--json', o.json)
    found, rows = measure(o), []
    print(f'# {o.ranks} ranks, medians of {o.rounds} rounds, microseconds: p50/p99; ratios are the best peer over ours')
    print('%-22s %10s ' % ('collective', 'bytes') + ' '.join('%19s' % n for n in [*o.peers, 'ours']) + '  p50 ratio  p99 ratio')
    for c in o.collectives:
        for op, place in SHORT[c]:
            for size in o.sizes:
                middle = {n: tuple(statistics.median(x[i] for x in found[op, size, n]) for i in (0, 1)) for n in [*o.peers, 'ours'] if (op, size, n) in found}
                ratio = [min(middle[n][i] for n in o.peers if n in middle) / middle['ours'][i] for i in (0, 1)]
                label = c + (' in place' if place == 'in_place' else '')
                rows.append(dict(collective=label, bytes=size, ranks=o.ranks, us={n: m[0] for n, m in middle.items()}, p99={n: m[1] for n, m in middle.items()},
                                 ratio=ratio[0], p99_ratio=ratio[1]))
                print('%-22s %10d ' % (label, size) + ' '.join('%19s' % ('%.2f/%.2f' % middle[n] if n in middle else '-') for n in [*o.peers, 'ours']) +
                      '  %9.2f  %9.2f' % tuple(ratio), flush=True)
    for name, key in (('p50', 'ratio'), ('p99', 'p99_ratio')):
        r = [x[key] for x in rows]
        print(f'# {name} ratios: min {min(r):.2f}, geometric mean {statistics.geometric_mean(r):.2f}, below 1: {sum(x < 1 for x in r)} of {len(r)}')
    if o.json:
        with open(o.json, 'w') as f: json.dump(rows, f, indent=1)

if __name__ == '__main__': main()
