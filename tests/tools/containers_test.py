#!/usr/bin/env python3
"""The commands of docs/guide/several_hosts.md for containers, by Podman on two hosts (tools/cluster.py). The image has programs of BIN, a shell, and
their libraries, so nothing is downloaded. Skipped, with the reason, where Podman or hosts are not possible.

    containers_test.py ROOT BIN"""
import os, re, resource, shutil, subprocess, sys, tempfile, time, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.dont_write_bytecode = True
sys.path.insert(0, f'{ROOT}/tools')
import cluster

PROGRAMS = [f'{BIN}/{p}' for p in ('rzrun', 'doctor', 'all_reduce_perf')] + [shutil.which(p) for p in ('sh', 'sleep', 'id')]

def make_image(path, folder):
    """A tar file of a root folder, whose /work has all_reduce_perf as the program of the guide."""
    root = f'{folder}/root'
    for d in ('usr/bin', 'tmp', 'etc', 'work', 'run', 'proc', 'sys', 'dev', 'lib', 'lib64'): os.makedirs(f'{root}/{d}')
    os.symlink('usr/bin', f'{root}/bin')
    files = {p: f'/usr/bin/{os.path.basename(p)}' for p in PROGRAMS}
    for p in PROGRAMS:
        for library in re.findall(r'(/\S+) \(0x', subprocess.run(['ldd', p], capture_output=True, text=True).stdout): files[library] = library
    for source, target in files.items():
        os.makedirs(os.path.dirname(root + target), exist_ok=True)
        shutil.copy(source, root + target)
    os.link(f'{root}/usr/bin/all_reduce_perf', f'{root}/work/several_hosts')
    subprocess.run(['tar', '-C', root, '-cf', path, '.'], check=True)

class Containers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not shutil.which('podman'): raise unittest.SkipTest('podman is not installed')
        try: cls.hosts = cluster.Cluster(['worker-0', 'worker-1'])
        except cluster.Unavailable as e: raise unittest.SkipTest(str(e))
        cls.addClassCleanup(cls.hosts.close)
        cls.folder = tempfile.mkdtemp(dir=cls.hosts.folder)
        make_image(f'{cls.folder}/image.tar', cls.folder)
        for runtime in [None] + [r for r in ('crun', 'runc') if shutil.which(r)]:
            cls.prepare(runtime)
            trial = cls.run_on(0, 'podman run --rm --network host IMAGE sh -c :')
            if trial.returncode == 0: break
        else: raise unittest.SkipTest(f'podman starts no container here: {trial.stderr.strip()[-200:]}')
        cls.run_on(0, '(umask 77; openssl rand -hex 32 > secret)')

    @classmethod
    def prepare(cls, runtime):
        """A podman for each host, whose containers have no higher limits than this process may give."""
        files, processes = (resource.getrlimit(r)[1] for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        processes = 30000 if processes == resource.RLIM_INFINITY else min(processes, 30000)
        configuration = f'{cls.folder}/containers.conf'
        with open(configuration, 'w') as f:
            f.write(f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n[engine]\ncgroup_manager = "cgroupfs"\n')
            if runtime: f.write(f'runtime = "{runtime}"\n')
        cls.environment = os.environ | {'CONTAINERS_CONF': configuration, 'DS_ENV_FILE': ''}
        for i in range(2):
            if not os.path.exists(f'{cls.folder}/{i}.root'): cls.run_on(i, 'podman import --change WORKDIR=/work image.tar IMAGE')

    @classmethod
    def words(cls, i, text):
        podman = f'podman --root {cls.folder}/{i}.root --runroot /run/podman '
        return ['sh', '-c', f'cd {cls.folder} && ' + text.replace('podman ', podman).replace('IMAGE', 'localhost/ringzero')]
    @classmethod
    def run_on(cls, i, text): return cls.hosts.hosts[i].run(*cls.words(i, text), env=cls.environment, timeout=100)
    def start_on(self, i, text): return self.hosts.hosts[i].start(*self.words(i, text), env=self.environment)

    def command_of_guide(self):
        with open(f'{ROOT}/docs/guide/several_hosts.md') as f: text = f.read()
        command = re.search(r'^    (docker run (?:.*\\\n)*.*)$', text, re.M)[1]
        return re.sub(r'\\\n\s*', '', command).replace('docker run', 'podman run')

    def test_a_job_of_two_containers(self):
        command = self.command_of_guide()
        self.assertIn(' IMAGE rzrun --nnodes 2 ', command)
        jobs = [self.start_on(i, f'{command} -b 8 -e 64K -f 8 -n 2') for i in range(2)]
        ends = [(*j.communicate(timeout=100), j.returncode) for j in jobs]
        self.assertEqual([e[2] for e in ends], [0, 0], ends)
        self.assertIn('# Backend: native over shm+tcp', ends[0][0])
        self.assertIn('# Out of bounds values : 0 OK', ends[0][0])

    def test_the_owner_and_mode_of_the_secret(self):
        def status(owner, mode):
            shutil.copy(f'{self.folder}/secret', f'{self.folder}/other')
            os.chown(f'{self.folder}/other', *owner)
            os.chmod(f'{self.folder}/other', mode)
            end = self.run_on(0, 'podman run --rm --user 1234:1234 --network host --volume "$PWD/other:/run/secrets/ringzero:ro" '
                                 '--env RZ_SECRET_FILE=/run/secrets/ringzero IMAGE rzrun --nnodes 1:2 --rdzv-conf last_call_timeout=0 --rdzv-endpoint worker-0:29400 id -u')
            return end.returncode, end.stdout.strip(), end.stderr
        self.assertEqual(status((1234, 1234), 0o600)[:2], (0, '1234'))
        self.assertEqual(status((0, 1234), 0o640)[:2], (0, '1234'))
        for owner, mode, why in (((0, 0), 0o644, 'other users may access it'), ((0, 0), 0o600, 'Permission denied')):
            code, _, err = status(owner, mode)
            self.assertEqual(code, 2, err)
            self.assertIn(why, err)

    def test_stop_ends_the_ranks_in_order(self):
        program = "trap 'echo saved; exit 0' TERM; echo up; sleep 1000 & wait"
        job = self.start_on(0, f'podman run --name stopped --stop-timeout=60 --network host IMAGE rzrun -n 2 sh -c "{program}"')
        cluster.wait_until(lambda: self.run_on(0, 'podman logs stopped').stdout.count('up') == 2, 'start of the ranks', 60)
        begin = time.monotonic()
        self.assertEqual(self.run_on(0, 'podman stop stopped').returncode, 0)
        self.assertLess(time.monotonic() - begin, 50)
        out, err = job.communicate(timeout=60)
        self.assertEqual(out.count('saved'), 2, err)
        self.assertIn('rzrun: SIGTERM: ending 2 ranks', err)

    def test_limits_are_named(self):
        end = self.run_on(0, 'podman run --rm --network host --memory 100m --memory-swap 100m IMAGE rzrun -n 2 ./several_hosts -b 256M -e 256M -n 2')
        if 'cgroup' in end.stderr: self.skipTest(end.stderr.strip()[-200:])
        self.assertEqual(end.returncode, 137, end.stderr)
        self.assertIn("the kernel's out-of-memory killer struck", end.stderr)
        end = self.run_on(0, 'podman run --rm --network host --pids-limit 30 IMAGE doctor --ranks 8')
        self.assertIn('docker run --pids-limit=-1', end.stdout)

if __name__ == '__main__': unittest.main(verbosity=2)
