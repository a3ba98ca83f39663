#!/usr/bin/env python3
"""doctor itself: on this host with less than it has (limits, mounts, control groups), and on hosts that are namespaces of
network, names and mounts, at a switch.

    doctor_test.py ROOT DOCTOR"""
import contextlib, json, os, re, subprocess, sys, tempfile, time, unittest
DOCTOR, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.dont_write_bytecode = True
sys.path.insert(0, f'{ROOT}/tools')
import cluster
OTHERS = ('XDG_CONFIG_HOME', 'OPENBLAS_CORETYPE', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
ENV = {k: v for k, v in os.environ.items() if k not in OTHERS and not k.startswith('RZ_')}

def sh(command): subprocess.run(command, shell=True, check=True, capture_output=True, text=True)

def doctor(*words, prefix=(), env=None, status=None):
    p = subprocess.run([*prefix, DOCTOR, *words], capture_output=True, text=True, timeout=180, env={**ENV, **(env or {})}, stdin=subprocess.DEVNULL)
    if status is not None and p.returncode != status: raise AssertionError(f'{words}: status {p.returncode}\n{p.stdout}{p.stderr}')
    return p

def findings(p): return json.loads(p.stdout)['findings']

class Case(unittest.TestCase):
    def verdict(self, p, check, verdict, found='', host=None):
        these = [f for f in findings(p) if f['check'] == check and (host is None or f['host'] == host)]
        self.assertEqual(len(these), 1, f'{check} of {host}: {these}')
        self.assertEqual(these[0]['verdict'], verdict, these[0])
        if found: self.assertRegex(these[0]['found'], found)
        self.assertEqual(these[0]['remedy'] == '', verdict == 'ok', these[0])
        return these[0]

class RemoteShell(Case):
    def test_what_ssh_prints_decides_the_remedy(self):
        for line, remedy in (('ssh: Could not resolve hostname node1: Name or service not known', "echo 'ADDRESS node1' >> /etc/hosts"),
                             ('Host key verification failed.', 'ssh-keygen -R node1'),
                             ('ssh: connect to host node1 port 22: Connection refused', 'Start sshd there'),
                             ('root@node1: Permission denied (publickey).', 'ssh-copy-id node1')):
            with tempfile.TemporaryDirectory() as folder:
                with open(f'{folder}/ssh', 'w') as f: f.write(f"#!/bin/sh\necho '{line}' >&2\nexit 255\n")
                with open(f'{folder}/hosts', 'w') as f: f.write('node1 slots=1\n')
                os.chmod(f'{folder}/ssh', 0o755)
                p = doctor('--json', '--hostfile', f'{folder}/hosts', env={'PATH': f'{folder}:{os.environ["PATH"]}'}, status=1)
                f = self.verdict(p, 'remote shell', 'missing', re.escape(line), host='node1')
                self.assertIn(remedy, f['remedy'])

class ThisHost(Case):
    def test_a_table_and_json(self):
        p = doctor('--ranks', '2')
        self.assertRegex(p.stdout, r'\n\ndoctor: a job of 2 ranks would (not )?run[^\n]*\n$')
        self.assertEqual(p.returncode, 1 if 'would not run' in p.stdout else 0)
        p = doctor('--ranks', '2', '--json')
        self.assertEqual(json.loads(p.stdout)['runs'], p.returncode == 0)
        self.assertEqual(len(findings(p)), len({f['check'] for f in findings(p)}))
        self.verdict(p, 'trial group', 'ok', 'connect and reduce')
        facts = json.loads(doctor('--facts', status=0).stdout)
        self.assertEqual(facts['name'], os.uname().nodename)
        self.assertEqual(facts['processors'], sorted(os.sched_getaffinity(0)))

    def test_few_open_files(self):
        p = doctor('--ranks', '2', '--json', prefix=['prlimit', '--nofile=30:30'], status=1)
        self.verdict(p, 'open files', 'missing', 'up to 30')

    def test_small_files(self):
        p = doctor('--ranks', '2', '--json', prefix=['prlimit', '--fsize=4096'], status=1)
        f = self.verdict(p, 'shared memory', 'missing', 'files up to 4 KiB')
        self.assertIn('ulimit -f', f['remedy'])

    def test_one_processor(self):
        first = str(min(os.sched_getaffinity(0)))
        p = doctor('--ranks', '2', '--json', prefix=['taskset', '-c', first], status=0)
        self.verdict(p, 'processors', 'warning', '^1 of ')
        self.verdict(doctor('--json', prefix=['taskset', '-c', first], status=0), 'processors', 'ok', '^1 of ')

    def test_a_wrong_variable_is_a_wrong_input(self):
        p = doctor(env={'RZ_SOCKETS': 'x'}, status=2)
        self.assertRegex(p.stderr, r'^doctor: [^\n]*RZ_SOCKETS[^\n]*\n$')
        self.assertEqual(p.stdout, '')

    def test_no_place_to_meet(self):
        p = doctor('--json', env={'TMPDIR': '/nowhere', 'XDG_RUNTIME_DIR': ''}, status=1)
        self.verdict(p, 'temporary directory', 'missing', "TMPDIR='/nowhere'")

    def test_a_master_that_no_name_server_knows(self):
        p = doctor('--json', env={'MASTER_ADDR': 'nowhere.invalid'}, status=1)
        self.verdict(p, 'MASTER_ADDR', 'missing', 'nowhere.invalid')

    def as_root(self, command='true'):
        if os.geteuid() != 0: self.skipTest('needs root')
        try: sh(command)
        except subprocess.CalledProcessError as e: self.skipTest(f'not permitted here: {command}: {e.stderr.strip()}')

    def test_a_small_dev_shm(self):
        small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm'
        self.as_root(f"unshare -m sh -c '{small}'")
        prefix = ['unshare', '-m', 'sh', '-c', small + ' && exec "$0" "$@"']
        p = doctor('--ranks', '2', '--json', prefix=prefix)
        self.verdict(p, '/dev/shm', 'ok', '1 MiB free of 1 MiB')  # of a job on the host
        p = doctor('--ranks', '2', '--json', '--device', 'cuda', prefix=prefix, status=1)
        self.verdict(p, '/dev/shm', 'missing', '1 MiB')
        gone = ['unshare', '-m', 'sh', '-c', 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$0" "$@"']
        self.verdict(doctor('--device', 'cuda', '--ranks', '2', '--json', prefix=gone, status=1), '/dev/shm', 'missing', 'none')

    def test_a_name_that_is_loopback(self):
        with tempfile.NamedTemporaryFile('w', prefix='hosts') as f:
            f.write('127.0.0.1 localhost\n127.0.1.1 thishost\n')
            f.flush()
            bind = f'hostname thishost && mount --bind {f.name} /etc/hosts'
            self.as_root(f"unshare -um sh -c '{bind}'")
            p = doctor('--json', prefix=['unshare', '-um', 'sh', '-c', bind + ' && exec "$0" "$@"'])
            self.verdict(p, 'own name', 'ok', 'thishost: 127.0.1.1')  # of a job on one host
            f.seek(0), f.truncate(), f.write('127.0.0.1 localhost\n'), f.flush()
            p = doctor('--json', prefix=['unshare', '-um', 'sh', '-c', bind.replace('thishost', 'nohost.invalid') + ' && exec "$0" "$@"'])
            self.verdict(p, 'own name', 'warning', 'nohost.invalid')

    def test_a_core_type_of_openblas(self):
        if os.uname().machine != 'x86_64': self.skipTest('the names are those of x86')
        self.verdict(doctor('--json', status=0), 'OPENBLAS_CORETYPE', 'ok', 'not set')
        f = self.verdict(doctor('--json', env={'OPENBLAS_CORETYPE': 'Prescott'}), 'OPENBLAS_CORETYPE', 'warning', '^Prescott, on a processor with ')
        self.assertIn('unset OPENBLAS_CORETYPE', f['remedy'])

    def test_an_old_processor(self):
        if os.uname().machine != 'x86_64': self.skipTest('the names are those of x86')
        with tempfile.NamedTemporaryFile('w', prefix='cpuinfo') as f:
            f.write('processor\t: 0\nflags\t\t: fpu sse2 avx\n')
            f.flush()
            bind = f'mount --bind {f.name} /proc/cpuinfo'
            self.as_root(f"unshare -m sh -c '{bind}'")
            prefix = ['unshare', '-m', 'sh', '-c', bind + ' && exec "$0" "$@"']
            p = doctor('--json', prefix=prefix, status=0)
            self.verdict(p, 'instructions', 'warning', '^AVX$')
            self.verdict(p, 'AES', 'ok', 'none')  # of a job on one host
            p = doctor('--json', prefix=prefix, env={'OPENBLAS_CORETYPE': 'Haswell'}, status=1)
            self.verdict(p, 'OPENBLAS_CORETYPE', 'missing', '^Haswell, on a processor with AVX$')

    @contextlib.contextmanager
    def control_group(self, controller, **limits):
        """A shell command that enters a new control group with these limits, of version 1 or 2."""
        v1 = f'/sys/fs/cgroup/{controller}'
        base = v1 if os.path.isdir(v1) else '/sys/fs/cgroup'
        with open('/proc/self/cgroup') as f: own = [line.rstrip().split(':', 2) for line in f]
        path = next((p for _, c, p in own if (controller in c.split(',') if base == v1 else c == '')), '/')
        folder = f'{base}{path.rstrip("/")}/doctor_test_{os.getpid()}'
        try:
            os.mkdir(folder)
            try:
                for name, value in limits.items():
                    with open(f'{folder}/{controller}.{name}', 'w') as f: f.write(str(value))
            except OSError:
                os.rmdir(folder)
                raise
        except OSError as e: self.skipTest(f'no control group of {controller} can be made here: {e}')
        try: yield ['sh', '-c', f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"']
        finally:
            end = time.monotonic() + 5
            while True:
                try: break_ = os.rmdir(folder) is None
                except OSError: break_ = time.monotonic() > end
                if break_: break
                time.sleep(0.01)

    def test_few_processes(self):
        self.as_root()
        with self.control_group('pids', max=6) as prefix:
            p = doctor('--ranks', '4', '--json', prefix=prefix, status=1)
        self.verdict(p, 'processes', 'missing', '^[0-5] more may start')

    def test_no_process_at_all(self):
        self.as_root()
        with self.control_group('pids', max=1) as prefix:
            p = doctor('--ranks', '2', '--json', prefix=prefix, status=1)
        self.verdict(p, 'trial group', 'missing', 'pids.max')
        self.verdict(p, 'single copy', 'warning', 'fork')

    def test_little_memory(self):
        self.as_root()
        limit = {'limit_in_bytes' if os.path.isdir('/sys/fs/cgroup/memory') else 'max': 200 << 20}
        with self.control_group('memory', **limit) as prefix:
            p = doctor('--ranks', '4', '--json', prefix=prefix, status=0)
        self.verdict(p, 'memory', 'warning', r'^1\d\d(\.\d)? MiB available')

class Hosts(Case):
    """Three hosts at a switch; each has its own name, /etc/hosts and /dev/shm."""
    @classmethod
    def setUpClass(cls):
        try: cls.cluster = cluster.Cluster(['node1', 'node2', 'node3'])
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))
        cls.addClassCleanup(cls.cluster.close)
        for i in (1, 2, 3): os.mkdir(cls.path(f'user{i}'))
        cls.shell = cls.path('rsh')
        with open(cls.shell, 'w') as f:
            f.write(f'#!/bin/sh\nhost=$1; shift\necho "Welcome to $host"\ncase $host in\n')
            for host in ('node1', 'node2', 'node02', 'node3'):
                i = int(host[-1])
                enter = ' '.join(cls.cluster.hosts[i - 1].words('unshare', '-m', 'sh', '-c'))
                f.write(f'{host}) exec {enter} "mount --bind {cls.path("hosts")}.{host} /etc/hosts; HOME={cls.path("user")}{i} $*";;\n')
            f.write('esac\necho "rsh: $host: no such host" >&2; exit 255\n')
        os.chmod(cls.shell, 0o755)

    def setUp(self):
        for i in (1, 2, 3): self.names(i, ''.join(f'10.79.0.{k} node{k}\n' for k in (1, 2, 3)))

    def names(self, host, text):
        with open(self.path(f'hosts.node{host}'), 'w') as f: f.write('127.0.0.1 localhost\n' + text)

    @classmethod
    def path(cls, name): return f'{cls.cluster.folder}/{name}'

    def diagnose(self, *words, lines='node1 slots=2\nnode2 slots=2\n', shell=None, env=None, status=None):
        with open(self.path('hostfile'), 'w') as f: f.write(lines)
        start = time.monotonic()
        p = doctor('--hostfile', self.path('hostfile'), '--rsh', shell or self.shell, *words, env=env, status=status)
        self.assertLess(time.monotonic() - start, 90)
        for host in self.cluster.hosts: self.assertEqual(host.processes(DOCTOR), [], 'processes are left on the hosts')
        return p

    def on(self, host, command): return f'nsenter -t {self.cluster.hosts[host - 1].space.pid} -n {command}'

    @contextlib.contextmanager
    def changed(self, command, back):
        try: sh(command)
        except subprocess.CalledProcessError as e: self.skipTest(f'not permitted here: {command}: {e.stderr.strip()}')
        try: yield
        finally: sh(back)

    def test_three_sound_hosts(self):
        p = self.diagnose('--json', lines='node1 slots=1\nnode2 slots=1\nnode3 slots=1\n', status=0)
        self.assertEqual([f['facts']['name'] for f in json.loads(p.stdout)['facts']], ['node1', 'node2', 'node3'])
        pairs = json.loads(p.stdout)['pairs']
        self.assertEqual(len(pairs), 6)
        for pair in pairs:
            self.assertEqual((pair['error'], pair['packet'], pair['passed']), ('', 1500, 1500))
            self.assertGreater(pair['send_rate'], 1e7)
            self.assertGreater(pair['receive_rate'], 1e7)
            self.assertGreater(pair['round_trip_us'], 0)
        self.verdict(p, 'interface', 'ok', 'eth0 10.79.0.2', host='node2')
        for check in ('hosts', 'ringzero', 'clock', 'MTU'): self.verdict(p, check, 'ok')
        self.verdict(p, 'MASTER_ADDR', 'ok', host='')

    def test_fewer_ranks_than_slots_use_the_first_hosts(self):
        p = self.diagnose('--json', '--ranks', '2', status=0)
        self.assertEqual([f['facts']['name'] for f in json.loads(p.stdout)['facts']], ['node1'])
        p = self.diagnose('--ranks', '5', status=2)
        self.assertRegex(p.stderr, r'^doctor: --ranks 5: [^\n]* have 4 slots[^\n]*\n$')

    def test_a_cut_link(self):
        self.cluster.hosts[1].link('down')
        try: p = self.diagnose('--json', status=1)
        finally: self.cluster.hosts[1].link('up')
        for host in ('node1 -> node2', 'node2 -> node1'): self.verdict(p, 'route', 'missing', 'connect to 10.79.0.', host=host)

    def test_a_firewall_that_lets_no_udp_pass_is_no_lack(self):
        tc = self.on(2, 'tc')
        rule = f'{tc} qdisc add dev eth0 clsact && {tc} filter add dev eth0 ingress protocol ip u32 match ip protocol 17 0xff action drop'
        with self.changed(rule, f'{tc} qdisc del dev eth0 clsact'): p = self.diagnose('--json', status=0)
        self.verdict(p, 'path MTU', 'ok', 'not known', host='node1 -> node2')

    def test_mtus_that_differ(self):
        switch = f'nsenter -t {self.cluster.switch.pid} -n ip link set {self.cluster.hosts[1].port}'
        command = f'{self.on(2, "ip link set eth0")} mtu 1400; {switch} mtu 1400'
        with self.changed(command, command.replace('1400', '1500')):
            p = self.diagnose('--json')
        self.verdict(p, 'MTU', 'warning', 'node1 1500, node2 1400')
        self.verdict(p, 'path MTU', 'ok', '1400', host='node2 -> node1')

    def test_a_switch_that_drops_large_packets(self):
        """Both ends have jumbo frames, the switch between has not, and reports nothing."""
        up = '; '.join(self.on(i, 'ip link set eth0 mtu 9000') for i in (1, 2))
        with self.changed(up, up.replace('9000', '1500')): p = self.diagnose('--json')
        for host in ('node1 -> node2', 'node2 -> node1'):
            f = self.verdict(p, 'path MTU', 'warning' if self.route_is_ok(p, host) else 'missing', 'packets above 1500 bytes are lost', host=host)
            self.assertIn('mtu 1500', f['remedy'])
        self.assertTrue(self.verdict(p, 'MTU', 'ok', '9000'))

    def route_is_ok(self, p, host): return next(f for f in findings(p) if f['check'] == 'route' and f['host'] == host)['verdict'] != 'missing'

    def test_large_packets_that_are_lost_stop_transfers(self):
        """As above, where the hardware does not segment: one packet a frame."""
        up = '; '.join(self.on(i, 'ip link set eth0 mtu 9000 gso_max_segs 1') for i in (1, 2))
        back = '; '.join(self.on(i, 'ip link set eth0 mtu 1500 gso_max_segs 65535') for i in (1, 2))
        with self.changed(up, back): p = self.diagnose('--json', status=1)
        f = self.verdict(p, 'route', 'missing', 'a transfer of \\d+ bytes there stopped', host='node1 -> node2')
        self.assertIn('tracepath -n 10.79.0.2', f['remedy'])
        self.verdict(p, 'path MTU', 'missing', 'packets above 1500 bytes', host='node1 -> node2')

    def test_a_slow_link(self):
        shape = self.on(3, 'tc qdisc {} dev eth0 root')
        with self.changed(shape.format('add') + ' tbf rate 200mbit burst 64k latency 50ms', shape.format('del')):
            p = self.diagnose('--json', lines='node1 slots=1\nnode2 slots=1\nnode3 slots=1\n', status=0)
        self.verdict(p, 'route', 'ok', host='node1 -> node2')
        for host in ('node1 -> node3', 'node3 -> node2'): self.verdict(p, 'route', 'warning', r'0\.0\d GB/s', host=host)

    def test_processors_that_differ(self):
        """The second host starts doctor with another OPENBLAS_CORETYPE and another /proc/cpuinfo."""
        if os.uname().machine != 'x86_64': self.skipTest('the names are those of x86')
        with open(self.path('cpuinfo'), 'w') as f: f.write('processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\n')
        with open(self.path('old'), 'w') as f:
            f.write(f'#!/bin/sh\n[ $1 = node2 ] || exec {self.shell} "$@"\n'
                    f'exec {self.shell} node2 "mount --bind {self.path("cpuinfo")} /proc/cpuinfo; OPENBLAS_CORETYPE=Zen $2 $3"\n')
        os.chmod(self.path('old'), 0o755)
        p = self.diagnose('--json', shell=self.path('old'), status=0)
        f = self.verdict(p, 'instructions', 'warning', r'^node1 .*, node2 AVX2 and OPENBLAS_CORETYPE=Zen$', host='')
        self.assertIn('OPENBLAS_CORETYPE', f['remedy'])
        self.verdict(p, 'AES', 'warning', 'none', host='node2')
        self.verdict(p, 'kernel', 'ok', 'on all hosts', host='')

    def test_names_that_differ(self):
        self.names(2, '10.79.0.3 node1\n10.79.0.2 node2\n')
        p = self.diagnose('--json', status=1)
        f = self.verdict(p, 'MASTER_ADDR', 'missing', 'node1 10.79.0.1, node2 10.79.0.3', host='')
        self.assertIn('on node2', f['remedy'])
        self.names(2, '127.0.1.1 node1\n10.79.0.2 node2\n')
        self.verdict(self.diagnose('--json', status=1), 'MASTER_ADDR', 'missing', 'node1: 127.0.1.1', host='node2')
        self.names(2, '10.79.0.2 node2\n')
        self.verdict(self.diagnose('--json', status=1), 'MASTER_ADDR', 'missing', "'node1'", host='node2')
        self.verdict(self.diagnose('--json', '--master-addr', '10.79.0.1', status=0), 'MASTER_ADDR', 'ok', host='')

    def secret(self, host, text, mode=0o600):
        """Writes the secret of the user on that host."""
        folder = self.path(f'user{host}/.config/ringzero')
        os.makedirs(folder, exist_ok=True)
        with open(f'{folder}/secret', 'w') as f: f.write(text + '\n')
        os.chmod(f'{folder}/secret', mode)

    def test_secrets(self):
        text, other = 'correct horse battery staple, and more', 'another secret of thirty-two characters'
        p = self.diagnose('--json', status=0)
        self.verdict(p, 'secret', 'warning', 'node1 none yet, node2 none yet', host='')
        self.assertFalse(os.path.exists(self.path('user1/.config/ringzero/secret')), 'a diagnosis changes nothing')
        for host in (1, 2): self.secret(host, text)
        p = self.diagnose('--json', status=0)
        self.verdict(p, 'secret', 'ok', 'equal on all hosts', host='')
        self.secret(2, other)
        p = self.diagnose('--json', status=0)
        self.verdict(p, 'secret', 'warning', 'differs: node1 has one, node2 has one', host='')
        for word in (text, other): self.assertNotIn(word, p.stdout + p.stderr)
        self.secret(2, text, 0o644)
        self.verdict(self.diagnose('--json', status=1), 'secret', 'missing', 'mode 0644', host='node2')
        for host in (1, 2): os.remove(self.path(f'user{host}/.config/ringzero/secret'))

    def test_a_host_that_knows_itself_as_loopback(self):
        self.names(1, '127.0.1.1 node1\n10.79.0.2 node2\n')
        p = self.diagnose('--json', status=0)
        for check in ('own name', 'MASTER_ADDR'): self.verdict(p, check, 'warning', '127.0.1.1', host='node1')
        self.verdict(p, 'interface', 'ok', '10.79.0.1', host='node1')

    def test_one_host_with_two_names(self):
        os.symlink(self.path('hosts.node2'), self.path('hosts.node02'))
        self.addCleanup(os.remove, self.path('hosts.node02'))
        p = self.diagnose('--json', '--master-addr', 'node2', lines='node2 slots=1\nnode02 slots=1\n', status=1)
        self.verdict(p, 'hosts', 'missing', 'node2 and node02 are one host, node2')

    def test_hosts_that_are_not_there(self):
        p = self.diagnose('--json', lines='node1 slots=1\nnode9 slots=1\nnode2 slots=1\n', status=1)
        f = self.verdict(p, 'remote shell', 'missing', 'rsh: node9: no such host', host='node9')
        self.assertIn('node9 true', f['remedy'])
        self.verdict(p, 'route', 'ok', host='node1 -> node2')  # the others are examined
        p = self.diagnose('--json', '--program', '/nowhere/doctor', status=1)
        f = next(f for f in findings(p) if f['check'] == 'remote shell')
        self.assertIn('/nowhere/doctor', f['found'])
        self.assertIn('--program PATH', f['remedy'])
        p = doctor('--json', '--hostfile', self.path('hostfile'), '--rsh', '/nowhere/rsh', status=1)
        self.verdict(p, 'remote shell', 'missing', "cannot start '/nowhere/rsh': No such file", host='node1')

    def test_a_stranger_is_not_served(self):
        server = subprocess.Popen([DOCTOR, '--agent'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.addCleanup(server.stdout.close)
        token = 'f' * 32
        server.stdin.write('serve ' + json.dumps({'address': '127.0.0.1', 'token': token, 'port': 0}) + '\n')
        server.stdin.flush()
        port = json.loads(server.stdout.readline().removeprefix('doctor: serving '))['port']
        listening = subprocess.run(['ss', '-Hltn', f'sport = :{port}'], capture_output=True, text=True).stdout.split()
        if listening: self.assertIn(f'127.0.0.1:{port}', listening)
        def measured(token):
            client = subprocess.run([DOCTOR, '--agent'], input='measure ' + json.dumps({'address': '127.0.0.1', 'token': token, 'port': port}) + '\n',
                                    capture_output=True, text=True, timeout=60, env=ENV)
            return json.loads(client.stdout.removeprefix('doctor: measured '))
        wrong = measured('0' * 32)
        self.assertFalse(wrong['connected'])
        self.assertNotEqual(wrong['error'], '')
        right = measured(token)
        self.assertTrue(right['connected'], right)
        self.assertEqual(right['error'], '')
        server.stdin.close()
        self.assertEqual(server.stdout.read(), 'doctor: served {}\n')
        self.assertEqual(server.wait(timeout=10), 0)

if __name__ == '__main__': unittest.main(verbosity=2)
