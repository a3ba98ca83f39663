#!/usr/bin/env python3
"""tools/cluster.py: its hosts, and that nothing of them is left; bench/hosts.py: a small run of all_reduce, and the errors of a
wrong command line; bench/under_attack.py: a small run.

    hosts_test.py ROOT BIN"""
import os, shutil, signal, subprocess, sys, tempfile, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, f'{ROOT}/tools')
sys.dont_write_bytecode = True
import cluster

def run(*words): return subprocess.run([sys.executable, f'{ROOT}/bench/hosts.py', *words], capture_output=True, text=True, timeout=120)

def network_of(process):
    try: return os.readlink(f'/proc/{process}/ns/net')
    except OSError: return ''

def processes_in(networks): return [p for p in os.listdir('/proc') if p.isdigit() and network_of(p) in networks]

class CommandLine(unittest.TestCase):
    def refused(self, why, *words):
        p = run(*words)
        self.assertEqual((p.returncode, p.stdout), (2, ''))
        self.assertIn(why, p.stderr.splitlines()[-1])

    def test_wrong_words(self):
        self.refused('invalid choice: 9', '--hosts', '9')
        self.refused('invalid choice: 0', '--per-host', '0')
        self.refused('invalid choice: 0', '--rounds', '0')
        self.refused("'12Q' is no size", '--sizes', '1K,12Q')
        self.refused("'' is no size", '--sizes', '1K,')
        self.refused("'fast' is no rate", '--rate', 'fast')
        for flag in ('--env', '--against'): self.refused("'RZ_SOCKETS' is no NAME=VALUE", flag, 'RZ_SOCKETS')
        self.refused('--algorithms are those of all_reduce', '--collective', 'all_gather', '--algorithms', 'ring')

    def test_a_program_that_is_not_there(self):
        for words, program in ((['--alone'], 'all_reduce_perf'), (['--collective', 'broadcast'], 'broadcast_perf')):
            p = run('--bin', '/nowhere', *words)
            self.assertEqual((p.returncode, p.stderr), (1, f'hosts.py: no {program} in /nowhere; set the folder with --bin\n'))

class Hosts(unittest.TestCase):
    def setUp(self):
        try: self.cluster = cluster.Cluster(2)
        except cluster.Unavailable as e: self.skipTest(str(e))
        self.addCleanup(self.cluster.close)

    def test_hosts_have_names_addresses_and_folders_of_their_own(self):
        first, second = self.cluster.hosts
        self.assertEqual([h.run('hostname').stdout for h in (first, second)], ['rzh0\n', 'rzh1\n'])
        self.assertEqual(first.run('ping', '-c1', '-W5', 'rzh1').returncode if shutil.which('ping') else 0, 0)
        for folder in ('/tmp', '/run', '/dev/shm'):
            first.run('touch', f'{folder}/here')
            self.assertEqual([h.run('ls', f'{folder}/here').returncode == 0 for h in (first, second)], [True, False])
        self.assertEqual(second.run('ls', self.cluster.folder).returncode, 0)

    def test_two_clusters_at_once(self):
        with cluster.Cluster(2) as other:
            self.assertNotEqual(network_of(other.hosts[0].space.pid), network_of(self.cluster.hosts[0].space.pid))

    def test_nothing_is_left(self):
        spaces = [h.space for h in self.cluster.hosts] + [self.cluster.switch]
        networks = {network_of(s.pid) for s in spaces}
        self.assertEqual(len(networks - {''}), 3)
        job = self.cluster.hosts[0].start('sleep', '1000')
        self.cluster.close()
        job.communicate()
        self.assertEqual(processes_in(networks), [])
        self.assertFalse(os.path.exists(self.cluster.folder))

    def test_nothing_is_left_of_a_killed_run(self):
        command = [sys.executable, f'{ROOT}/tools/cluster.py', 'sh', '-c', 'touch $TMPDIR/file; echo $TMPDIR; readlink /proc/self/ns/net; exec setsid sleep 1000']
        for kill in (signal.SIGTERM, signal.SIGKILL):
            p = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            folder, network = p.stdout.readline().strip(), p.stdout.readline().strip()
            self.assertTrue(folder and network)
            p.send_signal(kill)
            p.wait()
            p.stdout.close()
            cluster.wait_until(lambda: not processes_in([network]), 'end of the hosts')
            cluster.wait_until(lambda: not os.path.exists(folder), 'end of the folder')

    def test_the_status_is_that_of_the_command(self):
        p = subprocess.run([sys.executable, f'{ROOT}/tools/cluster.py', '--hosts', '1', '--name', 'n', 'sh', '-c', 'hostname; pwd; exit 3'], cwd='/usr', capture_output=True, text=True)
        self.assertEqual((p.returncode, p.stdout, p.stderr), (3, 'n0\n/usr\n', ''))

class Bench(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try: cluster.Cluster(1).close()
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))

    def program(self, text):
        """A folder with an all_reduce_perf that is a shell script."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        with open(f'{folder.name}/all_reduce_perf', 'w') as f: f.write('#!/bin/sh\n' + text)
        os.chmod(f'{folder.name}/all_reduce_perf', 0o755)
        return folder.name

    def test_a_small_run(self):
        p = run('--bin', BIN, '--per-host', '2', '--rounds', '1', '--sizes', '256', '--algorithms', 'two_shot', '--against', 'RZ_ENCRYPTION=off', '--start')
        self.assertEqual((p.returncode, p.stderr), (0, ''))  # wrong results, or ranks elsewhere, would be an error
        head, names, row, start = p.stdout.splitlines()
        self.assertEqual(head, '# all_reduce, 2 hosts of 2 ranks, float sum, medians of 1 rounds, microseconds')
        self.assertEqual(names.split(), ['bytes', 'ours', 'RZ_ENCRYPTION=off', 'two_shot', 'peer', 'limit', 'line'])
        self.assertEqual(row.split()[0], '256')
        self.assertEqual(start.split()[0], 'start')
        for time_us in row.split()[1:4] + start.split()[1:3]: self.assertGreater(float(time_us), 0)

    def test_a_small_run_under_attack(self):
        p = subprocess.run([sys.executable, f'{ROOT}/bench/under_attack.py', '--bin', BIN, '--rounds', '1', '--sizes', '4M', '--attacks', 'half_open'],
                           capture_output=True, text=True, timeout=300)
        self.assertEqual((p.returncode, p.stderr), (0, ''))
        head, names, *rows = p.stdout.splitlines()
        self.assertEqual(names.split(), ['attack', '4194304', 'start'])
        self.assertEqual([r.split()[:-2] for r in rows], [['none'], ['half_open'], ['half_open', 'control']])
        for r in rows:
            for time in r.split()[-2:]: self.assertGreater(float(time), 0)

    def test_wrong_results_are_an_error(self):
        wrong = self.program('echo "# Backend: native over tcp"; echo "256 64 float sum -1 1 1 1 3"')
        p = run('--bin', wrong, '--alone', '--rounds', '1', '--sizes', '256')
        self.assertEqual((p.returncode, p.stderr), (1, 'hosts.py: 3 wrong results at 256 bytes\n'))

    def test_a_rank_that_fails_is_named_and_nothing_is_left(self):
        p = run('--bin', self.program('[ $RANK = 1 ] && echo no luck >&2 && exit 3; exit 0'), '--alone', '--rounds', '1', '--sizes', '256')
        self.assertEqual(p.returncode, 1)
        self.assertRegex(p.stderr, r'^hosts\.py: .*all_reduce_perf .* ended with 3: no luck\n$')

    def test_a_run_that_is_ended_leaves_nothing(self):
        folder = self.program('readlink /proc/self/ns/net > "$0.at.$RANK"; mv "$0.at.$RANK" "$0.up.$RANK"; exec sleep 60')
        p = subprocess.Popen([sys.executable, f'{ROOT}/bench/hosts.py', '--bin', folder, '--alone'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        up = [f'{folder}/all_reduce_perf.up.{r}' for r in (0, 1)]
        cluster.wait_until(lambda: all(map(os.path.exists, up)) or p.poll() is not None, 'start of the ranks', 30)
        networks = []
        for name in up:
            with open(name) as f: networks.append(f.read().strip())
        self.assertEqual(len(set(networks)), 2)
        p.send_signal(signal.SIGTERM)
        p.communicate(timeout=30)
        self.assertEqual(p.returncode, 143)
        cluster.wait_until(lambda: not processes_in(networks), 'end of the hosts')

if __name__ == '__main__': unittest.main(verbosity=2)
