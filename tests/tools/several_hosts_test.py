#!/usr/bin/env python3
"""Jobs of 2 hosts with 2 ranks each, by rzrun over ssh, mpirun and srun, rzrun on each host with torchrun's flags, and by Slurm and Open
MPI alone: bandwidth, training with the bits of one host, a resumed run, killed ranks; of rzrun also lost agents, connections and links, hosts that may not join, and
full disks. The classes with a 4 have 4 hosts. The hosts are namespaces (tools/cluster.py); a launcher that is not installed is skipped.

    several_hosts_test.py ROOT BIN [CLASS[.TEST]…]"""
import ctypes, json, os, re, shutil, signal, subprocess, sys, tempfile, time, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.dont_write_bytecode = True
sys.path.insert(0, f'{ROOT}/tools')
import cluster

# Kernels that a variable selects on one host alone would round otherwise than those of the others.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith('OPENBLAS_')} | {'DS_ENV_FILE': ''}

EAVESDROPPER = """import select, socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
print('listens', flush=True)
found, ended = set(), False
while True:
    ready = select.select([link] + ([] if ended else [sys.stdin]), [], [], 0.2)[0]
    if link in ready:
        packet = link.recv(1 << 17)
        found |= {t for t in sys.argv[1:] if t.encode() in packet}
    elif ended: break
    elif ready: ended = not sys.stdin.read(1)
print(*found)
"""

class Eavesdropper:
    """Reads all packets at the switch of the hosts; found() returns those of the texts that were in one."""
    def __init__(self, hosts, *texts):
        self.process = subprocess.Popen(['nsenter', '-t', str(hosts.switch.pid), '-n', sys.executable, '-c', EAVESDROPPER, *texts],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == 'listens\n'
    def found(self): return set(self.process.communicate(timeout=120)[0].split())

def write_config(folder):
    with open(f'{folder}/ds.json', 'w') as f:
        json.dump({'train_micro_batch_size_per_gpu': 2, 'gradient_clipping': 1.0, 'zero_optimization': {'stage': 3},
                   'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}}, f)
    return f.name

class Launcher:
    """Starts a job from the first host."""
    def start(self, hosts, *program): return hosts.hosts[0].start(*self.words(*program), env=self.environment)

class RzrunJob(Launcher):
    """2 ranks a host by rzrun over ssh."""
    def prepare(self, hosts):
        hosts.sshd()
        self.environment, self.hostfile = ENVIRONMENT, f'{hosts.folder}/hostfile'
        with open(self.hostfile, 'w') as f: f.writelines(f'{h.name} slots=2\n' for h in hosts.hosts)
    def words(self, *program): return [f'{BIN}/rzrun', '--hostfile', self.hostfile, '--grace', '2', *program]

# Open MPI starts nothing for root without these.
OPEN_MPI = {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}
def need(program):
    if not shutil.which(program): raise cluster.Unavailable(f'{program} is not installed')

class RzrunOpenMpiJob(RzrunJob):
    """2 ranks a host by rzrun, whose agents mpirun starts."""
    def prepare(self, hosts):
        need('mpirun')
        super().prepare(hosts)
        self.environment = self.environment | OPEN_MPI
    def words(self, *program): return super().words('--launcher', 'openmpi', *program)

class RzrunSlurmJob(Launcher):
    """2 ranks a node by rzrun in an allocation of Slurm, whose agents srun starts."""
    def prepare(self, hosts): self.nodes, self.environment = len(hosts.hosts), ENVIRONMENT | hosts.slurm()
    def words(self, *program):
        return ['salloc', '--quiet', f'--nodes={self.nodes}', '--ntasks-per-node=2', f'{BIN}/rzrun', '--launcher', 'slurm', '--grace', '2', *program]

class SlurmJob(Launcher):
    """2 tasks a node by srun."""
    def prepare(self, hosts): self.nodes, self.environment = len(hosts.hosts), ENVIRONMENT | hosts.slurm()
    def words(self, *program): return ['srun', f'--nodes={self.nodes}', '--ntasks-per-node=2', '--kill-on-bad-exit=1', *program]

class OpenMpiJob(Launcher):
    """2 processes a host by mpirun over ssh, on hosts that share no secret. MPI hands on all that the ranks need."""
    def prepare(self, hosts):
        need('mpirun')
        hosts.sshd()
        self.hosts, self.environment = hosts, ENVIRONMENT | OPEN_MPI
    def words(self, *program):
        where = ','.join(f'{h.name}:2' for h in self.hosts.hosts)
        return ['mpirun', '--host', where, '-x', 'XDG_CONFIG_HOME=/tmp/config', *program]

class SlurmOpenMpiJob(Launcher):
    """2 processes a node by mpirun in an allocation of Slurm."""
    def prepare(self, hosts):
        need('mpirun')
        self.nodes, self.environment = len(hosts.hosts), ENVIRONMENT | OPEN_MPI | hosts.slurm()
    def words(self, *program): return ['salloc', '--quiet', f'--nodes={self.nodes}', '--ntasks-per-node=2', 'mpirun', *program]

class SlurmRzrunOpenMpiJob(SlurmOpenMpiJob):
    """2 ranks a node by rzrun in an allocation of Slurm, whose agents mpirun starts."""
    def words(self, *program):
        return [*super().words()[:-1], f'{BIN}/rzrun', '--launcher', 'openmpi', '--grace', '2', *program]

class TorchrunJob:
    """2 ranks a host by an rzrun on each, with torchrun's flags."""
    class Process:
        """Those of all hosts. The status is that of node 0, the output that of all."""
        def __init__(self, all): self.all = all
        def communicate(self, timeout):
            ends = [p.communicate(timeout=timeout) for p in self.all]
            self.returncode = self.all[0].returncode
            return ''.join(e[0] for e in ends), ''.join(e[1] for e in ends)
    def prepare(self, hosts): self.environment = ENVIRONMENT | {'RZ_SECRET': 'a secret of this test, of more than 32 characters'}
    def words(self, hosts, *program, nnodes=None):
        return [f'{BIN}/rzrun', '--nnodes', nnodes or str(len(hosts.hosts)), '--nproc-per-node', '2', '--rdzv-endpoint',
                f'{hosts.hosts[0].address}:29400', '--rdzv-conf', 'last_call_timeout=1', '--grace', '2', *program]
    def start(self, hosts, *program):
        return self.Process([h.start(*self.words(hosts, '--node-rank', str(i), *program), env=self.environment) for i, h in enumerate(hosts.hosts)])

class Jobs:
    """The tests; each launcher has a class of them."""
    size = 2  # hosts
    @classmethod
    def setUpClass(cls):
        try:
            cls.hosts = cluster.Cluster(cls.size)
            cls.addClassCleanup(cls.hosts.close)
            cls.job.prepare(cls.hosts)
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))
        cls.folder = tempfile.mkdtemp(dir=cls.hosts.folder)
        cls.config = write_config(cls.folder)

    def start(self, *program): return self.job.start(self.hosts, *program)
    def end(self, job, seconds=120):
        out, err = job.communicate(timeout=seconds)
        return job.returncode, re.sub(r'^\[rzh\d:\d\] ', '', out, flags=re.M), err
    def training(self, folder, *more):
        return (f'{BIN}/train_lm', '--model', f'{ROOT}/tests/data/gpt2_tiny', '--config', self.config, '--data', f'{ROOT}/LICENSE',
                '--save', os.path.join(self.folder, folder), '--threads', '1', *more)
    def weights(self, folder):
        with open(f'{self.folder}/{folder}/model.safetensors', 'rb') as f: return f.read()
    def ranks(self, host): return host.processes(f'{BIN}/(train_lm|all_reduce_perf) ')
    def sent(self, host):
        """The bytes that a host has sent."""
        with open(f'/proc/{host.space.pid}/net/dev') as f: return next(int(line.split()[9]) for line in f if line.lstrip().startswith('eth0:'))
    def endless(self, *flags):
        """A job that runs until it is ended, once the ranks of all hosts make calls."""
        before = [self.sent(host) for host in self.hosts.hosts]
        job = self.start(*flags, f'{BIN}/all_reduce_perf', '-b', '4M', '-e', '4M', '-n', '1000000', '-w', '1')
        for host in self.hosts.hosts: cluster.wait_until(lambda: len(self.ranks(host)) == 2, f'start of the ranks on {host.name}')
        for host, bytes in zip(self.hosts.hosts, before): cluster.wait_until(lambda: self.sent(host) > bytes + (32 << 20), f'calls of the ranks on {host.name}')
        return job
    def tearDown(self):
        for host in self.hosts.hosts: cluster.wait_until(lambda: not self.ranks(host) + host.processes(f'({BIN}/rzrun|sleep 1000|mpirun|orted|srun)'), f'end of all processes on {host.name}')

    def test_bandwidth(self):
        status, out, err = self.end(self.start(f'{BIN}/all_reduce_perf', '-b', '8', '-e', '4M', '-f', '8', '-n', '5'))
        self.assertEqual(status, 0, err)
        self.assertIn('# Backend: native over shm+tcp', out)
        self.assertIn('# Out of bounds values : 0 OK', out)
        self.assertEqual(sorted(re.findall(r'# +Rank +(\d+) .* on +(\w+) device', out)), [(str(r), f'rzh{r // 2}') for r in range(2 * self.size)])

    def test_training_has_the_bits_of_one_host_and_resumes(self):
        status, _, err = self.end(self.start(*self.training('whole', '--steps', '6')))
        self.assertEqual(status, 0, err)
        alone = self.hosts.hosts[0].run(f'{BIN}/rzrun', '-n', str(2 * self.size), *self.training('alone', '--steps', '6'), env=ENVIRONMENT, timeout=120)
        self.assertEqual(alone.returncode, 0, alone.stderr)
        self.assertEqual(self.weights('whole'), self.weights('alone'))
        for more in (('--steps', '4', '--save-steps', '3'), ('--steps', '6', '--resume', 'true')):
            status, _, err = self.end(self.start(*self.training('resumed', '--output-dir', f'{self.folder}/checkpoints', *more)))
            self.assertEqual(status, 0, err)
        self.assertEqual(self.weights('whole'), self.weights('resumed'))

    def test_a_killed_rank_ends_the_job(self):
        for host in self.hosts.hosts:
            job = self.endless()
            begin = time.monotonic()
            host.kill(self.ranks(host)[0])
            self.assertNotEqual(self.end(job)[0], 0)
            self.assertLess(time.monotonic() - begin, 60)

class Agents(Jobs):
    """The tests of rzrun with an agent on each host. `connector` starts the one of the second host."""

    def lost(self, job, why):
        """The end of a job whose second host is lost."""
        status, _, err = self.end(job)
        self.assertEqual(status, 255, err)
        self.assertRegex(err, f'host rzh1 is lost: {why}')

    def test_environment(self):
        status, out, err = self.end(self.start('sh', '-c', 'echo $(hostname) $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR'))
        self.assertEqual(status, 0, err)
        self.assertEqual(sorted(out.splitlines()), [f'rzh{r // 2} {r} {r % 2} 4 {self.hosts.hosts[0].address}' for r in range(4)])

    def test_the_choice_of_encryption_reaches_the_ranks_of_all_hosts(self):
        job = self.hosts.hosts[0].start(*self.job.words('sh', '-c', 'echo $RZ_ENCRYPTION'), env=self.job.environment | {'RZ_ENCRYPTION': 'always'})
        status, out, err = self.end(job)
        self.assertEqual((status, out.split()), (0, ['always'] * 4), err)

    def test_a_stopped_rank_is_named_with_its_host_and_its_state(self):
        job, second = self.endless('env', 'RZ_TIMEOUT_S=5'), self.hosts.hosts[1]
        second.kill(self.ranks(second)[0], 'STOP')
        status, _, err = self.end(job)
        self.assertEqual(status, 1, err)
        self.assertRegex(err.splitlines()[-1], r'first failure: rank [23] of 4 on host rzh1 was stopped \(state T, as by SIGSTOP\); rank \d exited with 1: .*rank [23] sends no reply')
    test_a_killed_rank_ends_the_job = None  # the next test has more
    def test_a_killed_rank_is_named(self):
        for i, host in enumerate(self.hosts.hosts):
            job = self.endless()
            host.kill(self.ranks(host)[0])
            status, _, err = self.end(job)
            self.assertEqual(status, 137, err)
            self.assertRegex(err, f'first failure: rank [{2 * i}{2 * i + 1}] of 4 on host {host.name} killed by SIGKILL')

    def test_a_killed_agent(self):
        for process in range(2):  # the one that was started, and its child
            job = self.endless('--max-restarts', '2')
            agent = self.hosts.hosts[1].processes(f'{BIN}/rzrun --agent')
            self.assertEqual(len(agent), 2)
            self.hosts.hosts[1].kill(agent[process])
            self.lost(job, f'{self.lost_agent}; no restart: a host is gone')
            self.tearDown()

    def test_a_killed_launcher(self):
        job = self.endless()
        self.hosts.hosts[0].kill(self.hosts.hosts[0].processes(self.connector)[0])
        self.lost(job, f'{self.connector.split()[0]} killed by SIGKILL')

    def test_a_cut_link(self):
        job = self.endless()
        begin = time.monotonic()
        try:
            self.hosts.hosts[1].link('down')
            self.lost(job, '')
            self.assertLess(time.monotonic() - begin, 60)
            cluster.wait_until(lambda: not self.ranks(self.hosts.hosts[1]), 'end of the ranks behind the cut link')
        finally: self.hosts.hosts[1].link('up')

    def test_signals_to_rzrun(self):
        for signal, status in (('KILL', self.status_if_killed), ('TERM', 143), ('INT', 130)):
            job = self.endless()
            self.hosts.hosts[0].kill(self.hosts.hosts[0].processes(f'{BIN}/rzrun --(hostfile|launcher)')[0], signal)
            self.assertEqual(self.end(job)[0], status)
            self.tearDown()

    def test_a_second_signal_kills_at_once(self):
        words = self.job.words('sh', '-c', 'trap "" TERM; exec sleep 1000')
        words[words.index('--grace') + 1] = '100'
        first, name = self.hosts.hosts[0], 'sleep 1000'
        job = first.start(*words, env=self.job.environment)
        for h in self.hosts.hosts: cluster.wait_until(lambda: len(h.processes(name)) == 2, f'start of the ranks on {h.name}')
        begin = time.monotonic()
        rzrun = first.processes(f'{BIN}/rzrun --(hostfile|launcher)')[0]
        for _ in range(2):
            first.kill(rzrun, 'INT')
            time.sleep(1.2)  # signals within a second are one
        status, _, err = self.end(job)
        self.assertEqual(status, 130, err)
        self.assertIn('not ended since SIGTERM: SIGKILL (SIGINT once more)', err)
        self.assertLess(time.monotonic() - begin, 90)
        for h in self.hosts.hosts: self.assertEqual(h.processes(name), [])

    def test_a_killed_rank_and_a_restart(self):
        job, second = self.start('--max-restarts', '1', 'sleep', '1000'), self.hosts.hosts[1]
        before = []
        for _ in range(2):
            for h in self.hosts.hosts:
                cluster.wait_until(lambda: len(h.processes('sleep 1000')) == 2 and not set(before) & set(second.processes('sleep 1000')), 'start of the ranks')
            before = second.processes('sleep 1000')
            second.kill(before[0])
        status, _, err = self.end(job)
        self.assertEqual(status, 137, err)
        self.assertIn('restart 1 of 1', err)

class Rzrun(Agents, unittest.TestCase):
    job, connector, lost_agent, status_if_killed = RzrunJob(), 'ssh .*rzh1', 'ssh .*', -9

    def test_a_killed_host(self):
        with cluster.Cluster(2, 'rzk') as hosts:
            job = RzrunJob()
            job.prepare(hosts)
            running = hosts.hosts[0].start(*job.words('sleep', '1000'), env=job.environment)
            for host in hosts.hosts: cluster.wait_until(lambda: len(host.processes('sleep 1000')) == 2, 'start of the ranks')
            hosts.hosts[1].space.kill()
            self.assertEqual(self.end(running)[0], 255)
            self.assertEqual(hosts.hosts[0].processes('sleep 1000'), [])

    def test_a_host_that_refuses_the_login(self):
        keys = f'{self.hosts.folder}/.ssh/authorized_keys'
        os.rename(keys, f'{keys}.away')
        try: status, _, err = self.end(self.start('true'))
        finally: os.rename(f'{keys}.away', keys)
        self.assertEqual(status, 255)
        self.assertIn('Permission denied', err)
        self.assertIn('host rzh1 is lost: ssh exited with 255 before an agent of rzrun began', err)

class Launched(Agents):
    """One process starts all agents, which connect to rzrun."""
    lost_agent = 'it has closed the connection'

    def test_no_secret_and_no_argument_is_on_a_command_line(self):
        job = self.start('sleep', '1000')
        for h in self.hosts.hosts: cluster.wait_until(lambda: len(h.processes('sleep 1000')) == 2, f'start of the ranks on {h.name}')
        first = self.hosts.hosts[0]
        variables = lambda host, words: host.run('cat', f'/proc/{host.processes(words)[0]}/environ').stdout.split('\0')
        secret, = [v.removeprefix('RZ_SECRET=') for v in variables(first, self.connector) if v.startswith('RZ_SECRET=')]
        self.assertRegex(secret, '^[0-9a-f]{64}$')
        for h in self.hosts.hosts:
            lines = h.run('ps', '-eww', '-o', 'args').stdout.splitlines()
            self.assertEqual([l for l in lines if secret in l], [])
            self.assertEqual([l for l in lines if re.match(r'(\S*/)?(mpirun|orted|srun|ssh|slurmstepd)\b', l) and 'sleep' in l], [])
            names = [v.split('=')[0] for v in variables(h, 'sleep 1000')]
            self.assertEqual([n for n in names if re.match('RZ_SECRET$|RZ_AGENT|OMPI_COMM|PMI', n)], [])
            self.assertIn('RANK', names)
        first.kill(first.processes(f'{BIN}/rzrun --(hostfile|launcher)')[0], 'TERM')
        self.assertEqual(self.end(job)[0], 143)

    def test_a_working_folder_that_one_host_lacks(self):
        first = self.hosts.hosts[0]
        words = self.job.words('sleep', '1000')
        first.run('mkdir', '/tmp/only_here')
        status = first.run('sh', '-c', 'cd /tmp/only_here && exec "$@"', 'sh', *words, env=self.job.environment, timeout=120)
        self.assertEqual(status.returncode, 2, status.stderr)
        self.assertIn('host rzh1: the working folder /tmp/only_here: No such file or directory', status.stderr)

class RzrunOpenMpi(Launched, unittest.TestCase):
    job, connector, status_if_killed = RzrunOpenMpiJob(), 'mpirun ', -9

    def test_a_host_without_a_login_is_named(self):
        first, hostfile = self.hosts.hosts[0], f'{self.folder}/with_a_third'
        with open(hostfile, 'w') as f: f.writelines(f'{name} slots=1\n' for name in ('rzh0', 'rzh1', 'rzh9'))
        end = first.run(f'{BIN}/rzrun', '--hostfile', hostfile, '--launcher', 'openmpi', 'true', env=self.job.environment, timeout=60)
        self.assertEqual(end.returncode, 255, end.stderr)
        self.assertRegex(end.stderr, r'(?m)^rzrun: first failure: host rzh9 is lost: mpirun exited with \d+ before an agent of rzrun began$')

    def test_a_connection_of_mpirun_that_is_lost(self):
        """mpirun then prints no host, and ends the agents that it reaches only after their time to end."""
        job, first = self.endless(), self.hosts.hosts[0]
        begin = time.monotonic()
        first.kill(first.processes(r'(/usr/bin/)?ssh .*rzh1 .*orted')[0])
        self.lost(job, 'mpirun ends the agents of the other hosts, and does not reach its own')
        self.assertLess(time.monotonic() - begin, 25)

class RzrunSlurm(Launched, unittest.TestCase):
    job, connector, status_if_killed = RzrunSlurmJob(), 'srun ', 0  # salloc's, if a signal ends its command

    def test_limits_of_one_task_are_not_those_of_an_agent(self):
        for name in ('SLURM_GPUS_PER_TASK', 'SLURM_NTASKS_PER_GPU'):  # srun would refuse them here, as no host has a GPU
            job = self.hosts.hosts[0].start(*self.job.words('true'), env=self.job.environment | {name: '1'})
            status, _, err = self.end(job)
            self.assertEqual(status, 0, err)

class SlurmDevices(unittest.TestCase):
    """Nodes of Slurm with 4 devices, of which others have some."""
    def test_slots_count_the_devices_of_the_job(self):
        try:
            hosts = cluster.Cluster(2)
            self.addCleanup(hosts.close)
            environment = ENVIRONMENT | hosts.slurm(gpus=4)
        except cluster.Unavailable as e: self.skipTest(str(e))
        first = hosts.hosts[0]
        other = first.start('srun', '--nodelist=rzh1', '--gpus-per-node=2', 'sleep', '1000', env=environment)
        cluster.wait_until(lambda: hosts.hosts[1].processes(r'\S*sleep 1000'), 'start of the other job')
        def job(include):
            end = first.run('salloc', '--quiet', '--nodes=2', '--gpus-per-node=2', f'{BIN}/rzrun', '--launcher', 'slurm', '--include', include,
                            'sh', '-c', 'echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES', env=environment, timeout=60)
            return end.returncode, sorted(end.stdout.splitlines()), end.stderr
        self.assertEqual(job('rzh0:1@rzh1:0')[1], ['[rzh0:0] 0 1', '[rzh1:1] 0 2'])
        self.assertEqual(job('rzh0@rzh1:1')[1], ['[rzh0:0] 0 0,1', '[rzh0:1] 1 0,1', '[rzh1:2] 0 3'])
        hosts.close()
        other.communicate(timeout=60)

class Torchrun(Jobs, unittest.TestCase):
    job = TorchrunJob()

    def start_all(self, *program, nnodes='2', environment=None, hosts=None, more=({},) * 4):
        """`more`: variables of each host."""
        return [h.start(*self.job.words(self.hosts, *program, nnodes=nnodes), env=(environment or self.job.environment) | m)
                for h, m in zip(hosts or self.hosts.hosts, more)]
    def sleeping(self, *flags, **how):
        jobs = self.start_all(*flags, 'sleep', '1000', **how)
        for h in self.hosts.hosts: cluster.wait_until(lambda: len(h.processes('sleep 1000')) == 2, f'start of the ranks on {h.name}')
        return jobs
    def ends(self, jobs): return [(*j.communicate(timeout=120), j.returncode) for j in jobs]
    def signal(self, host, signal): host.kill(host.processes(f'{BIN}/rzrun --nnodes')[0], signal)

    def test_nobody_on_the_network_reads_the_job_or_the_store(self):
        job, key, n = 'a-word-of-the-job', 'address/', ('-b', '8', '-e', '64K', '-f', '8192', '-n', '2', '-w', '1')
        for choice, read in (('on', set()), ('off', {job, key})):
            network = Eavesdropper(self.hosts, job, key)
            ends = self.ends(self.start_all('sh', '-c', f'exec {BIN}/all_reduce_perf {" ".join(n)} # {job}', more=[{'RZ_ENCRYPTION': choice}] * 2))
            self.assertEqual([e[2] for e in ends], [0, 0], ends)
            self.assertIn('# Out of bounds values : 0 OK', ends[0][0])
            self.assertEqual(network.found(), read, choice)

    def test_sizes_around_those_of_encrypted_records(self):
        """Each element of the results is compared; sums of integers are exact."""
        for words in ('-b 0 -e 1 -i 1 -d uint8', '-b 16383 -e 16385 -i 1 -d uint8', '-b 3M -e 5M -i 2M'):
            for collective in ('all_reduce', 'all_gather', 'broadcast'):
                ends = self.ends(self.start_all(f'{BIN}/{collective}_perf', *words.split(), '-n', '2', '-w', '1'))
                self.assertEqual([e[2] for e in ends], [0, 0], (collective, ends))
                self.assertIn('# Out of bounds values : 0 OK', ends[0][0], (collective, words))

    def test_training_has_the_bits_of_one_without_encryption(self):
        def weights(choice):
            with tempfile.TemporaryDirectory(dir=self.hosts.folder) as folder:
                words = (f'{BIN}/train_lm', '--model', f'{ROOT}/tests/data/gpt2_tiny', '--data', f'{ROOT}/LICENSE', '--save', f'{folder}/saved',
                         '--threads', '1', '--steps', '4', '--learning-rate', '0.001', '--per-device-train-batch-size', '2')
                ends = self.ends(self.start_all(*words, more=[{'RZ_ENCRYPTION': choice}] * 2))
                self.assertEqual([e[2] for e in ends], [0, 0], ends)
                with open(f'{folder}/saved/model.safetensors', 'rb') as f: return f.read()
        self.assertEqual(weights('on'), weights('off'))

    def test_hosts_with_another_choice_of_encryption(self):
        jobs = self.start_all('sleep', '1000', more=[{'RZ_ENCRYPTION': 'on'}, {'RZ_ENCRYPTION': 'off'}])
        out, err = jobs[1].communicate(timeout=120)
        self.assertEqual((jobs[1].returncode, out), (2, ''), err)
        self.assertIn('is of this job, but it encrypts (RZ_ENCRYPTION=on), and this process has RZ_ENCRYPTION=off', err)
        self.signal(self.hosts.hosts[0], 'TERM')
        self.ends(jobs[:1])

    def test_each_host_prints_its_ranks_and_has_the_status_of_the_job(self):
        ends = self.ends(self.start_all('sh', '-c', 'echo $(hostname) $RANK $WORLD_SIZE; [ $RANK = 3 ] && exit 7; exit 0'))
        self.assertEqual([sorted(e[0].splitlines()) for e in ends], [['rzh0 0 4', 'rzh0 1 4'], ['rzh1 2 4', 'rzh1 3 4']])
        for _, err, status in ends:
            self.assertEqual(status, 7)
            self.assertRegex(err, 'rank 3 of 4 on host rzh1 exited with 7')  # node 0, the other host

    def test_signals_end_the_job_on_both(self):
        for host in self.hosts.hosts:
            jobs = self.sleeping()
            self.signal(host, 'INT')
            self.assertEqual([e[2] for e in self.ends(jobs)], [130, 130])
            self.tearDown()

    def test_a_kill_of_either_process_of_rzrun_ends_both_hosts(self):
        for i, host, process, expected, line in ((0, self.hosts.hosts[0], 0, 137, 'SIGKILL: killing 4 ranks'), (0, self.hosts.hosts[0], 1, 255, 'node 0 at .* is lost'),
                                                 (1, self.hosts.hosts[1], 0, 255, 'host rzh1 is lost'), (1, self.hosts.hosts[1], 1, 255, 'host rzh1 is lost')):
            with self.subTest(host=host.name, process=process):
                jobs = self.sleeping()
                host.kill(host.processes(f'{BIN}/rzrun --nnodes')[process])  # the one that was started, and its child
                _, err, status = self.ends(jobs)[1 - i]
                self.assertEqual(status, expected, err)
                self.assertRegex(err, line)
                self.tearDown()

    def test_those_that_remain_start_again(self):
        jobs = self.sleeping('--max-restarts', '1', nnodes='1:2')
        first = self.hosts.hosts[0]
        before = first.processes('sleep 1000')
        self.signal(self.hosts.hosts[1], 'KILL')
        cluster.wait_until(lambda: len(first.processes('sleep 1000')) == 2 and not set(before) & set(first.processes('sleep 1000')), 'restart')
        self.signal(first, 'TERM')
        _, err, status = self.ends(jobs)[0]
        self.assertEqual(status, 143, err)
        self.assertIn('restart 1 of 1', err)

    def test_a_killed_rank_is_named_and_all_start_again(self):
        jobs = self.sleeping('--max-restarts', '1')
        second = self.hosts.hosts[1]
        before = second.processes('sleep 1000')
        second.kill(before[0])
        for h in self.hosts.hosts: cluster.wait_until(lambda: len(h.processes('sleep 1000')) == 2 and not set(before) & set(second.processes('sleep 1000')), 'restart')
        second.kill(second.processes('sleep 1000')[0])
        for _, err, status in self.ends(jobs): self.assertEqual(status, 137, err)

    def test_a_cut_link(self):
        """Neither end has any sign of the other, whichever of the two links is cut."""
        second = self.hosts.hosts[1]
        jobs = self.sleeping()
        begin = time.monotonic()
        try:
            second.link('down')
            ends = self.ends(jobs)
        finally: second.link('up')
        self.assertLess(time.monotonic() - begin, 60)
        for (_, err, status), line in zip(ends, ('host rzh1 is lost: ', 'node 0 at .* is lost: no sign of it for 10 s')):
            self.assertEqual(status, 255, err)
            self.assertRegex(err, line)

    def test_a_network_that_loses_large_packets(self):
        """Its hosts have an MTU that the switch has not. Each end misses the other, so none is blamed."""
        for h in self.hosts.hosts: h.space.ip('link', 'set', 'eth0', 'mtu', '9000')
        try: ends = self.ends(self.start_all(f'{BIN}/all_reduce_perf', '-b', '16M', '-e', '16M', '-n', '20'))
        finally:
            for h in self.hosts.hosts: h.space.ip('link', 'set', 'eth0', 'mtu', '1500')
        for _, err, status in ends:
            self.assertNotEqual(status, 0, err)
            self.assertRegex(err, r'first failure: .*the connection between rank \d on host rzh\d and rank \d on host rzh\d is lost \(.*large packets do not pass \(MTU\)')
            self.assertNotRegex(err, r'rank \d is lost')

    def test_another_secret_is_refused(self):
        first, second = self.hosts.hosts
        jobs = self.start_all('sleep', '1000', hosts=[first])
        other, = self.start_all('sleep', '1000', hosts=[second], environment=self.job.environment | {'RZ_SECRET': 'another secret, which is as long as the first one'})
        _, err, status = self.ends([other])[0]
        self.assertEqual(status, 2, err)
        self.assertIn('copy ~/.config/ringzero/secret of one host to the others, or set one RZ_SECRET on all', err)
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertEqual(first.processes('sleep 1000'), [])  # which still waits
        self.signal(first, 'TERM')
        _, err, status = self.ends(jobs)[0]
        self.assertEqual(status, 143, err)
        self.assertRegex(err, r'(?m)^rzrun: waiting for hosts: 1 of 2 hosts have come .* names itself a member at 10\.79\.0\.2 of this job: if')

    def test_flags_that_differ(self):
        first, second = self.hosts.hosts
        jobs = self.start_all('sleep', '1000', hosts=[first]) + self.start_all('sleep', '1000', hosts=[second], nnodes='1:2')
        for _, err, status in self.ends(jobs):
            self.assertEqual(status, 2, err)
            self.assertIn('the hosts differ in --nnodes: 2 on rzh0, 1:2 on rzh1', err)

    def test_a_second_user_of_the_port(self):
        jobs = self.sleeping()
        _, err, status = self.ends(self.start_all('--node-rank', '0', 'sleep', '1000', hosts=self.hosts.hosts[:1]))[0]
        self.assertNotEqual(status, 0)
        self.assertRegex(err, '^rzrun: (error: )?port 29400 of 10.79.0.1 is in use, .*\n$')
        for h in self.hosts.hosts: self.assertEqual(len(h.processes('sleep 1000')), 2)
        self.signal(self.hosts.hosts[0], 'TERM')
        for _, err, status in self.ends(jobs): self.assertEqual(status, 143, err)

    def test_a_host_that_comes_late(self):
        jobs = self.start_all('sh', '-c', 'echo $RANK', hosts=self.hosts.hosts[1:])  # the one that joins, long before node 0
        time.sleep(2)
        jobs += self.start_all('sh', '-c', 'echo $RANK', hosts=self.hosts.hosts[:1])
        for (out, err, status), ranks in zip(self.ends(jobs), ('23', '01')):
            self.assertEqual(status, 0, err)
            self.assertEqual(sorted(out.split()), list(ranks))

class Endpoints(unittest.TestCase):
    """Endpoints of rzrun's torchrun flags, and MASTER_ADDR of ranks without a launcher, that are not one address of one host."""
    environment = ENVIRONMENT | {'RZ_SECRET': 'a secret of this test, of more than 32 characters'}
    @classmethod
    def setUpClass(cls):
        try:
            cls.hosts = cluster.Cluster(2)
            cls.addClassCleanup(cls.hosts.close)
            first, second = cls.hosts.hosts
            first.space.ip('addr', 'add', '10.79.0.101/24', 'dev', 'eth0')
            for host, addresses in ((first, ('10.79.0.1', '10.79.0.101')), (second, ('10.79.0.101',))):
                with open(f'{cls.hosts.folder}/hosts.{host.name}', 'w') as f:
                    f.write('127.0.0.1 localhost\n' + ''.join(f'{a} head\n' for a in addresses) + '10.79.0.200 service\n')
                host.run('mount', '--bind', f.name, '/etc/hosts')
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))

    def rzrun(self, host, endpoint, *flags, program=('sh', '-c', 'echo $MASTER_ADDR $RANK'), wait=20):
        return host.start(f'{BIN}/rzrun', '--nnodes', '2', '--nproc-per-node', '1', '--rdzv-endpoint', f'{endpoint}:29400',
                          '--rdzv-conf', f'join_timeout={wait}', *flags, *program, env=self.environment)
    def rank(self, number, master, **variables):
        here = {'RANK': number, 'WORLD_SIZE': 2, 'LOCAL_RANK': 0, 'LOCAL_WORLD_SIZE': 1, 'MASTER_ADDR': master, 'MASTER_PORT': 29555}
        return self.hosts.hosts[number].start(*SMALL, env=self.environment | {k: str(v) for k, v in (here | variables).items()})
    def ends(self, *jobs): return [(*j.communicate(timeout=120), j.returncode) for j in jobs]
    def both_end_well(self, *jobs):
        ends = self.ends(*jobs)
        self.assertEqual([e[2] for e in ends], [0, 0], ends)
        return ends

    def test_a_name_with_several_addresses(self):
        """Each resolver has others of them."""
        first, second = self.hosts.hosts
        ends = self.both_end_well(self.rzrun(first, 'head', program=SMALL), self.rzrun(second, 'head', program=SMALL))
        self.assertIn('# Out of bounds values : 0 OK', ends[0][0])
        self.both_end_well(self.rank(0, 'head'), self.rank(1, 'head'))
    def test_where_it_listens_is_said(self):
        first = self.hosts.hosts[0]
        (_, err, status), = self.ends(self.rzrun(first, 'head', wait=1))
        self.assertEqual(status, 1, err)
        self.assertIn('node 0 listens at 10.79.0.1:29400, 10.79.0.101:29400', err)
        (_, err, status), = self.ends(self.rank(0, 'head', RZ_RENDEZVOUS_TIMEOUT_S=1))
        self.assertEqual(status, 1, err)
        self.assertRegex(err, r'the store at head:29555, which listens at 10\.79\.0\.1, 10\.79\.0\.101')
        self.assertIn('does a firewall keep it from port 29555 of this host? RZ_PORTS=FIRST-LAST limits the ports', err)
    def test_the_unspecified_address_is_this_host_on_that_of_rank_0(self):
        first, second = self.hosts.hosts
        for any in ('0.0.0.0', '[::]'):
            ends = self.both_end_well(self.rzrun(first, any, '--node-rank', '0'), self.rzrun(second, '10.79.0.1', '--node-rank', '1'))
            self.assertEqual([e[0] for e in ends], ['10.79.0.1 0\n', '10.79.0.1 1\n'])
            self.both_end_well(self.rank(0, any.strip('[]')), self.rank(1, '10.79.0.1'))
            (_, err, status), = self.ends(self.rank(1, any.strip('[]')))
            self.assertEqual(status, 2, err)
            self.assertIn(f"MASTER_ADDR={any.strip('[]')} is each host itself, and rank 1 is not on that of rank 0", err)
    def test_the_address_of_a_service(self):
        first, second = self.hosts.hosts
        (_, err, status), (_, late, _) = self.ends(self.rzrun(first, 'service', '--node-rank', '0'), self.rzrun(second, 'service', wait=1))
        self.assertEqual((status, len(err.splitlines())), (2, 1), err)
        self.assertIn('node 0 listens at service:29400, but this host cannot: ', err)
        self.assertIn('give --local-addr ADDRESS with one of its own', err)
        self.assertIn('node 0 is the host that owns the address service, or, where that is of a service or router, the one with --node-rank 0', late)
        (_, err, status), = self.ends(self.rank(0, 'service'))
        self.assertEqual(status, 1)
        self.assertIn('rank 0 serves it at a name or address of its own host', err)
    def test_a_port_that_gets_free(self):
        """The host that owns the endpoint becomes node 0 then."""
        first, second = self.hosts.hosts
        other = first.start(sys.executable, '-c', 'import socket, time\ns = socket.create_server(("10.79.0.1", 29400)); print(flush=True); time.sleep(3)')
        other.stdout.readline()
        jobs = [self.rzrun(host, '10.79.0.1', wait=30) for host in (second, first)]
        self.both_end_well(*jobs)
        other.communicate()

class FullDisk(unittest.TestCase):
    """A folder without room on one host, or on all: one line names host and path, nothing hangs, nothing is left."""
    @classmethod
    def setUpClass(cls):
        # The shared disk is mounted in mounts of this process, which end with it.
        if ctypes.CDLL(None).unshare(0x20000) != 0: raise unittest.SkipTest('mounts of its own need root')  # CLONE_NEWNS
        try:
            cluster.sh('mount', '--make-rprivate', '/')
            cls.disk = tempfile.mkdtemp(prefix='rz_disk.', dir='/var/tmp')
            cls.addClassCleanup(lambda: (cluster.sh('umount', '-l', cls.disk), os.rmdir(cls.disk)))
            cluster.sh('mount', '-t', 'tmpfs', '-o', 'size=16m', 'tmpfs', cls.disk)  # one checkpoint has 10 MB
            cls.hosts, cls.job = cluster.Cluster(2), RzrunJob()
            cls.addClassCleanup(cls.hosts.close)
            cls.job.prepare(cls.hosts)
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))
        cls.folder = cls.hosts.folder
        cls.config = write_config(cls.folder)

    start, end, training = Jobs.start, Jobs.end, Jobs.training
    def fill(self, folder, command='mount -t tmpfs -o size=64k tmpfs'):
        """Makes a folder of the second host full, until the test ends."""
        second = self.hosts.hosts[1]
        for h in self.hosts.hosts: h.run('mkdir', '-p', folder)
        self.assertEqual(second.run('sh', '-c', f'{command} {folder} && cat /dev/zero > {folder}/filler 2>/dev/null; test -s {folder}/filler').returncode, 0)
        return lambda: second.run('umount', folder)
    def tearDown(self):
        for h in self.hosts.hosts: cluster.wait_until(lambda: not h.processes(f'{BIN}/(train_lm|all_reduce_perf|rzrun)'), f'end of all processes on {h.name}')

    def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(self):
        folder = f'{self.disk}/checkpoints'
        for more in ((), ('--resume', 'true')):
            status, _, err = self.end(self.start(*self.training('none', '--steps', '4', '--save-steps', '1', '--output-dir', folder, *more)))
            self.assertEqual(status, 1, err)
            self.assertRegex(err.splitlines()[-1], rf'^rzrun: first failure: rank \d of 4 on host rzh\d exited with 1: (rank \d: )?{folder}/\.global_step2\S*: cannot be written: No space left on device$')
            self.assertEqual(sorted(os.listdir(folder)), ['global_step1', 'latest'])
        verified = self.hosts.hosts[0].run(f'{BIN}/checkpoint', 'verify', folder)
        self.assertEqual(verified.returncode, 0, verified)
    def test_a_checkpoint_of_which_one_rank_has_no_room(self):
        """The part of one rank, of another host than rank 0's, does not fit: all have its error, and remove what they have written."""
        folder = f'{self.disk}/one_rank'
        cluster.sh('mount', '-o', 'remount,size=64m', self.disk)  # room for the parts of the others
        self.addCleanup(cluster.sh, 'mount', '-o', 'remount,size=16m', self.disk)
        self.addCleanup(shutil.rmtree, folder, True)
        program = [*self.training('none', '--steps', '4', '--save-steps', '1', '--output-dir', folder)]
        script = f'[ $RANK = 3 ] && export LD_PRELOAD={os.path.dirname(BIN)}/stubs/full_disk.so FULL_DISK={folder}/.global_step2; exec "$0" "$@"'
        status, _, err = self.end(self.start('sh', '-c', script, *program))
        self.assertEqual(status, 1, err)
        self.assertRegex(err.splitlines()[-1], rf'^rzrun: first failure: rank \d of 4 on host rzh\d exited with 1: (rank 3: )?{folder}/\.global_step2\S*: cannot be written: No space left on device')
        self.assertEqual(sorted(os.listdir(folder)), ['global_step1', 'latest'])
    def test_a_model_that_does_not_fit(self):
        taken = f'{self.disk}/taken'
        with open(taken, 'wb') as f: os.posix_fallocate(f.fileno(), 0, os.statvfs(self.disk).f_bavail * os.statvfs(self.disk).f_frsize - (1 << 20))
        try:
            status, _, err = self.end(self.start(*self.training(f'{self.disk}/model', '--steps', '1')))
            self.assertEqual(status, 1, err)
            self.assertRegex(err.splitlines()[-1], rf'first failure: rank \d of 4 on host rzh\d exited with 1: (rank \d: )?{self.disk}/model\S*: cannot be written: No space left on device$')
            self.assertNotIn('model.safetensors', ' '.join(os.listdir(f'{self.disk}/model')) if os.path.exists(f'{self.disk}/model') else '')
        finally: os.remove(taken)
    def test_log_files(self):
        for tee in ((), ('--tee',)):
            self.addCleanup(self.fill('/tmp/logs'))
            status, _, err = self.end(self.start('--log-dir', '/tmp/logs', *tee, 'sh', '-c', 'seq 1000; [ $RANK = 3 ] && exit 7; exit 0'))
            self.assertEqual(status, 7, err)
            self.assertEqual(re.findall('.*No space.*', err), ['rzrun: host rzh1: --log-dir /tmp/logs: No space left on device; output is missing in log files'])
            self.assertRegex(err, 'first failure: rank 3 of 4 on host rzh1 exited with 7; its log: /tmp/logs/rank3.stderr')
            self.doCleanups()
    def test_tmp(self):
        self.addCleanup(self.fill('/tmp'))
        status, _, err = self.end(self.start('sh', '-c', '[ $RANK = 3 ] && exit 7; exit 0'))
        self.assertEqual(status, 7, err)
        self.assertRegex(err, 'first failure: rank 3 of 4 on host rzh1 exited with 7')
        self.reduces()
    def test_shared_memory(self):
        self.fill('/dev/shm', 'mount -o remount,size=64k')
        self.addCleanup(self.hosts.hosts[1].run, 'rm', '/dev/shm/filler')
        self.reduces()
    def reduces(self):
        status, out, err = self.end(self.start(f'{BIN}/all_reduce_perf', '-b', '8', '-e', '4M', '-f', '8', '-n', '2'))
        self.assertEqual(status, 0, err)
        self.assertIn('# Out of bounds values : 0 OK', out)

SMALL = (f'{BIN}/all_reduce_perf', '-b', '8', '-e', '64K', '-f', '8', '-n', '2')

class Slurm(Jobs, unittest.TestCase):
    job = SlurmJob()
    @unittest.skipUnless(shutil.which('mpirun'), 'mpirun is not installed')
    def test_open_mpi_in_an_allocation(self):
        for job in (SlurmOpenMpiJob(), SlurmRzrunOpenMpiJob()):
            job.nodes, job.environment = self.job.nodes, self.job.environment | OPEN_MPI
            status, out, err = self.end(job.start(self.hosts, *SMALL))
            self.assertEqual(status, 0, err)
            self.assertIn('# Out of bounds values : 0 OK', out)

class OpenMpi(Jobs, unittest.TestCase):
    job = OpenMpiJob()
    secret = 'a secret of this test, of more than 32 characters'

    def start_with(self, environment, *words):
        """mpirun's ranks on its own host have the variables; `words` may begin with flags that hand them on."""
        return self.hosts.hosts[0].start(*self.job.words(*words), env=self.job.environment | environment)
    def place(self): return {'MASTER_ADDR': self.hosts.hosts[0].address, 'MASTER_PORT': '29555'}
    def test_variables_of_all_ranks(self):
        for variables in (self.place() | {'RZ_SECRET': self.secret}, {'RZ_SECRET': self.secret}, {'RZ_INSECURE': '1'}, {'RZ_BACKEND': 'mpi'}):
            flags = [w for name in variables for w in ('-x', name)]
            status, out, err = self.end(self.start_with(variables, *flags, *SMALL))
            self.assertEqual(status, 0, err)
            self.assertIn('# Out of bounds values : 0 OK', out)
            self.assertIn(f"# Backend: {variables.get('RZ_BACKEND', 'native')}", out)
    def test_variables_of_some_ranks(self):
        status, _, err = self.end(self.start_with({'RZ_SECRET': self.secret}, *SMALL))
        self.assertEqual(status, 2, err)
        self.assertIn('rank 2 has no RZ_SECRET, but rank 0 has RZ_SECRET; set it on all hosts, as mpirun does with -x', err)
    def test_no_file_has_the_secret_and_one_address_listens(self):
        job, first = self.endless(), self.hosts.hosts[0]
        for h in self.hosts.hosts: self.assertNotEqual(h.run('ls', '/tmp/config').returncode, 0)
        lines = [l.split() for l in first.run('ss', '-Hltnp').stdout.splitlines() if 'all_reduce_perf' in l]
        self.assertEqual([l[3].rsplit(':', 1)[0] for l in lines], [first.address])
        first.kill(first.processes('mpirun')[0], 'TERM')
        self.assertNotEqual(self.end(job)[0], 0)

class OpenMpiWaits(OpenMpi):
    """Ranks that never come, too."""
    def test_a_rank_that_does_not_start(self):
        for how in ('sleep 1000', 'exit 0'):
            begin = time.monotonic()
            status, _, err = self.end(self.start_with({}, 'sh', '-c', f'[ $OMPI_COMM_WORLD_RANK = 3 ] && {how}; exec "$@"', 'sh', *SMALL), 100)
            self.assertEqual(status, 1, err)
            self.assertRegex(err, 'rank [0-2]: MPI_Init did not end within 40 s: another of the 4 ranks has not come')
            self.assertLess(time.monotonic() - begin, 80)
            self.tearDown()
    def test_an_address_that_some_ranks_have(self):
        status, _, err = self.end(self.start_with(self.place(), *SMALL), 100)
        self.assertEqual(status, 1, err)
        self.assertIn('rank 0 of 4: rank 2 and 3 did not reach the rendezvous', err)

class SlurmOpenMpi(Jobs, unittest.TestCase): job = SlurmOpenMpiJob()
class SlurmRzrunOpenMpi(Launched, unittest.TestCase): job, connector, status_if_killed = SlurmRzrunOpenMpiJob(), 'mpirun ', 0

class Rzrun4(Jobs, unittest.TestCase): job, size = RzrunJob(), 4
class RzrunOpenMpi4(Jobs, unittest.TestCase): job, size = RzrunOpenMpiJob(), 4
class RzrunSlurm4(Jobs, unittest.TestCase): job, size = RzrunSlurmJob(), 4
class Torchrun4(Jobs, unittest.TestCase): job, size = TorchrunJob(), 4
class Slurm4(Jobs, unittest.TestCase): job, size = SlurmJob(), 4
class OpenMpi4(Jobs, unittest.TestCase): job, size = OpenMpiJob(), 4

if __name__ == '__main__':
    unittest.main(verbosity=2)
