#!/usr/bin/env python3
"""Writes characters.json: what Hugging Face's tokenizers 0.23.3 do with each character. With the package tokenizers.

    python3 make_characters.py >characters.json

Of the characters of `codes`, outside of which all are private or not assigned: the checksum of those that a regular
expression matches, and of those of \\p{NAME} for each name; of what a normalizer makes of them, and into which words a
pre-tokenizer splits them. This takes minutes."""
import json
import os
import re
import sys
import tokenizers
from tokenizers import normalizers, pre_tokenizers

CODES = [(0, 0xD7FF), (0xE000, 0x33FFF), (0x3FFF0, 0x4000F), (0xDFFFE, 0xE03FF), (0xEFFF0, 0xF000F), (0x10FFFD, 0x10FFFF)]
TEXT = ''.join(chr(code) for first, last in CODES for code in range(first, last + 1))
EXPRESSIONS = r'''\d \D [\d] [^\d] \w \W [\w] [^\w] [\W] \s \S [^\S] \h . \p{Word} \P{Word} \p{^Word} [\p{word}] \p{Alnum} \p{punct}
    [[:alnum:]] [[:alpha:]] [[:ascii:]] [[:blank:]] [[:cntrl:]] [[:digit:]] [[:graph:]] [[:lower:]] [[:print:]] [[:punct:]]
    [[:space:]] [[:upper:]] [[:xdigit:]] [[:word:]] [[:^punct:]] [^[:^alpha:]] \p{Lu} \P{Lu} \p{^Lu} \P{^Lu} [\P{Lu}] [^\p{Lu}]
    \p{other-Sym_bol} \p{Cs} \P{Cs} \p{Cn} [^\s\p{L}\p{N}] (?i)\p{Lu} (?i:[\p{Han}\P{Greek}]) [\w&&[^\d_]] (?<=\W)\p{Han} (?<!\p{L})\p{L}
    (?x)\p{Mn}#[ []\p{Sc}] [^]\p{S}] (?#[)\p{Zs} \b. .\b \B. .\B \s+(?!\S)'''.split()
NORMALIZERS = ['NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase', 'StripAccents']
PRE_TOKENIZERS = ['Digits', 'Punctuation', 'Whitespace', 'WhitespaceSplit']

def checksum(data):
    """FNV-1a of 64 bits."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f'{value:016x}'

def matched(expression):
    """The runs of characters that are gone, in hexadecimal."""
    rest = set(normalizers.Replace(tokenizers.Regex(expression), '').normalize_str(TEXT))
    runs = []
    for code in (ord(c) for c in TEXT if c not in rest):
        if runs and code == runs[-1][1] + 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return checksum(''.join(f'{first:x} {last:x}\n' for first, last in runs).encode())

def words(name):
    text = ''.join('x' + c + '\n' for c in TEXT)
    return checksum(b''.join(word.encode() + b'\xFF' for word, _ in getattr(pre_tokenizers, name)().pre_tokenize_str(text)))

def main():
    assert tokenizers.__version__ == '0.23.3'
    marked = ''.join('a' + c + '\u0334\u0301\n' for c in TEXT)
    with open(os.path.join(os.path.dirname(__file__), '../../../sharding/tokenizer/unicode.inc')) as table:
        rows = re.findall(r'(?:PROPERTY|UNION)\("([A-Z0-9 ]+)"', table.read())
    names = [name for row in rows for name in row.split() if name not in ('POSIXPUNCT', 'WORD')]  # no names, or more, there
    json.dump({'codes': CODES,
               'expressions': {expression: matched(expression) for expression in EXPRESSIONS},
               'properties': {name: matched(r'\p{%s}' % name) for name in names},
               'normalizers': {name: checksum(getattr(normalizers, name)().normalize_str(marked).encode()) for name in NORMALIZERS},
               'pre_tokenizers': {name: words(name) for name in PRE_TOKENIZERS}}, sys.stdout, indent=1)
    print()

if __name__ == '__main__':
    main()
