#!/usr/bin/env python3
"""Makes the files of this folder: what PyTorch and DeepSpeed themselves write, and the weights that they read back.

    make_files.py [NAME...]        all, or those named; needs deepspeed 0.19.8 and torch from PyPI

zip.pt, legacy.pt     torch.save() of one state dict in both formats
sharded/              the same, in two files with an index of Hugging Face
zeroS_ranksN/         checkpoints of DeepSpeed, of stage S on N ranks
NAME.safetensors      the weights: of state dicts as PyTorch has them; of zero1 to zero3 as DeepSpeed's zero_to_fp32 reads them

No test needs this program."""
import json, os, shutil, struct, subprocess, sys
HERE = os.path.dirname(os.path.abspath(__file__))
# name: stage, ranks, whether the model is in bf16
CHECKPOINTS = {'zero0_ranks1': (0, 1, True), 'zero1_ranks3': (1, 3, True), 'zero2_ranks2': (2, 2, False), 'zero3_ranks1': (3, 1, False),
               'zero3_ranks3': (3, 3, True)}

def write_safetensors(path, tensors):
    import torch
    names = {torch.float32: 'F32', torch.float64: 'F64', torch.float16: 'F16', torch.bfloat16: 'BF16', torch.int64: 'I64', torch.int32: 'I32',
             torch.uint8: 'U8', torch.bool: 'BOOL'}
    header, data = {}, b''
    for name, t in tensors.items():
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b''
        header[name] = dict(dtype=names[t.dtype], shape=list(t.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(os.path.join(HERE, path), 'wb') as f: f.write(struct.pack('<Q', len(text)) + text + data)

def state_dict():
    """Of a module with a norm, a buffer and tied weights, and more tensors: every kind of view and dtype that is common."""
    import torch
    torch.manual_seed(1)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 6)
            self.norm = torch.nn.BatchNorm1d(6)
            self.head = torch.nn.Linear(6, 7)
            self.head.weight = self.embedding.weight
    state = Net().state_dict()
    whole = torch.randn(6, 10)
    state['transposed'] = whole.t()
    state['columns'] = whole[1:5, 2:9:3]
    state['expanded'] = torch.randn(3, 1).expand(3, 4)
    state['parameter'] = torch.nn.Parameter(torch.randn(2, 3))
    state['bf16'], state['f16'], state['f64'] = torch.randn(5).bfloat16(), torch.randn(5).half(), torch.randn(5).double()
    state['mask'], state['bytes'], state['scalar'] = torch.tensor([True, False, True]), torch.arange(4, dtype=torch.uint8), torch.tensor(2.5)
    state['empty'] = torch.empty(0, 3)
    return state

def make_state_dicts():
    import torch
    state = state_dict()
    path = lambda name: os.path.join(HERE, name)
    torch.save(state, path('zip.pt'))
    torch.save(state, path('legacy.pt'), _use_new_zipfile_serialization=False)
    os.makedirs(path('sharded'), exist_ok=True)
    names = list(state)
    files = {'pytorch_model-00001-of-00002.bin': names[:9], 'pytorch_model-00002-of-00002.bin': names[9:]}
    for file, own in files.items(): torch.save({k: state[k] for k in own}, path('sharded/' + file))
    index = dict(metadata=dict(total_size=0), weight_map={k: file for file, own in files.items() for k in own})
    with open(path('sharded/pytorch_model.bin.index.json'), 'w') as f: json.dump(index, f, indent=1)
    write_safetensors('state_dict.safetensors', state)

def model():
    """Tied weights, a frozen parameter, a buffer, a scalar and sizes that no number of ranks divides."""
    import torch
    torch.manual_seed(2)
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 5)
            self.inner = torch.nn.Linear(5, 5)
            self.frozen = torch.nn.Linear(5, 5)
            self.head = torch.nn.Linear(5, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.scale = torch.nn.Parameter(torch.tensor([1.5]))
            self.register_buffer('count', torch.tensor([3, 4]))
            for p in self.frozen.parameters(): p.requires_grad_(False)
        def forward(self, x):
            return self.head(self.frozen(torch.tanh(self.inner(self.embedding(x)))) * self.scale)
    return Net()

def run_rank(name):
    import torch
    torch.set_num_threads(1)
    import deepspeed
    stage, ranks, bf16 = CHECKPOINTS[name]
    deepspeed.init_distributed('gloo')
    net = model()
    decayed = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.dim() <= 1]
    config = {'train_batch_size': 4 * ranks, 'optimizer': dict(type='AdamW', params=dict(lr=1e-2, torch_adam=True)),
              'zero_optimization': dict(stage=stage), 'zero_allow_untested_optimizer': True,
              'bf16': dict(enabled=bf16)}
    engine, _, _, _ = deepspeed.initialize(model=net, config=config, model_parameters=[dict(params=decayed, weight_decay=0.1), dict(params=others)])
    for step in range(2):
        x = torch.arange(4) + step + int(os.environ['RANK'])
        loss = torch.nn.functional.cross_entropy(engine(x % 7).float(), (x + 1) % 7)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(os.path.join(HERE, name), tag='global_step2', client_state=dict(note='two updates'))

def make_checkpoint(name, port):
    ranks = CHECKPOINTS[name][1]
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    processes = []
    for r in range(ranks):
        env = dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                   MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), DS_ACCELERATOR='cpu', OMP_NUM_THREADS='1')
        processes.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), '--rank', name], env=env))
    if any([p.wait() for p in processes]): sys.exit(f'{name}: a rank failed')
    for script in ('zero_to_fp32.py', 'zero_to_torch.py'):  # DeepSpeed's own programs
        if os.path.exists(os.path.join(folder, script)): os.remove(os.path.join(folder, script))
    if CHECKPOINTS[name][0] == 0:
        import torch
        state = torch.load(os.path.join(folder, 'global_step2', 'mp_rank_00_model_states.pt'), weights_only=False)['module']
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        state = get_fp32_state_dict_from_zero_checkpoint(folder)
    write_safetensors(name + '.safetensors', state)

if __name__ == '__main__':
    arguments = sys.argv[1:]
    if arguments[:1] == ['--rank']:
        run_rank(arguments[1])
    else:
        if not arguments or 'state_dicts' in arguments: make_state_dicts()
        for i, name in enumerate(CHECKPOINTS):
            if not arguments or name in arguments: make_checkpoint(name, 29700 + i)
