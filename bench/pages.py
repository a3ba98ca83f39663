#!/usr/bin/env python3
"""Writes the figures of docs/performance.md, and README's plot, from bench/results/figures.json.

    bench/pages.py [ROOT]             writes them
    bench/pages.py --check [ROOT]     exit status 1: a page is not what this script would write

A figure names the commit that was measured and the sources that it depends on. It is shown while these sources are those of the
commit, apart from comments; a later change leaves it out, with no list of exceptions. Its command stays on the page.
Exit status 2: a file is not as expected, or a commit is not in this clone."""
import argparse, json, os, subprocess, sys

RESULTS, PERFORMANCE, README = 'bench/results/figures.json', 'docs/performance.md', 'README.md'
BEGIN, END = '<!-- bench/pages.py writes the lines from here -->\n', '<!-- to here -->\n'
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')

def fail(line):
    print(f'pages.py: {line}', file=sys.stderr)
    sys.exit(2)

def read(root, name):
    try:
        with open(os.path.join(root, name), encoding='utf-8') as file: return file.read()
    except OSError as e: fail(f'{name}: {e.strerror}')

def git(root, *words):
    return subprocess.run(['git', '-C', root, *words], text=True, capture_output=True)

def is_current(root, result):
    """Whether the sources of a result, in the working tree, differ from those of its commit in comments at most."""
    if missing := [s for s in result['sources'] if not os.path.exists(os.path.join(root, s))]:
        fail(f'{RESULTS}: {result["commit"]}: there are no sources {", ".join(missing)}')
    changes = git(root, 'diff', '-w', '-I^[[:space:]]*//', '-I^[[:space:]]*\n', result['commit'], '--', *result['sources'])
    if changes.returncode: fail(f'{RESULTS}: commit {result["commit"]} is not in this clone: git fetch --unshallow')
    return not changes.stdout

def table(root, figures):
    if not figures: return 'The sources of every figure have changed since it was measured: measure with the commands below.\n'
    rows = ['| | ringzero | beside it | commit | machine |', '|---|---|---|---|---|']
    for f in figures:
        date = git(root, 'log', '-1', '--format=%as', f['commit']).stdout.strip()
        rows.append(f'| {f["what"]} | {f["ours"]} | {f["beside"]} | `{f["commit"]}`, {date} | {f["machine"]} |')
    return '\n'.join(rows) + '\n'

def commands(figures):
    """Each command once, behind what it measures."""
    of = {}
    for f in figures: of.setdefault(f['command'], []).append(f['what'].replace('`', ''))
    return '\n'.join(''.join(f'    # {what}\n' for what in whats) + f'    {command}\n' for command, whats in of.items())

def picture(plot):
    return f'<img src="{plot["file"]}" width="720" alt="{plot["alternative"]}">\n\n{plot["caption"]}\n'

def between_marks(root, name, text):
    page = read(root, name)
    if page.count(BEGIN) != 1 or page.count(END) != 1: fail(f'{name}: expected one line {BEGIN.strip()} and one line {END.strip()}')
    return page[:page.index(BEGIN) + len(BEGIN)] + text + page[page.index(END):]

def draw(root, plot):
    p = subprocess.run([sys.executable, os.path.join(ROOT, 'bench/plot.py'), os.path.join(root, plot['results'])], text=True, capture_output=True)
    if p.returncode: fail(p.stderr.strip())
    return p.stdout

def pages(root):
    """{file: its text, None if there is none}."""
    results = json.loads(read(root, RESULTS))
    shown = [p for p in results['plots'] if is_current(root, p)]
    figures = table(root, [f for f in results['figures'] if is_current(root, f)]) + '\n' + commands(results['figures'])
    return {PERFORMANCE: between_marks(root, PERFORMANCE, figures), README: between_marks(root, README, '\n'.join(map(picture, shown))),
            **{p['file']: draw(root, p) if p in shown else None for p in results['plots']}}

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('root', nargs='?', default=ROOT); a.add_argument('--check', action='store_true')
    o = a.parse_args()
    differ = []
    for name, text in pages(o.root).items():
        path = os.path.join(o.root, name)
        if text == (read(o.root, name) if os.path.exists(path) else None): continue
        differ.append(name)
        if o.check: continue
        if text is None: os.remove(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf-8') as file: file.write(text)
    if o.check and differ: sys.exit(f'pages.py: {", ".join(differ)}: not as {RESULTS} and the sources say: run bench/pages.py')

if __name__ == '__main__': main()
