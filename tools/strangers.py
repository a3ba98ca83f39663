#!/usr/bin/env python3
"""Strangers on the network of a job: what a host that has not the job's secret may try at its listening sockets. For tests and
measurements on hosts of tools/cluster.py.

    tools/strangers.py KIND [--at ADDRESS[:PORT,PORT…]]… [--watch PID:ADDRESS]… [--held 256] [--seconds S] [--sessions FILE] [--seed N]

runs until the time has passed, or until SIGTERM, and prints one line of JSON: `opened` connections; `ended`: by the other end; `received`:
bytes of all; `let_in`: connections that received more than the 64 bytes of a reply to a hello, or any byte without a hello. KIND:

scan       connects to all --ports of each address (1-65535) in turn; `ports`: those that were open; `whole`: times that all were tried
garbage    sends random bytes of random length
half_open  connects and is silent
hello      sends a hello as of a rank, or that of a recorded session (--sessions), then a proof that is none
slow       sends the bytes of such a hello one by one
thousands  holds 4,096 connections of these kinds open at each port
replay     sends what the clients of recorded sessions sent (--sessions)
unix       as the user nobody, on a host of the job, calls the Unix sockets of its ranks

Connections that the other end closes are opened again at once, --held of them at each port. --watch: at all ports at which the host
ADDRESS listens, as soon as it does; PID is a process of that host.

    tools/strangers.py middle --for ADDRESS --ports FIRST-LAST[,…] --through PID [--change HOW] [--after BYTES] [--only N] [--sessions FILE]

stands between the true ADDRESS, which it reaches through the network namespace of PID, and a host that takes this one for it (deceive()).
It passes all bytes, except that it does HOW in the bytes to ADDRESS of a connection after the first BYTES: flip (a bit), inject (a byte),
drop (8 bytes), reorder (two pieces), cut (end both). --only N: in the first N connections. At its end it writes what the clients of the
connections have sent (--sessions)."""
import argparse, ctypes, errno, json, os, random, selectors, signal, socket, subprocess, sys, time

HELLO, VERSION = 64, 3
KINDS = ('scan', 'garbage', 'half_open', 'hello', 'slow', 'thousands', 'replay')  # over TCP
stopped = []

def plausible_hello(purpose=1):
    """A hello as a rank would send it (comm/net/authentication.h): of its first connection, which requires TLS."""
    return b'ringzero' + bytes([VERSION, purpose, 0, 2]) + b''.join(n.to_bytes(4, 'little') for n in (4, 3, 0)) + os.urandom(40)

def read_sessions(path):
    """What the client of each recorded connection sent, by port."""
    with open(path) as f: return [(s['port'], bytes.fromhex(s['client'])) for s in map(json.loads, f)]

class Connection:
    """One of a stranger: what it sends, and what came back."""
    def __init__(self, place, payload, slow=False):
        self.place, self.payload, self.slow, self.received = place, payload, slow, 0
        self.has_hello = payload.startswith(b'ringzero') and len(payload) >= HELLO
        self.socket = socket.socket(socket.AF_INET6 if ':' in place[0] else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')  # frees the port at once
        self.socket.connect_ex(place)
    def send(self):
        """False once there is nothing more to send."""
        try: self.payload = self.payload[self.socket.send(self.payload[:1] if self.slow else self.payload):]
        except BlockingIOError: pass
        return bool(self.payload)
    @property
    def let_in(self): return self.received > (HELLO if self.has_hello else 0)

class Strangers:
    def __init__(self, kind, places, watched, held, seed, sessions):
        self.kind, self.places, self.watched, self.random, self.sessions = kind, places, watched, random.Random(seed), sessions
        self.held = 4096 if kind == 'thousands' else held
        self.selector = selectors.DefaultSelector()
        self.slow = []
        self.count = dict(opened=0, ended=0, received=0, let_in=0)

    def hello(self):
        recorded = [s for _, s in self.sessions if len(s) >= HELLO]
        return self.random.choice(recorded)[:HELLO] if recorded else plausible_hello(self.random.choice((1, 2, 3)))
    def payload(self, kind, place):
        """What a connection sends."""
        if kind == 'thousands': return self.payload(self.random.choice(('garbage', 'half_open', 'hello', 'slow')), place)
        if kind == 'half_open': return b''
        if kind == 'garbage': return self.random.choice((os.urandom, lambda n: b'GET / HTTP/1.1\r\nHost: a\r\n\r\n'))(self.random.choice((1, 63, 64, 65, 96, 5000, 200_000)))
        if kind == 'slow': return self.hello()
        if kind == 'hello': return self.hello() + os.urandom(self.random.choice((0, 31, 32, 400)))
        here = [s for port, s in self.sessions if port == place[1]] or [s for _, s in self.sessions]
        return self.random.choice(here)
    def open(self, place):
        try: c = Connection(place, self.payload(self.kind, place), self.kind == 'slow')
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS): raise
            return
        self.count['opened'] += 1
        self.selector.register(c.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if c.payload and not c.slow else 0), c)
        if c.slow: self.slow.append(c)
    def end(self, c):
        self.count['ended'] += 1
        self.selector.unregister(c.socket)
        c.socket.close()
    def ready(self, c, events):
        try:
            if events & selectors.EVENT_READ:
                n = len(c.socket.recv(65536))
                if not n: return False
                before, c.received = c.let_in, c.received + n
                self.count['received'] += n
                self.count['let_in'] += c.let_in and not before
            if events & selectors.EVENT_WRITE and not c.send(): self.selector.modify(c.socket, selectors.EVENT_READ, c)
        except BlockingIOError: pass
        except OSError: return False
        return True
    def creep(self):
        """One byte more of each slow connection."""
        for c in self.slow:
            try: c.send()
            except OSError: pass
        self.slow = [c for c in self.slow if c.payload and c.socket.fileno() >= 0]
    def run(self, until):
        self.fill(self.places)
        next_byte = 0
        while not stopped and time.monotonic() < until:
            self.turn(0.02 if not self.watched else 0.002)
            if self.watched: self.look()
            if time.monotonic() > next_byte: self.creep(); next_byte = time.monotonic() + 0.05
        return self.count
    def fill(self, places):
        for i in range(self.held):
            for place in places:
                if stopped: return
                self.open(place)
            if i % 64 == 0: self.turn(0)
    def look(self):
        """Goes to the listeners that the watched hosts have now."""
        now = [(address, port) for pid, address in self.watched for port in listening_ports(f'/proc/{pid}/net/tcp')]
        new = [p for p in now if p not in self.places]
        self.places = now
        self.fill(new)
    def turn(self, wait):
        for key, events in self.selector.select(wait):
            if self.ready(key.data, events): continue
            self.end(key.data)
            if key.data.place in self.places: self.open(key.data.place)

def scan(addresses, all_ports, until):
    """Connects to all ports in turn; the ports that were open, and how often all were tried."""
    count, ports = dict(opened=0, ended=0, received=0, let_in=0, whole=0), set()
    while not stopped and time.monotonic() < until:
        for address in addresses:
            for first in range(0, len(all_ports), 512):
                if stopped: break
                calls = [(p, Connection((address, p), b'')) for p in all_ports[first:first + 512]]
                count['opened'] += len(calls)
                time.sleep(0.001)
                for port, c in calls:
                    if c.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        try: c.socket.getpeername(); ports.add(f'{address}:{port}')
                        except OSError: pass  # it has not connected
                        try: count['let_in'] += bool(c.socket.recv(1))
                        except OSError: pass
                    c.socket.close()
        count['whole'] += not stopped
    return count | {'ports': sorted(ports)}

def call_unix_sockets(until):
    """As the user nobody, calls all abstract Unix sockets of ringzero that listen on this host."""
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    count, open_ones = dict(opened=0, ended=0, received=0, let_in=0), []
    while not stopped and time.monotonic() < until:
        with open('/proc/self/net/unix') as f: lines = [l.split() for l in f.read().splitlines()[1:]]
        for name in (l[7][1:] for l in lines if len(l) == 8 and l[3] == '00010000' and l[7].startswith('@ringzero')):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            if s.connect_ex('\0' + name) == 0:
                count['opened'] += 1
                try: s.send(plausible_hello(2))
                except OSError: pass
                open_ones.append(s)
            else: s.close()
        for s in open_ones[:]:
            try: n = len(s.recv(1))
            except BlockingIOError: continue
            except OSError: n = 0
            count['received'] += n; count['let_in'] += n; count['ended'] += not n
            s.close(); open_ones.remove(s)
    return count

# ---- an end in the middle

class Middle:
    """Between the connections of a deceived host and the true address."""
    def __init__(self, address, ports, through, change, after, only):
        self.address, self.change, self.after, self.only = address, change, after, only
        self.selector, self.sessions = selectors.DefaultSelector(), []
        here, there = os.open('/proc/self/ns/net', os.O_RDONLY), os.open(f'/proc/{through}/ns/net', os.O_RDONLY)
        self.spaces = here, there
        for port in ports:
            s = socket.create_server((address, port), backlog=128)
            s.setblocking(False)
            self.selector.register(s, selectors.EVENT_READ, ('accept', s, port))
    def true_end(self, port):
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            if libc.setns(self.spaces[1], 0): raise OSError(ctypes.get_errno(), 'setns')
            return socket.create_connection((self.address, port), timeout=5)
        finally: libc.setns(self.spaces[0], 0)
    def accept(self, listener, port):
        try: client = listener.accept()[0]
        except OSError: return
        try: server = self.true_end(port)
        except OSError: return client.close()
        session = dict(port=port, number=len(self.sessions), client=b'', passed=0, done=False)
        self.sessions.append(session)
        for s, other, to_server in ((client, server, True), (server, client, False)):
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.settimeout(10)  # a whole piece is passed
            self.selector.register(s, selectors.EVENT_READ, ('pass', s, other, session, to_server))
    def changed(self, data, session):
        """The bytes to the server, with the change where it is due; None: the end of the connection."""
        at = self.after - session['passed']
        if not self.change or session['done'] or session['number'] >= self.only or not 0 <= at < len(data): return data
        session['done'] = True
        rest = data[at:]
        if self.change == 'flip': rest = bytes([rest[0] ^ 4]) + rest[1:]
        if self.change == 'inject': rest = b'x' + rest
        if self.change == 'drop': rest = rest[8:]
        if self.change == 'reorder': rest = rest[len(rest) // 2:] + rest[:len(rest) // 2]
        return None if self.change == 'cut' else data[:at] + rest
    def move(self, s, other, session, to_server):
        try:
            data = s.recv(1 << 18)
            if data and to_server:
                if len(session['client']) < 1 << 16: session['client'] += data
                sent = self.changed(data, session)
                session['passed'] += len(data)
                data = sent if sent is not None else b''
                if sent == b'': return
            if not data: raise OSError
            other.sendall(data)
        except OSError:
            for e in (s, other):
                try: self.selector.unregister(e)
                except (KeyError, ValueError): pass
                e.close()
    def run(self, until):
        while not stopped and time.monotonic() < until:
            for key, _ in self.selector.select(0.1):
                what, *rest = key.data
                if what == 'accept': self.accept(*rest)
                elif rest[0].fileno() >= 0: self.move(*rest)
        return dict(connections=len(self.sessions), changed=sum(s['done'] for s in self.sessions))

# ---- for the programs that start strangers

class Stranger:
    """A process of strangers on a host; `report` is what it has printed."""
    def __init__(self, host, *words):
        # Not in the host's namespace of processes, so that signals reach it and it has the ids of this one.
        self.process = subprocess.Popen(host.words(sys.executable, os.path.abspath(__file__), *map(str, words), spaces='nu'),
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.report = None
        if self.process.stdout.readline() != 'ready\n': raise RuntimeError(self.process.stderr.read())
    def end(self):
        if self.report is None:
            self.process.terminate()
            out, err = self.process.communicate(timeout=60)
            if self.process.returncode: raise RuntimeError(f'strangers ended with {self.process.returncode}: {err.strip()[-500:]}')
            self.report = json.loads(out)
        return self.report
    def __enter__(self): return self
    def __exit__(self, *_):
        try: self.end()
        finally:
            if self.process.poll() is None: self.process.kill(); self.process.wait()
            for pipe in (self.process.stdout, self.process.stderr): pipe.close()

def listening_ports(table):
    """Those of a file like /proc/net/tcp, other than at loopback."""
    with open(table) as f: lines = [l.split() for l in f.read().splitlines()[1:]]
    return sorted({int(l[1].split(':')[1], 16) for l in lines if l[3] == '0A' and not l[1].startswith('0100007F')})

def listening(host):
    """The TCP ports at which the processes of a host listen: ADDRESS:PORT,PORT…, or empty."""
    ports = listening_ports(f'/proc/{host.space.pid}/net/tcp')
    return f'{host.address}:{",".join(map(str, ports))}' if ports else ''

def usage(host, pid):
    """Descriptors, memory (bytes) and processors' time (s) of a process of a host; `store`: the time of its store's thread."""
    out = host.run('sh', '-c', f'ls /proc/{pid}/fd | wc -l; grep VmRSS /proc/{pid}/status; for t in /proc/{pid}/task/*; do cat $t/stat; done').stdout.splitlines()
    tick, store, cpu = os.sysconf('SC_CLK_TCK'), 0.0, 0.0
    for line in out[2:]:
        name, fields = line[line.index('(') + 1:line.rindex(')')], line[line.rindex(')') + 2:].split()
        seconds = (int(fields[11]) + int(fields[12])) / tick
        cpu += seconds
        if name == 'rz-store': store += seconds
    return dict(fds=int(out[0]), rss=int(out[1].split()[1]) * 1024, cpu=cpu, store=store)

def deceive(cluster, host, stranger, victim):
    """Makes `host` take `stranger` for `victim`. The stranger's host reaches the victim through the switch."""
    address = f'{victim.address}/32'
    stranger.run('sysctl', '-qw', 'net.ipv4.conf.all.arp_ignore=1')  # it answers no question for the address
    stranger.space.ip('addr', 'add', address, 'dev', 'lo')
    if '10.79.0.254' not in cluster.switch.ip('addr', 'show', 'br0'): cluster.switch.ip('addr', 'add', '10.79.0.254/24', 'dev', 'br0')
    mac = json.loads(stranger.space.ip('-j', 'link', 'show', 'eth0'))[0]['address']
    host.space.ip('neigh', 'replace', victim.address, 'lladdr', mac, 'dev', 'eth0', 'nud', 'permanent')
    def undo():
        host.space.ip('neigh', 'del', victim.address, 'dev', 'eth0')
        stranger.space.ip('addr', 'del', address, 'dev', 'lo')
    return undo

def place(text):
    address, _, ports = text.partition(':')
    return [(address, int(p)) for p in ports.split(',') if p] or [(address, 0)]

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('kind', choices=KINDS + ('unix', 'middle')); a.add_argument('--at', action='append', default=[], type=place); a.add_argument('--held', type=int, default=256)
    a.add_argument('--watch', action='append', default=[], type=lambda t: tuple(t.split(':')))
    a.add_argument('--seconds', type=float, default=1e9); a.add_argument('--sessions'); a.add_argument('--seed', type=int, default=1)
    a.add_argument('--for', dest='address'); a.add_argument('--ports'); a.add_argument('--through', type=int)
    a.add_argument('--change', choices=('flip', 'inject', 'drop', 'reorder', 'cut')); a.add_argument('--after', type=int, default=0); a.add_argument('--only', type=int, default=1 << 30)
    o = a.parse_args()
    if o.kind == 'replay' and not o.sessions: a.error('replay needs --sessions')
    if o.kind == 'middle' and not (o.address and o.ports and o.through): a.error('middle needs --for, --ports and --through')
    for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, lambda *_: stopped.append(True))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the process that started it (PR_SET_PDEATHSIG)
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    until, places = time.monotonic() + o.seconds, [p for at in o.at for p in at]
    ports = [p for part in (o.ports or '1-65535').split(',') for a, _, b in [part.partition('-')] for p in range(int(a), int(b or a) + 1)]
    if o.kind == 'middle':
        middle = Middle(o.address, ports, o.through, o.change, o.after, o.only)
    print('ready', flush=True)
    if o.kind == 'middle':
        report = middle.run(until)
        if o.sessions:
            with open(o.sessions, 'w') as f: f.writelines(json.dumps(dict(port=s['port'], client=s['client'].hex())) + '\n' for s in middle.sessions)
    elif o.kind == 'scan': report = scan([address for address, _ in places], ports, until)
    elif o.kind == 'unix': report = call_unix_sockets(until)
    else: report = Strangers(o.kind, places, o.watch, o.held, o.seed, read_sessions(o.sessions) if o.sessions else []).run(until)
    print(json.dumps(report))

if __name__ == '__main__': main()
