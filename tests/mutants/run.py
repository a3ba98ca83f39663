#!/usr/bin/env python3
"""Counts the mutants of the product that its tests kill: faults in mutants.txt, of which each must make some test fail.

    run.py check [ROOT]             each has its place in the sources; 1 if not
    run.py apply [ROOT]             puts all of them into the sources of a checkout, as switches; work on a copy
    run.py run BUILD [NUMBER ...]   runs the tests of BUILD, made of such a checkout, with one of them on at a time

A build of the checkout, with -DCMAKE_CXX_FLAGS="-include ROOT/tests/mutants/switch.h", has all of them, off. RZ_MUTANT=N
switches number N on. A mutant is killed as soon as a test of its floor, or of one above, fails; a test that exceeds its
time limit fails. Prints a line a mutant, KILLED with the first test that failed or SURVIVED, and the number of each."""
import os, re, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Tests of a floor, in the order in which they are tried.
TESTS = {
    'comm': ['core|comm', 'mpi|emulated_gpu|tools'],
    'tensor': ['tensor|host|operators', 'emulated_gpu', 'autograd|sharding'],
    'autograd': ['autograd', 'sharding|emulated_gpu', 'tools'],
    'sharding': ['data|sharding', 'emulated_gpu', 'tools'],
    'tools': ['tools'],
}

def mutants():
    text = open(os.path.join(HERE, 'mutants.txt'), encoding='utf-8').read()
    for block in re.split(r'\n(?=(?:%s) \S+\n)' % '|'.join(TESTS), text)[1:]:
        head, _, body = block.partition('\n')
        floor, path = head.split()
        original, _, mutated = body.rpartition('»')
        rest, _, replacement = mutated.partition('\n')
        before, _, part = original.partition('«')
        yield floor, path, before, part, rest, replacement.strip()

def check(root):
    wrong = []
    for number, (_, path, before, part, rest, _) in enumerate(mutants(), 1):
        name = os.path.join(root, path)
        times = open(name, encoding='utf-8').read().count(before + part + rest) if os.path.exists(name) else 0
        if times != 1: wrong.append(f'mutants.txt: mutant {number}: {path} has its text {times} times')
    if wrong: sys.exit('\n'.join(wrong))

def apply(root):
    check(root)
    for number, (_, path, before, part, rest, replacement) in enumerate(mutants(), 1):
        name = os.path.join(root, path)
        source = open(name, encoding='utf-8').read()
        on = f'rz_mutant({number})'
        changed = f'({on} ? ({replacement}) : ({part}))' if replacement else f'if (!{on}) {{ {part} }}'
        with open(name, 'w', encoding='utf-8') as out:
            out.write(source.replace(before + part + rest, before + changed + rest))

def first_failure(build, number, floor):
    for group in TESTS[floor]:
        done = subprocess.run(['ctest', '--test-dir', build, '-R', rf'^({group})[._]', '-j2', '--stop-on-failure', '--timeout', '120'],
                              env={**os.environ, 'RZ_MUTANT': str(number)}, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            failed = re.search(r'Test +#\d+: (\S+) .*(?:Failed|Exception|Timeout|\*\*\*)', done.stdout)
            return failed.group(1) if failed else done.stdout[-300:]
    return ''

def run(build, numbers):
    survived = 0
    for number, (floor, path, _, part, _, replacement) in enumerate(mutants(), 1):
        if numbers and number not in numbers:
            continue
        test = first_failure(build, number, floor)
        survived += not test
        print(f'{number:3} {"KILLED" if test else "SURVIVED":8} {path}: {" ".join(part.split())} -> {replacement or "nothing"}  {test}',
              flush=True)
    print(f'{survived} survived')

if __name__ == '__main__':
    if sys.argv[1:2] in (['apply'], ['check']) and len(sys.argv) <= 3:
        (apply if sys.argv[1] == 'apply' else check)(sys.argv[2] if len(sys.argv) == 3 else os.path.join(HERE, '..', '..'))
    elif sys.argv[1:2] == ['run'] and len(sys.argv) >= 3:
        run(sys.argv[2], [int(n) for n in sys.argv[3:]])
    else:
        sys.exit(__doc__)
