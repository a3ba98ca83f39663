#!/usr/bin/env python3
"""Refuses an include that goes up a floor, or sideways between siblings. check_floors.py [ROOT]

The rooms of the house and what each may include besides itself. The longest room that a path starts with counts."""
import pathlib
import re
import sys

CORE = ['comm/core']
COMM = CORE + ['comm']
TENSOR = CORE + ['tensor']
AUTOGRAD = TENSOR + ['autograd_lite']
SHARDING = AUTOGRAD + COMM + ['sharding']
PROGRAMS = SHARDING + ['bench', 'tools']
MAY_INCLUDE = {
    'comm/core': CORE,
    'comm': COMM,
    'tensor': TENSOR,
    'autograd_lite': AUTOGRAD,
    'sharding': SHARDING,
    'bench': SHARDING + ['bench'],
    'tools': SHARDING + ['tools'],
    'tests': PROGRAMS + ['tests'],
}
INCLUDE = re.compile(r'\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
SOURCES = {'.h', '.cpp', '.cu', '.cuh', '.inc'}


def room_of(path):
    """The room that holds a path relative to the root, or None for the world outside the house."""
    rooms = [room for room in MAY_INCLUDE if path.startswith(room + '/')]
    return max(rooms, key=len, default=None)


def target_of(included, source, root):
    """An include is meant from the root, or from the file's own folder."""
    beside = source.parent / included
    if room_of(included) is None and beside.is_file():
        return beside.resolve().relative_to(root).as_posix()
    return included


def faults_of(source, root):
    room = room_of(source.relative_to(root).as_posix())
    for number, line in enumerate(source.read_text(errors='replace').splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        included = target_of(match[1] or match[2], source, root)
        target = room_of(included)
        if target and target not in MAY_INCLUDE[room]:
            allowed = ', '.join(r for r in MAY_INCLUDE[room])
            yield f'{source.relative_to(root)}:{number}: {room} must not include {included}: it may include only {allowed}'


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] in (['-h'], ['--help']):
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    sources = [f for top in {room.split('/')[0] for room in MAY_INCLUDE} for f in sorted((root / top).rglob('*'))
               if f.suffix in SOURCES]
    if not sources:
        sys.exit(f'check_floors.py: no sources under {root}')
    faults = [fault for source in sources for fault in faults_of(source, root)]
    print(*faults, sep='\n', end='\n' if faults else '')
    print(f'{len(sources)} files, {len(faults)} includes against the floors')
    sys.exit(1 if faults else 0)


if __name__ == '__main__':
    main()
