#!/usr/bin/env python3
"""Compiles each source of comm and tools, and of their tests, that has changed, by itself and without code: builds of several
sources at a time hide that one of them lacks an include, if those before it have it.

    tools/check_includes.py [BASE]    changed since BASE; default: origin/main, or the last commit but one if that is HEAD or not known

Ends with 0 if git does not know what has changed, as in an export. A source of which this machine lacks a library's header is
left out, and of many sources all but the first 100: a compilation takes about a second."""
import concurrent.futures, glob, os, re, subprocess, sys

MAX_SOURCES = 100
FOLDERS = ['comm', 'tools', 'tests/comm', 'tests/tools']
PATTERNS = [f'{folder}/*.cpp' for folder in FOLDERS]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SYSTEM = ['/usr/local/cuda/include', *glob.glob('/usr/lib/*/openmpi/include')]
FLAGS = ['-std=c++20', '-fsyntax-only', '-w', '-I.', '-DRZ_SOURCE_DIR=""', '-DRZ_BINARY_DIR=""', '-DRZ_MPIRUN=""', '-DRZ_VERSION=""',
         *(f'-isystem{folder}' for folder in SYSTEM)]

def git(*words):
    p = subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True)
    return p.stdout.strip() if p.returncode == 0 else None

def base():
    if len(sys.argv) > 1: return sys.argv[1]
    main, head = git('merge-base', 'HEAD', 'origin/main'), git('rev-parse', 'HEAD')
    return main if main and main != head else git('rev-parse', 'HEAD~1')

def changed(since):
    tracked = git('diff', '--name-only', '--diff-filter=d', since, '--', *PATTERNS)
    new = git('ls-files', '--others', '--exclude-standard', '--', *PATTERNS)
    return None if tracked is None else sorted({*tracked.split(), *(new or '').split()})

def compile_alone(source):
    """None if it compiles; else what is wrong, and whether that is an error of the source."""
    p = subprocess.run(['g++', *FLAGS, source], cwd=ROOT, capture_output=True, text=True)
    if p.returncode == 0: return None
    absent = re.search(r'fatal error: (\S+): No such file', p.stderr)
    if absent and not os.path.isdir(f'{ROOT}/{absent[1].split("/")[0]}'):
        return f'left out: no {absent[1]} here', False
    errors = [line for line in p.stderr.splitlines() if ' error: ' in line]
    return '\n'.join(errors[:5]) or p.stderr, True

def main():
    since = base()
    sources = since and changed(since)
    if sources is None: return print('includes: what has changed is not known')
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, result in zip(sources, pool.map(compile_alone, sources[:MAX_SOURCES])):
            if result: print(f'{source}: {result[0]}')
            failed += bool(result and result[1])
    print(f'includes: {len(sources)} sources have changed, {min(len(sources), MAX_SOURCES)} were compiled, {failed} failed')
    sys.exit(1 if failed else 0)

if __name__ == '__main__': main()
