#!/usr/bin/env python3
"""Times updates of a GPT-2 or a Llama on meshes of ranks over hosts that share this machine, beside PyTorch's FSDP and tensor parallelism over Gloo.

    bench/mesh_training.py [--bin build/host/bin] [--hosts 2] [--per-host 2] [--rate 1gbit [--burst 128kb]] [--meshes shard=4 replicate=2,shard=2]
                           [--strategy zero3] [--model gpt2|llama] [--vocabulary 256] [--layers 6] [--channels 384] [--length 128] [--micro 2] [--steps 12] [--rounds 3]
                           [--torch PYTHON] [--json OUT]

The hosts are those of bench/hosts.py, whose requirements apply: network namespaces with --per-host ranks each, whose outgoing
traffic --rate limits. --hosts 1: the machine itself. Every round runs all meshes once, in turn, ours and, with --torch, PyTorch's:
fully_shard() on a mesh of the dimensions dp_replicate and dp_shard (HSDP), or parallelize_module() for tp, which divides a vocabulary
above 256 too, with its loss. "threads=N" in place of a mesh: one rank with N threads, on the machine itself. Heads have 64 channels;
a Llama has 10, and 2 key heads: with --layers 30 --channels 576 --vocabulary 49152 135M parameters, as many as SmolLM-135M, whose 9
and 3 tp 2 does not divide. A figure is the median
over rounds of the median over updates after the second, in ms; each rank has one thread."""
import argparse, array, contextlib, json, os, pathlib, statistics, sys, tempfile, time
import outputs

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

def sizes_of(mesh, ranks):
    sizes = dict(replicate=1, shard=0, tp=1, threads=0)
    for part in mesh.split(','):
        name, value = part.split('=')
        sizes[name] = int(value)
    sizes['shard'] = sizes['shard'] or ranks // sizes['replicate'] // sizes['tp']
    return sizes

def config_of(o):
    if o.model == 'gpt2':
        return dict(model_type='gpt2', vocab_size=o.vocabulary, n_positions=o.length, n_embd=o.channels, n_layer=o.layers, n_head=o.channels // 64,
                    embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
    return dict(model_type='llama', hidden_act='silu', max_position_embeddings=o.length, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True,
                num_hidden_layers=o.layers, num_attention_heads=10, num_key_value_heads=2, head_dim=64, hidden_size=o.channels,
                intermediate_size=o.channels * 8 // 3, vocab_size=o.vocabulary)

# ---- PyTorch: a rank of it, started by this script

def torch_rank(o):
    import torch, torch.nn as nn, torch.nn.functional as F
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group('gloo')
    sizes = sizes_of(o.meshes[0], dist.get_world_size())
    torch.set_num_threads(sizes['threads'] or 1)
    C, H, T = o.channels, o.channels // 64, o.length

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
            self.q, self.k, self.v, self.c_proj = (nn.Linear(C, C) for _ in range(4))
            self.c_fc, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        def forward(self, x):
            B, T, _ = x.shape
            h = self.ln_1(x)
            q, k, v = (f(h).view(B, T, -1, 64).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, -1))
            return x + self.down(F.gelu(self.c_fc(self.ln_2(x)), approximate='tanh'))
    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(o.vocabulary, C), nn.Embedding(T, C)
            self.h, self.ln_f = nn.ModuleList(Block() for _ in range(o.layers)), nn.LayerNorm(C)
            self.lm_head = nn.Linear(C, o.vocabulary, bias=False)
            self.lm_head.weight = self.wte.weight
        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.h: x = block(x)
            return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.reshape(-1))
    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            import train_gpu_torch
            model = train_gpu_torch.Llama(config_of(o))
            self.wte, self.h, self.ln_f, self.cos, self.sin = model.tokens, model.layers, model.norm, model.cos, model.sin
            self.lm_head = nn.Linear(C, o.vocabulary, bias=False)
            self.lm_head.weight = self.wte.weight
        def forward(self, tokens, targets):
            x = self.wte(tokens)
            for layer in self.h: x = layer(x, self.cos[:T], self.sin[:T])
            return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.reshape(-1))
    torch.manual_seed(0)
    model = Llama() if o.model == 'llama' else Gpt()
    loss_context = contextlib.nullcontext
    if sizes['tp'] > 1:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
        mesh = init_device_mesh('cpu', (dist.get_world_size() // sizes['tp'], sizes['tp']), mesh_dim_names=('dp', 'tp'))
        rows = {'c_proj', 'o', 'down'}
        for block in model.h:
            parallelize_module(block, mesh['tp'], {name: RowwiseParallel() if name in rows else ColwiseParallel()
                                                   for name, m in block.named_children() if isinstance(m, nn.Linear)})
        if o.vocabulary > 256:
            parallelize_module(model, mesh['tp'], dict(wte=RowwiseParallel(input_layouts=Replicate()),
                                                       lm_head=ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)))
            model.lm_head.weight = model.wte.weight
            loss_context = loss_parallel
        if mesh['dp'].size() > 1:
            from torch.distributed.fsdp import fully_shard
            for block in model.h: fully_shard(block, mesh=mesh['dp'])
            fully_shard(model, mesh=mesh['dp'])
        data = dist.get_rank() // sizes['tp']
    elif sizes['threads']:
        data = 0
    else:
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh('cpu', (sizes['replicate'], sizes['shard']), mesh_dim_names=('dp_replicate', 'dp_shard'))
        mesh = mesh if sizes['replicate'] > 1 else mesh['dp_shard']
        for block in model.h: fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        data = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (o.micro, T + 1), generator=torch.Generator().manual_seed(data))
    times = []
    for _ in range(o.steps):
        dist.barrier()
        start = time.perf_counter()
        with loss_context(): model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - start) * 1e3)
    if dist.get_rank() == 0: print(json.dumps(times))
    dist.destroy_process_group()

# ---- the runs

def launch(o, mesh, command, out_of):
    """The times of an update, from what rank 0 prints or writes."""
    import hosts
    threads = sizes_of(mesh, 1)['threads']
    here = o.hosts == 1 or threads
    n, per_host = (1, 1) if threads else (o.hosts * o.per_host, o.per_host)
    base = dict(os.environ, WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(per_host), MASTER_PORT=str(29600 + o.run % 300), OMP_NUM_THREADS=str(threads or 1),
                MASTER_ADDR='127.0.0.1' if here else hosts.address(0), GLOO_SOCKET_IFNAME='lo' if here else 'eth0')
    o.run += 1
    on = (lambda i, c: c) if here else hosts.on_host
    pin = lambda r: [] if threads > 1 else ['taskset', '-c', str(r % os.cpu_count())]
    printed = hosts.run_all([on(r // per_host, pin(r) + command) for r in range(n)],
                            [dict(base, RANK=str(r), LOCAL_RANK=str(r % per_host)) for r in range(n)], 600)
    times = out_of(printed)
    return statistics.median(times[2:])

def ours(o, mesh, folder):
    metrics = folder / f'metrics{o.run}.jsonl'
    threads = sizes_of(mesh, 1)['threads']
    command = [f'{o.bin}/train_lm', '--model', str(folder / 'config.json'), '--tokens', str(folder / 'tokens.bin'), '--strategy', o.strategy,
               '--learning-rate', '1e-4', '--per-device-train-batch-size', str(o.micro), '--seq-len', str(o.length), '--steps', str(o.steps),
               '--threads', str(threads or 1), '--metrics', str(metrics)] + ([] if threads else ['--mesh', mesh])
    return launch(o, mesh, command, lambda _: [json.loads(line)['step_ms'] for line in metrics.read_text().splitlines()])

def torchs(o, mesh):
    command = [o.torch, os.path.abspath(__file__), '--as-torch', '--meshes', mesh]
    for name in ('model', 'vocabulary', 'layers', 'channels', 'length', 'micro', 'steps'): command += [f'--{name}', str(getattr(o, name))]
    return launch(o, mesh, command, lambda printed: json.loads(printed.splitlines()[-1]))

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--bin', default='build/host/bin'); a.add_argument('--hosts', type=int, default=2); a.add_argument('--per-host', type=int, default=2)
    a.add_argument('--rate'); a.add_argument('--burst', default='64kb'); a.add_argument('--meshes', nargs='+', default=['shard=4', 'replicate=2,shard=2']); a.add_argument('--strategy', default='zero3')
    a.add_argument('--model', choices=['gpt2', 'llama'], default='gpt2'); a.add_argument('--vocabulary', type=int, default=256)
    a.add_argument('--layers', type=int, default=6); a.add_argument('--channels', type=int, default=384); a.add_argument('--length', type=int, default=128)
    a.add_argument('--micro', type=int, default=2); a.add_argument('--steps', type=int, default=12); a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--torch', metavar='PYTHON'); a.add_argument('--json', metavar='OUT'); a.add_argument('--as-torch', action='store_true', help=argparse.SUPPRESS)
    o = a.parse_args()
    if o.as_torch: return torch_rank(o)
    import hosts
    outputs.empty('--json', o.json)
    o.run = 0
    times = {}
    with tempfile.TemporaryDirectory() as name, (hosts.network(o.hosts, o.rate, None, o.burst) if o.hosts > 1 else contextlib.nullcontext()):
        folder = pathlib.Path(name)
        (folder / 'config.json').write_text(json.dumps(config_of(o)))
        (folder / 'tokens.bin').write_bytes(array.array('H', (i * i * 7919 % o.vocabulary for i in range(1 << 18))).tobytes())
        for _ in range(o.rounds):
            for mesh in o.meshes:
                times.setdefault(('ours', mesh), []).append(ours(o, mesh, folder))
                if o.torch: times.setdefault(('PyTorch', mesh), []).append(torchs(o, mesh))
    print('| mesh | ours, ms | PyTorch, ms | PyTorch / ours |' if o.torch else '| mesh | ours, ms |')
    print('|---|---|---|---|' if o.torch else '|---|---|')
    result = {}
    for mesh in o.meshes:
        own = statistics.median(times['ours', mesh])
        result[mesh] = dict(ours=own)
        row = f'| {mesh} | {own:.1f} |'
        if o.torch:
            peer = result[mesh]['torch'] = statistics.median(times['PyTorch', mesh])
            row += f' {peer:.1f} | {peer / own:.2f} |'
        print(row)
    if o.json: pathlib.Path(o.json).write_text(json.dumps(dict(options={k: v for k, v in vars(o).items() if k not in ('run', 'as_torch')}, meshes=result), indent=1))

if __name__ == '__main__': main()
