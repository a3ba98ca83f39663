#!/usr/bin/env python3
"""Makes expected.json: logits of transformers, in float64, for models whose config.json spells the same settings in
several ways. With torch, and transformers 5.24 or 4.57:

    make_expected.py >expected.json     the spellings of each model must have the same logits
    make_expected.py --check            those of expected.json

A spelling that only one version reads has its number in front. Weights are those of ../llama_tiny/make_expected.py, token i of the text is
(7·i² + 3·i + 1) mod 61, and the logits are those behind the last of 12 tokens."""
import importlib.util, json, math, os, sys, tempfile
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location('gpt2', os.path.join(HERE, '../gpt2_tiny/make_expected.py'))
gpt2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt2)
TOKENS = [(7 * i * i + 3 * i + 1) % 61 for i in range(12)]
VERSION = transformers.__version__.split('.')[0]

base = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
windows = dict(base, num_key_value_heads=2, sliding_window=5, use_sliding_window=True, max_window_layers=1)
linear = dict(factor=2.0)
# The first spelling is that of transformers 4, and the others have what is different.
MODELS = {
    'gpt2': [dict(vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
             dict(n_embd=None, n_layer=None, n_head=None, n_positions=None, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                  max_position_embeddings=32),
             dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32),
             dict(n_ctx=32, activation_function='gelu_pytorch_tanh'), dict(tie_word_embeddings=True, torch_dtype='float16'),
             dict(dtype='bfloat16', layer_types=['full_attention'] * 2, pad_token_id=60)],
    'llama': [base, dict(num_key_value_heads='null'), dict(num_key_value_heads=4, head_dim='null'), dict(head_dim=4, hidden_act='swish'),
              dict(torch_dtype='float16', pretraining_tp=2, rope_theta=10000.0, rope_scaling='null'),
              dict(dtype='bfloat16', torch_dtype='bfloat16', layer_types=['full_attention'] * 2, tie_word_embeddings=False),
              dict(rope_parameters=dict(rope_type='default', rope_theta=10000.0))],
    'mistral': [dict(base, num_key_value_heads=4, sliding_window=4096), dict(sliding_window=None), dict(sliding_window='null', head_dim='null'),
                {'4': dict(num_key_value_heads='null')}],
    'qwen2': [windows, dict(layer_types=['full_attention', 'sliding_attention']),
              dict(rope_parameters=dict(rope_type='default', rope_theta=10000.0), dtype='bfloat16', layer_types=['full_attention', 'sliding_attention']),
              dict(hidden_act='swish', head_dim=4)],
    'qwen2_without_windows': [dict(base, num_key_value_heads='null'), dict(num_key_value_heads=4, sliding_window=5, max_window_layers=0),
                              dict(use_sliding_window=False, sliding_window='null', layer_types=['full_attention'] * 2)],
    'qwen3': [dict(windows, head_dim=8), dict(layer_types=['full_attention', 'sliding_attention'], attention_bias=False)],
    'gpt_neox': [dict(base, num_attention_heads=2, rotary_pct=0.5, rotary_emb_base=500, rope_scaling=dict(linear, type='linear')),
                 dict(rope_scaling=dict(linear, rope_type='linear')),
                 {'5': dict(rotary_pct=None, rotary_emb_base=None, rope_scaling=None,
                            rope_parameters=dict(linear, rope_type='linear', rope_theta=500, partial_rotary_factor=0.5))}],
}

def value(name, count):
    h = gpt2.fnv1a64(name)
    u = gpt2.shift_right(gpt2.splitmix64(torch.arange(count, dtype=torch.int64) + gpt2.wrap(h)), 40).double() / (1 << 24)
    return (0.08 * (2 * u - 1) * math.sqrt(3.0) + (1 if 'norm' in name and name.endswith('weight') else 0)).float()

def spellings(name):
    """The version that reads it, or none, and config.json."""
    first = dict(MODELS[name][0])
    for more in [{}] + MODELS[name][1:]:
        version = next(iter(more)) if len(more) == 1 and next(iter(more)) in '45' else None
        config = {'model_type': name.split('_without')[0], **first, **(more[version] if version else more)}
        yield version, {key: None if v == 'null' else v for key, v in config.items() if v is not None}

def logits(config):
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + '/config.json', 'w') as file:
            json.dump(config, file)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == 'lm_head.weight' and config['model_type'] == 'gpt_neox':
                name = 'embed_out.weight'  # as in files, and in transformers 4
            parameter.copy_(value(name, parameter.numel()).view(parameter.shape))
        return model.double()(torch.tensor([TOKENS])).logits[0, -1].tolist()

def main():
    check = json.load(open(os.path.join(HERE, 'expected.json'))) if '--check' in sys.argv else None
    out = {}
    for name in MODELS:
        all_configs = list(spellings(name))
        expected = check[name]['logits'] if check else logits(all_configs[0][1])
        for version, config in all_configs:
            if version in (None, VERSION):
                error = max(abs(a - b) for a, b in zip(expected, logits(config)))
                assert error < 1e-7, (name, config, error)
        out[name] = {'configs': [config for _, config in all_configs], 'logits': [round(x, 9) for x in expected]}
    if not check:
        print('{\n' + ',\n'.join(f'"{name}": {json.dumps(case)}' for name, case in out.items()) + '\n}')

if __name__ == '__main__':
    main()
