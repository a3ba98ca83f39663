#!/usr/bin/env python3
"""Writes categories.inc: RUN(first, last, category) for the ranges of characters of the categories that tokenizers
distinguish. With Python 3 and the package unicodedata2 16.0.0, since Hugging Face's tokenizers 0.23 has Unicode 16.

    python3 make_categories.py >categories.inc"""
import sys
import textwrap
import unicodedata2 as unicode

GROUPS = {'Lu': 'upper', 'Ll': 'lower', 'Lt': 'title', 'Lm': 'modifier', 'Lo': 'other_alpha', 'Mn': 'mark', 'Mc': 'mark',
          'Me': 'mark', 'Nd': 'digit', 'Nl': 'numeral', 'No': 'other_number', 'Pc': 'connector', 'Pd': 'punctuation',
          'Ps': 'punctuation', 'Pe': 'punctuation', 'Pi': 'punctuation', 'Pf': 'punctuation', 'Po': 'punctuation'}

def main():
    assert unicode.unidata_version == '16.0.0', unicode.unidata_version
    print('// Unicode 16.0.0, made by make_categories.py.')
    start, group, runs = 0, None, []
    for code in range(sys.maxunicode + 2):
        now = GROUPS.get(unicode.category(chr(code))) if code <= sys.maxunicode else None
        if now != group:
            if group:
                runs.append(f'RUN(0x{start:X}, 0x{code - 1:X}, {group})')
            start, group = code, now
    print('\n'.join(textwrap.wrap(' '.join(runs), 118, break_on_hyphens=False)))

if __name__ == '__main__':
    main()
