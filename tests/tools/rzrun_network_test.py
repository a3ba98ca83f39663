#!/usr/bin/env python3
"""rzrun over hosts that are network namespaces with their own names, /dev/shm and /run, through a real sshd and ssh, with keys
made here: collectives, training, lost ranks, agents, connections and links, and that no process is left on any host.

    rzrun_network_test.py ROOT BIN"""
import contextlib, io, os, re, shutil, signal, subprocess, sys, tempfile, time, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, f'{ROOT}/bench')
sys.dont_write_bytecode = True
import hosts

HOSTS, PER_HOST = 2, 2

def pids(host):
    """Of the processes of a host, without its sshd."""
    found = {}
    for pid in hosts.sh(f'ip netns pids {host}').split():
        with contextlib.suppress(OSError):
            with open(f'/proc/{pid}/cmdline', 'rb') as file: words = file.read().decode().replace('\0', ' ').strip()
            if words and 'sshd' not in words: found[int(pid)] = words
    return found

def wait_until(what, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what(): return True
        time.sleep(0.05)
    return False

class OverSsh(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if os.geteuid() != 0: raise unittest.SkipTest('network namespaces need root')
        sshd = shutil.which('sshd') or '/usr/sbin/sshd'
        if not os.path.exists(sshd) or not shutil.which('ssh'): raise unittest.SkipTest('no sshd and ssh here (Debian: openssh-server)')
        try: there = set(hosts.sh('ip netns list').split()) & set(hosts.NAMES + [hosts.SWITCH])
        except (OSError, RuntimeError) as e: raise unittest.SkipTest(f'no ip here ({e})')
        if there: raise unittest.SkipTest(f'another run is on: {", ".join(sorted(there))}')
        cls.scope = contextlib.ExitStack()
        cls.addClassCleanup(cls.scope.close)
        cls.folder = cls.scope.enter_context(tempfile.TemporaryDirectory())
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed): cls.scope.enter_context(hosts.network(HOSTS, None, None))
        except SystemExit: raise unittest.SkipTest(printed.getvalue().strip())
        f = cls.folder
        for key in ('host', 'user'): subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', f'{f}/{key}'], check=True)
        shutil.copy(f'{f}/user.pub', f'{f}/authorized')
        known = open(f'{f}/host.pub').read().split(None, 2)
        cls.write('sshd_config', f'HostKey {f}/host\nAuthorizedKeysFile {f}/authorized\nPermitRootLogin yes\nStrictModes no\n'
                  'PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPidFile none\nBanner none\n')
        cls.write('ssh_config', ''.join(f'Host {hosts.NAMES[i]}\n  HostName {hosts.address(i)}\n' for i in range(HOSTS)) +
                  f'Host *\n  IdentityFile {f}/user\n  UserKnownHostsFile {f}/known\n  User root\n  LogLevel ERROR\n')
        cls.write('known', ''.join(f'{hosts.address(i)} {known[0]} {known[1]}\n' for i in range(HOSTS)))
        cls.write('hosts', ''.join(f'{hosts.NAMES[i]} slots={PER_HOST}\n' for i in range(HOSTS)))
        for i in range(HOSTS):
            daemon = subprocess.Popen(cls.on_host(i, [sshd, '-D', '-e', '-f', f'{f}/sshd_config']), stderr=cls.scope.enter_context(open(f'{f}/sshd{i}.log', 'w')))
            cls.scope.callback(lambda p=daemon: (p.kill(), p.wait()))
        # The first login waits for sshd; without one, e.g. as root's account is locked, there is nothing to test.
        login = hosts.on_host(0, cls.ssh() + [hosts.NAMES[1], 'hostname'])
        if not wait_until(lambda: subprocess.run(login, capture_output=True, text=True).stdout.strip() == hosts.NAMES[1], 10):
            with open(f'{f}/sshd1.log') as log: raise unittest.SkipTest('no login through sshd here: ' + log.read().strip()[-300:])

    @classmethod
    def write(cls, name, text):
        with open(f'{cls.folder}/{name}', 'w') as file: file.write(text)

    @classmethod
    def ssh(cls): return ['ssh', '-F', f'{cls.folder}/ssh_config', '-T', '-o', 'BatchMode=yes', '-o', 'ServerAliveInterval=5']

    @staticmethod
    def on_host(i, command):
        return ['ip', 'netns', 'exec', hosts.NAMES[i], 'unshare', '-um', 'sh', '-c',
                f'mount -t tmpfs shm /dev/shm && mount -t tmpfs run /run && mkdir /run/sshd && hostname {hosts.NAMES[i]} && exec "$@"', 'sh'] + command

    def start(self, *words):
        command = [f'{BIN}/rzrun', '--hostfile', f'{self.folder}/hosts', '--rsh', ' '.join(self.ssh()), '--grace', '2', *words]
        p = subprocess.Popen(self.on_host(0, command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (p.poll() is None and p.kill(), p.wait(), p.stdout.close(), p.stderr.close()))
        return p

    def finish(self, p, status, seconds=60):
        out, err = p.communicate(timeout=seconds)
        self.assertEqual(p.returncode, status, out[-2000:] + err[-2000:])
        return out, err

    def tearDown(self):
        for host in hosts.NAMES[:HOSTS]:
            self.assertTrue(wait_until(lambda: not pids(host), 20), f'left on {host}: {pids(host)}')

    def endless(self, *flags):
        """A job that runs until it is ended; returns it once the ranks of the second host run."""
        p = self.start(*flags, f'{BIN}/all_reduce_perf', '-b', '4M', '-e', '4M', '-n', '1000000', '-w', '1')
        self.assertTrue(wait_until(lambda: len(self.ranks(1)) == PER_HOST, 20), 'no ranks on the second host')
        time.sleep(1)
        return p

    def ranks(self, host): return [p for p, words in pids(hosts.NAMES[host]).items() if words.startswith(f'{BIN}/all_reduce_perf')]

    def test_collectives(self):
        out, err = self.finish(self.start(f'{BIN}/all_reduce_perf', '-b', '1K', '-e', '1M', '-f', '32', '-n', '5', '-c', '1'), 0)
        self.assertIn('[rz0:0] # Backend: native over ', out)
        rows = re.findall(r'^\[rz0:0\] +(\d+) .* 0$', out, re.M)
        self.assertEqual(rows, ['1024', '32768', '1048576'], out)

    def test_environment(self):
        out, err = self.finish(self.start('sh', '-c', 'echo $(hostname) $RANK $MASTER_ADDR'), 0)
        self.assertEqual(sorted(out.splitlines()), [f'[rz{r // 2}:{r}] rz{r // 2} {r} {hosts.address(0)}' for r in range(4)])

    def test_a_killed_rank_on_each_host(self):
        for host in range(HOSTS):
            p = self.endless()
            os.kill(self.ranks(host)[0], signal.SIGKILL)
            out, err = self.finish(p, 137)
            self.assertRegex(err, rf'rank [{2 * host}{2 * host + 1}] of 4 on host rz{host} failed first: killed by SIGKILL')

    def test_a_killed_agent(self):
        p = self.endless('--max-restarts', '2')
        agent = [pid for pid, words in pids('rz1').items() if words.endswith('rzrun --agent')]
        os.kill(agent[-1], signal.SIGKILL)
        out, err = self.finish(p, 255)
        self.assertRegex(err, 'host rz1 is lost: ssh .*; no restart: a host is gone')

    def test_a_killed_ssh(self):
        p = self.endless()
        client = [pid for pid, words in pids('rz0').items() if words.startswith('ssh ')]
        os.kill(client[0], signal.SIGKILL)
        self.assertRegex(self.finish(p, 255)[1], 'host rz1 is lost: ssh killed by SIGKILL')

    def test_a_cut_link(self):
        p = self.endless()
        begin = time.monotonic()
        try:
            hosts.sh(f'ip -n {hosts.SWITCH} link set v1 down')
            err = self.finish(p, 255, 40)[1]
            self.assertRegex(err, 'host rz1 is lost: ')
            self.assertLess(time.monotonic() - begin, 25)
            self.assertTrue(wait_until(lambda: not self.ranks(1), 20), 'ranks are left behind the cut link')
        finally: hosts.sh(f'ip -n {hosts.SWITCH} link set v1 up')

    def test_a_killed_rzrun(self):
        p = self.endless()
        os.kill([pid for pid, words in pids('rz0').items() if 'rzrun --hostfile' in words and not words.startswith(('ip', 'unshare', 'sh '))][0], signal.SIGKILL)
        self.finish(p, -signal.SIGKILL)

    def test_a_signal_to_rzrun(self):
        p = self.endless()
        os.kill([pid for pid, words in pids('rz0').items() if 'rzrun --hostfile' in words][0], signal.SIGTERM)
        self.finish(p, 143)

    def test_a_host_that_refuses_the_login(self):
        shutil.move(f'{self.folder}/authorized', f'{self.folder}/unauthorized')
        try: err = self.finish(self.start('true'), 255)[1]
        finally: shutil.move(f'{self.folder}/unauthorized', f'{self.folder}/authorized')
        self.assertIn('Permission denied', err)
        self.assertIn('host rz1 is lost: ssh exited with 255 before an agent of rzrun began', err)

if __name__ == '__main__': unittest.main(verbosity=2)
