#!/usr/bin/env python3
"""Writes the figures of docs/performance.md, and README's plot, from bench/results/figures.json.

    bench/pages.py [ROOT]             writes them
    bench/pages.py --check [ROOT]     exit status 1: a page is not what this script would write
    bench/pages.py --measured TEXT [ROOT]
                                      the figures and plots whose `what` or `file` has TEXT are those of this checkout, and writes

A figure names the commit that was measured, the sources that it depends on, and `state`, a hash of them without comments. It is
shown while the sources have that hash; a change leaves it out, with no list of exceptions. Its command stays on the page.
Exit status 2: a file is not as expected."""
import argparse, datetime, hashlib, json, os, subprocess, sys

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

def state_of(root, sources):
    """A hash of the sources without comments and blank lines: files of code in these folders, or these files."""
    if missing := [s for s in sources if not os.path.exists(os.path.join(root, s))]:
        fail(f'{RESULTS}: there are no sources {", ".join(missing)}')
    files = []
    for source in sources:
        if os.path.isfile(os.path.join(root, source)): files.append(source)
        for folder, _, names in os.walk(os.path.join(root, source)):
            files += [os.path.relpath(os.path.join(folder, n), root) for n in names if n.endswith(('.h', '.cpp', '.cu', '.inc', '.py'))]
    state = hashlib.sha256()
    for name in sorted(set(files)):
        lines = [line.strip() for line in read(root, name).splitlines()]
        state.update('\n'.join([name] + [line for line in lines if line and not line.startswith('//')]).encode())
    return state.hexdigest()[:16]

def is_current(root, result):
    return state_of(root, result['sources']) == result['state']

def measured(root, text):
    results = json.loads(read(root, RESULTS))
    found = [r for r in results['figures'] + results['plots'] if text in r.get('what', r.get('file'))]
    if not found: fail(f'{RESULTS}: no figure or plot has {text!r} in its name')
    commit = subprocess.run(['git', '-C', root, 'rev-parse', '--short=8', 'HEAD'], text=True, capture_output=True, check=True).stdout.strip()
    for r in found: r.update(commit=commit, date=datetime.date.today().isoformat(), state=state_of(root, r['sources']))
    with open(os.path.join(root, RESULTS), 'w', encoding='utf-8') as file: file.write(json.dumps(results, indent=1, ensure_ascii=False) + '\n')

def table(root, figures):
    if not figures: return 'The sources of every figure have changed since it was measured: measure with the commands below.\n'
    rows = ['| | ringzero | beside it | commit | machine |', '|---|---|---|---|---|']
    for f in figures:
        rows.append(f'| {f["what"]} | {f["ours"]} | {f["beside"]} | `{f["commit"]}`, {f["date"]} | {f["machine"]} |')
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
    a.add_argument('root', nargs='?', default=ROOT); a.add_argument('--check', action='store_true'); a.add_argument('--measured', metavar='TEXT')
    o = a.parse_args()
    if o.measured: measured(o.root, o.measured)
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
