#!/usr/bin/env python3
"""Checks the results of every collective with the _perf programs: all types and reductions, several sizes and numbers of
ranks, in place and out of place.

    check_all.py [--bin build/release/bin] [--ranks 1,2,3,4,7,8] [--sizes 1000,100000,3000000]
                 [--collectives all_reduce,...] [--registered 0,2] [--launch '{bin}/rzrun -n {n}'] [--extra '...']
                 [--json OUT]

--bin         folder of the _perf programs and rzrun
--ranks       numbers of ranks, each in runs of its own
--sizes       bytes of the whole buffer
--collectives all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, alltoall, alltoallv, sendrecv;
              default all
--registered  0: ordinary memory; 1, 2: memory of the communicator (-R of the _perf programs)
--launch      command that starts a program on n ranks
--extra       more flags for the _perf programs
--json        file for the table as JSON

Each program runs once per number of ranks, with -d all -o all and one checked iteration of each row (-c 1): inputs are
numbers with exactly known results, and output elements that differ are counted, in place and out of place.
RZ_TRANSPORT, RZ_ALGORITHM and the other variables of the library apply. Prints a line per collective; "results" are rows
of the _perf programs, in place and out of place.

Exit status: 0 all results correct, 7 some wrong, 1 a program failed, 2 a wrong command line."""
import argparse, json, os, shlex, subprocess, sys, tempfile, time
import outputs

COLLECTIVES = ['all_reduce', 'reduce_scatter', 'all_gather', 'broadcast', 'reduce', 'gather', 'scatter', 'alltoall', 'alltoallv', 'sendrecv']

def fail(status, line):
    print(f'check_all.py: {line}', file=sys.stderr)
    sys.exit(status)

class Parser(argparse.ArgumentParser):
    def error(self, message): fail(2, message + '; see --help')

def numbers(least):
    def parse(text):
        try: values = [int(x) for x in text.split(',')]
        except ValueError: raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers with commas between")
        if min(values) < least: raise argparse.ArgumentTypeError(f'{min(values)} is less than {least}')
        return values
    return parse

def collectives(text):
    for name in (names := text.split(',')):
        if name not in COLLECTIVES: raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(COLLECTIVES)}")
    return names

def options():
    a = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    a.add_argument('--bin', default='build/release/bin', help=argparse.SUPPRESS)
    a.add_argument('--ranks', type=numbers(1), default=[1, 2, 3, 4, 7, 8], help=argparse.SUPPRESS)
    a.add_argument('--sizes', type=numbers(1), default=[1000, 100_000, 3_000_000], help=argparse.SUPPRESS)
    a.add_argument('--collectives', type=collectives, default=COLLECTIVES, help=argparse.SUPPRESS)
    a.add_argument('--registered', type=numbers(0), default=[0, 2], help=argparse.SUPPRESS)
    a.add_argument('--launch', default='{bin}/rzrun -n {n}', help=argparse.SUPPRESS)
    a.add_argument('--extra', type=shlex.split, default=[], help=argparse.SUPPRESS)
    a.add_argument('--json', help=argparse.SUPPRESS)
    o = a.parse_args()
    o.bin = os.path.abspath(o.bin)
    for name in o.collectives:
        if not os.path.exists(f'{o.bin}/{name}_perf'): fail(2, f"--bin: {o.bin} has no {name}_perf; build it: tools/build.sh")
    return o

def wrong_of(result):
    """(number of checked results of a row, number of them with wrong elements)."""
    found = [result[place].get('nwrong') for place in ('out_of_place', 'in_place')]
    checked = [int(w) for w in found if w not in (None, 'N/A')]
    return len(checked), sum(w > 0 for w in checked)

def run(o, name, ranks, registered, size, folder):
    """(checked, wrong) of one run of a _perf program."""
    out = f'{folder}/rows.json'
    command = shlex.split(o.launch.format(bin=o.bin, n=ranks)) + [
        f'{o.bin}/{name}_perf', '-b', str(size), '-e', str(size), '-d', 'all', '-o', 'all', '-n', '1', '-w', '0', '-c', '1', '-R', str(registered), '-J', out] + o.extra
    p = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if p.returncode not in (0, 7): fail(1, f'{" ".join(command)} ended with {p.returncode}: {p.stderr.strip()}')
    with open(out) as f: rows = json.load(f)['results']
    if not rows: fail(1, f'{" ".join(command)} printed no row')
    found = [wrong_of(r) for r in rows]
    return sum(c for c, _ in found), sum(w for _, w in found)

def main():
    o = options()
    outputs.empty('--json', o.json)
    table, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in o.collectives:
            checked = wrong = 0
            for ranks in o.ranks:
                for registered in o.registered:
                    if sys.stderr.isatty(): print(f'\r{name}: {ranks} ranks, -R {registered}      ', end='', file=sys.stderr, flush=True)
                    for size in o.sizes:
                        c, w = run(o, name, ranks, registered, size, folder)
                        table.append(dict(collective=name, ranks=ranks, registered=registered, bytes=size, checked=c, wrong=w))
                        checked, wrong = checked + c, wrong + w
            if sys.stderr.isatty(): print('\r' + ' ' * 50 + '\r', end='', file=sys.stderr)
            print(f'{name:<15} {checked:7} results checked, {wrong} wrong', flush=True)
    all_checked, all_wrong = (sum(r[k] for r in table) for k in ('checked', 'wrong'))
    print(f'# {all_checked} results on {", ".join(map(str, o.ranks))} ranks in {time.monotonic() - begin:.0f} s: {all_wrong} wrong')
    if o.json:
        with open(o.json, 'w') as f: json.dump(dict(tool='check_all', rows=table), f, indent=1)
    sys.exit(7 if all_wrong else 0)

if __name__ == '__main__': main()
