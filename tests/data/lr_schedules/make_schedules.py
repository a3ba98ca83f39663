#!/usr/bin/env python3
"""Makes schedules.json: rates and momenta that torch 2.15 itself sets, in double.

    python3 -m venv DIR && DIR/bin/pip install torch==2.15.0 && DIR/bin/python make_schedules.py

Each case has the class, its arguments, the base rates of the groups, whether the optimizer has betas or a momentum, and a
row for each number of steps: the rates of the groups, then their momenta if the schedule moves them. Cases with "metrics"
step ReduceLROnPlateau once for each of them. No test needs this program."""
import json, math, os, random, torch
from torch.optim import lr_scheduler

CASES = [
    ('StepLR', dict(step_size=3), 14), ('StepLR', dict(step_size=1, gamma=0.7), 9),
    ('MultiStepLR', dict(milestones=[2, 5, 5, 9]), 13), ('MultiStepLR', dict(milestones=[6, 3], gamma=0.5), 9),
    ('MultiStepLR', dict(milestones=[]), 3),
    ('ConstantLR', dict(), 9), ('ConstantLR', dict(factor=0.25, total_iters=2), 6),
    ('LinearLR', dict(), 9), ('LinearLR', dict(start_factor=1.0, end_factor=0.0, total_iters=8), 11),
    ('LinearLR', dict(start_factor=0.1, end_factor=0.9, total_iters=7), 10),
    ('ExponentialLR', dict(gamma=0.9), 40), ('ExponentialLR', dict(gamma=1.05), 12),
    ('PolynomialLR', dict(), 8), ('PolynomialLR', dict(total_iters=9, power=2.5), 12),
    ('CosineAnnealingLR', dict(T_max=7), 7), ('CosineAnnealingLR', dict(T_max=6, eta_min=1e-4), 20),
    ('CosineAnnealingWarmRestarts', dict(T_0=4), 14), ('CosineAnnealingWarmRestarts', dict(T_0=3, T_mult=2, eta_min=1e-4), 30),
    ('OneCycleLR', dict(max_lr=[0.1, 0.05], total_steps=20), 20),
    ('OneCycleLR', dict(max_lr=0.1, epochs=3, steps_per_epoch=7, anneal_strategy='linear'), 21),
    ('OneCycleLR', dict(max_lr=0.1, total_steps=24, three_phase=True, pct_start=0.4), 24),
    ('OneCycleLR', dict(max_lr=0.2, total_steps=15, three_phase=True, anneal_strategy='linear', div_factor=10.0,
                        final_div_factor=100.0, base_momentum=[0.8, 0.7], max_momentum=0.9), 15),
    ('OneCycleLR', dict(max_lr=0.1, total_steps=10, cycle_momentum=False), 10),
    ('OneCycleLR', dict(max_lr=0.1, total_steps=2), 2),
]
FALLING = [1.0, 0.5, 0.49999, 0.49, 0.6, 0.6, 0.5, 0.7, 0.48, 0.9, 0.9, 0.9, 0.9, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]
PLATEAUS = [
    (dict(), FALLING + [0.5] * 15), (dict(patience=1), FALLING), (dict(patience=0, factor=0.5, min_lr=1e-3), FALLING),
    (dict(patience=1, cooldown=2, factor=0.3), FALLING), (dict(mode='max', patience=2), FALLING),
    (dict(patience=1, threshold=0.1), FALLING), (dict(patience=1, threshold=0.1, threshold_mode='abs'), FALLING),
    (dict(mode='max', patience=1, threshold=0.3, threshold_mode='abs'), FALLING),
    (dict(patience=0, factor=0.9, eps=1e-3, min_lr=[5e-3, 1e-4]), FALLING),
    (dict(mode='max', patience=1), [-x for x in FALLING]), (dict(patience=1), [-x for x in FALLING]),
]
BASE = [0.01, 0.004]


def optimizer_of(kind):
    groups = [dict(params=[torch.nn.Parameter(torch.zeros(1))], lr=lr) for lr in BASE]
    return torch.optim.AdamW(groups) if kind == 'betas' else torch.optim.SGD(groups, momentum=0.9)


def momenta(optimizer, kind):
    return [g['betas'][0] if kind == 'betas' else g['momentum'] for g in optimizer.param_groups]


def run(name, params, steps, kind):
    optimizer = optimizer_of(kind)
    scheduler = getattr(lr_scheduler, name)(optimizer, **params)
    cycles = name == 'OneCycleLR' and params.get('cycle_momentum', True)
    rows = []
    for _ in range(steps):
        rows.append([float(g['lr']) for g in optimizer.param_groups] + (momenta(optimizer, kind) if cycles else []))
        optimizer.step()
        scheduler.step()
    return dict(type=name, params=params, optimizer=kind, rows=rows)


def run_plateau(params, metrics):
    optimizer = optimizer_of('betas')
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **params)
    rows = []
    for metric in metrics:
        scheduler.step(metric)
        rows.append([float(g['lr']) for g in optimizer.param_groups])
    return dict(type='ReduceLROnPlateau', params=params, optimizer='betas', metrics=metrics, rows=rows)


if __name__ == '__main__':
    kinds = lambda name: ['betas', 'momentum'] if name == 'OneCycleLR' else ['betas']
    runs = [run(name, params, steps, kind) for name, params, steps in CASES for kind in kinds(name)]
    runs += [run_plateau(params, metrics) for params, metrics in PLATEAUS]
    lines = ',\n'.join(json.dumps(r) for r in runs)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'schedules.json'), 'w') as out:
        out.write('{"base_rates": %s, "runs": [\n%s\n]}\n' % (json.dumps(BASE), lines))
