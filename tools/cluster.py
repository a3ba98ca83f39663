#!/usr/bin/env python3
"""Hosts on one machine, to try jobs of several hosts without having them, and for tests and measurements.

    tools/cluster.py [--hosts 2] [--name worker-] [--ssh] [--slurm] [COMMAND…]

runs COMMAND, or a shell, on the first host. Each host is a set of namespaces (network, host name, mounts, processes) with its own
/tmp, /run and /dev/shm; all other folders are shared. The variable TMPDIR names a shared folder, which ends with the hosts. Veth
links join the hosts at a switch in another namespace; the network of the machine is not changed.

--ssh    an sshd on each host; `ssh worker-1` needs no password and no flag
--slurm  Slurm's daemons; srun and sbatch need no flag

No namespace has a name, so runs cannot collide. When this process ends, however it ends, so do the hosts with all their
processes, and the shared folder. Needs root, iproute2 and util-linux; exit status 77 if hosts are not possible here."""
import argparse, contextlib, os, shutil, signal, stat, subprocess, sys, tempfile, time

class Unavailable(Exception): pass

def sh(*words):
    r = subprocess.run(words, capture_output=True, text=True)
    if r.returncode: raise Unavailable(f'{" ".join(words)}: {(r.stderr or r.stdout).strip()}')
    return r.stdout

def wait_until(true, what, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end: raise Unavailable(f'{what} did not happen within {seconds} s')
        time.sleep(0.05)

# The first process of a set of namespaces waits for the end of this one: a pipe that only this process can write to then closes.
# With the first process all others of its namespace end. It leaves no zombies of those.
UNTIL_THE_END = 'trap "" CHLD && echo ready && exec cat >/dev/null'

# Removes a folder when this process has ended. In a session of its own, and no child, so that what kills a test with its
# children lets it live.
REMOVER = '''exec 3<&0; ( trap "" INT TERM HUP; cat <&3 >/dev/null
for i in 1 2 3 4 5 6 7 8 9 10; do rm -rf "$0" && break; sleep 1; done ) </dev/null >/dev/null 2>&1 &'''

class Space:
    """A process in new namespaces. `pid` is that of their first process, as this host has it."""
    def __init__(self, kinds, start='true'):
        self.unshare = subprocess.Popen(['unshare', *kinds, '--pid', '--fork', '--kill-child', 'sh', '-c', f'{start} && {UNTIL_THE_END}'],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        line = self.unshare.stdout.readline()
        if line != 'ready\n': raise Unavailable(f'a host cannot be made: {line.strip()}')
        with open(f'/proc/{self.unshare.pid}/task/{self.unshare.pid}/children') as f: self.pid = int(f.read().split()[0])
    def kill(self):
        """Returns once no process of the namespaces is left."""
        if self.unshare.poll() is None:
            with contextlib.suppress(ProcessLookupError): os.kill(self.pid, signal.SIGKILL)
        self.unshare.wait()
    def close(self):
        self.kill()
        for pipe in (self.unshare.stdin, self.unshare.stdout): pipe.close()
    def ip(self, *words): return sh('nsenter', '-t', str(self.pid), '-n', 'ip', *words)

class Host:
    def __init__(self, cluster, name, address, port):
        self.cluster, self.name, self.address, self.port = cluster, name, address, port
        homes = ''
        for folder in ('.ssh', '.config'):
            os.makedirs(os.path.expanduser(f'~/{folder}'), mode=0o700, exist_ok=True)
            homes += f'mount --bind {cluster.folder}/{folder} {os.path.expanduser(f"~/{folder}")} && '
        self.space = Space(['--net', '--uts', '--mount', '--mount-proc', '--propagation', 'private'],
                           f'hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /tmp && '
                           f'mount --bind {cluster.folder}/hosts /etc/hosts && {homes}'
                           'mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd')
        cluster.hosts.append(self)
        self.space.ip('link', 'add', 'eth0', 'type', 'veth', 'peer', 'name', port, 'netns', str(cluster.switch.pid))
        cluster.switch.ip('link', 'set', port, 'master', 'br0', 'up')
        self.space.ip('addr', 'add', f'{address}/24', 'dev', 'eth0')
        for device in ('eth0', 'lo'): self.space.ip('link', 'set', device, 'up')

    def words(self, *command, spaces='numpw', folder='/'):
        """The command line that runs a command on this host: in its namespaces of network, names (u), mounts, processes."""
        kinds = [f'-{kind}' for kind in spaces if kind != 'w'] + ([f'--wdns={folder}'] if 'w' in spaces else [])
        return ['nsenter', '-t', str(self.space.pid), *kinds, '--', *command]
    def start(self, *command, **how):
        return subprocess.Popen(self.words(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **how)
    def run(self, *command, **how):
        return subprocess.run(self.words(*command), stdin=subprocess.DEVNULL, capture_output=True, text=True, **how)
    def processes(self, words):
        """Process ids, as this host has them, of the processes whose command line begins with these words (a regular expression)."""
        return self.run('pgrep', '-f', f'^{words}').stdout.split()
    def kill(self, pid, signal='KILL'): self.run('kill', f'-{signal}', pid)
    def link(self, state): self.cluster.switch.ip('link', 'set', self.port, state)

class Cluster:
    """`n` hosts NAME0, NAME1 …, or hosts with these names, at one switch. ~/.ssh and ~/.config are those of the cluster."""
    def __init__(self, n, name='rzh'):
        names = n if isinstance(n, list) else [f'{name}{i}' for i in range(n)]
        self.switch, self.hosts, self.daemons, self.environment = None, [], [], {}
        for program in ('ip', 'nsenter', 'unshare'):
            if not shutil.which(program): raise Unavailable(f'{program} is not installed (Debian: iproute2, util-linux)')
        if os.geteuid() != 0: raise Unavailable('namespaces need root')
        self.folder = tempfile.mkdtemp(prefix='rz_cluster.', dir='/var/tmp')
        self.remover = subprocess.Popen(['setsid', 'sh', '-c', REMOVER, self.folder], stdin=subprocess.PIPE)
        self.remover.wait()
        os.chmod(self.folder, 0o755)
        for folder in ('.ssh', '.config'): os.mkdir(f'{self.folder}/{folder}', 0o700)
        addresses = [f'10.79.0.{i + 1}' for i in range(len(names))]
        with open(f'{self.folder}/hosts', 'w') as f:
            f.write('127.0.0.1 localhost\n' + ''.join(f'{a} {name}\n' for name, a in zip(names, addresses)))
        try:
            self.switch = Space(['--net'])
            self.switch.ip('link', 'add', 'br0', 'type', 'bridge')
            self.switch.ip('link', 'set', 'br0', 'up')
            for i, (name, a) in enumerate(zip(names, addresses)): Host(self, name, a, f'port{i}')
        except BaseException:
            self.close()
            raise

    def __enter__(self): return self
    def __exit__(self, *_): self.close()
    def close(self):
        for p in self.daemons:
            with contextlib.suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)
            p.wait()
        for space in [h.space for h in self.hosts] + [self.switch] * bool(self.switch): space.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.remover.stdin.close()

    def daemon(self, host, *command):
        if not shutil.which(command[0]): raise Unavailable(f'{command[0]} is not installed')
        with open(f'{self.folder}/{os.path.basename(command[0])}.{host.name}.log', 'w') as log:
            p = subprocess.Popen(host.words(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.daemons.append(p)

    def sshd(self):
        """An sshd on each host, which lets the user in with a key of the cluster; `ssh HOST` needs no flag."""
        key = f'{self.folder}/.ssh/id_ed25519'
        if not shutil.which('ssh-keygen'): raise Unavailable('ssh is not installed')
        sh('ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', key)
        shutil.copy(f'{key}.pub', f'{self.folder}/.ssh/authorized_keys')
        with open(f'{key}.pub') as f: public = ' '.join(f.read().split()[:2])
        with open(f'{self.folder}/.ssh/known_hosts', 'w') as f: f.writelines(f'{h.name},{h.address} {public}\n' for h in self.hosts)
        config = f'{self.folder}/sshd_config'
        with open(config, 'w') as f:
            f.write(f'HostKey {key}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPermitRootLogin yes\nPrintMotd no\n')
        for h in self.hosts: self.daemon(h, '/usr/sbin/sshd', '-D', '-e', '-f', config)
        for h in self.hosts: wait_until(lambda: h.run('ssh', '-o', 'BatchMode=yes', h.name, 'true').returncode == 0, f'ssh to {h.name}')

    def slurm(self, processors=4, gpus=0):
        """Slurm's daemons; returns the variables of srun. The GPUs are device files without a device."""
        f, first = self.folder, self.hosts[0]
        for i in range(gpus): os.mknod(f'{f}/gpu{i}', 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        if gpus:
            with open(f'{f}/gres.conf', 'w') as g: g.write(f'Name=gpu File={f}/gpu[0-{gpus - 1}]\n')
        with open(f'{f}/munge.key', 'wb', opener=lambda p, flags: os.open(p, flags, 0o400)) as key: key.write(os.urandom(128))
        for folder in ['state'] + [f'spool.{h.name}' for h in self.hosts]: os.mkdir(f'{f}/{folder}')
        with open(f'{f}/slurm.conf', 'w') as conf:
            conf.write('\n'.join([
                'ClusterName=test', f'SlurmctldHost={first.name}', 'SlurmUser=root', 'SlurmdUser=root', 'AuthType=auth/munge',
                f'AuthInfo=socket={f}/munge.socket', f'StateSaveLocation={f}/state', f'SlurmdSpoolDir={f}/spool.%n',
                f'SlurmctldPidFile={f}/slurmctld.pid', f'SlurmdPidFile={f}/slurmd.%n.pid', 'ProctrackType=proctrack/linuxproc',
                'TaskPlugin=task/none', 'SelectType=select/cons_tres', 'SelectTypeParameters=CR_CPU', 'MpiDefault=none', 'ReturnToService=2',
                'MailProg=/bin/true', 'SlurmdParameters=config_overrides',
                *(['GresTypes=gpu'] if gpus else []), *[f'NodeName={h.name} CPUs={processors}' + f' Gres=gpu:{gpus}' * bool(gpus) for h in self.hosts], 'PartitionName=all Nodes=ALL Default=YES', '']))
        self.daemon(first, 'munged', '--foreground', '--force', f'--key-file={f}/munge.key', f'--socket={f}/munge.socket',
                    f'--pid-file={f}/munge.pid', f'--log-file={f}/munge.log', f'--seed-file={f}/munge.seed')
        wait_until(lambda: os.path.exists(f'{f}/munge.socket'), 'start of munged')
        self.daemon(first, 'slurmctld', '-D', '-f', f'{f}/slurm.conf')
        for h in self.hosts: self.daemon(h, 'slurmd', '-D', '-f', f'{f}/slurm.conf', '-N', h.name)
        self.environment = {'SLURM_CONF': f'{f}/slurm.conf'}
        idle = lambda: first.run('sinfo', '-h', '-o', '%T %D', env=os.environ | self.environment).stdout == f'idle {len(self.hosts)}\n'
        wait_until(idle, 'start of slurmd')
        return self.environment

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--hosts', type=int, default=2, choices=range(1, 65), metavar='HOSTS'); a.add_argument('--name', default='worker-')
    a.add_argument('--ssh', action='store_true'); a.add_argument('--slurm', action='store_true'); a.add_argument('command', nargs=argparse.REMAINDER)
    o = a.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the folder
    try:
        with Cluster(o.hosts, o.name) as cluster:
            if o.ssh: cluster.sshd()
            if o.slurm: cluster.slurm()
            command = o.command[o.command[:1] == ['--']:] or [os.environ.get('SHELL', 'sh')]
            words = cluster.hosts[0].words(*command, folder=os.getcwd())
            process = subprocess.Popen(words, env=os.environ | cluster.environment | {'TMPDIR': cluster.folder})
            while True:
                try: return process.wait()
                except KeyboardInterrupt: pass  # the command has had it, too
    except Unavailable as e:
        print(f'cluster.py: {e}', file=sys.stderr)
        return 77

if __name__ == '__main__': sys.exit(main())
