#!/usr/bin/env python3
"""Warns of figures that are of an older build: prints each as FILE:LINE, and exits with 0.

    check_figures.py [ROOT] [--max N]      N: commits to what is measured that make figures old (default: 20)

Each section of docs/performance.md that has a table names the commit that was measured, as "Commit `1234abc`". Counted
are the commits to comm, tensor, autograd_lite and sharding since then. Exit status 2: ROOT is no git repository."""
import argparse, os, re, subprocess, sys

MEASURED = ('comm', 'tensor', 'autograd_lite', 'sharding')
DOCUMENT = 'docs/performance.md'

def sections(lines):
    """(number of the heading's line, heading, text) of each section, of any level."""
    start = None
    for number, line in enumerate(lines + ['#'], 1):
        if line.startswith('#'):
            if start:
                yield start[0], start[1].strip('# \n'), ''.join(lines[start[0]:number - 1])
            start = (number, line)

def commits_since(root, commit):
    """None: the commit is unknown, as in a shallow clone."""
    run = subprocess.run(['git', '-C', root, 'rev-list', '--count', f'{commit}..HEAD', '--', *MEASURED], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return int(run.stdout) if run.returncode == 0 else None

def check(root, limit):
    with open(os.path.join(root, DOCUMENT), encoding='utf-8') as file:
        lines = file.readlines()
    old = 0
    for number, heading, text in sections(lines):
        if '\n|' not in text:
            continue
        found = re.search(r'[Cc]ommit `([0-9a-f]{7,40})`', text)
        since = commits_since(root, found[1]) if found else None
        if found and since is not None and since <= limit:
            continue
        old += 1
        what = 'names no commit' if not found else f'is of {found[1]}, which is not in this clone' if since is None \
            else f'is of {found[1]}; {since} commits to {", ".join(MEASURED)} since'
        print(f'{DOCUMENT}:{number}: warning: "{heading}" {what}: measure it again, or take it out')
    print(f'figures: {old} sections of an older build' if old else 'figures: none of an older build')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', nargs='?', default=os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
    parser.add_argument('--max', type=int, default=20)
    options = parser.parse_args()
    if subprocess.run(['git', '-C', options.root, 'rev-parse', '--git-dir'], stdout=subprocess.DEVNULL,
                      stderr=subprocess.DEVNULL).returncode:
        print(f'check_figures.py: {options.root}: no git repository', file=sys.stderr)
        sys.exit(2)
    check(options.root, options.max)
