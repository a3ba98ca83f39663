#!/usr/bin/env python3
"""Refuses an include of a room that may not be included: prints each as FILE:LINE and the rule, and exits with 1.

    check_floors.py [ROOT]

A room is a folder. ROOMS lists, from the ground up, what each room may include besides itself: rooms above it only, so
that no two rooms include each other. A folder with sources that is no room is refused too."""
import os, re, sys

DEVICE = 'comm/core comm/os comm/device '
KERNELS = 'comm/core comm/device tensor tensor/kernels/scalar tensor/kernels '
TENSOR = KERNELS + 'tensor/kernels/optimizer '
MODULES = 'autograd_lite autograd_lite/nn '
MODEL = MODULES + 'comm comm/core comm/device autograd_lite/models tensor '
ROOMS = {
    'comm/core': '',
    'comm/os': 'comm/core',
    'comm/device': 'comm/core comm/os',
    'tensor': 'comm/core comm/device',
    'tensor/kernels/scalar': 'comm/core',
    'tensor/kernels': 'comm/core comm/device tensor tensor/kernels/scalar',
    'tensor/kernels/elementwise': KERNELS,
    'tensor/kernels/linear_algebra': KERNELS + 'comm/os',
    'tensor/kernels/normalization': KERNELS,
    'tensor/kernels/attention': KERNELS + 'tensor/kernels/elementwise',
    'tensor/kernels/losses': KERNELS,
    'tensor/kernels/layout': KERNELS,
    'tensor/kernels/image': KERNELS + 'tensor/kernels/linear_algebra',
    'tensor/kernels/optimizer': KERNELS,
    'autograd_lite': 'comm/core comm/device tensor',
    'autograd_lite/nn': 'comm/core comm/device autograd_lite tensor',
    'autograd_lite/models': 'comm/core autograd_lite autograd_lite/nn tensor',
    # Public headers: they include no other folder of their own floor.
    'comm': 'comm/core comm/device',
    'comm/net': 'comm/core comm/os',
    'comm/bootstrap': DEVICE + 'comm comm/net',
    'comm/shared_memory': 'comm/core comm/os comm',
    'comm/reduce': 'comm/core',
    'comm/transport': 'comm/core comm/os comm comm/net comm/shared_memory',
    'comm/transport/shm': 'comm/core comm/os comm/net comm/shared_memory comm/transport',
    'comm/transport/tcp': 'comm/core comm/os comm/net comm/transport',
    'comm/transport/group': 'comm/core comm comm/net comm/bootstrap comm/shared_memory comm/transport '
                            'comm/transport/shm comm/transport/tcp',
    'comm/progress': 'comm/core comm/os comm comm/transport',
    'comm/schedule': 'comm/core comm comm/reduce comm/transport',
    'comm/schedule/algorithms': 'comm/core comm comm/schedule',
    'comm/tuning': 'comm/core comm comm/schedule comm/schedule/algorithms comm/transport',
    'comm/intranode/mailbox': 'comm/core comm/os comm comm/transport',
    'comm/intranode/plan': 'comm/core comm comm/reduce comm/transport comm/tuning comm/intranode/mailbox',
    'comm/intranode': 'comm/core comm/os comm comm/reduce comm/shared_memory comm/transport comm/progress comm/tuning '
                      'comm/intranode/mailbox comm/intranode/plan',
    'comm/backends/native': 'comm/core comm/os comm comm/reduce comm/shared_memory comm/transport comm/schedule '
                            'comm/schedule/algorithms comm/tuning comm/intranode comm/intranode/plan comm/progress',
    'comm/backends/peer_cuda/kernels': 'comm/core comm/device comm/reduce',
    'comm/backends/peer_cuda': DEVICE + 'comm comm/bootstrap comm/tuning comm/backends/peer_cuda/kernels',
    'comm/backends/nccl/api': 'comm/core',
    'comm/backends/nccl': DEVICE + 'comm comm/transport comm/backends/nccl/api comm/backends/peer_cuda/kernels',
    'comm/backends': DEVICE + 'comm comm/bootstrap comm/transport/group comm/tuning comm/backends/native '
                     'comm/backends/peer_cuda comm/backends/peer_cuda/kernels '
                     'comm/backends/nccl comm/backends/nccl/api',
    'comm/backends/mpi': DEVICE + 'comm comm/bootstrap comm/reduce comm/transport comm/schedule comm/progress comm/backends',
    'comm/api': 'comm/core comm/os comm comm/backends',
    'sharding/io': 'comm/core comm/os',
    'sharding/tokenizer': 'comm/core comm/os sharding/io',
    'sharding/optim': TENSOR + MODULES + 'comm',
    'sharding/parallel': TENSOR + MODULES + 'comm comm/os',
    'sharding/data': DEVICE + 'tensor sharding/io sharding/tokenizer sharding/parallel',
    'sharding/model': TENSOR + MODULES + 'comm sharding/optim sharding/parallel',
    'sharding/config': 'comm/core autograd_lite/models sharding/io sharding/optim sharding/parallel sharding/model',
    'sharding/strategy': TENSOR + MODEL + 'sharding/optim sharding/parallel sharding/model',
    'sharding/checkpoint/torch_files': 'comm/core sharding/io',
    'sharding/checkpoint': TENSOR + MODULES + 'comm comm/os sharding/io sharding/optim sharding/parallel sharding/model '
                           'sharding/strategy sharding/checkpoint/torch_files',
    'sharding/huggingface': MODEL + 'sharding/io sharding/tokenizer sharding/optim sharding/parallel sharding/strategy sharding/checkpoint',
    'sharding/engine/reports': TENSOR + MODULES + 'comm comm/os sharding/io sharding/data sharding/optim sharding/config sharding/parallel '
                               'sharding/model sharding/strategy',
    'sharding/engine/loop': TENSOR + MODULES + 'comm comm/os sharding/optim sharding/config sharding/parallel sharding/model sharding/strategy '
                            'sharding/engine/reports',
    'sharding/engine/checkpoints': TENSOR + MODULES + 'autograd_lite/models comm comm/os sharding/io sharding/data sharding/optim sharding/config '
                                   'sharding/parallel sharding/model sharding/strategy sharding/checkpoint sharding/huggingface '
                                   'sharding/engine/reports sharding/engine/loop',
    'sharding/engine': TENSOR + MODULES + 'autograd_lite/models comm comm/os sharding/io sharding/data sharding/optim sharding/config '
                       'sharding/parallel sharding/model sharding/strategy sharding/checkpoint sharding/huggingface '
                       'sharding/engine/reports sharding/engine/loop sharding/engine/checkpoints',
    'sharding/lm': MODEL + 'sharding/io sharding/tokenizer sharding/data sharding/config sharding/parallel sharding/strategy '
                   'sharding/huggingface sharding/engine/reports sharding/engine/loop sharding/engine/checkpoints sharding/engine',
    'tools/command_line': 'comm/core comm/os',
    'tools/checkpoint': 'comm/core sharding/io sharding/checkpoint sharding/huggingface tools/command_line',
    'tools/report': 'comm/core sharding/io tools/command_line',
    'tools/flight': 'comm/core sharding/io sharding/checkpoint/torch_files tools/command_line',
    'tools': 'comm tools/command_line',
    'tools/rzrun/hosts': 'comm/bootstrap comm/core comm/os tools/command_line',
    'tools/rzrun/accelerate': 'comm/core sharding/io tools/rzrun/hosts',
    'tools/rzrun/flags': 'comm comm/core comm/device comm/net comm/os tools/command_line tools/rzrun/hosts tools/rzrun/accelerate',
    'tools/rzrun/ranks': 'comm comm/bootstrap comm/core comm/device comm/net comm/os comm/transport tools/rzrun/flags',
    'tools/rzrun/agents': 'comm comm/bootstrap comm/core comm/net comm/os tools/rzrun/hosts tools/rzrun/flags tools/rzrun/ranks',
    'tools/rzrun': 'comm/core comm/os tools/command_line tools/rzrun/flags tools/rzrun/ranks tools/rzrun/agents',
    'tools/doctor': DEVICE + 'comm comm/net comm/bootstrap comm/shared_memory comm/transport comm/transport/shm comm/transport/tcp '
                    'comm/backends/nccl/api sharding/io tools/command_line tools/rzrun/hosts',
    'tools/tokenize': 'comm comm/core sharding/io sharding/tokenizer sharding/data tools/command_line',
    'tools/tune': 'comm comm/core comm/tuning tools/command_line',
    'tools/lm_flags': 'comm/core sharding/config sharding/engine sharding/lm tools/command_line',
    'tools/train_lm/report': MODEL + 'comm/os sharding/lm tools/command_line',
    'tools/train_lm': MODEL + 'comm/os sharding/strategy sharding/engine/reports sharding/engine/checkpoints sharding/engine sharding/lm '
                      'tools/command_line tools/lm_flags tools/train_lm/report',
    'tools/plan': 'comm/core sharding/lm tools/command_line tools/lm_flags',
    'tools/generate': MODEL + 'sharding/io sharding/tokenizer sharding/huggingface sharding/lm tools/command_line',
    # Stand-alone programs, which time internal parts of a library.
    'bench': 'autograd_lite autograd_lite/models autograd_lite/nn comm comm/core comm/device comm/net comm/reduce tensor tensor/kernels/linear_algebra sharding/checkpoint '
             'sharding/io sharding/tokenizer sharding/parallel sharding/engine',
    'bench/support': 'comm comm/core comm/device tools/command_line bench',
    'bench/harness': 'comm comm/core comm/device tools/command_line bench bench/support',
    'bench/concurrent': 'comm comm/core bench/support',
    'bench/overlap': 'comm comm/core bench/support',
    'bench/lower_bound': 'comm comm/core comm/os comm/reduce comm/shared_memory bench/support',
}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')

def check_table():
    seen = set()
    for room, may in ROOMS.items():
        for other in may.split():
            assert other in seen, f'{room} may include {other}, which does not stand above it'
        seen.add(room)

def check_file(root, path):
    room, wrong = os.path.dirname(path), []
    may = ROOMS[room].split() + [room]
    with open(os.path.join(root, path), encoding='utf-8') as lines:
        for number, line in enumerate(lines, 1):
            found = INCLUDE.match(line)
            if not found: continue
            # As compilers look it up: public headers name each other by relative paths, all others are named from the root.
            relative = os.path.normpath(os.path.join(room, found[1]))
            other = os.path.dirname(relative if os.path.exists(os.path.join(root, relative)) else found[1])
            if other and other not in may:
                wrong.append(f'{path}:{number}: {room} must not include {found[1]}; '
                             f'it stands on {", ".join(sorted(set(may) - {room})) or "nothing"}')
    return wrong

def check(root):
    wrong = []
    for top in ('comm', 'tensor', 'autograd_lite', 'sharding', 'bench', 'tools'):
        for folder, _, files in os.walk(os.path.join(root, top)):
            sources = [f for f in sorted(files) if f.endswith(('.h', '.cpp', '.cu', '.cuh', '.inc'))]
            room = os.path.relpath(folder, root)
            if sources and room not in ROOMS:
                wrong.append(f'{room}/{sources[0]}:1: {room} is no room; add it to tools/check_floors.py')
                continue
            for name in sources:
                wrong += check_file(root, os.path.join(room, name))
    return wrong

if __name__ == '__main__':
    if len(sys.argv) > 2 or sys.argv[1:] in (['-h'], ['--help']):
        print(__doc__)
        sys.exit(0 if len(sys.argv) == 2 else 2)
    check_table()
    wrong = check(sys.argv[1] if len(sys.argv) == 2 else os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
    print('\n'.join(wrong) if wrong else 'rooms: every include goes down')
    sys.exit(1 if wrong else 0)
