#!/usr/bin/env python3
"""The PyTorch side of bench/train_gpu.py and bench/train_step.py: a plain GPT-2 or Llama that trains on request.

    train_gpu_torch.py --model config.json --tokens TOKENS.bin --batch B [--seq-len T] [--warm W] [--precision autocast|pure|f32]
                       [--device cuda|cpu] [--no-compile] [--compile-mode MODE] [--no-clip]

Runs W warm-up updates, which compile the model, and writes a line of JSON with versions and settings. Then it reads lines from standard
input, each a number N, runs N updates and writes a line of JSON: "ms" (milliseconds per update, wall time between two synchronisations)
and "loss" (of the last update). Exits at the end of standard input. After N a line may have "eager" or "compiled", and the number of
threads of the CPU. Samples are read in order: update s uses samples s·B … s·B+B-1, of T + 1 tokens at a distance of T.

Precisions: autocast (float32 parameters, bfloat16 where autocast selects it), pure (parameters, gradients and moments in bfloat16), f32
(with TF32 if the device has it). AdamW is fused, gradients are clipped to norm 1, cross-entropy covers all logits; nothing is read
from the device between updates. With WORLD_SIZE in the environment, as torchrun sets it, it is a rank of DDP over Gloo, with B samples.

Exit status 3: PyTorch is not installed or does not support the device; one line reports it."""
import argparse, contextlib, json, math, os, sys, time

ADAMW = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
CLIP = 1.0

def absent(why):
    print(f'train_gpu_torch.py: {why}', file=sys.stderr)
    sys.exit(3)

try:
    import torch, torch.nn as nn, torch.nn.functional as F
except ImportError as e:
    absent(f'no PyTorch here ({e})')

def attend(q, k, v):
    if hasattr(F, 'scaled_dot_product_attention'): return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    t = q.shape[-2]  # before PyTorch 2.0
    later = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    return F.softmax((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf), -1) @ v

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        e = c['n_embd']
        self.heads = c['n_head']
        self.ln_1, self.ln_2 = nn.LayerNorm(e), nn.LayerNorm(e)
        self.qkv, self.out = nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.up, self.down = nn.Linear(e, 4 * e), nn.Linear(4 * e, e)

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (z.view(b, t, self.heads, e // self.heads).transpose(1, 2) for z in self.qkv(self.ln_1(x)).split(e, 2))
        x = x + self.out(attend(q, k, v).transpose(1, 2).reshape(b, t, e))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate='tanh'))

class Gpt2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c['vocab_size'], c['n_embd']), nn.Embedding(c['n_positions'], c['n_embd'])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c['n_layer']))
        self.ln = nn.LayerNorm(c['n_embd'])
        for name, p in self.named_parameters():
            if p.dim() < 2: continue
            deep = name.endswith(('out.weight', 'down.weight'))
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * c['n_layer']) if deep else 0.02)
        for b in self.blocks:
            for linear in (b.qkv, b.out, b.up, b.down): nn.init.zeros_(linear.bias)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[:inputs.shape[1]]
        for block in self.blocks: x = block(x)
        logits = F.linear(self.ln(x), self.tokens.weight)  # tied embeddings
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

class LlamaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        e, self.size = c['hidden_size'], c['head_dim']
        self.heads, self.kv_heads, self.eps = c['num_attention_heads'], c['num_key_value_heads'], c['rms_norm_eps']
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(e, self.eps), nn.RMSNorm(e, self.eps)
        self.q, self.k, self.v = linear(e, self.heads * self.size), linear(e, self.kv_heads * self.size), linear(e, self.kv_heads * self.size)
        self.o, self.gate, self.up, self.down = linear(self.heads * self.size, e), linear(e, c['intermediate_size']), linear(e, c['intermediate_size']), linear(c['intermediate_size'], e)

    def forward(self, x, cos, sin):
        b, t, e = x.shape
        def rotated(z):  # Hugging Face's apply_rotary_pos_emb
            return z * cos + torch.cat((-z[..., self.size // 2:], z[..., :self.size // 2]), -1) * sin
        y = self.norm_1(x)
        q, k, v = (z.view(b, t, -1, self.size).transpose(1, 2) for z in (self.q(y), self.k(y), self.v(y)))
        y = F.scaled_dot_product_attention(rotated(q).to(v.dtype), rotated(k).to(v.dtype), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c['vocab_size'], c['hidden_size'])
        self.layers = nn.ModuleList(LlamaLayer(c) for _ in range(c['num_hidden_layers']))
        self.norm = nn.RMSNorm(c['hidden_size'], c['rms_norm_eps'])
        for p in self.parameters():
            if p.dim() == 2: nn.init.normal_(p, std=0.02)
        angles = torch.arange(c['max_position_embeddings'])[:, None] * c['rope_theta'] ** (-torch.arange(0, c['head_dim'], 2) / c['head_dim'])
        self.register_buffer('cos', torch.cat([angles.cos()] * 2, -1)); self.register_buffer('sin', torch.cat([angles.sin()] * 2, -1))

    def forward(self, inputs, targets):
        x = self.tokens(inputs)
        t = inputs.shape[1]
        for layer in self.layers: x = layer(x, self.cos[:t], self.sin[:t])
        logits = F.linear(self.norm(x), self.tokens.weight)  # tied embeddings
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

class Batches:
    def __init__(self, path, batch, context, device):
        with open(path, 'rb') as f: raw = bytearray(f.read())
        # uint16 data, which PyTorch hardly supports
        tokens = torch.frombuffer(raw, dtype=torch.int16).to(torch.int64) & 0xffff
        samples = (len(tokens) - 1) // context // batch * batch
        x, y = (tokens[o:o + samples * context].view(-1, batch, context) for o in (0, 1))
        pin = (lambda t: t.pin_memory()) if device == 'cuda' else (lambda t: t)
        self.all, self.device, self.next = list(zip(pin(x.contiguous()), pin(y.contiguous()))), device, 0

    def take(self):
        x, y = self.all[self.next % len(self.all)]
        self.next += 1
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

class Training:
    def __init__(self, o, config):
        torch.manual_seed(0)
        self.device = o.device
        model = (Llama if config.get('model_type') == 'llama' else Gpt2)(config).to(o.device)
        if o.precision == 'pure': model = model.to(torch.bfloat16)
        self.parameters = list(model.parameters())
        self.adamw = torch.optim.AdamW(self.parameters, **ADAMW, fused=True)
        if 'WORLD_SIZE' in os.environ:
            torch.distributed.init_process_group('gloo')
            model = nn.parallel.DistributedDataParallel(model)
        self.cast = (lambda: torch.autocast(o.device, dtype=torch.bfloat16)) if o.precision == 'autocast' else contextlib.nullcontext
        self.eager, self.compiled = model, torch.compile(model, mode=o.compile_mode) if hasattr(torch, 'compile') else None
        self.model, self.clip = self.compiled if o.compile else model, o.clip
        self.batches = Batches(o.tokens, o.batch, o.seq_len or config['n_positions'], o.device)

    def synchronize(self):
        if self.device == 'cuda': torch.cuda.synchronize()

    def update(self):
        x, y = self.batches.take()
        with self.cast(): loss = self.model(x, y)
        self.adamw.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip: torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.adamw.step()
        return loss

    def run(self, updates, model=None, threads=None):
        if model: self.model = self.compiled if model == 'compiled' else self.eager
        if threads: torch.set_num_threads(int(threads))
        self.synchronize()
        start = time.perf_counter()
        for _ in range(updates): loss = self.update()
        self.synchronize()
        return dict(ms=(time.perf_counter() - start) * 1e3 / updates, loss=float(loss.detach().float()))

def options():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--model', required=True); a.add_argument('--tokens', required=True); a.add_argument('--batch', type=int, required=True)
    a.add_argument('--seq-len', type=int, help='default: n_positions of the model')
    a.add_argument('--no-clip', dest='clip', action='store_false')
    a.add_argument('--warm', type=int, default=5); a.add_argument('--threads', type=int, help='of the CPU; default: PyTorch\'s')
    a.add_argument('--precision', choices=['autocast', 'pure', 'f32'], default='autocast')
    a.add_argument('--device', choices=['cuda', 'cpu'], default='cuda')
    a.add_argument('--no-compile', dest='compile', action='store_false')
    a.add_argument('--compile-mode', default='default')
    return a.parse_args()

def main():
    o = options()
    if o.device == 'cuda' and not torch.cuda.is_available(): absent(f'PyTorch {torch.__version__} sees no CUDA device')
    if o.compile and not hasattr(torch, 'compile'): absent(f'PyTorch {torch.__version__} has no torch.compile; --no-compile goes without')
    if o.threads: torch.set_num_threads(o.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with open(o.model) as f: config = json.load(f)
    training = Training(o, config)
    warm = training.run(o.warm) if o.warm else {}
    print(json.dumps(dict(torch=torch.__version__, precision=o.precision, compile=o.compile_mode if o.compile else None,
                          attention='sdpa' if hasattr(F, 'scaled_dot_product_attention') else 'plain',
                          parameters=sum(p.numel() for p in training.parameters), loss=warm.get('loss'))), flush=True)
    for line in sys.stdin:
        updates, *how = line.split()
        print(json.dumps(training.run(int(updates), *how)), flush=True)

if __name__ == '__main__': main()
