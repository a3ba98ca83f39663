#!/usr/bin/env python3
"""Times training of a language model on one GPU: train_lm and PyTorch, interleaved in one run on one machine.

    train_gpu.py [--bin build/gpu/bin] [--out DIR] [--shape 124M|llama_135m|tiny] [--batch B] [--precision bf16|f32] [--steps N] [--rounds R]
                 [--peak FLOPS] [--torch LIST] [--python PYTHON] [--device cuda|cpu]

Shapes: 124M (GPT-2: 12 layers, 12 heads, 768 channels, vocabulary 50257, context 1024, batch 16), llama_135m (a Llama of SmolLM's shape: 30
layers, 9 heads, 3 key heads, 576 channels, 1536 in between, 49152, context 1024, batch 16) and tiny (GPT-2: 4, 4, 128, 256, 64, batch 8; a
smoke test, f32 by default). All cases use AdamW (lr 1e-4, weight decay 0.01), gradients clipped to norm 1, no dropout, and the same tokens in
the same order. A round runs each case for N updates after some warm-up updates; the table shows the median over rounds of tokens per
second. Ours waits for the loss of every update, PyTorch only for the end of a round. f32: both may multiply in TF32.

--torch LIST: precisions of PyTorch (bench/train_gpu_torch.py), separated by commas: autocast, pure, f32; default: autocast for bf16, f32
for f32; "none" omits PyTorch. If PyTorch is not installed, a line reports it and only ours is timed. --no-compile: without torch.compile.

Model FLOPs per token: 6 N + 12 L H Q T (N parameters without the position embedding, L layers, H heads of Q channels, context T). For bf16
the table shows their share of the bf16 peak of the device (dense, looked up by the device name; --peak sets it for other devices).
--device cpu runs everything on the host, to test this script. --out DIR: also writes train_gpu.md and train_gpu.json there. Exit status 2:
no GPU, or a wrong argument."""
import argparse, glob, json, os, platform, select, shutil, statistics, subprocess, sys, tempfile, time
import outputs

GPT2 = dict(model_type='gpt2', activation_function='gelu_new')
LLAMA = dict(model_type='llama', hidden_act='silu', rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True)
# name: (configuration of the model, tokens of a sample, batch, precision)
SHAPES = {'124M': (dict(GPT2, n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257), 1024, 16, 'bf16'),
          'llama_135m': (dict(LLAMA, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576,
                              intermediate_size=1536, max_position_embeddings=2048, vocab_size=49152), 1024, 16, 'bf16'),
          'tiny': (dict(GPT2, n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=256), 64, 8, 'f32')}
# Dense bf16 FLOPS with f32 accumulation, from NVIDIA's data sheets. The first name contained in the device
# name applies.
PEAKS = [('H100 PCIe', 756e12), ('H100 NVL', 835e12), ('H200 NVL', 835e12), ('GH200', 989.4e12), ('H200', 989.4e12), ('H100', 989.4e12),
         ('A100', 312e12), ('L40S', 362e12)]
WARM = 5          # updates of a round that are not counted
DEADLINE = 420    # seconds for PyTorch to compile, or for a round

def fail(status, what):
    print(f'train_gpu.py: {what}', file=sys.stderr)
    sys.exit(status)

def write(path, value):
    with open(path, 'w') as f: json.dump(value, f)
    return path

def gpu():
    """Properties of the first GPU; None if there is none."""
    if shutil.which('nvidia-smi'):
        fields = 'name,driver_version,memory.total,clocks.max.sm,power.limit'
        p = subprocess.run(['nvidia-smi', '-i', '0', f'--query-gpu={fields}', '--format=csv,noheader'], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, text=True)
        if p.returncode == 0 and p.stdout.strip():
            return dict(zip(fields.split(','), (x.strip() for x in p.stdout.splitlines()[0].split(','))))
    for path in glob.glob('/proc/driver/nvidia/gpus/*/information'):
        for line in open(path):
            if line.startswith('Model:'): return dict(name=line.split(':', 1)[1].strip())
    return None

def cpu():
    for line in open('/proc/cpuinfo'):
        if line.startswith('model name'): return f'{line.split(":", 1)[1].strip()}, {len(os.sched_getaffinity(0))} cores'
    return platform.machine()

def flops_per_token(c, context):
    """Parameters without the position embedding, and FLOPs."""
    if c['model_type'] == 'gpt2':
        e, layers, attended = c['n_embd'], c['n_layer'], c['n_embd']
        layer = 12 * e * e + 13 * e
        last = 2 * e
    else:
        e, layers, attended = c['hidden_size'], c['num_hidden_layers'], c['num_attention_heads'] * c['head_dim']
        layer = 2 * e * attended + 2 * e * c['num_key_value_heads'] * c['head_dim'] + 3 * e * c['intermediate_size'] + 2 * e
        last = e
    parameters = c['vocab_size'] * e + layers * layer + last
    return parameters, 6 * parameters + 12 * layers * attended * context

class Ours:
    def __init__(self, o, files):
        ds = dict(train_batch_size=o.batch, gradient_clipping=1.0,
                  optimizer=dict(type='AdamW', params=dict(lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01)))
        if o.precision == 'bf16': ds['bf16'] = dict(enabled=True)
        self.name, self.how = f'train_lm, {o.precision}', f'commit {commit()}'
        self.log = f'{files}/log'
        self.command = [f'{o.bin}/train_lm', '--model', f'{files}/model.json', '--tokens', f'{files}/tokens.bin', '--config',
                        write(f'{files}/ds.json', ds), '--seq-len', str(o.context), '--steps', str(WARM + o.steps), '--strategy', o.strategy, '--no-shuffle', '--metrics', self.log,
                        '--device', 'host' if o.device == 'cpu' else o.device]

    def round(self):
        p = subprocess.run(self.command, env=dict(os.environ, RZ_ALLOW_TF32='1'), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if p.returncode: fail(1, f'{" ".join(self.command)} ended with {p.returncode}:\n{p.stdout.strip()}')
        with open(self.log) as f: rows = [json.loads(line) for line in f]
        return dict(ms=statistics.mean(r['step_ms'] for r in rows[WARM:]), loss=rows[-1]['loss'])

    def close(self): pass

class Absent(Exception): pass

class Torch:
    """One process for all rounds, so that it compiles once; it is idle while other cases run."""
    def __init__(self, o, files, precision):
        here = os.path.dirname(os.path.abspath(__file__))
        command = [o.python, f'{here}/train_gpu_torch.py', '--model', f'{files}/model.json', '--tokens', f'{files}/tokens.bin', '--batch',
                   str(o.batch), '--seq-len', str(o.context), '--warm', str(WARM), '--precision', precision, '--device', o.device] + ([] if o.compile else ['--no-compile'])
        self.errors = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.steps = o.steps
        started = self.read()
        self.name = f'PyTorch {started["torch"]}, {precision}'
        self.how = f'torch.compile {started["compile"] or "off"}, attention {started["attention"]}, {started["parameters"]} parameters'

    def read(self):
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
        line = self.process.stdout.readline() if ready else ''
        if line: return json.loads(line)
        self.process.kill()
        status = self.process.wait()
        self.errors.seek(0)
        errors = self.errors.read().strip()
        if ready and status == 3: raise Absent(errors)
        fail(1, f'PyTorch ' + (f'ended with {status}' if ready else f'printed nothing for {DEADLINE} s') + f': {errors[-2000:]}')

    def round(self):
        print(self.steps, file=self.process.stdin, flush=True)
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()

def commit():
    p = subprocess.run(['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'rev-parse', '--short', 'HEAD'], stdout=subprocess.PIPE,
                       stderr=subprocess.DEVNULL, text=True)
    return p.stdout.strip() or 'unknown'

def cases(o, files):
    all = [Ours(o, files)]
    for precision in [] if o.torch == 'none' else o.torch.split(','):
        try:
            all.append(Torch(o, files, precision))
        except Absent as why:
            print(f'PyTorch {precision} is left out: {why}', flush=True)
    return all

def table(rows, machine, o, peak, per_token):
    parameters, flops = per_token
    lines = [f'# {"GPT-2 " if o.config["model_type"] == "gpt2" else ""}{o.shape} on {machine["device"]}', '',
             ', '.join(f'{k} {v}' for k, v in machine.items() if k != 'device'), '',
             f'Batch {o.batch} x {o.context} tokens, {o.rounds} rounds of {o.steps} updates (and {WARM} before each that are not counted), in turn. '
             f'FLOPs per token: 6 N + 12 L H Q T = {flops / 1e6:.1f} M, N = {parameters / 1e6:.2f} M. '
             + (f'Peak: {peak / 1e12:g} TFLOPS (bf16, dense).' if peak else 'Share of the peak: not given.'), '',
             f'| case | tokens/s, median | min | max | ms per update | share of the peak | loss after the first {WARM + o.steps} |', '|---|---|---|---|---|---|---|']
    for r in rows:
        share = f'{100 * r["share_of_peak"]:.1f}%' if r['share_of_peak'] else ''
        lines.append(f'| {r["case"]} | {r["tokens_per_second"]:,.0f} | {min(r["rounds"]):,.0f} | {max(r["rounds"]):,.0f} | {r["ms"]:.2f} | {share} | {r["loss"]:.4f} |')
    lines += [''] + [f'- {r["case"]}: {r["how"]}' for r in rows]
    lines += [f'- ours / {r["case"]}: {rows[0]["tokens_per_second"] / r["tokens_per_second"]:.3f}' for r in rows[1:]]
    return '\n'.join(lines) + '\n'

def options():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/gpu/bin'); a.add_argument('--out', metavar='DIR')
    a.add_argument('--shape', choices=SHAPES, default='124M'); a.add_argument('--batch', type=int)
    a.add_argument('--precision', choices=['bf16', 'f32']); a.add_argument('--strategy', default='ddp')
    a.add_argument('--steps', type=int, default=30); a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--peak', type=float, metavar='FLOPS'); a.add_argument('--torch', metavar='LIST')
    a.add_argument('--python', default=sys.executable); a.add_argument('--no-compile', dest='compile', action='store_false')
    a.add_argument('--device', choices=['cuda', 'cpu'], default='cuda')
    o = a.parse_args()
    o.config, o.context, batch, precision = SHAPES[o.shape]
    o.batch, o.precision = o.batch or batch, o.precision or precision
    o.torch = o.torch or ('autocast' if o.precision == 'bf16' else 'f32')
    if min(o.steps, o.rounds, o.batch) < 1: fail(2, '--steps, --rounds and --batch must be at least 1')
    if set(o.torch.split(',')) - {'none', 'autocast', 'pure', 'f32'}: fail(2, f'--torch: {o.torch} must be of autocast, pure, f32 or none')
    if not os.access(f'{o.bin}/train_lm', os.X_OK): fail(2, f'--bin: no train_lm in {o.bin}; build it first')
    return o

def main():
    o = options()
    card = gpu() if o.device == 'cuda' else dict(name=cpu())
    if not card: fail(2, 'no NVIDIA GPU here, so nothing was timed; --device cpu --shape tiny tries this script on the host')
    peak = o.peak or next((p for name, p in PEAKS if name in card['name']), None) if o.precision == 'bf16' else None
    if not peak and o.precision == 'bf16': print(f'the peak of {card["name"]} is not known here; give --peak for the share of it', flush=True)
    machine = dict(device=card['name'], **{k: v for k, v in card.items() if k != 'name'}, host=cpu(), kernel=platform.release(),
                   date=time.strftime('%Y-%m-%d', time.gmtime()))
    outputs.empty_in_folder('--out', o.out, 'train_gpu.md', 'train_gpu.json')
    with tempfile.TemporaryDirectory() as files:
        write(f'{files}/model.json', o.config)
        count = o.context * o.batch * (WARM + o.steps) + 1
        with open(f'{files}/tokens.bin', 'wb') as f:
            f.write(b''.join(((i * 2654435761 >> 7) % o.config['vocab_size']).to_bytes(2, 'little') for i in range(count)))
        running = cases(o, files)
        rounds = [[] for _ in running]
        for r in range(o.rounds):
            for case, into in zip(running, rounds):
                if sys.stderr.isatty(): print(f'\rround {r + 1} of {o.rounds}: {case.name}          ', end='', file=sys.stderr, flush=True)
                into.append(case.round())
        if sys.stderr.isatty(): print(file=sys.stderr)
        for case in running: case.close()
    per_token = flops_per_token(o.config, o.context)
    rows = []
    for case, done in zip(running, rounds):
        speeds = [o.batch * o.context * 1e3 / d['ms'] for d in done]
        median = statistics.median(speeds)
        rows.append(dict(case=case.name, how=case.how, tokens_per_second=median, ms=statistics.median(d['ms'] for d in done), rounds=speeds,
                         loss=done[0]['loss'], share_of_peak=median * per_token[1] / peak if peak else None))
    text = table(rows, machine, o, peak, per_token)
    print(text, end='')
    if o.out:
        with open(f'{o.out}/train_gpu.md', 'w') as f: f.write(text)
        write(f'{o.out}/train_gpu.json', dict(machine=machine, shape=dict(o.config, batch=o.batch, context=o.context, precision=o.precision), steps=o.steps, peak=peak,
                                              parameters=per_token[0], flops_per_token=per_token[1], cases=rows))

if __name__ == '__main__': main()
