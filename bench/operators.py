#!/usr/bin/env python3
"""Times operators on the host: ours (operators_bench) and PyTorch's, in turn, in one run. Run it with a Python that has PyTorch.

    operators.py [--bin build/host/bin] [--threads N] [--dtype f32|bf16] [--rounds R] [--only NAME,…] [--json FILE]

Each operator has three shapes. A cell of the table is PyTorch's time over ours, forward without gradients / forward and backward: above 1 ours is
faster. Times are medians over rounds of medians over runs: of the time of the processor with one thread, of the wall otherwise. Inputs, tokens and masks are the same in kind: ours has masks of the dtype of
the operands, PyTorch of bool. PyTorch's permute, transpose and split are followed by contiguous(), since ours copy; its attention is
scaled_dot_product_attention between views of [B, T, H·D], with enable_gqa, and a mask of bool for a window or padding."""
import argparse, json, os, statistics, subprocess, sys, time
import outputs

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # idle threads must not take the time of ours
try:
    import torch, torch.nn.functional as F
except ImportError as e:
    sys.exit(f'operators.py: no PyTorch here ({e})')

def values(*shape, positive=False):
    x = torch.rand(*shape, dtype=torch.float32)
    return (x * 2 + 0.1 if positive else x * 4 - 2).to(DTYPE)

def unary(f, positive=False): return lambda n: ([values(n, positive=positive)], f)

def attention(kind):
    def make(B, T, H, K, D):
        mask = None
        rows, columns = torch.arange(T)[:, None], torch.arange(T)[None]
        if kind == 'window': mask = (columns <= rows) & (columns > rows - T // 4)
        if kind == 'padding':
            counts = torch.tensor([T * (4 - b % 3) // 4 for b in range(B)])
            mask = (columns[0] < counts[:, None])[:, None, None]
        def f(q, k, v):
            q, k, v = (x.view(B, T, -1, D).transpose(1, 2) for x in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=H != K)
            return y.transpose(1, 2).reshape(B, T, H * D)
        return [values(B, T, H * D), values(B, T, K * D), values(B, T, K * D)], f
    return make

def rotary(B, T, H, D):
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(DTYPE)[:, None] for f in (torch.cos, torch.sin))
    def f(x):  # Hugging Face's apply_rotary_pos_emb
        x = x.view(B, T, H, D)
        return (x * cos + torch.cat((-x[..., D // 2:], x[..., :D // 2]), -1) * sin).view(B, T, H * D)
    return [values(B, T, H * D)], f

def indices(n, below): return torch.tensor([i * 7919 % below for i in range(n)])
def mask(n): return (torch.arange(n) * 2654435761 >> 30 & 3) == 0

def index_select(rows, columns, n):
    index = indices(n, rows)
    return [values(rows, columns)], lambda x: torch.index_select(x, 0, index)
def gather(rows, columns):
    index = indices(rows, columns)[:, None]
    return [values(rows, columns)], lambda x: torch.gather(x, 1, index)
def where(n):
    c = mask(n)
    return [values(n), values(n)], lambda a, b: torch.where(c, a, b)
def masked_fill(n):
    c = mask(n)
    return [values(n)], lambda x: x.masked_fill(c, -1e9)
def conv2d(N, C, H, W, O, k, s, p): return [values(N, C, H, W), values(O, C, k, k), values(O)], lambda x, w, b: F.conv2d(x, w, b, stride=s, padding=p)
def pool(f): return lambda N, C, H, W, k, s, p: ([values(N, C, H, W)], lambda x: f(x, k, s, p))

IMAGES = [(8, 16, 32, 32), (8, 64, 32, 32), (8, 256, 14, 14)]
VECTORS = [(1 << 12,), (1 << 17,), (1 << 22,)]
OPERATORS = {  # name: (shapes, inputs and function of PyTorch)
    'attention': ([(4, 64, 12, 12, 64), (2, 256, 12, 12, 64), (1, 1024, 12, 12, 64)], attention('')),
    'attention_groups': ([(4, 64, 9, 3, 64), (2, 256, 9, 3, 64), (1, 1024, 9, 3, 64)], attention('')),
    'attention_window': ([(4, 64, 9, 3, 64), (2, 256, 9, 3, 64), (1, 1024, 9, 3, 64)], attention('window')),
    'attention_padding': ([(4, 64, 12, 12, 64), (2, 256, 12, 12, 64), (1, 1024, 12, 12, 64)], attention('padding')),
    'rotary': ([(4, 64, 9, 64), (2, 256, 9, 64), (8, 1024, 9, 64)], rotary),
    'rms_norm': ([(64, 576), (512, 576), (4096, 1024)], lambda n, c: ([values(n, c), values(c)], lambda x, w: F.rms_norm(x, (c,), w, 1e-5))),
    'permute': ([(4, 64, 9, 64), (2, 256, 12, 64), (8, 1024, 12, 64)], lambda *s: ([values(*s)], lambda x: x.permute(0, 2, 1, 3).contiguous())),
    'transpose': ([(4, 64, 64), (4, 512, 512), (4, 1024, 1000)], lambda *s: ([values(*s)], lambda x: x.transpose(1, 2).contiguous())),
    'cat': ([(64, 64), (512, 576), (4096, 576)], lambda n, c: ([values(n, c), values(n, c)], lambda x, y: torch.cat((x, y), 1))),
    'split': ([(64, 64), (512, 576), (4096, 576)], lambda n, c: ([values(n, 3 * c)], lambda x: [y.contiguous() for y in x.split(c, 1)])),
    'index_select': ([(1000, 64, 64), (10000, 576, 512), (49152, 576, 4096)], index_select),
    'gather': ([(64, 1000), (512, 10000), (1024, 49152)], gather),
    'matmul': ([(12, 64, 64, 64), (24, 256, 64, 256), (12, 512, 512, 64)], lambda b, m, k, n: ([values(b, m, k), values(b, k, n)], torch.matmul)),
    'where': (VECTORS, where),
    'masked_fill': (VECTORS, masked_fill),
    'log_softmax': ([(64, 1000), (512, 10000), (256, 49152)], lambda n, c: ([values(n, c)], lambda x: F.log_softmax(x, -1))),
    'conv2d': ([(8, 16, 32, 32, 16, 3, 1, 1), (8, 64, 32, 32, 64, 3, 1, 1), (8, 256, 14, 14, 512, 1, 1, 0)], conv2d),
    'max_pool2d': ([(*i, 2, 2, 0) for i in IMAGES[:2]] + [(8, 64, 56, 56, 3, 2, 1)], pool(F.max_pool2d)),
    'avg_pool2d': ([(*i, 2, 2, 0) for i in IMAGES[:2]] + [(8, 64, 56, 56, 3, 2, 1)], pool(F.avg_pool2d)),
    'batch_norm': (IMAGES, lambda *s: ([values(*s), values(s[1]), values(s[1])], lambda x, w, b: F.batch_norm(x, None, None, w, b, True))),
    'group_norm': ([(*i, 8) for i in IMAGES], lambda *s: ([values(*s[:4]), values(s[1]), values(s[1])], lambda x, w, b: F.group_norm(x, s[4], w, b))),
    'abs': (VECTORS, unary(torch.abs)),
    'pow': (VECTORS, unary(lambda x: torch.pow(x, 2.5), positive=True)),
    'rsqrt': (VECTORS, unary(torch.rsqrt, positive=True)),
    'sin': (VECTORS, unary(torch.sin)),
    'cos': (VECTORS, unary(torch.cos)),
    'softplus': (VECTORS, unary(F.softplus)),
    'elu': (VECTORS, unary(F.elu)),
    'leaky_relu': (VECTORS, unary(F.leaky_relu)),
    'gelu_erf': (VECTORS, unary(F.gelu)),
}

def median_ms(f):
    """As time() of operators_bench.cpp."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    def once(calls):
        begin = clock()
        for _ in range(calls): f()
        return (clock() - begin) * 1e3 / calls
    once(3)
    calls = max(1, int(2 / max(once(1), 1e-4)))
    times, total = [], 0
    while len(times) < 5 or (total < 200 and len(times) < 200):
        times.append(once(calls))
        total += times[-1] * calls
    return statistics.median(times)

def torch_times(make, extents):
    inputs, f = make(*extents)
    def forward():
        with torch.no_grad(): f(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outs = f(*leaves)
    gradients = [torch.rand_like(x) for x in (outs if isinstance(outs, (list, tuple)) else [outs])]
    def both():
        for x in leaves: x.grad = None
        torch.autograd.backward(f(*leaves), gradients[0] if len(gradients) == 1 else gradients)
    return dict(forward=median_ms(forward), both=median_ms(both))

def main():
    global DTYPE
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/host/bin'); a.add_argument('--threads', type=int, default=1); a.add_argument('--dtype', choices=['f32', 'bf16'], default='f32')
    a.add_argument('--rounds', type=int, default=1); a.add_argument('--only'); a.add_argument('--json', metavar='FILE')
    o = a.parse_args()
    DTYPE = dict(f32=torch.float32, bf16=torch.bfloat16)[o.dtype]
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    names = o.only.split(',') if o.only else list(OPERATORS)
    for name in names:
        if name not in OPERATORS: sys.exit(f"operators.py: --only: no operator '{name}'; known: {', '.join(OPERATORS)}")
    outputs.empty('--json', o.json)
    # Ours calls OpenBLAS with one thread; its others would spin at the start, in the time of the process
    ours = subprocess.Popen([f'{o.bin}/operators_bench'], env=dict(os.environ, OPENBLAS_NUM_THREADS='1'), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def our_times(name, extents):
        print(name, o.dtype, o.threads, *extents, file=ours.stdin, flush=True)
        line = ours.stdout.readline()
        return json.loads(line) if line else sys.exit('operators.py: operators_bench ended')
    print(f'PyTorch {torch.__version__}, {o.dtype}, {o.threads} thread{"s" if o.threads > 1 else ""}\n')
    print('| operator | shapes | | | |\n|---|---|---|---|---|')
    rows = []
    for name in names:
        shapes, make = OPERATORS[name]
        cells = []
        for extents in shapes:
            times = [(our_times(name, extents), torch_times(make, extents)) for _ in range(o.rounds)]
            of = {(side, kind): statistics.median(t[i][kind] for t in times) for i, side in enumerate(('ours', 'torch')) for kind in ('forward', 'both')}
            rows.append(dict(operator=name, extents=extents, ours={k: of['ours', k] for k in ('forward', 'both')}, torch={k: of['torch', k] for k in ('forward', 'both')}))
            cells.append(f'{of["torch", "forward"] / of["ours", "forward"]:.2f} / {of["torch", "both"] / of["ours", "both"]:.2f}')
        print(f'| {name} | {", ".join("x".join(map(str, s)) for s in shapes)} | {" | ".join(cells)} |', flush=True)
    ours.stdin.close()
    if o.json:
        with open(o.json, 'w') as f: json.dump(dict(torch=torch.__version__, dtype=o.dtype, threads=o.threads, rows=rows), f, indent=1)

if __name__ == '__main__': main()
