#!/usr/bin/env python3
"""Makes expected.json: PyTorch's results, in float64 and in float32, for the cases below, and the spread of rounding. Run it with a Python that
has torch (Debian: python3-torch); no test needs it.

    make_expected.py             writes expected.json
    make_expected.py --spread    replaces the spread in it: standard deviations of ten more runs in float64, in which each value that a model in
                                 float32 stores (activations, their gradients, gradients of parameters) is rounded up or down at random

The initial weights come from a formula, so that no checkpoint has to be stored. Element i of the parameter called NAME is
    std · (2u - 1) · sqrt(3),   u = (splitmix64(fnv1a64(NAME) + i) >> 40) / 2^24,
computed in double and rounded to float32; std is 0.02, and 0.02 / sqrt(2 · n_layer) for c_proj.weight. Layer norm weights are 1, biases 0.
Sample i is tokens[i·T … i·T+T], taken modulo the vocabulary; update s uses samples s·B … s·B+B-1."""
import json, math, os, statistics, struct, sys, torch
import torch.nn.functional as F
torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
MASK = (1 << 64) - 1
CASES = {
    'tiny': dict(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=256, tied=True, batch=8, steps=20),
    'tiny_batch12': dict(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=256, tied=True, batch=12, steps=13),
    'untied': dict(n_layer=3, n_head=3, n_embd=96, n_positions=48, vocab_size=131, tied=False, batch=8, steps=20),
}
LR, B1, B2, EPS, WD = 1e-3, 0.9, 0.95, 1e-8, 0.1

def fnv1a64(name):
    h = 0xcbf29ce484222325
    for c in name.encode(): h = ((h ^ c) * 0x100000001b3) & MASK
    return h

def wrap(x): return x - (1 << 64) if x >= 1 << 63 else x

def shift_right(x, n): return (x >> n) & ((1 << (64 - n)) - 1)      # logical shift of int64

def splitmix64(x):                                                  # int64 tensor, wrapping
    z = x + wrap(0x9e3779b97f4a7c15)
    z = (z ^ shift_right(z, 30)) * wrap(0xbf58476d1ce4e5b9)
    z = (z ^ shift_right(z, 27)) * wrap(0x94d049bb133111eb)
    return z ^ shift_right(z, 31)

def shapes(c):
    C = c['n_embd']; p = 'transformer.'
    yield p + 'wte.weight', (c['vocab_size'], C)
    yield p + 'wpe.weight', (c['n_positions'], C)
    for l in range(c['n_layer']):
        h = f'{p}h.{l}.'
        yield from {h + 'ln_1.weight': (C,), h + 'ln_1.bias': (C,), h + 'attn.c_attn.weight': (C, 3 * C), h + 'attn.c_attn.bias': (3 * C,),
                    h + 'attn.c_proj.weight': (C, C), h + 'attn.c_proj.bias': (C,), h + 'ln_2.weight': (C,), h + 'ln_2.bias': (C,),
                    h + 'mlp.c_fc.weight': (C, 4 * C), h + 'mlp.c_fc.bias': (4 * C,), h + 'mlp.c_proj.weight': (4 * C, C),
                    h + 'mlp.c_proj.bias': (C,)}.items()
    yield p + 'ln_f.weight', (C,)
    yield p + 'ln_f.bias', (C,)
    if not c['tied']: yield 'lm_head.weight', (c['vocab_size'], C)

def initial(c):
    out = {}
    for name, shape in shapes(c):
        if len(shape) == 1:
            out[name] = torch.full(shape, 1.0 if name.endswith('.weight') else 0.0)
            continue
        std = 0.02 / math.sqrt(2 * c['n_layer']) if name.endswith('c_proj.weight') else 0.02
        n = shape[0] * shape[1]
        u = shift_right(splitmix64(torch.arange(n, dtype=torch.int64) + wrap(fnv1a64(name))), 40).double() / (1 << 24)
        out[name] = (std * (2 * u - 1) * math.sqrt(3)).float().reshape(shape)
    return out

def loss_of(P, c, x, y, stored=lambda value: value):
    t = lambda k: P['transformer.' + k]
    C, H, (B, T) = c['n_embd'], c['n_head'], x.shape
    mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
    norm = lambda h, k: stored(F.layer_norm(h, (C,), t(k + '.weight'), t(k + '.bias'), 1e-5))
    h = stored(t('wte.weight')[x] + t('wpe.weight')[:T])
    for l in range(c['n_layer']):
        p = f'h.{l}.'
        linear = lambda a, k: stored(a @ t(p + k + '.weight') + t(p + k + '.bias'))
        q, k, v = [z.view(B, T, H, C // H).transpose(1, 2) for z in linear(norm(h, p + 'ln_1'), 'attn.c_attn').split(C, 2)]
        s = F.softmax(((q @ k.transpose(-2, -1)) / math.sqrt(C // H)).masked_fill(mask, float('-inf')), -1)
        h = stored(h + linear(stored(s @ v).transpose(1, 2).reshape(B, T, C), 'attn.c_proj'))
        h = stored(h + linear(stored(F.gelu(linear(norm(h, p + 'ln_2'), 'mlp.c_fc'), approximate='tanh')), 'mlp.c_proj'))
    head = t('wte.weight') if c['tied'] else P['lm_head.weight']
    return F.cross_entropy(stored(norm(h, 'ln_f') @ head.T).reshape(-1, c['vocab_size']), y.reshape(-1))

def rounding(dtype, generator):
    """Stochastic rounding to this dtype of values and of their gradients: up or down, at random, without bias."""
    bits, lowest = {torch.float16: (11, -14), torch.bfloat16: (8, -126), torch.float32: (24, -126)}[dtype]
    def rounded(x):
        exponent = torch.frexp(x)[1].clamp(min=lowest + 1) - bits
        ulp = torch.ldexp(torch.ones_like(x), exponent)
        return torch.floor(x / ulp + torch.rand(x.shape, dtype=x.dtype, generator=generator)) * ulp
    class Stored(torch.autograd.Function):
        @staticmethod
        def forward(_, x): return rounded(x)
        @staticmethod
        def backward(_, g): return rounded(g)
    class Working(torch.autograd.Function):
        @staticmethod
        def forward(_, x): return x.to(dtype).double()
        @staticmethod
        def backward(_, g): return rounded(g)
    return Stored.apply, Working.apply

def train(c, dtype, stored=lambda value: value, working=lambda value: value):
    raw = open(os.path.join(HERE, 'tokens.bin'), 'rb').read()
    tokens = torch.tensor(struct.unpack('<%dH' % (len(raw) // 2), raw)) % c['vocab_size']
    P = {k: v.to(dtype, copy=True).requires_grad_() for k, v in initial(c).items()}
    M = {k: torch.zeros_like(v) for k, v in P.items()}; V = {k: torch.zeros_like(v) for k, v in P.items()}
    T, B, out = c['n_positions'], c['batch'], dict(loss=[], grad_norm=[])
    norm = lambda x: math.sqrt(float((x.detach().double() ** 2).sum()))
    for s in range(c['steps']):
        rows = torch.stack([tokens[i * T:i * T + T + 1] for i in range(s * B, s * B + B)])
        loss = loss_of({k: working(p) for k, p in P.items()}, c, rows[:, :-1], rows[:, 1:], stored)
        for p in P.values(): p.grad = None
        loss.backward()
        out['loss'].append(loss.item())
        out['grad_norm'].append(math.sqrt(sum(norm(p.grad) ** 2 for p in P.values())))
        if s == 0: out['grad_norm_first_step'] = {k: norm(p.grad) for k, p in P.items()}
        with torch.no_grad():
            for k, p in P.items():
                M[k].mul_(B1).add_(p.grad, alpha=1 - B1)
                V[k].mul_(B2).addcmul_(p.grad, p.grad, value=1 - B2)
                if p.dim() >= 2: p.mul_(1 - LR * WD)
                p.sub_(LR / (1 - B1 ** (s + 1)) * M[k] / (V[k].sqrt() / math.sqrt(1 - B2 ** (s + 1)) + EPS))
    out['param_norm_final'] = {k: norm(p) for k, p in P.items()}
    return out

def spread(c):
    """Standard deviations of the losses, and of the norms in units of themselves."""
    runs = [train(c, torch.float64, *rounding(torch.float32, torch.Generator().manual_seed(seed))) for seed in range(10)]
    deviation = lambda values: float(f'{statistics.stdev(values):.3g}')
    return dict(loss=[deviation(v) for v in zip(*(r['loss'] for r in runs))],
                relative_grad_norm=[deviation([x / v[0] for x in v]) for v in zip(*(r['grad_norm'] for r in runs))])

def write(result):
    with open(os.path.join(HERE, 'expected.json'), 'w') as f: json.dump(result, f, indent=1); f.write('\n')

def make():
    result = {}
    for name, case in CASES.items():
        result[name] = dict(case, float64=train(case, torch.float64), float32=train(case, torch.float32), spread=spread(case))
        a, b = result[name]['float64'], result[name]['float32']
        print(name, 'loss', a['loss'][0], '->', a['loss'][-1], 'float32 differs by', max(abs(x - y) for x, y in zip(a['loss'], b['loss'])),
              'and in grad_norm, relative, by', max(abs(x - y) / x for x, y in zip(a['grad_norm'], b['grad_norm'])))
    write(result)

def replace_spread():
    with open(os.path.join(HERE, 'expected.json')) as f: result = json.load(f)
    for name, case in CASES.items():
        result[name]['spread'] = spread(case)
        print(name, result[name]['spread'], flush=True)
    write(result)

if __name__ == '__main__':
    replace_spread() if sys.argv[1:] == ['--spread'] else make()
