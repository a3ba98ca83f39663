#!/usr/bin/env python3
"""Writes tensor_parallel.json: what torch's ColwiseParallel and RowwiseParallel leave of each weight of llama_tiny on
two ranks. Run it with a Python that has PyTorch: make_tensor_parallel.py FOLDER_OF_LLAMA_TINY

A part is its shape and a sum of its f32 bits, each times its number from 1, modulo 2^64."""
import json, os, pathlib, struct, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2
STYLES = {'embed_tokens': RowwiseParallel, 'lm_head': ColwiseParallel, 'q_proj': ColwiseParallel, 'k_proj': ColwiseParallel,
          'v_proj': ColwiseParallel, 'o_proj': RowwiseParallel, 'gate_proj': ColwiseParallel, 'up_proj': ColwiseParallel,
          'down_proj': RowwiseParallel}


def tensors(file):
    data = file.read_bytes()
    n = struct.unpack('<Q', data[:8])[0]
    for name, t in json.loads(data[8:8 + n]).items():
        if name != '__metadata__':
            assert t['dtype'] == 'F32'
            begin, end = (8 + n + x for x in t['data_offsets'])
            yield name, torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).reshape(t['shape'])


def layer_of(name, weight):
    rows, columns = weight.shape
    layer = torch.nn.Embedding(rows, columns) if name == 'embed_tokens' else torch.nn.Linear(columns, rows, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    return layer


def part(t):
    bits = t.contiguous().view(torch.int32).flatten().tolist()
    return {'shape': list(t.shape), 'bits': sum((i + 1) * (b & 0xffffffff) for i, b in enumerate(bits)) % (1 << 64)}


def run(rank, folder, out):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29641')
    dist.init_process_group('gloo', rank=rank, world_size=RANKS)
    mesh = init_device_mesh('cpu', (RANKS,))
    parts = {}
    for name, weight in tensors(folder / 'model.safetensors'):
        style = STYLES.get(name.split('.')[-2])
        if style:
            layer = parallelize_module(layer_of(name.split('.')[-2], weight), mesh, style())
            weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
        parts[name] = part(weight.detach())
    pathlib.Path(out, f'{rank}.json').write_text(json.dumps(parts))
    dist.destroy_process_group()


if __name__ == '__main__':
    here = pathlib.Path(__file__).parent
    mp.spawn(run, (pathlib.Path(sys.argv[1]), '/tmp'), RANKS)
    ranks = [json.loads(pathlib.Path('/tmp', f'{r}.json').read_text()) for r in range(RANKS)]
    lines = [f'{json.dumps(n)}: {json.dumps([r[n] for r in ranks])}' for n in sorted(ranks[0])]
    text = ',\n  '.join(lines)
    (here / 'tensor_parallel.json').write_text(f'{{"torch": "{torch.__version__}", "parts": {{\n  {text}\n}}}}\n')
