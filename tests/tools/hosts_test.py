#!/usr/bin/env python3
"""bench/hosts.py: the network that it makes and removes, a small run of all_reduce, and the errors of a wrong command line.

    hosts_test.py ROOT BIN"""
import contextlib, io, os, signal, subprocess, sys, tempfile, time, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, f'{ROOT}/bench')
sys.dont_write_bytecode = True
import hosts

def run(*words): return subprocess.run([sys.executable, f'{ROOT}/bench/hosts.py', *words], capture_output=True, text=True, timeout=120)

def spaces(): return set(hosts.sh('ip netns list').split()) & set(hosts.NAMES + [hosts.SWITCH])

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
        self.refused("'fast' is no rate", '--rate', 'fast')
        self.refused("'RZ_SOCKETS' is no NAME=VALUE", '--env', 'RZ_SOCKETS')
        self.refused('--algorithms are those of all_reduce', '--collective', 'all_gather', '--algorithms', 'ring')

    def test_a_program_that_is_not_there(self):
        for words, program in ((['--alone'], 'all_reduce_perf'), (['--collective', 'broadcast'], 'broadcast_perf')):
            p = run('--bin', '/nowhere', *words)
            self.assertEqual((p.returncode, p.stderr), (1, f'hosts.py: no {program} in /nowhere; set the folder with --bin\n'))

class Network(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if os.geteuid() != 0: raise unittest.SkipTest('network namespaces need root')
        try: there = spaces()
        except (OSError, RuntimeError) as e: raise unittest.SkipTest(f'no ip here ({e})')
        if there: raise unittest.SkipTest(f'another run is on: {", ".join(sorted(there))}')
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), hosts.network(2, None, None): cls.made = spaces()
        except SystemExit: raise unittest.SkipTest(printed.getvalue().strip())

    def tearDown(self): self.assertEqual(spaces(), set())

    def program(self, text):
        """A folder with an all_reduce_perf that is a shell script."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        with open(f'{folder.name}/all_reduce_perf', 'w') as f: f.write('#!/bin/sh\n' + text)
        os.chmod(f'{folder.name}/all_reduce_perf', 0o755)
        return folder.name

    def test_hosts_at_a_switch(self): self.assertEqual(self.made, {'rz0', 'rz1', 'rzsw'})

    def test_a_small_run(self):
        p = run('--bin', BIN, '--per-host', '2', '--rounds', '1', '--sizes', '256', '--algorithms', 'two_shot')
        self.assertEqual((p.returncode, p.stderr), (0, ''))  # wrong results, or ranks elsewhere, would be an error
        head, names, row = p.stdout.splitlines()
        self.assertEqual(head, '# all_reduce, 2 hosts of 2 ranks, float sum, medians of 1 rounds, microseconds')
        self.assertEqual(names.split(), ['bytes', 'ours', 'two_shot', 'peer', 'limit', 'line'])
        self.assertEqual(row.split()[0], '256')
        for time_us in row.split()[1:3]: self.assertGreater(float(time_us), 0)

    def test_wrong_results_are_an_error(self):
        wrong = self.program('echo "# Backend: native over tcp"; echo "256 64 float sum -1 1 1 1 3"')
        p = run('--bin', wrong, '--alone', '--rounds', '1', '--sizes', '256')
        self.assertEqual((p.returncode, p.stderr), (1, 'hosts.py: 3 wrong results at 256 bytes\n'))

    def test_a_rank_that_fails_is_named_and_nothing_is_left(self):
        p = run('--bin', self.program('[ $RANK = 1 ] && echo no luck >&2 && exit 3; exit 0'), '--alone', '--rounds', '1', '--sizes', '256')
        self.assertEqual(p.returncode, 1)
        self.assertRegex(p.stderr, r'^hosts\.py: .*all_reduce_perf .* ended with 3: no luck\n$')

    def test_a_run_that_is_ended_leaves_nothing(self):
        folder = self.program('touch "$0.up"; exec sleep 60')
        p = subprocess.Popen([sys.executable, f'{ROOT}/bench/hosts.py', '--bin', folder, '--alone'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        end = time.monotonic() + 30
        while not os.path.exists(f'{folder}/all_reduce_perf.up') and p.poll() is None and time.monotonic() < end: time.sleep(0.01)
        self.assertEqual(spaces(), {'rz0', 'rz1', 'rzsw'})
        p.send_signal(signal.SIGTERM)
        p.communicate(timeout=30)
        self.assertEqual(p.returncode, 143)

if __name__ == '__main__': unittest.main(verbosity=2)
