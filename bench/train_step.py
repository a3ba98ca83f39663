#!/usr/bin/env python3
"""Times training steps of train_lm: medians over updates, interleaved in one run on one machine.

    train_step.py [--bin build/release/bin] [--shape tiny|124M|llama_135m] [--precision f32|bf16] [--steps N] [--rounds R]
                  [--beside COMMAND] [--torch PYTHON]

Shapes: tiny (4 layers, 4 heads, 128 channels, vocabulary 256, batch 8 x 64 tokens), 124M (12, 12, 768, 50257, batch 4 x 64) and llama_135m
(a Llama of SmolLM's shape: 30 layers, 9 heads, 3 key heads, 576 channels, 1536 in between, 49152, batch 4 x 64). Cases: one rank on 1 and
on 2 threads; 2 ranks of one thread each with DDP and with ZeRO-1 to 3, with half of the batch each; and 2 independent processes with half
of the batch each, the cost of DDP without communication. "over" is the median of a case minus that of the independent processes.

--torch PYTHON: only the cases that PyTorch has too (1 and 2 threads, 2 ranks with DDP), each in turn with bench/train_gpu_torch.py under
this Python, eager and compiled. bf16 is bf16 of the configuration for ours (parameters in bf16, updates in f32), torch.autocast for
PyTorch.

--beside COMMAND runs `COMMAND SHAPE` once per round, after ours, and reads the times of another program: lines of JSON with "ms_med"
(median, milliseconds) and any of "peer", "mode", "world", "thr" and "nosync", which identify the case. The table then shows the median over
rounds."""
import argparse, json, os, shlex, statistics, subprocess, sys, tempfile

GPT2 = dict(model_type='gpt2', activation_function='gelu_new', n_positions=64)
LLAMA = dict(model_type='llama', hidden_act='silu', max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True)
SHAPES = {'tiny': dict(GPT2, n_layer=4, n_head=4, n_embd=128, vocab_size=256, batch=8),
          '124M': dict(GPT2, n_layer=12, n_head=12, n_embd=768, vocab_size=50257, batch=4),
          'llama_135m': dict(LLAMA, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536,
                             vocab_size=49152, batch=4)}
SKIPPED = 3  # updates that are not counted
CASES = [('1 rank, 1 thread', 1, 1, 'ddp', True), ('1 rank, 2 threads', 1, 2, 'ddp', True), ('2 ranks apart', 2, 1, 'ddp', False)]
CASES += [(f'2 ranks, {s}', 2, 1, s, True) for s in ('ddp', 'zero1', 'zero2', 'zero3')]

def write(path, value):
    with open(path, 'w') as f: json.dump(value, f)
    return path

def run(o, tmp, shape, ranks, threads, strategy, together):
    micro = shape['batch'] // ranks
    config = write(f'{tmp}/ds.json', dict(train_batch_size=micro * (ranks if together else 1), gradient_clipping=0, optimizer=dict(type='AdamW', params=dict(lr=1e-4)),
                                              bf16=dict(enabled=o.precision == 'bf16')))
    command = [f'{o.bin}/train_lm', '--model', f'{tmp}/model.json', '--tokens', f'{tmp}/tokens.bin', '--config', config, '--seq-len', '64',
               '--steps', str(o.steps), '--strategy', strategy, '--threads', str(threads)]
    log = f'{tmp}/log'
    if together:
        launches = [[f'{o.bin}/rzrun', '-n', str(ranks)] + command + ['--metrics', log]]
    else:
        launches = [['taskset', '-c', str(r)] + command + ['--metrics', f'{log}{r}'] for r in range(ranks)]
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in launches]
    for p in running:
        error = p.communicate()[1]
        if p.returncode: sys.exit(f'train_step.py: {" ".join(p.args)} ended with {p.returncode}: {error.strip()}')
    rows = [json.loads(l) for name in ([log] if together else [f'{log}{r}' for r in range(ranks)]) for l in open(name)]
    rows = [r for r in rows if r['step'] >= SKIPPED]
    return [r['step_ms'] for r in rows], [r['exposed_comm_ms'] for r in rows]

def run_beside(command, shape):
    times = {}
    for line in subprocess.run(shlex.split(command) + [shape], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout.splitlines():
        if not line.startswith('{'): continue
        row = json.loads(line)
        times[f'{row.get("peer", "peer")}: {row.get("world", 1)} x {row.get("thr", 1)}, ' + ('no_sync' if row.get('nosync') else row.get('mode', ''))] = row['ms_med']
    return times

class Torch:
    """PyTorch's ranks, which keep running between measurements."""
    def __init__(self, o, tmp, shape, ranks):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train_gpu_torch.py')
        command = [o.torch, script, '--model', f'{tmp}/model.json', '--tokens', f'{tmp}/tokens.bin', '--batch', str(shape['batch'] // ranks), '--seq-len', '64',
                   '--device', 'cpu', '--no-clip', '--no-compile', '--warm', '1', '--threads', '1', '--precision', 'autocast' if o.precision == 'bf16' else 'f32']
        environment = dict(os.environ, OMP_WAIT_POLICY='passive')
        if ranks > 1: environment.update(WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT='29517', OMP_NUM_THREADS='1')
        self.ranks = [subprocess.Popen(command, env=dict(environment, RANK=str(r)) if ranks > 1 else environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                      for r in range(ranks)]
        self.version = self.replies()[0]['torch']

    def replies(self):
        lines = [p.stdout.readline() for p in self.ranks]
        if not all(lines): sys.exit('train_step.py: PyTorch ended')
        return [json.loads(line) for line in lines]

    def run(self, updates, model, threads):
        for p in self.ranks: print(updates, model, threads, file=p.stdin, flush=True)
        return max(r['ms'] for r in self.replies())

    def end(self):
        for p in self.ranks: p.stdin.close()
        for p in self.ranks: p.wait()

def beside_torch(o, tmp, shape):
    """Prints medians over rounds of ms, ours and PyTorch's, of each case as soon as it is measured."""
    cases = [('1 rank, 1 thread', 1, 1), ('1 rank, 2 threads', 1, 2), ('2 ranks, DDP', 2, 1)]
    peers, updates = {}, o.steps - SKIPPED
    for name, ranks, threads in cases:
        if ranks not in peers:
            for p in peers.values(): p.end()  # for memory
            first, peers = not peers, {ranks: Torch(o, tmp, shape, ranks)}
            if first:
                print(f'{o.shape}, {o.precision}, batch {shape["batch"]} x 64 tokens, {o.rounds} rounds of {updates} updates, ms per update; '
                      f'PyTorch {peers[ranks].version}\n\n| | ours | eager | compiled | eager / ours | compiled / ours |\n|---|---|---|---|---|---|', flush=True)
        times = dict(ours=[], eager=[], compiled=[])
        for r in range(o.rounds):
            times['ours'].append(statistics.median(run(o, tmp, shape, ranks, threads, 'ddp', True)[0]))
            for model in ('eager', 'compiled'):
                if r == 0: peers[ranks].run(2, model, threads)  # compiles
                times[model].append(peers[ranks].run(updates, model, threads))
        t = {k: statistics.median(v) for k, v in times.items()}
        print(f'| {name} | {t["ours"]:,.0f} | {t["eager"]:,.0f} | {t["compiled"]:,.0f} | {t["eager"] / t["ours"]:.2f} | {t["compiled"] / t["ours"]:.2f} |', flush=True)
    for p in peers.values(): p.end()

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/release/bin'); a.add_argument('--shape', choices=SHAPES, default='tiny')
    a.add_argument('--steps', type=int, default=30); a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--beside', metavar='COMMAND'); a.add_argument('--torch', metavar='PYTHON'); a.add_argument('--precision', choices=['f32', 'bf16'], default='f32')
    o = a.parse_args()
    if o.steps < 5: sys.exit('train_step.py: --steps must be at least 5, since the first 3 updates are not counted')
    shape = SHAPES[o.shape]
    with tempfile.TemporaryDirectory() as tmp:
        write(f'{tmp}/model.json', {k: v for k, v in shape.items() if k != 'batch'})
        with open(f'{tmp}/tokens.bin', 'wb') as f:
            f.write(b''.join(((i * 2654435761 >> 7) % shape['vocab_size']).to_bytes(2, 'little') for i in range(64 * 400 + 1)))
        if o.torch: return beside_torch(o, tmp, shape)
        times = {c[0]: ([], []) for c in CASES}
        others = {}
        for r in range(o.rounds):
            for name, *case in CASES:
                if sys.stderr.isatty(): print(f'\rround {r + 1} of {o.rounds}: {name}          ', end='', file=sys.stderr, flush=True)
                for into, new in zip(times[name], run(o, tmp, shape, *case)): into += new
            for name, t in (run_beside(o.beside, o.shape) if o.beside else {}).items(): others.setdefault(name, []).append(t)
    if sys.stderr.isatty(): print(file=sys.stderr)
    apart = statistics.median(times['2 ranks apart'][0])
    print(f'# {o.shape}, batch {shape["batch"]} x 64 tokens, {o.rounds} rounds of {o.steps - SKIPPED} updates, milliseconds')
    print('%-28s %10s %10s %10s %10s' % ('case', 'median', 'min', 'exposed', 'over'))
    for name, ranks, *_ in CASES:
        t, e = times[name]
        over = '%10.2f' % (statistics.median(t) - apart) if ranks == 2 else '%10s' % '-'
        print('%-28s %10.2f %10.2f %10.2f %s' % (name, statistics.median(t), min(t), statistics.median(e), over))
    for name, t in others.items(): print('%-28s %10.2f %10.2f %10s %10s' % (name, statistics.median(t), min(t), '-', '-'))

if __name__ == '__main__': main()
