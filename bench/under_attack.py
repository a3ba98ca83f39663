#!/usr/bin/env python3
"""Times all_reduce between two hosts, and the start of such a job, while a third host attacks it: beside no attack, and beside a control.

    bench/under_attack.py [--bin build/release/bin] [--sizes 1K,64K,4M] [--rounds 3] [--attacks scan,garbage,half_open,hello,slow,thousands]

The hosts are those of tools/cluster.py, with one rank each; the attacks are those of tools/strangers.py. All hosts share the processors of
this machine, of which the strangers take a part. The control is the same attack at an rzrun of another job, which sleeps on a fourth host:
its listener accepts as many strangers as the store of the job. Conditions follow each other in each round.

Output: microseconds of an all_reduce (p50, float sum, rank 0; medians of the rounds) by size, then milliseconds from the start of a job of one
all_reduce to its end ("start"). This needs root and iproute2; without them the script prints "skipped: …" and exits with 0."""
import argparse, contextlib, os, re, statistics, subprocess, sys, time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'tools'))
import cluster, hosts, strangers

PORT = 29533

def job(o, at, size, iterations):
    """Time of an all_reduce, and of the whole job."""
    env = dict(os.environ, WORLD_SIZE='2', LOCAL_RANK='0', LOCAL_WORLD_SIZE='1', MASTER_ADDR=at[0].address, MASTER_PORT=str(PORT), RZ_SECRET=hosts.SECRET,
               RZ_LAUNCH='measured')
    command = [f'{o.bin}/all_reduce_perf', '-b', str(size), '-e', str(size), '-n', str(iterations), '-w', '1', '-I', '1']
    begin = time.monotonic()
    out = hosts.run_all([h.words(*command, spaces='nu') for h in at], [dict(env, RANK=str(r)) for r in range(2)], 120)
    elapsed = time.monotonic() - begin
    row = [l.split() for l in out.splitlines() if l.strip()[:1].isdigit()][-1]
    if row[8] != '0': raise RuntimeError(f'{row[8]} wrong results at {size} bytes')
    return float(re.search(r'out-of-place: .* p50 ([\d.]+)', out).group(1)), elapsed * 1e3

@contextlib.contextmanager
def other_job(o, host):
    """An rzrun that listens, with an agent, both of one host."""
    command = [f'{o.bin}/rzrun', '--nnodes', '2', '--nproc-per-node', '1', '--rdzv-endpoint', f'{host.address}:{PORT}', 'sleep', '1000']
    running = [host.start(*command[:1], '--node-rank', str(n), *command[1:], env=dict(os.environ, RZ_SECRET=hosts.SECRET)) for n in range(2)]
    try:
        cluster.wait_until(lambda: len(host.processes('sleep 1000')) == 2, 'start of the other job')
        yield
    finally:
        for pid in host.processes(f'{o.bin}/rzrun'): host.kill(pid)
        for p in running: p.communicate()

def attack(at, kind, while_it_starts):
    if not kind: return contextlib.nullcontext()
    name, _, control = kind.partition(' ')
    if control: where = ['--at', f'{at[3].address}:{PORT}']
    elif name == 'scan': where = ['--at', at[0].address, '--at', at[1].address]
    elif while_it_starts: where = [w for h in at[:2] for w in ('--watch', f'{h.space.pid}:{h.address}')]
    else: where = ['--at', f'{at[0].address}:{PORT}']
    return strangers.Stranger(at[2], name, *where)

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/release/bin'); a.add_argument('--sizes', type=hosts.parse_sizes, default='1K,64K,4M')
    a.add_argument('--rounds', type=int, default=3); a.add_argument('--attacks', default='scan,garbage,half_open,hello,slow,thousands')
    o = a.parse_args()
    o.bin = os.path.abspath(o.bin)
    kinds = [k for k in o.attacks.split(',') if k]
    for k in kinds:
        if k not in strangers.KINDS or k == 'replay': a.error(f"'{k}' is none of the attacks")
    for program in ('all_reduce_perf', 'rzrun'):
        if not os.path.exists(f'{o.bin}/{program}'): sys.exit(f'under_attack.py: no {program} in {o.bin}; set the folder with --bin')
    conditions = [''] + [c for k in kinds for c in (k, f'{k} control')]
    times = {}
    try:
        with cluster.Cluster(4, 'rz') as made, other_job(o, made.hosts[3]):
            at = made.hosts
            for _ in range(o.rounds):
                for kind in conditions:
                    with attack(at, kind, False) as running:
                        for size in o.sizes: times.setdefault((kind, size), []).append(job(o, at[:2], size, hosts.iterations(size))[0])
                    if kind and running.report['let_in']: raise RuntimeError(f'{kind}: strangers were let in')
                    with attack(at, kind, True): times.setdefault((kind, 'start'), []).append(job(o, at[:2], 8, 1)[1])
    except cluster.Unavailable as e: return print('skipped:', e)
    except (RuntimeError, subprocess.TimeoutExpired) as e: sys.exit(f'under_attack.py: {e}')
    print('# all_reduce, 2 hosts, float sum, medians of', o.rounds, 'rounds, microseconds; start in milliseconds')
    print('%-20s' % 'attack' + ''.join('%12s' % s for s in [*o.sizes, 'start']))
    for kind in conditions: print('%-20s' % (kind or 'none') + ''.join('%12.1f' % statistics.median(times[kind, s]) for s in [*o.sizes, 'start']), flush=True)

if __name__ == '__main__': main()
