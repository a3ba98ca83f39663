#!/usr/bin/env python3
"""Makes expected.json: PyTorch's results in float64 for the cases below, small models of the shape of Llama and GPT-NeoX. Run it with a Python that has torch
(Debian: python3-torch); no test needs it.

Each case has its config.json, as Hugging Face writes it, for each update the loss and the norm of the gradient before clipping, and how the initial
model continues the prompts below with its likeliest tokens, which are ahead of the second by more than MARGIN. The initial weights come from the formula of ../gpt2_tiny/make_expected.py: element i of the parameter called NAME is 0.08 · (2u - 1) · sqrt(3), plus 1 for the
weights of norms. Sample i is tokens[i·T … i·T+T] of ../gpt2_tiny/tokens.bin, taken modulo the vocabulary; update s uses samples s·B … s·B+B-1."""
import importlib.util, json, math, os, re, torch
import torch.nn.functional as F
torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location('gpt2', os.path.join(HERE, '../gpt2_tiny/make_expected.py'))
gpt2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt2)
LR, B1, B2, EPS, WD, BATCH, STEPS = 1e-3, 0.9, 0.95, 1e-8, 0.1, 12, 6
PROMPTS, NEW_TOKENS, MARGIN = [[4, 7, 1, 9, 0], [2]], 15, 1e-4

base = dict(model_type='llama', hidden_act='silu', vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=40, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, attention_bias=False,
            mlp_bias=False, initializer_range=0.02)
neox = dict(model_type='gpt_neox', hidden_act='gelu', vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3,
            max_position_embeddings=40, layer_norm_eps=1e-5, rotary_pct=0.25, rotary_emb_base=10000, use_parallel_residual=True, attention_bias=True,
            tie_word_embeddings=False, initializer_range=0.02)
CASES = {
    'llama': (base, 24),
    'llama_without_groups': (dict(base, num_key_value_heads=6, head_dim=10), 17),
    'llama_linear': (dict(base, tie_word_embeddings=True, rope_scaling=dict(type='linear', factor=2.5)), 24),
    'llama_dynamic': (dict(base, max_position_embeddings=16, rope_scaling=dict(rope_type='dynamic', factor=4.0)), 40),
    'llama_llama3': (dict(base, tie_word_embeddings=True, head_dim=12, attention_bias=True, mlp_bias=True, rope_theta=500000.0,
                          rope_scaling=dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                            original_max_position_embeddings=16)), 40),
    'mistral': (dict(base, model_type='mistral', num_key_value_heads=1, sliding_window=7), 30),
    'qwen2': (dict(base, model_type='qwen2', tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1), 30),
    'qwen3': (dict(base, model_type='qwen3', head_dim=12, use_sliding_window=False, attention_bias=True), 24),
    'gpt_neox': (neox, 24),
    'gpt_neox_sequential': (dict(neox, use_parallel_residual=False, hidden_act='gelu_new', rotary_pct=0.5, rotary_emb_base=500, attention_bias=False,
                                 tie_word_embeddings=True, rope_scaling=dict(rope_type='linear', factor=2.0)), 17),
}

def head_dim(c): return c.get('head_dim', c['hidden_size'] // c['num_attention_heads'])

def shapes(c):
    C, I, D, H, K = c['hidden_size'], c['intermediate_size'], head_dim(c), c['num_attention_heads'], c['num_key_value_heads']
    yield 'model.embed_tokens.weight', (c['vocab_size'], C)
    for l in range(c['num_hidden_layers']):
        p = f'model.layers.{l}.'
        yield p + 'input_layernorm.weight', (C,)
        for name, rows, columns in (('q', H * D, C), ('k', K * D, C), ('v', K * D, C), ('o', C, H * D)):
            yield f'{p}self_attn.{name}_proj.weight', (rows, columns)
            if c['attention_bias'] or (c['model_type'] == 'qwen2' and name != 'o'): yield f'{p}self_attn.{name}_proj.bias', (rows,)
        if c['model_type'] == 'qwen3':
            for name in 'qk': yield f'{p}self_attn.{name}_norm.weight', (D,)
        yield p + 'post_attention_layernorm.weight', (C,)
        for name, rows, columns in (('gate', I, C), ('up', I, C), ('down', C, I)):
            yield f'{p}mlp.{name}_proj.weight', (rows, columns)
            if c['mlp_bias']: yield f'{p}mlp.{name}_proj.bias', (rows,)
    yield 'model.norm.weight', (C,)
    if not c['tie_word_embeddings']: yield 'lm_head.weight', (c['vocab_size'], C)

def neox_shapes(c):
    C, I = c['hidden_size'], c['intermediate_size']
    yield 'gpt_neox.embed_in.weight', (c['vocab_size'], C)
    for l in range(c['num_hidden_layers']):
        for name, rows, columns in (('input_layernorm', C, 0), ('post_attention_layernorm', C, 0), ('attention.query_key_value', 3 * C, C),
                                    ('attention.dense', C, C), ('mlp.dense_h_to_4h', I, C), ('mlp.dense_4h_to_h', C, I)):
            yield f'gpt_neox.layers.{l}.{name}.weight', (rows, columns) if columns else (rows,)
            if c['attention_bias'] or not name.startswith('attention'): yield f'gpt_neox.layers.{l}.{name}.bias', (rows,)
    for name in ('weight', 'bias'): yield f'gpt_neox.final_layer_norm.{name}', (C,)
    if not c['tie_word_embeddings']: yield 'embed_out.weight', (c['vocab_size'], C)

def initial(c):
    out = {}
    for name, shape in (neox_shapes if c['model_type'] == 'gpt_neox' else shapes)(c):
        i = torch.arange(math.prod(shape), dtype=torch.int64)
        u = gpt2.shift_right(gpt2.splitmix64(gpt2.wrap(gpt2.fnv1a64(name)) + i), 40).double() / (1 << 24)
        value = 0.08 * (2 * u - 1) * math.sqrt(3.0) + ('norm' in name and name.endswith('weight'))
        out[name] = value.float().double().reshape(shape)
    return out

def frequencies(c, length):
    D, theta, scaling = head_dim(c), c['rope_theta'], c.get('rope_scaling') or {}
    kind, factor = scaling.get('rope_type', scaling.get('type', 'default')), scaling.get('factor', 1.0)
    if kind == 'dynamic':
        trained = c['max_position_embeddings']
        theta *= (factor * max(length, trained) / trained - (factor - 1)) ** (D / (D - 2))
    f = 1 / theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    if kind == 'linear': f = f / factor
    if kind == 'llama3':
        old, low, high = scaling['original_max_position_embeddings'], scaling['low_freq_factor'], scaling['high_freq_factor']
        wave = 2 * math.pi / f
        smooth = ((old / wave - low) / (high - low)).clamp(0, 1)
        f = (1 - smooth) * f / factor + smooth * f
    return f

def rotate(x, angle):                       # [B, heads, T, D], [T, D / 2]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin

def norm(x, w, eps): return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w

def neox_forward(c, p, tokens):
    H, T = c['num_attention_heads'], tokens.shape[1]
    D = c['hidden_size'] // H
    R = int(D * c['rotary_pct'])
    linear = lambda x, name: F.linear(x, p[name + '.weight'], p.get(name + '.bias'))
    layer_norm = lambda x, name: F.layer_norm(x, x.shape[-1:], p[name + '.weight'], p[name + '.bias'], c['layer_norm_eps'])
    turned = lambda x: torch.cat([rotate(x[..., :R], angle), x[..., R:]], -1)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequencies(dict(c, head_dim=R, rope_theta=c['rotary_emb_base']), T)
    seen = torch.ones(T, T).tril().bool()
    x = p['gpt_neox.embed_in.weight'][tokens]
    for l in range(c['num_hidden_layers']):
        n = f'gpt_neox.layers.{l}.'
        q, k, v = linear(layer_norm(x, n + 'input_layernorm'), n + 'attention.query_key_value').reshape(*tokens.shape, H, 3, D).permute(3, 0, 2, 1, 4)
        scores = (turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(D)).masked_fill(~seen, -math.inf)
        attended = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(*tokens.shape, H * D), n + 'attention.dense')
        h = linear(layer_norm(x if c['use_parallel_residual'] else attended, n + 'post_attention_layernorm'), n + 'mlp.dense_h_to_4h')
        x = attended + linear(F.gelu(h) if c['hidden_act'] == 'gelu' else F.gelu(h, approximate='tanh'), n + 'mlp.dense_4h_to_h')
    return F.linear(layer_norm(x, 'gpt_neox.final_layer_norm'), p.get('embed_out.weight', p['gpt_neox.embed_in.weight']))

def forward(c, p, tokens):
    if c['model_type'] == 'gpt_neox': return neox_forward(c, p, tokens)
    D, H, K, T = head_dim(c), c['num_attention_heads'], c['num_key_value_heads'], tokens.shape[1]
    linear = lambda x, name: F.linear(x, p[name + '.weight'], p.get(name + '.bias'))
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequencies(c, T)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    x = p['model.embed_tokens.weight'][tokens]
    for l in range(c['num_hidden_layers']):
        n = f'model.layers.{l}.'
        window = c.get('sliding_window') or T
        if c['model_type'].startswith('qwen') and not (c.get('use_sliding_window') and l >= c['max_window_layers']): window = T
        seen = (j <= i) & (i - j < window)
        h = norm(x, p[n + 'input_layernorm.weight'], c['rms_norm_eps'])
        q, k, v = (linear(h, f'{n}self_attn.{m}_proj').reshape(*tokens.shape, -1, D).transpose(1, 2) for m in 'qkv')
        if c['model_type'] == 'qwen3': q, k = (norm(h, p[f'{n}self_attn.{m}_norm.weight'], c['rms_norm_eps']) for m, h in (('q', q), ('k', k)))
        q, k = rotate(q, angle), rotate(k, angle)
        k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(~seen, -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(*tokens.shape, H * D), n + 'self_attn.o_proj')
        h = norm(x, p[n + 'post_attention_layernorm.weight'], c['rms_norm_eps'])
        x = x + linear(F.silu(linear(h, n + 'mlp.gate_proj')) * linear(h, n + 'mlp.up_proj'), n + 'mlp.down_proj')
    x = norm(x, p['model.norm.weight'], c['rms_norm_eps'])
    return F.linear(x, p.get('lm_head.weight', p['model.embed_tokens.weight']))

def greedy(c, p, prompt):
    text = list(prompt)
    for _ in range(NEW_TOKENS):
        logits, tokens = forward(c, p, torch.tensor([text]))[0, -1].topk(2)
        assert logits[0] - logits[1] > MARGIN, (c, text)
        text.append(tokens[0].item())
    return text[len(prompt):]

def run(c, T):
    with torch.no_grad(): texts = [greedy(c, initial(c), prompt) for prompt in PROMPTS]
    p = {n: v.requires_grad_() for n, v in initial(c).items()}
    groups = [dict(params=[v for v in p.values() if v.dim() > 1], weight_decay=WD), dict(params=[v for v in p.values() if v.dim() < 2], weight_decay=0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(B1, B2), eps=EPS)
    with open(os.path.join(HERE, '../gpt2_tiny/tokens.bin'), 'rb') as file: data = torch.frombuffer(bytearray(file.read()), dtype=torch.int16).long() & 0xffff
    losses, norms = [], []
    for step in range(STEPS):
        rows = torch.stack([data[s * T:s * T + T + 1] for s in range(step * BATCH, (step + 1) * BATCH)]) % c['vocab_size']
        loss = F.cross_entropy(forward(c, p, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(); loss.backward()
        losses.append(loss.item()); norms.append(math.sqrt(sum(v.grad.pow(2).sum().item() for v in p.values())))
        optimizer.step()
    return dict(config=c, sequence_length=T, loss=losses, grad_norm=norms, greedy=texts)

if __name__ == '__main__':
    text = json.dumps(dict(batch=BATCH, prompts=PROMPTS, cases={name: run(*case) for name, case in CASES.items()}), indent=1)
    with open(os.path.join(HERE, 'expected.json'), 'w') as file: file.write(re.sub(r'\[[^][{}]*\]', lambda list: ' '.join(list[0].split()), text) + '\n')
