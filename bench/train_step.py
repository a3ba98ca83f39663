#!/usr/bin/env python3
"""Times training steps of train_lm: medians over updates, interleaved in one run on one machine.

    train_step.py [--bin build/release/bin] [--shape tiny|124M] [--steps N] [--rounds R] [--beside COMMAND]

Shapes: tiny (4 layers, 4 heads, 128 channels, vocabulary 256, batch 8 x 64 tokens) and 124M (12, 12, 768, 50257, batch 4 x 64). Cases: one
rank on 1 and on 2 threads; 2 ranks of one thread each with DDP and with ZeRO-1 to 3, with half of the batch each; and 2 independent
processes with half of the batch each, the cost of DDP without communication. "over" is the median of a case minus that of the independent
processes.

--beside COMMAND runs `COMMAND SHAPE` once per round, after ours, and reads the times of another program: lines of JSON with "ms_med"
(median, milliseconds) and any of "peer", "mode", "world", "thr" and "nosync", which identify the case. The table then shows the median over
rounds."""
import argparse, json, shlex, statistics, subprocess, sys, tempfile

SHAPES = {'tiny': dict(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=256, batch=8),
          '124M': dict(n_layer=12, n_head=12, n_embd=768, n_positions=64, vocab_size=50257, batch=4)}
CASES = [('1 rank, 1 thread', 1, 1, 'ddp', True), ('1 rank, 2 threads', 1, 2, 'ddp', True), ('2 ranks apart', 2, 1, 'ddp', False)]
CASES += [(f'2 ranks, {s}', 2, 1, s, True) for s in ('ddp', 'zero1', 'zero2', 'zero3')]

def write(path, value):
    with open(path, 'w') as f: json.dump(value, f)
    return path

def run(o, tmp, shape, ranks, threads, strategy, together):
    micro = shape['batch'] // ranks
    config = write(f'{tmp}/ds.json', dict(train_batch_size=micro * (ranks if together else 1), gradient_clipping=0, optimizer=dict(type='AdamW', params=dict(lr=1e-4))))
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
    return [r['step_ms'] for r in rows if r['step'] >= 3], [r['exposed_comm_ms'] for r in rows if r['step'] >= 3]

def run_beside(command, shape):
    times = {}
    for line in subprocess.run(shlex.split(command) + [shape], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout.splitlines():
        if not line.startswith('{'): continue
        row = json.loads(line)
        times[f'{row.get("peer", "peer")}: {row.get("world", 1)} x {row.get("thr", 1)}, ' + ('no_sync' if row.get('nosync') else row.get('mode', ''))] = row['ms_med']
    return times

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/release/bin'); a.add_argument('--shape', choices=SHAPES, default='tiny')
    a.add_argument('--steps', type=int, default=30); a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--beside', metavar='COMMAND')
    o = a.parse_args()
    if o.steps < 5: sys.exit('train_step.py: --steps must be at least 5, since the first 3 updates are not counted')
    shape = SHAPES[o.shape]
    with tempfile.TemporaryDirectory() as tmp:
        write(f'{tmp}/model.json', dict({k: v for k, v in shape.items() if k != 'batch'}, model_type='gpt2', activation_function='gelu_new'))
        with open(f'{tmp}/tokens.bin', 'wb') as f:
            f.write(b''.join(((i * 2654435761 >> 7) % shape['vocab_size']).to_bytes(2, 'little') for i in range(64 * 400 + 1)))
        times = {c[0]: ([], []) for c in CASES}
        others = {}
        for r in range(o.rounds):
            for name, *case in CASES:
                if sys.stderr.isatty(): print(f'\rround {r + 1} of {o.rounds}: {name}          ', end='', file=sys.stderr, flush=True)
                for into, new in zip(times[name], run(o, tmp, shape, *case)): into += new
            for name, t in (run_beside(o.beside, o.shape) if o.beside else {}).items(): others.setdefault(name, []).append(t)
    if sys.stderr.isatty(): print(file=sys.stderr)
    apart = statistics.median(times['2 ranks apart'][0])
    print(f'# {o.shape}, batch {shape["batch"]} x 64 tokens, {o.rounds} rounds of {o.steps - 3} updates, milliseconds')
    print('%-28s %10s %10s %10s %10s' % ('case', 'median', 'min', 'exposed', 'over'))
    for name, ranks, *_ in CASES:
        t, e = times[name]
        over = '%10.2f' % (statistics.median(t) - apart) if ranks == 2 else '%10s' % '-'
        print('%-28s %10.2f %10.2f %10.2f %s' % (name, statistics.median(t), min(t), statistics.median(e), over))
    for name, t in others.items(): print('%-28s %10.2f %10.2f %10s %10s' % (name, statistics.median(t), min(t), '-', '-'))

if __name__ == '__main__': main()
