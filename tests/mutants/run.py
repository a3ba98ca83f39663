#!/usr/bin/env python3
"""Counts the mutants of the product that its tests kill: faults in mutants.txt, of which each must make some test fail.

    run.py check [ROOT]                   each has its place in the sources; 1 if not
    run.py apply [ROOT]                   puts all of them into the sources of a checkout, as switches; work on a copy
    run.py reach BUILD TABLE              runs the tests of BUILD, made of such a checkout, with every mutant off, and
                                          writes into TABLE how long each takes and which mutants it comes by;
                                          without those that CI omits too (label many_hosts)
    run.py run BUILD TABLE [NUMBER ...]   runs the tests that come by a mutant with it on, the shortest first

A build of the checkout, with -DCMAKE_CXX_FLAGS="-include ROOT/tests/mutants/switch.h", has all of them, off. RZ_MUTANT=N
switches number N on. A mutant is killed as soon as a test fails, or takes 20 s and five times as long as without it.
Prints a line a mutant, KILLED with the first test that failed or SURVIVED, and the number of those that survived."""
import concurrent.futures, json, os, re, signal, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
FLOORS = 'comm|tensor|autograd|sharding|tools'

def mutants():
    text = open(os.path.join(HERE, 'mutants.txt'), encoding='utf-8').read()
    for block in re.split(rf'\n(?=(?:{FLOORS}) \S+\n)', text)[1:]:
        head, _, body = block.partition('\n')
        path = head.split()[1]
        original, _, mutated = body.rpartition('»')
        rest, _, replacement = mutated.partition('\n')
        before, _, part = original.partition('«')
        yield path, before, part, rest, replacement.strip()

def check(root):
    wrong = []
    for number, (path, before, part, rest, _) in enumerate(mutants(), 1):
        name = os.path.join(root, path)
        times = open(name, encoding='utf-8').read().count(before + part + rest) if os.path.exists(name) else 0
        if times != 1: wrong.append(f'mutants.txt: mutant {number}: {path} has its text {times} times')
    if wrong: sys.exit('\n'.join(wrong))

def apply(root):
    check(root)
    for number, (path, before, part, rest, replacement) in enumerate(mutants(), 1):
        name = os.path.join(root, path)
        source = open(name, encoding='utf-8').read()
        on = f'rz_mutant({number})'
        changed = f'({on} ? ({replacement}) : ({part}))' if replacement else f'if (!{on}) {{ {part} }}'
        with open(name, 'w', encoding='utf-8') as out:
            out.write(source.replace(before + part + rest, before + changed + rest))

def tests_of(build):
    shown = subprocess.run(['ctest', '--test-dir', build, '--show-only=json-v1'], text=True, stdout=subprocess.PIPE, check=True)
    for test in json.loads(shown.stdout)['tests']:
        of = {p['name']: p['value'] for p in test.get('properties', [])}
        if not of.get('DISABLED') and 'many_hosts' not in of.get('LABELS', []) and test.get('command'):
            yield test['name'], test['command'], of

def passes(test, limit, **switches):
    name, command, of = test
    env = {**os.environ, **dict(line.split('=', 1) for line in of.get('ENVIRONMENT', [])), **switches}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=of.get('WORKING_DIRECTORY'), env=env, stdout=said, stderr=said,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = 'late'
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        said.seek(0)
        text = said.read().decode(errors='replace')
    if status == 'late': return False
    if 'FAIL_REGULAR_EXPRESSION' in of and any(re.search(x, text) for x in of['FAIL_REGULAR_EXPRESSION']): return False
    if 'PASS_REGULAR_EXPRESSION' in of: return any(re.search(x, text) for x in of['PASS_REGULAR_EXPRESSION'])
    return status == 0 or status == of.get('SKIP_RETURN_CODE') or (bool(of.get('WILL_FAIL')) and status != 0)

def reach(build, table):
    with tempfile.TemporaryDirectory() as folder:
        def row(test):
            begin, file = time.monotonic(), os.path.join(folder, test[0].replace('/', '_'))
            passed = passes(test, 600, RZ_MUTANT_REACHED=file)
            numbers = sorted({int(n) for n in open(file).read().split()}) if os.path.exists(file) else []
            print(f'{test[0]} {"passed" if passed else "FAILED"} {len(numbers)} mutants', flush=True)
            return test[0], {'seconds': time.monotonic() - begin, 'passed': passed, 'mutants': numbers}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            rows = dict(pool.map(row, tests_of(build)))
    with open(table, 'w') as out: json.dump(rows, out, indent=1)
    print(f'{len(rows)} tests; {sum(not r["passed"] for r in rows.values())} failed, and are left out of the runs')

def first_failure(tests, rows, number):
    reached = sorted((r['seconds'], name) for name, r in rows.items() if r['passed'] and number in r['mutants'])
    for at in range(0, len(reached), 2):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pair = reached[at:at + 2]
            good = pool.map(lambda t: passes(tests[t[1]], max(20, 5 * t[0]), RZ_MUTANT=str(number)), pair)
            for (_, name), passed in zip(pair, list(good)):
                if not passed: return name, len(reached)
    return '', len(reached)

def run(build, table, numbers):
    rows, survived = json.load(open(table)), 0
    tests = {t[0]: t for t in tests_of(build)}
    for number, (path, _, part, _, replacement) in enumerate(mutants(), 1):
        if numbers and number not in numbers:
            continue
        test, reached = first_failure(tests, rows, number)
        survived += not test
        print(f'{number:3} {"KILLED" if test else "SURVIVED":8} {path}: {" ".join(part.split())} -> {replacement or "nothing"}  '
              f'{test} ({reached} tests come by it)', flush=True)
    print(f'{survived} survived')

if __name__ == '__main__':
    what, rest = (sys.argv + [''])[1], sys.argv[2:]
    if what in ('apply', 'check') and len(rest) <= 1:
        (apply if what == 'apply' else check)(rest[0] if rest else os.path.join(HERE, '..', '..'))
    elif what == 'reach' and len(rest) == 2:
        reach(*rest)
    elif what == 'run' and len(rest) >= 2:
        run(rest[0], rest[1], [int(n) for n in rest[2:]])
    else:
        sys.exit(__doc__)
