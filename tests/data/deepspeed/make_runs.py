#!/usr/bin/env python3
"""Makes the runs of this folder: what DeepSpeed itself does with the configurations below, on the CPU.

    make_runs.py [NAME...]                 all runs, or those named; needs deepspeed 0.19.8 and torch from PyPI, g++ and ninja
    make_runs.py --spread [NAME...]        adds the spread of rounding to the runs in 16 bits (README.md); needs torch only
    make_runs.py --shared-spread [NAME...] writes spread/, that of the runs of ../shared/fixtures beside the sources

The model, its start and its tokens are the case "tiny" of ../gpt2_tiny. Update s uses samples s·B … s·B+B-1 modulo 160;
rank r of R has the r-th part of them. A run of several ranks uses gloo. No test needs this program."""
import importlib.util, json, math, os, struct, subprocess, sys
HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, '..', 'gpt2_tiny')
SHARED = os.path.join(HERE, '..', '..', '..', '..', 'shared', 'fixtures')
UPDATES, LENGTH, SAMPLES = 20, 64, 160

ADAMW = dict(type='AdamW', params=dict(lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, torch_adam=True))
def adamw(**changes): return dict(type='AdamW', params=dict(ADAMW['params'], **changes))
def scheduler(type, **params): return dict(type=type, params=params)
BF16, FP16 = dict(enabled=True), dict(enabled=True, loss_scale=1024)
OFFLOAD = dict(stage=2, offload_optimizer=dict(device='cpu'))

def config(**keys):
    return dict(dict(train_batch_size=8, zero_allow_untested_optimizer=True, optimizer=ADAMW), **keys)

# name: (ranks, configuration). Keys that a run is about stand here; config() adds the rest.
RUNS = {
    # optimizers
    'adam_fused': (1, config(optimizer=dict(type='Adam', params=dict(lr=1e-3, weight_decay=0.01)))),
    'adam_offloaded': (1, config(optimizer=dict(type='Adam', params=dict(lr=1e-3, weight_decay=0.1)), zero_optimization=OFFLOAD)),
    'adam_uncorrected': (1, config(optimizer=dict(type='Adam', params=dict(lr=1e-4, bias_correction=False)))),
    'adagrad_offloaded': (1, config(optimizer=dict(type='Adagrad', params=dict(lr=1e-3, weight_decay=0.01)), zero_optimization=OFFLOAD)),
    'lion': (1, config(optimizer=dict(type='Lion', params=dict(lr=1e-4, betas=[0.9, 0.99], weight_decay=0.1)), zero_optimization=OFFLOAD)),
    'lion_defaults': (1, config(optimizer=dict(type='Lion', params=dict(lr=5e-5)), zero_optimization=dict(OFFLOAD, stage=1))),
    'muon': (1, config(optimizer=dict(type='Muon', params=dict(lr=1e-3, weight_decay=0.1)))),
    'muon_standard': (1, config(gradient_clipping=0.0, optimizer=dict(type='Muon', params=dict(
        muon_lr=5e-3, adam_lr=1e-3, momentum=0.9, betas=[0.8, 0.9], eps=1e-8, ns_method='standard')))),
    'sgd_nesterov': (1, config(optimizer=dict(type='SGD', params=dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)))),
    # schedules
    'warmup_linear': (1, config(scheduler=scheduler('WarmupLR', warmup_min_lr=1e-5, warmup_max_lr=1e-3, warmup_num_steps=6, warmup_type='linear'))),
    'warmup_of_group': (1, config(scheduler=scheduler('WarmupLR', warmup_num_steps=1))),
    'warmup_decay_log': (1, config(scheduler=scheduler('WarmupDecayLR', total_num_steps=15, warmup_max_lr=1e-3, warmup_num_steps=5))),
    'warmup_cosine_linear': (1, config(scheduler=scheduler('WarmupCosineLR', total_num_steps=16, warmup_num_steps=4, warmup_type='linear',
                                                           warmup_min_ratio=0.1, cos_min_ratio=0.01))),
    'one_cycle_stairs': (1, config(scheduler=scheduler('OneCycle', cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=6,
                                                       cycle_first_stair_count=3, cycle_second_stair_count=2, cycle_momentum=False))),
    'one_cycle_sgd': (1, config(optimizer=dict(type='SGD', params=dict(lr=0.1)), scheduler=scheduler(
        'OneCycle', cycle_min_lr=0.01, cycle_max_lr=0.2, cycle_first_step_size=5, decay_step_size=2, decay_lr_rate=0.1))),
    'range_test_stairs': (1, config(scheduler=scheduler('LRRangeTest', lr_range_test_min_lr=1e-4, lr_range_test_step_size=4,
                                                        lr_range_test_step_rate=2.0, lr_range_test_staircase=True))),
    'cosine_annealing': (1, config(scheduler=scheduler('CosineAnnealingLR', T_max=12, eta_min=1e-5))),
    # clipping, accumulation, division of gradients
    'clipping_default': (1, config(zero_optimization=dict(stage=2))),
    'clipping_none': (1, config(gradient_clipping=0.0, zero_optimization=dict(stage=1))),
    'clipping_tight': (1, config(gradient_clipping=0.1, train_batch_size=16, gradient_accumulation_steps=4, optimizer=dict(type='SGD', params=dict(lr=1.0, momentum=0.8)))),
    'accumulation': (2, config(gradient_accumulation_steps=2, zero_optimization=dict(stage=2))),
    'accumulation_zero3': (2, config(train_batch_size=16, gradient_accumulation_steps=4, gradient_clipping=0.5, zero_optimization=dict(stage=3))),
    'prescaled': (4, config(prescale_gradients=True, optimizer=dict(type='SGD', params=dict(lr=0.1)))),
    'predivided': (4, config(gradient_predivide_factor=3.0, optimizer=dict(type='SGD', params=dict(lr=0.1)))),
    'prescaled_predivided': (2, config(prescale_gradients=True, gradient_predivide_factor=8.0, zero_optimization=dict(stage=1, reduce_scatter=False),
                                       optimizer=dict(type='SGD', params=dict(lr=0.1)))),
    'communication_bf16': (2, config(communication_data_type='bf16', optimizer=dict(type='SGD', params=dict(lr=0.1)))),
    'communication_fp16': (2, config(communication_data_type='fp16', zero_optimization=dict(stage=2), optimizer=dict(type='SGD', params=dict(lr=0.1)))),
    # 16 bits
    'bf16_stage0': (1, config(bf16=BF16)),
    'bf16_stage1': (1, config(bf16=BF16, zero_optimization=dict(stage=1))),
    'bf16_stage2': (1, config(bf16=BF16, zero_optimization=dict(stage=2))),
    'bf16_stage3': (1, config(bf16=BF16, zero_optimization=dict(stage=3))),
    'bf16_stage1_f32_gradients': (1, config(bf16=BF16, data_types=dict(grad_accum_dtype='fp32'), zero_optimization=dict(stage=1), train_batch_size=16, gradient_accumulation_steps=4)),
    'bf16_stage3_ranks2': (2, config(bf16=BF16, zero_optimization=dict(stage=3), gradient_accumulation_steps=2)),
    'bf16_small_rate': (1, config(bf16=BF16, zero_optimization=dict(stage=2), optimizer=adamw(lr=2e-5))),
    'bf16_sgd': (1, config(bf16=BF16, zero_optimization=dict(stage=1), gradient_clipping=0.0, optimizer=dict(type='SGD', params=dict(lr=0.05)))),
    'fp16_fixed': (1, config(fp16=FP16, zero_optimization=dict(stage=2))),
    'fp16_stage3': (1, config(fp16=FP16, zero_optimization=dict(stage=3))),
    'fp16_sgd': (1, config(fp16=FP16, zero_optimization=dict(stage=1), gradient_clipping=0.0, optimizer=dict(type='SGD', params=dict(lr=0.05)))),
    'fp16_small_rate': (1, config(fp16=FP16, zero_optimization=dict(stage=1), optimizer=adamw(lr=2e-6))),
    'fp16_overflow': (1, config(fp16=dict(enabled=True, initial_scale_power=24, loss_scale_window=4), zero_optimization=dict(stage=2),
                                scheduler=scheduler('WarmupLR', warmup_max_lr=1e-3, warmup_num_steps=5))),
    'fp16_overflow_stage3': (1, config(fp16=dict(enabled=True, initial_scale_power=22, loss_scale_window=3, hysteresis=1), zero_optimization=dict(stage=3))),
    'fp16_overflow_hysteresis': (1, config(fp16=dict(enabled=True, initial_scale_power=20, loss_scale_window=2, hysteresis=3, consecutive_hysteresis=True),
                                           zero_optimization=dict(stage=1))),
    'fp16_overflow_ranks2': (2, config(fp16=dict(enabled=True, initial_scale_power=24, loss_scale_window=4), zero_optimization=dict(stage=2),
                                       scheduler=scheduler('WarmupLR', warmup_max_lr=1e-3, warmup_num_steps=5))),
    'fp16_overflow_stage3_ranks2': (2, config(fp16=dict(enabled=True, initial_scale_power=22, loss_scale_window=3, hysteresis=1), zero_optimization=dict(stage=3))),
    'fp16_overflow_ranks4': (4, config(fp16=dict(enabled=True, initial_scale_power=20, loss_scale_window=2, hysteresis=3, consecutive_hysteresis=True),
                                       zero_optimization=dict(stage=1))),
    'fp16_stage0': (1, config(fp16=FP16)),
    'fp16_stage0_sgd': (1, config(fp16=FP16, optimizer=dict(type='SGD', params=dict(lr=0.05)))),
}

def tiny():
    spec = importlib.util.spec_from_file_location('make_expected', os.path.join(TINY, 'make_expected.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.CASES['tiny']

def tokens(folder=TINY):
    import torch
    raw = open(os.path.join(folder, 'tokens.bin'), 'rb').read()
    return torch.tensor(struct.unpack('<%dH' % (len(raw) // 2), raw))

def rows_of(all_tokens, first, count):
    import torch
    rows = [i % SAMPLES * LENGTH for i in range(first, first + count)]
    return torch.stack([all_tokens[at:at + LENGTH + 1] for at in rows])

def model_of():
    """The model as a module whose forward is the mean loss. Logits are in the dtype of the parameters, their loss in f32."""
    import torch
    import torch.nn.functional as F
    made, case = tiny()
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = {}
            for name, value in made.initial(case).items():
                self.names[name] = name.replace('.', '_')
                self.register_parameter(self.names[name], torch.nn.Parameter(value))
        def forward(self, x, y):
            P = {name: getattr(self, own) for name, own in self.names.items()}
            return made_loss(F, P, case, x, y)
    return Tiny()

def made_loss(F, P, c, x, y, stored=lambda value: value):
    """The loss. `stored` sees each value that a model in 16 bits stores, with the parameters already in P. A layer is rounded
    once: addmm adds the bias before, and norms are in f32, because PyTorch's backward of a norm in 16 bits on the CPU sums
    in 16 bits."""
    import torch
    t = lambda k: P['transformer.' + k]
    C, H, (B, T) = c['n_embd'], c['n_head'], x.shape
    wide = lambda value: value if value.element_size() == 8 else value.float()
    norm = lambda h, k: stored(F.layer_norm(wide(h), (C,), wide(t(k + '.weight')), wide(t(k + '.bias')), 1e-5).to(h.dtype))
    h = stored(t('wte.weight')[x] + t('wpe.weight')[:T])
    for l in range(c['n_layer']):
        p = f'h.{l}.'
        linear = lambda a, k: stored(torch.addmm(t(p + k + '.bias'), a.flatten(0, 1), t(p + k + '.weight')).unflatten(0, (B, T)))
        q, k, v = [z.view(B, T, H, C // H).transpose(1, 2) for z in linear(norm(h, p + 'ln_1'), 'attn.c_attn').split(C, 2)]
        a = stored(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = stored(h + linear(a.transpose(1, 2).reshape(B, T, C), 'attn.c_proj'))
        inner = stored(F.gelu(linear(norm(h, p + 'ln_2'), 'mlp.c_fc'), approximate='tanh'))
        h = stored(h + linear(inner, 'mlp.c_proj'))
    logits = stored(norm(h, 'ln_f') @ t('wte.weight').T).reshape(-1, c['vocab_size'])
    return F.cross_entropy(wide(logits), y.reshape(-1))

def run_rank(name):
    """One rank of a run; rank 0 prints the result as JSON."""
    import torch
    torch.set_num_threads(1)
    ranks, ds = RUNS[name]
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    if name.startswith('muon'):  # DeepSpeed's own choice where a device has no 16-bit arithmetic
        get_accelerator().is_fp16_supported = get_accelerator().is_bf16_supported = lambda: False
    deepspeed.init_distributed('gloo')
    rank, model, data = int(os.environ['RANK']), model_of(), tokens()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds)
    passes = ds.get('gradient_accumulation_steps', 1)
    batch = ds['train_batch_size']
    part = batch // ranks
    micro = part // passes
    out = dict(lr=[], loss=[], grad_norm=[], skipped=[], scale=[])
    for s in range(UPDATES):
        out['lr'].append(engine.get_lr()[0])
        total = 0.0
        scale = getattr(engine.optimizer, 'cur_scale', None) or getattr(engine.optimizer, 'loss_scale', 1.0) or 1.0
        before = engine.skipped_steps
        for m in range(passes):
            rows = rows_of(data, s * batch + rank * part + m * micro, micro)
            loss = engine(rows[:, :-1], rows[:, 1:])
            total += loss.item() / passes
            engine.backward(loss)
            engine.step()
        both = torch.tensor([total], dtype=torch.float64)
        torch.distributed.all_reduce(both)
        norm = engine.get_global_grad_norm()
        if ds.get('zero_optimization', {}).get('stage') == 3 and norm is not None:
            norm *= engine.optimizer.loss_scale / scale  # stage 3 divides by the scale of the next update
        skipped = engine.skipped_steps - before
        out['loss'].append(both.item() / ranks)
        out['grad_norm'].append(None if norm is None or skipped else float(norm))
        out['skipped'].append(skipped)
        out['scale'].append(float(scale))
    if rank == 0:
        result = dict(deepspeed=deepspeed.__version__, torch=torch.__version__, ranks=ranks, config=ds, **out)
        print('RESULT ' + json.dumps(result), flush=True)

def dtype_of(ds):
    """The dtype of the model."""
    import torch
    return torch.float16 if 'fp16' in ds else torch.bfloat16 if 'bf16' in ds else torch.float32

def shared_start():
    """The weights of the shared fixture."""
    import torch
    raw = open(os.path.join(SHARED, 'gpt2_tiny', 'model.safetensors'), 'rb').read()
    end = 8 + struct.unpack('<Q', raw[:8])[0]
    entries = {k: v for k, v in json.loads(raw[8:end]).items() if k != '__metadata__'}
    part = lambda v: bytearray(raw[end + v['data_offsets'][0]:end + v['data_offsets'][1]])
    return {k: torch.frombuffer(part(v), dtype=torch.float32).view(v['shape']) for k, v in entries.items()}

def draw(result, seed, data, start):
    """Losses and norms of the run in double, where what a model in the run's dtype stores is rounded at random. Rates,
    scales and skipped updates are those of the run."""
    import torch
    import torch.nn.functional as F
    made, case = tiny()
    ds, ranks = result['config'], result.get('ranks', 1)
    dtype = dtype_of(ds)
    stored, working = made.rounding(dtype, torch.Generator().manual_seed(seed))
    # DeepSpeed converts the model before it makes its masters.
    names = {name: torch.nn.Parameter(value.to(dtype).double()) for name, value in start.items()}
    params = dict(ds['optimizer']['params'])
    for key in ('torch_adam', 'adam_w_mode'): params.pop(key, None)
    optimizer = getattr(torch.optim, ds['optimizer']['type'])(names.values(), **params)
    sharded, wide = bool(ds.get('zero_optimization')), dtype == torch.float32
    if not sharded and not wide:  # without sharding, DeepSpeed makes a step with gradients of zero first in 16 bits
        for p in names.values(): p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    passes, batch, clip = ds.get('gradient_accumulation_steps', 1), ds['train_batch_size'], ds.get('gradient_clipping', 1.0)
    scales_losses = sharded or wide  # without sharding, DeepSpeed 0.19.8 divides gradients by the scale only
    losses, norms = [], []
    for s in range(len(result['lr'])):
        scale, total = result['scale'][s], 0.0
        parts = rows_of(data, s * batch, batch).chunk(passes * ranks)
        for part in parts:
            P = {name: working(value) for name, value in names.items()}
            loss = made_loss(F, P, case, part[:, :-1], part[:, 1:], stored)
            (loss * ((scale if scales_losses else 1.0) / passes)).backward()
            total += loss.item() / len(parts)
        losses.append(total)
        norms.append(None)
        if not result['skipped'][s]:
            for p in names.values(): p.grad /= scale * ranks
            norm = torch.nn.utils.clip_grad_norm_(list(names.values()), clip or math.inf).item()
            norms[-1] = norm if scales_losses else norm * scale
            for group in optimizer.param_groups: group['lr'] = result['lr'][s]
            optimizer.step()
        optimizer.zero_grad()
    return losses, norms

def spread(result, data, start, draws=10):
    """Mean and standard deviation of `draws` draws of the losses and norms."""
    drawn = [draw(result, seed, data, start) for seed in range(draws)]
    mean = lambda values: sum(values) / len(values)
    deviation = lambda values: math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))
    losses, norms = zip(*(d[0] for d in drawn)), zip(*(d[1] for d in drawn))
    columns = [(mean(v), deviation(v)) for v in losses]
    of_norms = [None if v[0] is None else (mean(v), deviation(v)) for v in norms]
    figure = lambda value: None if value is None else float(f'{value:.4g}')
    return dict(loss_mean=[float(f'{m:.8g}') for m, _ in columns], loss_deviation=[figure(d) for _, d in columns],
                norm_mean=[v and float(f'{v[0]:.8g}') for v in of_norms], norm_deviation=[v and figure(v[1]) for v in of_norms])

def add_spread(name):
    made, case = tiny()
    result = json.load(open(path_of(name)))
    result.update(spread(result, tokens(), made.initial(case)))
    write(name, result)

def write_shared_spread(name):
    result = json.load(open(os.path.join(SHARED, 'deepspeed', name + '.json')))
    write_lines(path_of(os.path.join('spread', name)), spread(result, tokens(os.path.join(SHARED, 'gpt2_tiny')), shared_start()))

def run(name, port):
    ranks = RUNS[name][0]
    processes = []
    for r in range(ranks):
        env = dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                   MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), DS_ACCELERATOR='cpu', OMP_NUM_THREADS='1')
        processes.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), '--rank', name], env=env, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    texts = [p.communicate()[0] for p in processes]
    found = [line for line in texts[0].splitlines() if line.startswith('RESULT ')]
    if not found:
        print(f'{name}: no result\n' + '\n'.join(texts[0].splitlines()[-12:]))
        return
    write(name, json.loads(found[0][7:]))

def path_of(name): return os.path.join(HERE, name + '.json')

def write_lines(path, result):
    """A list a line."""
    lines = [f' {json.dumps(key)}: {json.dumps(value)}' for key, value in result.items()]
    with open(path, 'w') as f: f.write('{\n' + ',\n'.join(lines) + '\n}\n')

def write(name, result):
    write_lines(path_of(name), result)
    print(name, 'loss', result['loss'][0], '->', result['loss'][-1], 'skipped', sum(result['skipped']), flush=True)

if __name__ == '__main__':
    arguments = sys.argv[1:]
    if arguments[:1] == ['--rank']:
        run_rank(arguments[1])
    elif arguments[:1] == ['--spread']:
        for name in arguments[1:] or [n for n in RUNS if n.startswith(('bf16', 'fp16'))]: add_spread(name)
    elif arguments[:1] == ['--shared-spread']:
        for name in arguments[1:] or sorted(f[:-5] for f in os.listdir(os.path.join(SHARED, 'deepspeed')) if f.endswith('.json')):
            write_shared_spread(name)
    else:
        for i, name in enumerate(arguments or RUNS): run(name, 29600 + i)
