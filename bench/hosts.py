#!/usr/bin/env python3
"""Times all_reduce (or another collective) between hosts, beside Open MPI, MPICH and Gloo over TCP and the limit of bare
sockets, interleaved in one run.

    bench/hosts.py [--bin build/release/bin] [--hosts 2] [--sizes 1K,64K,4M,64M] [--rounds 3]
                   [--peer-source DIR [--peer-build DIR]] [--peers ompi,mpich,gloo] [--per-host 1]
                   [--algorithms two_shot,hierarchical_chain] [--beside DIR] [--collective all_gather]
                   [--rate 1gbit [--burst 64kb]] [--congestion cubic] [--env RZ_SOCKETS=4 …] [--against RZ_ENCRYPTION=off …]
                   [--start] [--alone] [--json OUT]

The hosts are those of tools/cluster.py (rz0, rz1, …), of which the ranks have network and host name, --per-host ranks each.
They end with the script. This needs root, iproute2 and kernel support; without them the script prints "skipped: …" and
exits with 0.

--bin          folder of all_reduce_perf (or the program of --collective) and socket_limit
--hosts        number of hosts, 2 to 8; all share the processors of this machine
--peer-source  folder with mpi_coll.cpp and gloo_coll.cpp, which are compiled (Debian: libopenmpi-dev, libmpich-dev, libgloo-dev)
--peer-build   folder that keeps the compiled peer programs for the next run
--peers        the peer libraries to time
--per-host     ranks per host, up to 128, which share memory; more than one, or another collective, implies --alone
--algorithms   algorithms of all_reduce to force (RZ_ALGORITHM), timed beside the default of the tuning table ("ours")
--beside       folder of another build, timed beside ours ("beside")
--collective   the collective whose *_perf is run; default all_reduce
--rate         limits the outgoing traffic of every host (tc tbf), e.g. 1gbit; the column "line" shows its utilisation
--burst        bucket size of that limit. The largest packets of the kernel do not fit in 64kb and are segmented in software,
               which otherwise a network card does; 128kb avoids this
--congestion   congestion control of all sockets of the hosts (sysctl net.ipv4.tcp_congestion_control); default: the machine's
--env          environment variable for our ranks; may be repeated
--against      another environment for our ranks, timed beside ours; a column each; may be repeated
--sizes        '' measures none, for --start alone
--start        a last row, in microseconds too: from the start of all ranks to their end, with one all_reduce of 8 bytes. The
               difference of two columns is that of the time in which a group connects.
--alone        time only ours: no peers and no limit

Times are in microseconds, out of place, float sum: the median over iterations, then the median over rounds. The time of
an iteration is that of rank 0 for ours and for the limit, and that of the slowest rank for peers. For rooted collectives,
where one rank runs ahead, it is the mean over iterations. "peer": time of the best peer divided by ours; above 1 ours is
faster. "limit": time of bare sockets that carry the same bytes and add half of them (bench/socket_limit_bench.cpp),
divided by ours; 1 is the limit. "line": bytes that each host has to send, 2S(n-1)/n with n hosts, divided by our time, as a
fraction of --rate (all_reduce only); frame headers alone take 4.4% of it at 1500 bytes per frame."""
import argparse, contextlib, json, os, re, secrets, shlex, shutil, signal, statistics, subprocess, sys, tempfile, time
import outputs

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'tools'))
import cluster

SECRET = secrets.token_hex(32)  # of our ranks
HOSTS = []  # while there is a network

def address(i): return HOSTS[i].address

def skip(reason):
    print('skipped:', reason)
    sys.exit(0)

@contextlib.contextmanager
def network(n, rate, congestion, burst='64kb'):
    """n hosts at a switch."""
    try: made = cluster.Cluster(n, 'rz')
    except cluster.Unavailable as e: skip(f'no hosts here ({e})')
    with made:
        for host in made.hosts:
            try:
                if congestion: cluster.sh(*host.words('sysctl', '-qw', f'net.ipv4.tcp_congestion_control={congestion}', spaces='n'))
                if rate: cluster.sh(*host.words(*f'tc qdisc add dev eth0 root tbf rate {rate} burst {burst} latency 50ms'.split(), spaces='n'))
            except cluster.Unavailable as e: skip(f'a host cannot be set up here ({e})')
        HOSTS[:] = made.hosts
        try: yield
        finally: HOSTS.clear()

def on_host(i, command): return HOSTS[i].words(*command, spaces='nu')

def run_all(commands, environments, timeout):
    """Runs one command per rank and returns the output of rank 0. If one times out, kills all of them."""
    running = [subprocess.Popen(c, env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
               for c, e in zip(commands, environments)]
    try:
        out = [p.communicate(timeout=timeout) for p in running]
    finally:
        for p in running:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)
                p.wait()
    for p, (_, err) in zip(running, out):
        if p.returncode: raise RuntimeError(f'{shlex.join(p.args[p.args.index("--") + 1:])} ended with {p.returncode}: {err.strip()[-300:]}')
    return out[0][0]

def iterations(size): return 1000 if size <= 65536 else 50 if size <= 4 << 20 else 8

def run_ranks(o, command, env):
    """Our ranks, with --env and `env`."""
    n = o.hosts * o.per_host
    base = dict(os.environ, WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(o.per_host), MASTER_ADDR=address(0), MASTER_PORT='29533', RZ_SECRET=SECRET,
                **dict(dict(e.split('=', 1) for e in o.env), **env))
    return run_all([on_host(r // o.per_host, command) for r in range(n)], [dict(base, RANK=str(r), LOCAL_RANK=str(r % o.per_host)) for r in range(n)], 300)

def ours(o, size, folder=None, env={}):
    it = str(iterations(size))
    command = [f'{folder or o.bin}/{o.collective}_perf', '-b', str(size), '-e', str(size), '-n', it, '-w', str(max(2, int(it) // 20)), '-c', '1', '-I', '1']
    out = run_ranks(o, command, env)
    backend = re.search(r'# Backend: (.*)', out).group(1)
    if not re.search(r'\btcp\b', backend) or ('shm' in backend) != (o.per_host > 1):
        raise RuntimeError(f'the ranks are not on {o.hosts} hosts of {o.per_host}: {backend}')
    row = [l.split() for l in out.splitlines() if l.strip()[:1].isdigit()][-1]
    if row[8] != '0': raise RuntimeError(f'{row[8]} wrong results at {size} bytes')
    if o.collective in ('broadcast', 'reduce', 'gather', 'scatter', 'sendrecv'): return float(row[5])
    return float(re.search(r'out-of-place: .* p50 ([\d.]+)', out).group(1))

def start(o, env):
    """From the start of the ranks' processes to their end."""
    begin = time.monotonic()
    run_ranks(o, [f'{o.bin}/{o.collective}_perf', *'-b 8 -e 8 -n 1 -w 0 -c 0'.split()], env)
    return (time.monotonic() - begin) * 1e6

def oversubscribed(o): return o.hosts * o.per_host > len(os.sched_getaffinity(0))

def limit(o, size):
    commands = [on_host(i, [f'{o.bin}/socket_limit', str(i), ','.join(address(h) for h in range(o.hosts)), '29700', str(size), str(iterations(size))] +
                        (['-sleep'] if oversubscribed(o) else [])) for i in range(o.hosts)]
    return float(run_all(commands, [os.environ] * o.hosts, 300))

class Peers:
    """Open MPI, MPICH and Gloo, if installed. They report the time of the slowest rank, through a shared file."""
    def __init__(self, o, tmp):
        self.o, self.tmp, self.exe = o, tmp, {}
        self.agent = f'{tmp}/agent'  # replaces ssh: agent [-x …] HOST COMMAND…
        with open(self.agent, 'w') as f:
            f.write('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\ncase $host in\n' +
                    ''.join(f'{h.address}) exec {shlex.join(on_host(i, ["sh", "-c"]))} "$*";;\n' for i, h in enumerate(HOSTS)) + 'esac\n')
        os.chmod(self.agent, 0o755)
        wanted = {'ompi': ('mpicxx.openmpi', 'mpi_coll.cpp', []), 'mpich': ('mpicxx.mpich', 'mpi_coll.cpp', []),
                  'gloo': ('g++', 'gloo_coll.cpp', ['-lgloo', '-lpthread'])}
        if o.peer_build: os.makedirs(o.peer_build, exist_ok=True)
        for name in filter(None, o.peers.replace('none', '').split(',')):
            compiler, source, libraries = wanted[name]
            path = os.path.join(o.peer_source or '', source)
            if not o.peer_source: print(f'# {name} skipped: no --peer-source'); continue
            if not os.path.exists(path) or not shutil.which(compiler): print(f'# {name} skipped: no {compiler} or no {path}'); continue
            exe = os.path.join(o.peer_build or tmp, name)
            if not os.path.exists(exe):
                r = subprocess.run([compiler, path, '-O2', '-march=native', '-std=c++17', '-I', o.peer_source, '-o', exe] + libraries,
                                   capture_output=True, text=True)
                if r.returncode: print(f'# {name} skipped: not built: {(r.stderr.strip().splitlines() or ["?"])[-1]}'); continue
            self.exe[name] = exe

    def run(self, name, size):
        o, n, hosts = self.o, self.o.hosts, ','.join(address(i) for i in range(self.o.hosts))
        shm = f'/dev/shm/rz_hosts.{os.getpid()}'
        # Best case for the peers: no page faults in temporary buffers.
        env = {'BENCH_SHM': shm, 'BENCH_PEER': name, 'BENCH_OPS': 'ar', 'BENCH_SIZES': str(size), 'BENCH_BUDGET_MS': str(o.budget),
               'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': '1099511627776'}
        if name == 'ompi':
            command = ['mpirun.openmpi', '--allow-run-as-root', '-np', str(n), '-H', hosts, '--map-by', 'node', '--bind-to', 'none', '--mca',
                       'plm_rsh_agent', self.agent, '--mca', 'mpi_yield_when_idle', '1' if oversubscribed(o) else '0', '--mca', 'oob_tcp_if_include', 'eth0', '--mca', 'pml', 'ob1', '--mca', 'btl', 'tcp,self',
                       '--mca', 'btl_tcp_if_include', 'eth0'] + [w for k in env for w in ('-x', k)] + [self.exe[name]]
        if name == 'mpich':
            env['UCX_TLS'] = 'tcp,self'
            command = ['mpiexec.mpich', '-n', str(n), '-ppn', '1', '-hosts', hosts, '-launcher', 'ssh', '-launcher-exec', self.agent,
                       '-iface', 'eth0', self.exe[name]]
        try:
            if name == 'gloo':
                store = tempfile.mkdtemp(dir=self.tmp)
                out = run_all([on_host(i, [self.exe[name], str(i), str(n), store, address(i)]) for i in range(n)], [dict(os.environ, **env)] * n, 120)
            else: out = run_all([on_host(0, command)], [dict(os.environ, **env)], 120)
        finally:
            with contextlib.suppress(FileNotFoundError): os.unlink(shm)
        if 'WRONG' in out: raise RuntimeError(f'{name}: {out.strip()[:200]}')
        rows = [l.split(',') for l in out.splitlines() if l.startswith('ROW')]
        if not rows: raise RuntimeError(f'{name} printed no times')
        return float(rows[0][7])

def parse_size(text):
    size = re.fullmatch(r'(\d+)([KMG]?)', text.upper())
    if not size: raise argparse.ArgumentTypeError(f"'{text}' is no size, such as 64K or 4M")
    return int(size[1]) << {'': 0, 'K': 10, 'M': 20, 'G': 30}[size[2]]

def parse_sizes(text): return [parse_size(s) for s in text.split(',')] if text else []

def parse_rate(text):
    rate = re.fullmatch(r'(\d+(?:\.\d+)?)([kmg])bit', text.lower())
    if not rate: raise argparse.ArgumentTypeError(f"'{text}' is no rate, such as 1gbit")
    return float(rate[1]) * {'k': 1e3, 'm': 1e6, 'g': 1e9}[rate[2]]

def a_rate(text): return parse_rate(text) and text

def a_setting(text):
    if '=' not in text: raise argparse.ArgumentTypeError(f"'{text}' is no NAME=VALUE")
    return text

def measure(o, peers):
    runners = {'ours': lambda s: ours(o, s)}
    if o.beside: runners['beside'] = lambda s: ours(o, s, folder=o.beside)
    for setting in o.against: runners[setting] = lambda s, e=setting: ours(o, s, env=dict([e.split('=', 1)]))
    for a in o.algorithms: runners[a] = lambda s, a=a: ours(o, s, env={'RZ_ALGORITHM': a})
    if not o.alone:
        runners['sockets'] = lambda s: limit(o, s)
        for p in peers.exe: runners[p] = lambda s, p=p: peers.run(p, s)
    times, broken = {}, {}
    for _ in range(o.rounds):
        for s in o.sizes:
            for name, run in runners.items():
                if name in broken: continue
                try: times.setdefault((name, s), []).append(run(s))
                except (RuntimeError, subprocess.TimeoutExpired) as e:
                    if name == 'ours': raise
                    broken[name] = str(e)
        if o.start:
            for name in ['ours'] + o.against:
                times.setdefault((name, 'start'), []).append(start(o, dict([name.split('=', 1)]) if name != 'ours' else {}))
    for name, why in broken.items(): print(f'# {name} skipped: {why}')
    return list(runners), {k: statistics.median(v) for k, v in times.items()}

def table(o, names, times):
    peers = [n for n in names if n not in ['ours', 'beside', 'sockets'] + o.algorithms + o.against]
    wide = max(12, 2 + max(len(n) for n in names))
    print(f'# {o.collective}, {o.hosts} hosts' + (f' of {o.per_host} ranks' if o.per_host > 1 else '') + f', float sum, medians of {o.rounds} rounds, microseconds' + (f', links of {o.rate}, bursts of {o.burst}' if o.rate else '') +
          (f', {o.congestion}' if o.congestion else '') +
          (f', {" ".join(o.env)}' if o.env else ''))
    print('%10s' % 'bytes' + ''.join(n.rjust(wide) for n in names) + '%8s%8s%8s' % ('peer', 'limit', 'line'))
    rows = []
    for s in o.sizes:
        t = {n: times[n, s] for n in names if (n, s) in times}
        best = min((t[p] for p in peers if p in t), default=None)
        row = dict(bytes=s, us=t, peer=best and best / t['ours'], limit=t['sockets'] / t['ours'] if 'sockets' in t else None,
                   line=8 * 2 * s * (o.hosts - 1) / o.hosts / (t['ours'] * 1e-6) / parse_rate(o.rate) if o.rate and o.collective == 'all_reduce' else None)
        rows.append(row)
        print('%10d' % s + ''.join((f'{t[n]:.1f}' if n in t else '-').rjust(wide) for n in names) +
              ''.join('%8s' % (f'{row[k]:.2f}' if row[k] else '-') for k in ('peer', 'limit', 'line')))
    if o.start:
        us = {n: times[n, 'start'] for n in ['ours'] + o.against}
        rows.append(dict(bytes=8, start_us=us))
        print('%10s' % 'start' + ''.join((f'{us[n]:.0f}' if n in us else '-').rjust(wide) for n in names))
    return rows

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/release/bin'); a.add_argument('--hosts', type=int, default=2, choices=range(2, 9))
    a.add_argument('--sizes', type=parse_sizes, default='1K,64K,4M,64M'); a.add_argument('--rounds', type=int, default=3, choices=range(1, 1000), metavar='ROUNDS')
    a.add_argument('--peer-source'); a.add_argument('--peer-build'); a.add_argument('--peers', default='ompi,mpich,gloo'); a.add_argument('--rate', type=a_rate); a.add_argument('--burst', default='64kb'); a.add_argument('--congestion')
    a.add_argument('--env', action='append', default=[], type=a_setting); a.add_argument('--alone', action='store_true'); a.add_argument('--json')
    a.add_argument('--budget', type=float, default=150, help='milliseconds that a peer may spend on a size')
    a.add_argument('--per-host', type=int, default=1, choices=range(1, 129), metavar='1…128'); a.add_argument('--against', action='append', default=[], type=a_setting); a.add_argument('--start', action='store_true'); a.add_argument('--algorithms', default='')
    a.add_argument('--beside'); a.add_argument('--collective', default='all_reduce')
    o = a.parse_args()
    o.algorithms, o.beside = [n for n in o.algorithms.split(',') if n], o.beside and os.path.abspath(o.beside)
    o.alone = o.alone or o.per_host > 1 or o.collective != 'all_reduce'
    if o.algorithms and o.collective != 'all_reduce': a.error('--algorithms are those of all_reduce')
    o.bin = os.path.abspath(o.bin)
    programs = [(o.bin, f'{o.collective}_perf')] + ([(o.beside, f'{o.collective}_perf')] if o.beside else []) + ([] if o.alone else [(o.bin, 'socket_limit')])
    for folder, program in programs:
        if not os.path.exists(f'{folder}/{program}'): sys.exit(f'hosts.py: no {program} in {folder}; set the folder with --bin')
    if os.geteuid() != 0: skip('network namespaces need root')
    missing = [t for t in ('ip', 'tc', 'unshare', 'nsenter') if not shutil.which(t)]
    if missing: skip(f'no {", ".join(missing)} (Debian: iproute2, util-linux)')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outputs.empty('--json', o.json)
    with tempfile.TemporaryDirectory() as tmp, network(o.hosts, o.rate, o.congestion, o.burst):
        peers = Peers(o, tmp) if not o.alone else None
        try: names, times = measure(o, peers)
        except RuntimeError as e: sys.exit(f'hosts.py: {e}')
        rows = table(o, names, times)
    if o.json: json.dump(rows, open(o.json, 'w'), indent=1)

if __name__ == '__main__': main()
