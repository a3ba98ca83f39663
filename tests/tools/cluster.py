"""Hosts on one machine, for tests of launchers. Each is a set of namespaces (network, host name, mounts, processes) with its own
/tmp and /dev/shm, and on request with sshd or Slurm's daemons. Needs root; Unavailable has the reason why there can be none."""
import contextlib, os, shutil, signal, subprocess, tempfile, time

class Unavailable(Exception): pass

def sh(*words):
    r = subprocess.run(words, capture_output=True, text=True)
    if r.returncode: raise Unavailable(f'{" ".join(words)}: {(r.stderr or r.stdout).strip()}')
    return r.stdout

def wait_until(true, what, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end: raise Unavailable(f'{what} did not happen within {seconds} s')
        time.sleep(0.05)

class Host:
    """A host. `init` is its first process: when that ends, all others of the host are killed."""
    def __init__(self, cluster, name, address):
        self.cluster, self.name, self.address, self.port = cluster, name, address, f'v{name}'
        sh('ip', 'netns', 'add', name)
        sh('ip', '-n', name, 'link', 'add', 'eth0', 'type', 'veth', 'peer', 'name', self.port, 'netns', cluster.switch)
        sh('ip', '-n', cluster.switch, 'link', 'set', self.port, 'master', 'br0', 'up')
        sh('ip', '-n', name, 'addr', 'add', f'{address}/24', 'dev', 'eth0')
        for device in ('eth0', 'lo'): sh('ip', '-n', name, 'link', 'set', device, 'up')
        homes = ''
        for folder in ('.ssh', '.config'):
            os.makedirs(os.path.expanduser(f'~/{folder}'), mode=0o700, exist_ok=True)
            homes += f'mount --bind {cluster.folder}/{folder} {os.path.expanduser(f"~/{folder}")} && '
        start = (f'hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /tmp && '
                 f'mount --bind {cluster.folder}/hosts /etc/hosts && {homes}'
                 f'mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd && echo ready && exec sleep infinity')
        self.unshare = subprocess.Popen(
            ['nsenter', f'--net=/run/netns/{name}', 'unshare', '--uts', '--mount', '--pid', '--fork', '--kill-child', '--mount-proc',
             '--propagation', 'private', 'sh', '-c', start], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        line = self.unshare.stdout.readline()
        if line != 'ready\n': raise Unavailable(f'a host cannot be made: {line.strip()}')
        with open(f'/proc/{self.unshare.pid}/task/{self.unshare.pid}/children') as f: self.init = int(f.read().split()[0])

    def words(self, *command): return ['nsenter', '-t', str(self.init), '-n', '-u', '-m', '-p', '--', *command]
    def start(self, *command, **how):
        return subprocess.Popen(self.words(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **how)
    def run(self, *command, **how):
        return subprocess.run(self.words(*command), stdin=subprocess.DEVNULL, capture_output=True, text=True, **how)
    def processes(self, words):
        """Process ids, as this host has them, of the processes whose command line begins with these words (a regular expression)."""
        return self.run('pgrep', '-f', f'^{words}').stdout.split()
    def kill(self, pid, signal='KILL'): self.run('kill', f'-{signal}', pid)
    def link(self, state): sh('ip', '-n', self.cluster.switch, 'link', 'set', self.port, state)

class Cluster:
    """`n` hosts NAME0, NAME1 … at one switch. Files of folders other than /tmp, /run and /dev/shm are shared;
    ~/.ssh and ~/.config are those of the cluster."""
    def __init__(self, n, name='rzh'):
        self.name, self.switch, self.hosts, self.daemons = name, f'{name}sw', [], []
        for program in ('ip', 'nsenter', 'unshare'):
            if not shutil.which(program): raise Unavailable(f'{program} is not installed')
        if os.geteuid() != 0: raise Unavailable('namespaces need root')
        self.folder = tempfile.mkdtemp(dir='/var/tmp')
        os.chmod(self.folder, 0o755)
        for folder in ('.ssh', '.config'): os.mkdir(f'{self.folder}/{folder}', 0o700)
        addresses = [f'10.79.0.{i + 1}' for i in range(n)]
        with open(f'{self.folder}/hosts', 'w') as f:
            f.write('127.0.0.1 localhost\n' + ''.join(f'{a} {name}{i}\n' for i, a in enumerate(addresses)))
        try:
            sh('ip', 'netns', 'add', self.switch)
            sh('ip', '-n', self.switch, 'link', 'add', 'br0', 'type', 'bridge')
            sh('ip', '-n', self.switch, 'link', 'set', 'br0', 'up')
            for i, a in enumerate(addresses): self.hosts.append(Host(self, f'{name}{i}', a))
        except BaseException:
            self.close()
            raise

    def __enter__(self): return self
    def __exit__(self, *_): self.close()
    def close(self):
        for p in self.daemons:
            with contextlib.suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)
            p.wait()
        for h in self.hosts: h.unshare.kill(); h.unshare.wait(); h.unshare.stdout.close()
        for name in [h.name for h in self.hosts] + [self.switch]: subprocess.run(['ip', 'netns', 'del', name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def daemon(self, host, *command):
        if not shutil.which(command[0]): raise Unavailable(f'{command[0]} is not installed')
        with open(f'{self.folder}/{os.path.basename(command[0])}.{host.name}.log', 'w') as log:
            p = subprocess.Popen(host.words(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.daemons.append(p)

    def sshd(self):
        """An sshd on each host, which lets the user in with a key of the cluster; `ssh HOST` needs no flag."""
        key = f'{self.folder}/.ssh/id_ed25519'
        sh('ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', key)
        shutil.copy(f'{key}.pub', f'{self.folder}/.ssh/authorized_keys')
        with open(f'{key}.pub') as f: public = ' '.join(f.read().split()[:2])
        with open(f'{self.folder}/.ssh/known_hosts', 'w') as f: f.writelines(f'{h.name},{h.address} {public}\n' for h in self.hosts)
        config = f'{self.folder}/sshd_config'
        with open(config, 'w') as f:
            f.write(f'HostKey {key}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPermitRootLogin yes\nPrintMotd no\n')
        for h in self.hosts: self.daemon(h, '/usr/sbin/sshd', '-D', '-e', '-f', config)
        for h in self.hosts: wait_until(lambda: h.run('ssh', '-o', 'BatchMode=yes', h.name, 'true').returncode == 0, f'ssh to {h.name}')

    def slurm(self, processors=4):
        """Slurm's daemons; returns the variables of srun."""
        f, first = self.folder, self.hosts[0]
        with open(f'{f}/munge.key', 'wb', opener=lambda p, flags: os.open(p, flags, 0o400)) as key: key.write(os.urandom(128))
        for folder in ['state'] + [f'spool.{h.name}' for h in self.hosts]: os.mkdir(f'{f}/{folder}')
        with open(f'{f}/slurm.conf', 'w') as conf:
            conf.write('\n'.join([
                'ClusterName=test', f'SlurmctldHost={first.name}', 'SlurmUser=root', 'SlurmdUser=root', 'AuthType=auth/munge',
                f'AuthInfo=socket={f}/munge.socket', f'StateSaveLocation={f}/state', f'SlurmdSpoolDir={f}/spool.%n',
                f'SlurmctldPidFile={f}/slurmctld.pid', f'SlurmdPidFile={f}/slurmd.%n.pid', 'ProctrackType=proctrack/linuxproc',
                'TaskPlugin=task/none', 'SelectType=select/cons_tres', 'SelectTypeParameters=CR_CPU', 'MpiDefault=none', 'ReturnToService=2',
                'MailProg=/bin/true', 'SlurmdParameters=config_overrides', f'NodeName={self.name}[0-{len(self.hosts) - 1}] CPUs={processors}',
                'PartitionName=all Nodes=ALL Default=YES', '']))
        self.daemon(first, 'munged', '--foreground', '--force', f'--key-file={f}/munge.key', f'--socket={f}/munge.socket',
                    f'--pid-file={f}/munge.pid', f'--log-file={f}/munge.log', f'--seed-file={f}/munge.seed')
        wait_until(lambda: os.path.exists(f'{f}/munge.socket'), 'start of munged')
        self.daemon(first, 'slurmctld', '-D', '-f', f'{f}/slurm.conf')
        for h in self.hosts: self.daemon(h, 'slurmd', '-D', '-f', f'{f}/slurm.conf', '-N', h.name)
        environment = {'SLURM_CONF': f'{f}/slurm.conf'}
        idle = lambda: first.run('sinfo', '-h', '-o', '%T %D', env=os.environ | environment).stdout == f'idle {len(self.hosts)}\n'
        wait_until(idle, 'start of slurmd')
        return environment
