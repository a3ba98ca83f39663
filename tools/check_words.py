#!/usr/bin/env python3
"""Refuses words that docs/glossary.md has retired: prints each as FILE:LINE and the word, and exits with 1.

    check_words.py [ROOT]

Code, comments, documents and scripts speak the field's language. A name that came back is found here, not by a reader.
CHANGELOG.md and bench/results hold what was true at the time, and are left out."""
import os, re, subprocess, sys

# What each word was, and what the field calls it.
RETIRED = {
    r'\b[Tt]ogether[A-Z_]\w*|\btogether_\w+|\bTogether\b': 'intra-node engine, intranode',
    r'(?<!uppercase-)\b[Ll]etters?\b(?! of)|\bLetters\b': 'mailbox slot',  # Unicode has its own
    r'\b[Mm]eeting(?:_\w+|Place\w*| places?)?\b': 'mailbox',
    r'\bDoubt\b|\bdoubt_?\b': 'zero-copy backoff',
    r'\bMemoryOffers?\b': 'buffer handles',
    r'\bcrowded\w*': 'oversubscribed',
    r'\bin vain\b|\b[Ww]hoever\b': 'a plain sentence',
    r'\b(?:most|least|longest|fewest)_\w+': 'max_ or min_',
    r'\b[Rr]oster\w*': 'peer info',
    r'\b[Hh]omes?\b(?=[._:]|\s*\{)': 'device location',
    r'\bGuest\b|\bgifts?\b': 'pending connection, passed file descriptors',
    r'\bway_by_time\b|\bWayByTime\b|\bby_time\b': 'adaptive, single-copy tuner',
    r'\bSeat\b': 'rank context',
    r'\b(?:\w+_)?one_host_?\b|\bhosts\(\)|\bhosts_\b|\b(?:number|over|out_of_a|of_several)_hosts?\b': 'node',
}
PATTERN = re.compile('|'.join(f'(?P<w{i}>{p})' for i, p in enumerate(RETIRED)))
ENDINGS = ('.h', '.cpp', '.cu', '.cuh', '.inc', '.md', '.py', '.sh', '.txt', '.cmake', '.in', '.json')
LEFT_OUT = ('CHANGELOG.md', 'bench/results/', 'tools/check_words.py')

def files(root):
    listed = subprocess.run(['git', '-C', root, 'ls-files'], capture_output=True, text=True)
    if listed.returncode == 0: return listed.stdout.split('\n')
    return [os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names]

def check(root):
    wrong = []
    for path in files(root):
        if not path.endswith(ENDINGS) or path.startswith(LEFT_OUT): continue
        if not os.path.isfile(os.path.join(root, path)): continue
        with open(os.path.join(root, path), encoding='utf-8') as lines:
            for number, line in enumerate(lines, 1):
                for found in PATTERN.finditer(line):
                    field = list(RETIRED.values())[int(found.lastgroup[1:])]
                    wrong.append(f"{path}:{number}: '{found[0]}' is retired; the field's word: {field}")
    return wrong

if __name__ == '__main__':
    if len(sys.argv) > 2 or sys.argv[1:] in (['-h'], ['--help']):
        print(__doc__)
        sys.exit(0 if len(sys.argv) == 2 else 2)
    wrong = check(sys.argv[1] if len(sys.argv) == 2 else os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
    print('\n'.join(wrong) if wrong else 'words: none that is retired')
    sys.exit(1 if wrong else 0)
