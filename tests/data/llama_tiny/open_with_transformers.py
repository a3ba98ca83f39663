#!/usr/bin/env python3
"""Opens what train_lm saves with Hugging Face's transformers, and makes opened.json of it. Run it with a Python that has transformers (`pip install
transformers torch`) and the folder of our programs: open_with_transformers.py build/release/bin. No test needs it; tests/sharding/huggingface_config_test.cpp
compares the files that we write with opened.json, which must be made again where they change.

Each model is saved by train_lm in every way below. Any warning is an error, as is a tensor that is missing, unexpected or of another shape. The loss
of the first batch is that of train_lm within 2e-5. Besides, the first loss and gradient norm of expected.json are those of transformers' models in
float64, whose rotary tables are f32, within 2e-7, and they continue its prompts alike."""
import json, logging, os, pathlib, subprocess, sys, tempfile, warnings
import numpy, torch, transformers
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_expected
BATCH, T = 12, 24

expected = json.loads((HERE / 'expected.json').read_text())
gpt2 = dict(json.loads((HERE / '../gpt2_tiny/config.json').read_text()), embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
CASES = {name: case['config'] for name, case in expected['cases'].items()}
CASES['gpt2'] = gpt2
CASES['gpt2_untied'] = dict(gpt2, tie_word_embeddings=False)
tokens = numpy.fromfile(HERE / '../gpt2_tiny/tokens.bin', dtype='<u2')

class Refusing(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING: raise SystemExit(f'transformers warns: {record.getMessage()}')

def saved(bin, config, folder):
    (folder / 'config.json').write_text(json.dumps(config))
    ds = dict(train_batch_size=BATCH, gradient_clipping=0, optimizer=dict(type='AdamW', params=dict(lr=0)))
    (folder / 'ds.json').write_text(json.dumps(ds))
    (tokens % config['vocab_size']).astype('<u2').tofile(folder / 'tokens.bin')
    subprocess.run([os.path.join(bin, 'train_lm'), '--model', folder / 'config.json', '--config', folder / 'ds.json', '--tokens', folder / 'tokens.bin',
                    '--seq-len', str(T), '--no-shuffle', '--steps', '1', '--threads', '1', '--save', folder / 'saved', '--metrics',
                    folder / 'metrics.jsonl'], check=True, stdout=subprocess.DEVNULL)
    return folder / 'saved', json.loads((folder / 'metrics.jsonl').read_text().splitlines()[0])['loss']

def opened(folder, vocabulary, dtype):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=dtype, attn_implementation='eager')
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, wrong
    rows = torch.tensor(numpy.stack([tokens[s * T:s * T + T + 1] for s in range(BATCH)]).astype('int64')) % vocabulary
    with torch.no_grad(): logits = model.double()(rows[:, :-1]).logits
    return model, torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()

def renamed(tensors, model_type, head, to):  # transformers 5 renames the head of a GPT-NeoX when it reads and writes files
    return {to + '.weight' if model_type == 'gpt_neox' and name == head + '.weight' else name: tensor for name, tensor in tensors}

def check_expected(case):
    config, length = case['config'], case['sequence_length']
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), attn_implementation='eager').double()
    keys = model.load_state_dict(renamed(make_expected.initial(config).items(), config['model_type'], 'embed_out', 'lm_head'), strict=False)
    assert not keys.unexpected_keys and set(keys.missing_keys) <= ({'lm_head.weight'} if config['tie_word_embeddings'] else set()), keys
    rows = torch.tensor(numpy.stack([tokens[s * length:s * length + length + 1] for s in range(BATCH)]).astype('int64')) % config['vocab_size']
    loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    for prompt, text in zip(expected['prompts'], case['greedy']):
        room = min(len(text), config['max_position_embeddings'] - len(prompt))  # it warns of longer texts
        made = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=room, eos_token_id=None, use_cache=False)
        assert made[0, len(prompt):].tolist() == text[:room], (config, made, text)
    norm = sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5
    assert abs(loss.item() - case['loss'][0]) < 2e-7 and abs(norm - case['grad_norm'][0]) < 2e-7, (loss.item(), norm)

def main(bin):
    transformers.logging.set_verbosity_info()
    for logger in ('transformers', 'py.warnings', ''): logging.getLogger(logger).addHandler(Refusing())
    warnings.simplefilter('error')
    for case in expected['cases'].values(): check_expected(case)
    out = {}
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path, loss = saved(bin, config, pathlib.Path(folder))
            model, theirs = opened(path, config['vocab_size'], torch.float32)
            assert abs(loss - theirs) < 2e-5, (name, loss, theirs)
            print(name, loss, theirs)
            out[name] = dict(config=json.loads((path / 'config.json').read_text()),
                             tensors=renamed(((n, list(p.shape)) for n, p in model.named_parameters()), config['model_type'], 'lm_head', 'embed_out'))
    (HERE / 'opened.json').write_text('{\n' + ',\n'.join(f'"{name}": {json.dumps(case)}' for name, case in out.items()) + '\n}\n')

if __name__ == '__main__': main(sys.argv[1])
