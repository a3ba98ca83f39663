#!/usr/bin/env python3
"""Makes expected.json: what PyTorch computes in float64 with the models of docs/guide/encoder.md and docs/guide/vision.md, whose ```python blocks it
runs. Run it with a Python that has torch (Debian: python3-torch); no test needs it.

For each model the loss and the norm of the gradient of each update, and the loss in evaluation afterwards. With u(NAME, i), the uniform numbers of
../gpt2_tiny/make_expected.py, element i of the parameter NAME starts as 0.2 · (2u - 1), plus 1 for weights of norms. All updates have the batch of
images() or sentences()."""
import importlib.util, json, math, os, re, torch
import torch.nn as nn
import torch.nn.functional as F
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location('gpt2', os.path.join(HERE, '../gpt2_tiny/make_expected.py'))
gpt2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt2)
BATCH, STEPS, LR, MOMENTUM = 8, 4, 0.02, 0.9

def u(name, *shape):
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    return (gpt2.shift_right(gpt2.splitmix64(gpt2.wrap(gpt2.fnv1a64(name)) + i), 40).double() / (1 << 24)).reshape(shape)

def guide(name):
    with open(os.path.join(HERE, '../../../docs/guide', name + '.md')) as file: text = file.read()
    names = dict(torch=torch, nn=nn, F=F)
    for block in re.findall(r'^```python\n(.*?)^```$', text, re.M | re.S): exec(block, names)
    return names

def images(side, classes):
    return [2 * u('image', BATCH, 1, side, side) - 1], torch.arange(BATCH) % classes

def sentences(vocabulary, length):
    lengths = 1 + (length * u('lengths', BATCH)).long()
    targets = (vocabulary * u('targets', BATCH, length)).long()
    counts = (u('masked', BATCH, length) < 0.3) & (torch.arange(length) < lengths[:, None])
    return [(vocabulary * u('tokens', BATCH, length)).long(), lengths], targets.masked_fill(~counts, -100)

def run(net, data, targets):
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_((0.2 * (2 * u(name, *p.shape) - 1) + ('norm' in name and name.endswith('weight'))).float())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    loss_of = lambda: F.cross_entropy(net(*data).flatten(0, -2), targets.flatten())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.pow(2).sum().item() for p in net.parameters())))
        optimizer.step()
    net.eval()
    return dict(loss=losses, grad_norm=norms, evaluation=loss_of().item())

if __name__ == '__main__':
    text, vision = guide('encoder'), guide('vision')
    cases = dict(encoder=run(text['Encoder'](), *sentences(text['vocabulary'], text['length'])))
    for name in 'Cnn', 'Vit': cases[name.lower()] = run(vision[name](), *images(vision['side'], vision['classes']))
    json.dump(cases, open(os.path.join(HERE, 'expected.json'), 'w'), indent=1)
