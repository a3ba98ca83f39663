#!/usr/bin/env python3
"""Jobs of 2 hosts with 2 ranks each, by the launchers of clusters: bandwidth, training with the bits of one host, a resumed run,
killed ranks. The hosts are namespaces (cluster.py); launchers that are not installed are skipped.

    several_hosts_test.py ROOT BIN"""
import json, os, re, signal, sys, tempfile, time, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cluster

# Kernels that a variable selects on one host alone would round otherwise than those of the others.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith('OPENBLAS_')}

class SlurmJob:
    """2 tasks a node by srun."""
    def prepare(self, hosts): self.environment = ENVIRONMENT | hosts.slurm()
    def words(self, *program): return ['srun', '--nodes=2', '--ntasks-per-node=2', '--kill-on-bad-exit=1', *program]

class OpenMpiJob:
    """2 processes a host by mpirun over ssh."""
    def prepare(self, hosts):
        hosts.sshd()
        self.hosts, self.environment = hosts, ENVIRONMENT | {'MASTER_ADDR': hosts.hosts[0].address, 'MASTER_PORT': '29555'}
    def words(self, *program):
        where = ','.join(f'{h.name}:2' for h in self.hosts.hosts)
        return ['mpirun', '--allow-run-as-root', '--host', where, '-x', 'MASTER_ADDR', '-x', 'MASTER_PORT', *program]

class Jobs:
    """The tests; each launcher has a class of them."""
    @classmethod
    def setUpClass(cls):
        try:
            cls.hosts = cluster.Cluster(2)
            cls.addClassCleanup(cls.hosts.close)
            cls.job.prepare(cls.hosts)
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))
        cls.folder = tempfile.mkdtemp(dir=cls.hosts.folder)
        cls.config = f'{cls.folder}/ds.json'
        with open(cls.config, 'w') as f:
            json.dump({'train_micro_batch_size_per_gpu': 2, 'gradient_clipping': 1.0, 'zero_optimization': {'stage': 3},
                       'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}}, f)

    def start(self, *program): return self.hosts.hosts[0].start(*self.job.words(*program), env=self.job.environment)
    def end(self, job, seconds=60):
        out, err = job.communicate(timeout=seconds)
        return job.returncode, out, err
    def training(self, folder, *more):
        return (f'{BIN}/train_lm', '--model', f'{ROOT}/tests/data/gpt2_tiny', '--config', self.config, '--data', f'{ROOT}/LICENSE',
                '--save', f'{self.folder}/{folder}', '--threads', '1', *more)
    def weights(self, folder):
        with open(f'{self.folder}/{folder}/model.safetensors', 'rb') as f: return f.read()
    def no_process_left(self, name):
        for host in self.hosts.hosts: cluster.wait_until(lambda: not host.processes(name), f'the end of {name} on {host.name}')

    def test_bandwidth(self):
        status, out, err = self.end(self.start(f'{BIN}/all_reduce_perf', '-b', '8', '-e', '4M', '-f', '8', '-n', '5'))
        self.assertEqual(status, 0, err)
        self.assertIn('# Backend: native over shm+tcp', out)
        self.assertIn('# Out of bounds values : 0 OK', out)
        self.assertEqual(sorted(re.findall(r'# +Rank +(\d+) .* on +(\w+) device', out)), [(str(r), f'rzh{r // 2}') for r in range(4)])

    def test_training_has_the_bits_of_one_host_and_resumes(self):
        status, _, err = self.end(self.start(*self.training('whole', '--steps', '6')))
        self.assertEqual(status, 0, err)
        alone = self.hosts.hosts[0].run(f'{BIN}/rzrun', '-n', '4', *self.training('alone', '--steps', '6'), env=ENVIRONMENT, timeout=60)
        self.assertEqual(alone.returncode, 0, alone.stderr)
        self.assertEqual(self.weights('whole'), self.weights('alone'))
        for more in (('--steps', '4', '--save-steps', '3'), ('--steps', '6', '--resume', 'true')):
            status, _, err = self.end(self.start(*self.training('resumed', '--output-dir', f'{self.folder}/checkpoints', *more)))
            self.assertEqual(status, 0, err)
        self.assertEqual(self.weights('whole'), self.weights('resumed'))

    def test_a_killed_rank_ends_the_job(self):
        for i, host in enumerate(self.hosts.hosts):
            job = self.start(*self.training(f'killed{i}', '--steps', '1000000'))
            cluster.wait_until(lambda: len(host.processes('train_lm')) == 2, 'start of the ranks')
            time.sleep(1)
            begin = time.monotonic()
            host.run('kill', '-9', str(host.processes('train_lm')[0]))
            status, _, err = self.end(job)
            self.assertNotEqual(status, 0)
            self.assertLess(time.monotonic() - begin, 20)
            self.assertFalse(os.path.exists(f'{self.folder}/killed{i}'))
            self.no_process_left('train_lm')

class Slurm(Jobs, unittest.TestCase): job = SlurmJob()
class OpenMpi(Jobs, unittest.TestCase): job = OpenMpiJob()

if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the hosts, too
    unittest.main(verbosity=2)
