#!/usr/bin/env python3
"""Jobs of 2 hosts with 2 ranks each, which a third host on their network attacks (tools/strangers.py): nobody is let in, and the jobs end
well with right results. The hosts are namespaces (tools/cluster.py).

    strangers_test.py ROOT BIN [CLASS[.TEST]…]"""
import json, os, re, sys, tempfile, time, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.dont_write_bytecode = True
sys.path.insert(0, f'{ROOT}/tools')
import cluster, strangers

PORT, DATA_PORTS, SECRET = 29533, '40000-40127', 'a secret of this test, of more than 32 characters'
MIB = 1 << 20

class Job:
    """Ranks that are started one by one, with one secret and launch."""
    def __init__(self, hosts, *program, ranks=4):
        self.hosts, self.program = hosts, program
        self.ranks = [self.start(hosts[r // 2], r) for r in range(ranks)]
    def start(self, host, rank, **more):
        return host.start(*self.program, env=os.environ | {
            'RANK': str(rank), 'LOCAL_RANK': str(rank % 2), 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': self.hosts[0].address,
            'MASTER_PORT': str(PORT), 'RZ_SECRET': SECRET, 'RZ_LAUNCH': 'a launch', 'OMP_NUM_THREADS': '1', 'RZ_RENDEZVOUS_TIMEOUT_S': '100'} | more)
    def running(self): return all(r.poll() is None for r in self.ranks)
    def kill(self):
        for r in self.ranks:
            if r.poll() is None: r.kill()
            r.wait()
            for pipe in (r.stdout, r.stderr): pipe.close()
    def end(self, seconds=120):
        """Status, output and errors of each rank."""
        return [(r.returncode, *ends) for r in self.ranks for ends in [r.communicate(timeout=seconds)]]

class Network(unittest.TestCase):
    """Two hosts of a job, and one of strangers."""
    @classmethod
    def setUpClass(cls):
        try:
            cls.cluster = cluster.Cluster(3)
            cls.addClassCleanup(cls.cluster.close)
            cls.prepare()
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))
        cls.hosts, cls.stranger = cls.cluster.hosts[:2], cls.cluster.hosts[2]
        cls.folder = tempfile.mkdtemp(dir=cls.cluster.folder)

    @classmethod
    def prepare(cls): pass
    @classmethod
    def few_ports(cls):
        """Ranks get ports that strangers know before."""
        for setting in (f'net.ipv4.ip_local_port_range={DATA_PORTS.replace("-", " ")}', 'net.ipv4.tcp_max_tw_buckets=0'):
            for h in cls.cluster.hosts[:2]: cluster.sh(*h.words('sysctl', '-qw', setting, spaces='n'))

    def attack(self, kind, *words, host=None):
        s = strangers.Stranger(host or self.stranger, kind, *words)
        self.addCleanup(s.__exit__)
        return s
    def start(self, *program, ranks=4):
        job = Job(self.hosts, *program, ranks=ranks)
        self.addCleanup(job.kill)
        return job
    def reduce(self, size, iterations, **how): return self.start(f'{BIN}/all_reduce_perf', '-b', size, '-e', size, '-n', str(iterations), '-w', '1', **how)
    def ends_well(self, job):
        ends = job.end()
        for status, _, err in ends: self.assertEqual(status, 0, err)
        if job.program[0].endswith('all_reduce_perf'): self.assertIn('# Out of bounds values : 0 OK', ends[0][1])
        return ends
    def wait_for_the_store_alone(self, job):
        """Until all ranks have connected: only the store listens then."""
        alone = lambda: not job.running() or [strangers.listening(h) for h in self.hosts] == [f'{self.hosts[0].address}:{PORT}', '']
        cluster.wait_until(lambda: strangers.listening(self.hosts[0]) or not job.running(), 'start of the store')
        cluster.wait_until(lambda: alone() and all(self.connected(h) for h in self.hosts) or not job.running(), 'connection of all ranks', 60)
        self.assertTrue(job.running())
    def connected(self, host):
        """Whether the ranks of a host have connections with those of the other one, besides those to the store."""
        with open(f'/proc/{host.space.pid}/net/tcp') as f: lines = [l.split() for l in f.read().splitlines()[1:]]
        port = f':{PORT:04X}'
        return sum(l[3] == '01' and not l[1].endswith(port) and not l[2].endswith(port) for l in lines) >= 4
    def training(self, folder, steps):
        with open(f'{self.folder}/ds.json', 'w') as f:
            json.dump({'train_micro_batch_size_per_gpu': 2, 'zero_optimization': {'stage': 3}, 'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}}, f)
        return self.start(f'{BIN}/train_lm', '--model', f'{ROOT}/tests/data/gpt2_tiny', '--config', f'{self.folder}/ds.json', '--data', f'{ROOT}/LICENSE',
                   '--save', f'{self.folder}/{folder}', '--threads', '1', '--steps', str(steps))
    def weights(self, folder):
        with open(f'{self.folder}/{folder}/model.safetensors', 'rb') as f: return f.read()

class WhileItRuns(Network):
    """Attacks on the one port that a running job has."""
    iterations = 1500  # of 64 KiB: a second

    def disturbed(self, kind, *words, wanted=256):
        """Attacks jobs until one ends before which so many connections were opened; the report of the strangers, and the ends of the ranks."""
        iterations = self.iterations
        while True:
            report, ends = self.disturb(self.reduce('64K', iterations), kind, *words)
            if report['opened'] >= wanted: return report, ends
            iterations *= 2  # strangers are slower here than the job
    def disturb(self, job, kind, *words, memory=4 * MIB):
        """Attacks a job until its end."""
        self.wait_for_the_store_alone(job)
        root = self.hosts[0].processes(job.program[0])
        before, begin = {p: strangers.usage(self.hosts[0], p) for p in root}, time.monotonic()
        attack, after = self.attack(kind, *(words or ('--at', f'{self.hosts[0].address}:{PORT}'))), dict(before)
        peak = {p: dict(u) for p, u in before.items()}
        while job.running():
            for p in root:
                try: after[p] = strangers.usage(self.hosts[0], p)
                except (IndexError, ValueError): continue  # it has ended
                for what in ('fds', 'rss'): peak[p][what] = max(peak[p][what], after[p][what])
            time.sleep(0.05)
        elapsed, report, ends = time.monotonic() - begin, attack.end(), self.ends_well(job)
        self.assertEqual(report['let_in'], 0)
        for p in root:
            # 64 that have proved nothing, one a rank, and a batch that was accepted at once
            self.assertLessEqual(peak[p]['fds'] - before[p]['fds'], 64 + 4 + 32 + 4, kind)
            self.assertLess(peak[p]['rss'] - before[p]['rss'], memory, kind)
        # Processors' time of the store, which other load does not increase; the first accepts are not limited.
        self.assertLess(max(after[p]['store'] - before[p]['store'] for p in root), 0.2 + 0.25 * elapsed, kind)
        return report, ends
    def counted(self, ends):
        """The number of refused connections that rank 0 has printed."""
        found = re.search(r'^rank 0: (\d+) connections that did not prove the secret of this job were refused, the last from ' + self.stranger.address, ends[0][2], re.M)
        self.assertTrue(found, ends[0][2])
        return int(found[1])

    def test_thousands_at_once(self):
        report, ends = self.disturbed('thousands', wanted=4096)
        self.assertGreaterEqual(report['received'], 64)  # a reply to a hello, which proves nothing to those without the secret
        self.assertGreater(self.counted(ends), 64)
    def test_training_has_its_bits(self):
        self.ends_well(self.training('undisturbed', 10))
        self.disturb(self.training('disturbed', 10), 'thousands', memory=64 * MIB)  # of the training
        self.assertEqual(self.weights('undisturbed'), self.weights('disturbed'))
    def test_a_rank_of_another_job(self):
        job = self.reduce('64K', self.iterations)
        self.wait_for_the_store_alone(job)
        other = job.start(self.stranger, 3, RZ_SECRET='the secret of another job on the same network')
        out, err = other.communicate(timeout=60)
        self.assertNotEqual(other.returncode, 0)
        self.assertRegex(err, 'are of one launch, but .*secret')
        self.assertIn('names itself rank 3 at 10.79.0.3', self.ends_well(job)[0][2])

class WhileItRunsLong(WhileItRuns):
    """The same for longer, and all other attacks."""
    iterations = 15_000
    def test_all_ports(self):
        report, _ = self.disturbed('scan', *[w for h in self.hosts for w in ('--at', h.address)], wanted=2 * 65535)
        self.assertGreaterEqual(report['whole'], 1)
        self.assertIn(f'{self.hosts[0].address}:{PORT}', report['ports'])
    def test_hellos_without_a_proof(self):
        report, ends = self.disturbed('hello')
        self.assertGreaterEqual(report['received'], 64)
        self.assertGreater(self.counted(ends), 64)
    def test_garbage(self): self.assertGreater(self.counted(self.disturbed('garbage')[1]), 64)
    def test_half_open_connections(self): self.assertGreater(self.counted(self.disturbed('half_open')[1]), 64)
    def test_slow_senders(self): self.assertGreater(self.counted(self.disturbed('slow')[1]), 64)

class WhileItStarts(Network):
    """Attacks on each port as soon as a rank listens there."""
    def watched(self): return [w for h in self.hosts for w in ('--watch', f'{h.space.pid}:{h.address}')]
    def disturbed(self, kind, *words, host=None, jobs=2, wanted=64):
        """Attacks a number of jobs, and more until so many connections were opened."""
        for _ in range(5):
            attack = self.attack(kind, *words, host=host)
            ends = [self.ends_well(self.reduce('64K', 20)) for _ in range(jobs)]
            self.assertEqual(attack.end()['let_in'], 0)
            if attack.report['opened'] >= wanted: return attack.report, ends
            jobs *= 2
        self.fail(attack.report)

    def test_thousands_at_once(self):
        self.disturbed('thousands', *self.watched(), wanted=4096)
    def test_another_user_of_the_host(self):
        report, _ = self.disturbed('unix', host=self.hosts[0], wanted=1)
        self.assertEqual(report['received'], 0)
    def test_a_rank_of_another_job_comes_first(self):
        job = self.reduce('64K', 20, ranks=3)
        other = job.start(self.stranger, 3, RZ_SECRET='the secret of another job on the same network')
        out, err = other.communicate(timeout=60)
        self.assertNotEqual(other.returncode, 0)
        self.assertRegex(err, 'are of one launch, but .*secret')
        self.assertTrue(job.running())
        job.ranks.append(job.start(self.hosts[1], 3))
        self.assertRegex(self.ends_well(job)[0][2], r'(?m)^rank 0 waits for rank 3: .*; one of them names itself rank 3 at 10\.79\.0\.3 of this job: if')

class WhileItStartsLong(WhileItStarts):
    """The same, and all other attacks."""
    def test_all_ports(self):
        report, _ = self.disturbed('scan', *[w for h in self.hosts for w in ('--at', h.address)], jobs=4, wanted=2 * 65535)
        self.assertGreaterEqual(report['whole'], 1)
    def test_ports_of_ranks(self):
        self.few_ports()
        report, _ = self.disturbed('scan', '--ports', DATA_PORTS, *[w for h in self.hosts for w in ('--at', h.address)], jobs=4)
        self.assertGreaterEqual(len(report['ports']), 1)
    def test_garbage(self): self.disturbed('garbage', *self.watched(), jobs=4)
    def test_half_open_connections(self): self.disturbed('half_open', *self.watched(), jobs=4)
    def test_hellos_without_a_proof(self): self.assertGreater(self.disturbed('hello', *self.watched(), jobs=4)[0]['received'], 64)
    def test_slow_senders(self): self.disturbed('slow', *self.watched(), jobs=4)

class AtRzrun(Network):
    """A job by an rzrun on each host, which listens for the other one's until the end."""
    def run_job(self, iterations):
        words = [f'{BIN}/rzrun', '--nnodes', '2', '--nproc-per-node', '2', '--rdzv-endpoint', f'{self.hosts[0].address}:{PORT}',
                 f'{BIN}/all_reduce_perf', '-b', '64K', '-e', '64K', '-n', str(iterations)]
        all = [h.start(*words[:1], '--node-rank', str(i), *words[1:], env=os.environ | {'RZ_SECRET': SECRET, 'DS_ENV_FILE': '.', 'RZ_RENDEZVOUS_TIMEOUT_S': '100'})
               for i, h in enumerate(self.hosts)]
        return [(*p.communicate(timeout=120), p.returncode) for p in all]
    def test_thousands_at_once(self):  # at all ports of the job, from its start to its end
        for iterations in (300, 3000, 30_000):
            attack = self.attack('thousands', *[w for h in self.hosts for w in ('--watch', f'{h.space.pid}:{h.address}')])
            ends = self.run_job(iterations)
            for _, err, status in ends: self.assertEqual(status, 0, err)
            self.assertIn('# Out of bounds values : 0 OK', ends[0][0])
            self.assertRegex(ends[0][1], r'(?m)^rzrun: \d+ connections that did not prove the secret of this job were refused, the last from 10\.79\.0\.3')
            self.assertEqual(attack.end()['let_in'], 0)
            if attack.report['opened'] >= 4096: return
        self.fail(attack.report)

class InTheMiddle(Network):
    """The third host stands between the second and the first, whose connections it passes, records, replays and changes."""
    @classmethod
    def prepare(cls): cls.few_ports()
    def middle(self, *words):
        """Until the result is closed."""
        self.addCleanup(strangers.deceive(self.cluster, self.hosts[1], self.stranger, self.hosts[0]))
        return self.attack('middle', '--for', self.hosts[0].address, '--ports', f'{PORT},{DATA_PORTS}', '--through', self.cluster.switch.pid, *words)
    def record(self):
        sessions = f'{self.folder}/sessions'
        middle = self.middle('--sessions', sessions)
        self.ends_well(self.reduce('64K', 20))
        self.assertGreater(middle.end()['connections'], 4)
        self.doCleanups()
        purposes = {s[9] for _, s in strangers.read_sessions(sessions)}
        self.assertEqual(purposes, {1, 2})  # of the store and between ranks
        return sessions

    def test_recorded_sessions(self):
        sessions = self.record()
        watched = [w for h in self.hosts for w in ('--watch', f'{h.space.pid}:{h.address}')]
        # The next jobs have the same secret, launch and ports. They are longer where strangers are slower.
        for iterations in (300, 3000, 30_000):
            attack = self.attack('replay', '--sessions', sessions, *watched)
            for _ in range(2): ends = self.ends_well(self.reduce('64K', iterations))
            report = attack.end()
            self.assertEqual(report['let_in'], 0)
            if report['received'] > 64: break  # the recorded hello names this job
        self.assertGreater(report['received'], 64)
        self.assertRegex(ends[0][2], r'(?m)^rank 0: \d+ connections that did not prove the secret')
    def test_a_changed_hello_or_proof(self):
        for after in (20, 40, 70):  # numbers of the hello, its nonce, the proof
            with self.subTest(after=after):
                middle = self.middle('--change', 'flip', '--after', after, '--only', 1)
                self.ends_well(self.reduce('64K', 20))  # by another connection
                self.assertEqual(middle.end()['changed'], 1)
                self.doCleanups()
    def test_changed_hellos_let_nobody_in(self):
        middle = self.middle('--change', 'flip', '--after', 40)
        job = self.reduce('64K', 20)
        for r in job.ranks[2:]:
            out, err = r.communicate(timeout=100)
            self.assertNotEqual(r.returncode, 0)
            self.assertRegex(err, 'rank [23] and the store at 10.79.0.1:29533 are of one launch, but .*secret')
        self.assertGreater(middle.end()['changed'], 1)
        self.assertIsNone(job.ranks[0].poll())  # which waits for them until its deadline
        for r in job.ranks[:2]: r.kill()
        job.end()
    def test_cut_connections(self):
        middle = self.middle('--change', 'cut', '--after', 200_000)  # those between ranks
        for status, _, err in self.reduce('64K', 100_000).end():
            self.assertNotEqual(status, 0)
            self.assertRegex(err, 'rank [0-3]')
        self.assertGreater(middle.end()['changed'], 0)
    def test_changed_data(self):
        with open(f'{BIN}/all_reduce_perf', 'rb') as f:
            if b'RZ_ENCRYPTION' not in f.read(): self.skipTest('data between hosts is not protected (docs/security.md)')
        for change in ('flip', 'inject', 'drop', 'reorder'):
            with self.subTest(change=change):
                middle = self.middle('--change', change, '--after', 200_000, '--only', 1 << 20)
                errors = []
                for status, _, err in self.reduce('64K', 100_000).end():
                    self.assertNotEqual(status, 0)
                    errors.append(err)
                self.assertRegex(''.join(errors), 'something between the hosts changes')
                self.assertGreater(middle.end()['changed'], 0)
                self.doCleanups()

if __name__ == '__main__': unittest.main(verbosity=2)
