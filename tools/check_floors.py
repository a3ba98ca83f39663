#!/usr/bin/env python3
"""Refuses an include that goes up a floor or sideways: prints each as FILE:LINE and the rule, and exits with 1.

    check_floors.py [ROOT]

Floors, from the ground: comm/core, then comm and tensor (siblings), autograd_lite, sharding, and on top bench, tools and tests;
tools/command_line serves bench and tools."""
import os, re, sys

MAY = {  # room: the rooms that it may include
    'comm/core': {'comm/core'},
    'comm': {'comm/core', 'comm'},
    'tensor': {'comm/core', 'tensor'},
    'autograd_lite': {'comm/core', 'tensor', 'autograd_lite'},
    'sharding': {'comm/core', 'comm', 'tensor', 'autograd_lite', 'sharding'},
    'tools/command_line': {'comm/core', 'tools/command_line'},
    'bench': {'comm/core', 'comm', 'tensor', 'autograd_lite', 'sharding', 'tools/command_line', 'bench'},
    'tools': {'comm/core', 'comm', 'tensor', 'autograd_lite', 'sharding', 'tools/command_line', 'tools'},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')

def room(path):
    first_two = '/'.join(path.split('/')[:2])
    return first_two if first_two in MAY else path.split('/')[0]

def check(root):
    wrong = []
    for top in ('comm', 'tensor', 'autograd_lite', 'sharding', 'bench', 'tools'):
        for folder, _, files in os.walk(os.path.join(root, top)):
            for name in sorted(files):
                if not name.endswith(('.h', '.cpp', '.cu', '.cuh', '.inc')): continue
                path = os.path.relpath(os.path.join(folder, name), root)
                with open(os.path.join(folder, name), encoding='utf-8') as lines:
                    for number, line in enumerate(lines, 1):
                        found = INCLUDE.match(line)
                        if found and '/' in found[1] and room(found[1]) not in MAY[room(path)]:
                            wrong.append(f'{path}:{number}: {room(path)} must not include {found[1]}; '
                                         f'it stands on {", ".join(sorted(MAY[room(path)] - {room(path)})) or "nothing"}')
    return wrong

if __name__ == '__main__':
    if len(sys.argv) > 2 or sys.argv[1:] in (['-h'], ['--help']):
        print(__doc__)
        sys.exit(0 if len(sys.argv) == 2 else 2)
    wrong = check(sys.argv[1] if len(sys.argv) == 2 else os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
    print('\n'.join(wrong) if wrong else 'floors: every include goes down')
    sys.exit(1 if wrong else 0)
